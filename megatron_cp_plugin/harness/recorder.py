"""Records a training run: `--cp-record DIR`. `harness.parity` reads and compares records.

Every rank writes into DIR

- `rank00000.jsonl`: one line an iteration with losses, gradient norm and seconds;
- `rank00000.json`: what the run is, digests of this rank's parameters at the start, and of its
  gradients at the first, the middle and the last iteration;
- `rank00000.1.pt`: the gradients themselves at iteration 1, of the first rank of each model shard,
  with Q, K and V of a fused projection apart; likewise for the other two iterations.

A recording does not change the run: gradients are copied after Megatron has reduced and finalized
them and before its optimizer sees them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_cp_plugin.core.communication.record import record_communication
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.weight_parts import joined_rows, rows_of_weights
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.settings import Settings

# Megatron's arguments that identify a run.
_SETTINGS = (
    "context_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "world_size",
    "seq_length",
    "micro_batch_size",
    "global_batch_size",
    "train_iters",
    "seed",
)


class Recorder:
    """Writes one rank's recording."""

    def __init__(self, folder: str | Path, algo: str, allow_untested: bool = False) -> None:
        self._allow_untested = allow_untested
        self._folder = Path(folder)
        self._algo = algo
        self._iteration = 0
        self._recorded: set[int] = set()
        self._content: dict[str, Any] = {}
        self._recording_s = 0.0

    def install(self) -> None:
        """Wraps Megatron's `train_step`; call before the training loop starts.

        Raises: ContextParallelError: This Megatron is older than 0.18, or not as `contract` says.
        """
        compat.check_megatron("record", allow_untested=self._allow_untested)
        compat.replace({"train_step": self._step}, "record")

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        self._iteration += 1
        started = time.perf_counter()
        if self._iteration == 1:
            self._begin()
        self._recording_s = 0.0
        if self._iteration in self._recorded:
            call.arguments["forward_backward_func"] = partial(
                self._observed, call.arguments["forward_backward_func"], call.arguments["model"]
            )
        result = original(*call.args, **call.kwargs)
        losses, skipped, _, _, _, grad_norm, *_ = result  # see integration/contract.md
        auxiliary = _auxiliary_losses()
        found = losses | auxiliary if losses else {}
        line = {
            "iteration": self._iteration,
            "losses": {name: float(value) for name, value in found.items()},
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "skipped": bool(skipped),
            "seconds": time.perf_counter() - started - self._recording_s,
        }
        with self._path(".jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
        return result

    def _begin(self) -> None:
        from megatron.training import get_args

        args = get_args()
        last = (args.train_iters or 1) - args.iteration  # a run may go on from a checkpoint
        self._recorded = {1, (last + 1) // 2, last}
        if Settings(args).graphs == "full_iteration" and args.use_distributed_optimizer:
            raise ContextParallelError(
                "--cp-record needs all gradients on every rank, which a captured iteration "
                "does not give, got --cuda-graph-impl full_iteration with "
                "--use-distributed-optimizer: leave one of them out"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        # Files of an earlier run must not stay.
        for path in self._folder.glob(f"{self._path('.').name}*"):
            path.unlink()

    def _observed(
        self, forward_backward: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """The pass through the model of an iteration whose gradients are recorded."""
        if self._iteration == 1:
            started = time.perf_counter()
            self._content["weights"] = {
                name: _digest(_whole_values(p)) for name, p in _parameters(model).items()
            }
            self._recording_s += time.perf_counter() - started
        # A distributed optimizer would leave each rank with a part of the gradients.
        with _all_reduced(model), record_communication() as log, _counted_replays() as replays:
            result = forward_backward(*args, **kwargs)
        started = time.perf_counter()
        _gather_instances(model)
        sent = {phase: log.bytes(phase=phase) for phase in PHASES}
        for name, found in (("replays", len(replays)), ("sent_bytes", sent)):
            self._content.setdefault(name, {})[self._iteration] = found
        self._write_state(_gradient_copies(model))
        self._recording_s += time.perf_counter() - started
        return result

    def _write_state(self, gradients: Mapping[str, Tensor]) -> None:
        from megatron.core import parallel_state as state
        from megatron.training import get_args

        args = get_args()
        shard = (
            state.get_pipeline_model_parallel_rank(),
            state.get_tensor_model_parallel_rank(),
            state.get_expert_model_parallel_rank(),
        )
        first = state.get_data_parallel_rank(with_context_parallel=True) == 0
        if args.expert_model_parallel_size > 1:
            # Experts differ between ranks that are replicas for everything else.
            first = first or state.get_expert_data_parallel_rank() == 0
        if first:
            torch.save(dict(gradients), self._path(f".{self._iteration}.pt"))
        settings = {name: getattr(args, name) for name in _SETTINGS}
        settings["context_parallel_algo"] = self._algo
        settings["params_dtype"] = str(args.params_dtype).removeprefix("torch.")
        self._content |= {"settings": settings, "shard": shard}
        digests = {name: _digest(gradient) for name, gradient in gradients.items()}
        self._content.setdefault("gradients", {})[self._iteration] = digests
        self._path(".json").write_text(json.dumps(self._content) + "\n")

    def _path(self, suffix: str) -> Path:
        return self._folder / f"rank{torch.distributed.get_rank():05d}{suffix}"


@contextmanager
def _all_reduced(model: Any) -> Iterator[None]:
    """Gives every rank all gradients, not only the gradients that its optimizer needs.

    Megatron's own switch for it, `force_all_reduce`, is not heeded by the reductions that a
    pipeline schedule starts while others still compute.
    """
    groups = _bucket_groups(model)
    for group in groups:
        start: Any = group.start_grad_sync
        group.start_grad_sync = lambda force_all_reduce=False, start=start: start(
            force_all_reduce=True
        )
    try:
        yield
    finally:
        for group in groups:
            del group.start_grad_sync


def _gather_instances(model: Any) -> None:
    """Completes gradients that several instances of the distributed optimizer have summed.

    Each instance sums all of them over its own ranks; over the instances each rank sums only what
    its own part of the optimizer needs.
    """
    for group in _bucket_groups(model):
        ddp = group.ddp_config
        if not ddp.use_distributed_optimizer or ddp.num_distributed_optimizer_instances == 1:
            continue
        size = group.intra_distributed_optimizer_instance_size
        rank = group.intra_distributed_optimizer_instance_rank
        for bucket in group.buckets:
            own = bucket.grad_data.chunk(size)[rank].clone()
            torch.distributed.all_gather_into_tensor(
                bucket.grad_data, own, group=group.intra_distributed_optimizer_instance_group
            )


def _bucket_groups(model: Any) -> list[Any]:
    return [
        group
        for chunk in model
        for name in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(chunk, name, [])
    ]


@contextmanager
def _counted_replays() -> Iterator[list[None]]:
    """An entry for each CUDA graph that is replayed within this context."""
    replays: list[None] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        original(graph)

    with patch.object(torch.cuda.CUDAGraph, "replay", replay):
        yield replays


def _auxiliary_losses() -> dict[str, Tensor]:
    """Returns the auxiliary term of the loss of a micro-batch, without its coefficient.

    By the routers of a mixture of experts, summed over the layers, and by multi-token prediction.
    """
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker, get_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        # Stages may have no experts, and then no part in the sum.
        return {}
    found = MoEMetricsTracker()
    for name, entry in get_moe_metrics_tracker().metrics.items():
        found._metrics[name] = replace(entry, values=entry.values.clone())
    found._sync_metrics(list(found.metrics))
    sums = {name: entry.values.sum() for name, entry in found.metrics.items()}
    tracker = MTPLossLoggingHelper.tracker
    # The second is its name in Megatron 0.18.
    values = tracker.get("loss_values", tracker.get("values"))
    if values is not None:
        values = values.clone()
        torch.distributed.all_reduce(
            values, group=tracker["avg_group"], op=torch.distributed.ReduceOp.AVG
        )
        sums |= {f"mtp_{number} loss": value for number, value in enumerate(values, 1)}
    return {name: total / get_num_microbatches() for name, total in sums.items()}


def _parameters(model: Any) -> dict[str, torch.nn.Parameter]:
    """Returns this rank's parameters by name, without the names of wrappers."""
    found = {}
    for index, chunk in enumerate(model):
        prefix = f"chunk{index}." if len(model) > 1 else ""
        for name, parameter in compat.unwrapped(chunk).named_parameters():
            if parameter.requires_grad:
                found[prefix + name] = parameter
    return found


def _gradient_copies(model: Any) -> dict[str, Tensor]:
    """Returns copies of the finalized gradients; Q, K and V of a fused projection apart."""
    rows = rows_of_weights(model)
    found = {}
    for name, parameter in _parameters(model).items():
        if isinstance(parameter, DTensor):
            gradient = joined_rows(parameter, parameter.grad)
        else:
            summed: Any = parameter  # Megatron's own data parallelism adds up elsewhere
            gradient = summed.main_grad.detach().to("cpu", copy=True)
        if name in rows:
            found.update(rows[name].split(name, gradient))
        else:
            found[name] = gradient
    return found


def _whole_values(parameter: torch.nn.Parameter) -> Tensor:
    """A whole parameter on the CPU, in float32, which holds every value of a smaller type.

    What Megatron-FSDP has in the place of a model's parameters are its optimizer's main weights: in
    float32 where the model computes in bfloat16. At the start the values are the same.
    """
    whole = joined_rows(parameter, parameter) if isinstance(parameter, DTensor) else parameter
    return whole.detach().to("cpu").float()


def _digest(tensor: Tensor) -> str:
    """Returns a hash of the bytes: equal for equal values on any rank, cheap to keep."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
