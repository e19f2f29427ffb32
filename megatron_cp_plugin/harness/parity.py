"""Records what a training run computes, and compares two such recordings.

`--cp-record DIR` makes every rank write into DIR

- `rank00000.jsonl`: one line an iteration with losses, gradient norm and seconds;
- `rank00000.json`: what the run is, digests of this rank's parameters at the start, and of its
  gradients at the first, the middle and the last iteration;
- `rank00000.1.pt`: the gradients themselves at iteration 1, of the first rank of each model shard,
  with Q, K and V of a fused projection apart; likewise for the other two iterations.

A recording does not change the run: gradients are copied after Megatron has reduced and finalized
them and before its optimizer sees them.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_cp_plugin.core.comm import record_communication
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.weight_parts import rows_of_weights
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.contract import TRAIN_STEP
from megatron_cp_plugin.integration.features import Settings, graphs
from megatron_cp_plugin.integration.wrappers import gathered, unwrapped

# The position of a rank's model shard: (pipeline, tensor, expert) parallel rank.
Shard = tuple[int, int, int]

# What identifies a run, by the names of Megatron's arguments.
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
    """Writes one rank's recording.

    Args:
        folder: Where to write; made if missing.
        algo: Name of the context-parallel algorithm in force.
        allow_untested: Whether the version of Megatron may be one that nobody ran.
    """

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

        Raises:
            ContextParallelError: This Megatron is older than 0.18, or not as `contract` says.
        """
        compat.check("record", allow_untested=self._allow_untested)
        compat.replace({"train_step": self._step}, "record")

    def _step(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        call = inspect.signature(original).bind(*args, **kwargs)
        self._iteration += 1
        started = time.perf_counter()
        if self._iteration == 1:
            self._begin()
        self._recording_s = 0.0
        if self._iteration in self._recorded:
            call.arguments["forward_backward_func"] = self._observed(
                call.arguments["forward_backward_func"], call.arguments["model"]
            )
        result = original(*call.args, **call.kwargs)
        losses, skipped, grad_norm = (
            result[TRAIN_STEP.index(name)] for name in ("loss_reduced", "skipped_iter", "grad_norm")
        )
        auxiliary = _auxiliary_losses()
        line = {
            "iteration": self._iteration,
            "losses": {name: float(v) for name, v in (losses | auxiliary).items()}
            if losses
            else {},
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
        if graphs(Settings(args)) == "full_iteration" and args.use_distributed_optimizer:
            raise ContextParallelError(
                "--cp-record lets every rank have all gradients, which a captured iteration does "
                "not heed, got --cuda-graph-impl full_iteration with --use-distributed-optimizer: "
                "leave one of them out"
            )
        self._folder.mkdir(parents=True, exist_ok=True)
        # Those of an earlier run must not stay.
        for path in self._folder.glob(f"{self._path('.').name}*"):
            path.unlink()

    def _observed(self, forward_backward: Callable[..., Any], model: Any) -> Callable[..., Any]:
        """Wraps the pass through the model of an iteration whose gradients are recorded."""

        def observed(*args: Any, **kwargs: Any) -> Any:
            if self._iteration == 1:
                started = time.perf_counter()
                self._content["weights"] = {
                    name: _digest(gathered(p, p) if isinstance(p, DTensor) else p)
                    for name, p in _parameters(model).items()
                }
                self._recording_s += time.perf_counter() - started
            # A distributed optimizer would leave each rank with a part of the gradients.
            with _all_reduced(model), record_communication() as log, _counted_replays() as replays:
                result = forward_backward(*args, **kwargs)
            started = time.perf_counter()
            for name, count in (("replays", len(replays)), ("sent_bytes", log.bytes())):
                self._content.setdefault(name, {})[self._iteration] = count
            if self._iteration == 1:
                self._content["communication"] = {
                    f"{phase}_{direction}_bytes": log.bytes(phase=phase, direction=direction)
                    for phase in ("forward", "backward")
                    for direction in ("sent", "received")
                }
            self._write_state(_gradients(model))
            self._recording_s += time.perf_counter() - started
            return result

        return observed

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


@dataclass(frozen=True)
class Iteration:
    """One iteration of one rank; the losses are on the ranks of the last pipeline stage."""

    iteration: int
    losses: dict[str, float]
    grad_norm: float | None
    skipped: bool
    seconds: float


@dataclass(frozen=True)
class RankRecording:
    """What one rank recorded.

    Attributes:
        weights: Digests by parameter name.
        gradients: Digests by iteration and parameter name.
        replays: By iteration, how many CUDA graphs were replayed.
        sent_bytes: By iteration, what was sent for attention outside of CUDA graphs.
    """

    settings: dict[str, Any]
    shard: Shard
    weights: dict[str, str]
    gradients: dict[int, dict[str, str]]
    communication: dict[str, int]
    iterations: list[Iteration]
    replays: dict[int, int] = field(default_factory=dict)
    sent_bytes: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Recording:
    """What all ranks of a run recorded.

    Attributes:
        ranks: By global rank.
        gradients: By iteration, model shard and parameter name.
    """

    ranks: list[RankRecording]
    gradients: dict[int, dict[Shard, dict[str, Tensor]]]

    @classmethod
    def load(cls, folder: str | Path) -> Self:
        """Reads the recording in a folder.

        Raises:
            ContextParallelError: Nothing was recorded there, or files are missing.
        """
        folder = Path(folder)
        paths = sorted(folder.glob("rank*.json"))
        if not paths:
            raise ContextParallelError(
                f"no recording in {folder}: the run ended before its first iteration did"
            )
        ranks = []
        gradients: dict[int, dict[Shard, dict[str, Tensor]]] = {}
        for path in paths:
            content = json.loads(path.read_text())
            shard = (content["shard"][0], content["shard"][1], content["shard"][2])
            lines = path.with_suffix(".jsonl").read_text().splitlines()
            for name in ("gradients", "replays", "sent_bytes"):
                content[name] = {int(step): value for step, value in content.get(name, {}).items()}
            content.update(
                shard=shard,
                iterations=[Iteration(**json.loads(line)) for line in lines],
            )
            ranks.append(RankRecording(**content))
            for step in content["gradients"]:
                tensors = path.with_suffix(f".{step}.pt")
                found = gradients.setdefault(step, {})
                if tensors.is_file() and shard not in found:
                    found[shard] = torch.load(tensors, map_location="cpu", weights_only=True)
        world = ranks[0].settings["world_size"]
        if len(ranks) != world:
            raise ContextParallelError(f"{folder} holds {len(ranks)} of {world} ranks")
        shards = {rank.shard for rank in ranks}
        for step, found in gradients.items():
            if missing := shards - found.keys():
                raise ContextParallelError(
                    f"{folder} holds no gradients of shards {sorted(missing)} at iteration {step}"
                )
        return cls(ranks, gradients)

    @property
    def settings(self) -> dict[str, Any]:
        """What the run was."""
        return self.ranks[0].settings

    def losses(self) -> dict[str, list[float]]:
        """Returns every loss by name, one value an iteration."""
        for rank in self.ranks:
            if rank.iterations and rank.iterations[0].losses:
                names = rank.iterations[0].losses
                return {n: [i.losses.get(n, math.nan) for i in rank.iterations] for n in names}
        return {}

    def grad_norms(self) -> list[float]:
        """Returns the norm of all gradients, one value an iteration."""
        return [math.nan if i.grad_norm is None else i.grad_norm for i in self.ranks[0].iterations]

    def seconds(self) -> float:
        """Returns the median time of an iteration, without the first."""
        times = sorted(i.seconds for i in self.ranks[0].iterations[1:]) or [math.nan]
        return times[len(times) // 2]

    def sent_bytes(self) -> int:
        """Returns how much the busiest rank sent for attention in the first iteration."""
        return max(
            r.communication["forward_sent_bytes"] + r.communication["backward_sent_bytes"]
            for r in self.ranks
        )


@dataclass(frozen=True)
class Tolerances:
    """Relative errors that count as equal; the defaults hold for float32.

    Attributes:
        loss: Of every loss of every iteration.
        grad_norm: Of the gradient norm of every iteration.
        gradient: Of every parameter's gradient at the first iteration: the larger of the relative
            errors in the Euclidean and in the maximum norm.
        later_gradient: The same at later iterations, where rounding has made the weights of the
            two runs different, by up to two steps of Adam where a gradient is all but zero.
    """

    loss: float = 1e-5
    grad_norm: float = 1e-4
    gradient: float = 1e-4
    later_gradient: float = 1e-4


@dataclass(frozen=True)
class Worst:
    """The largest relative error of one quantity, and where it is."""

    error: float = 0.0
    at: str = ""

    def or_worse(self, error: float, at: str) -> Worst:
        """Returns the worse of this and another one. A NaN is infinitely wrong."""
        error = math.inf if math.isnan(error) else error
        return Worst(error, at) if error > self.error else self


@dataclass(frozen=True)
class Comparison:
    """How far a run is from its reference.

    Attributes:
        loss, grad_norm, gradient, later_gradient: The largest relative errors.
        gradients: Relative error of every parameter's gradient, by name and iteration.
        euclidean: The same, in the Euclidean norm alone.
        problems: One line for each error above its tolerance and for everything that makes the
            runs incomparable; empty if the run passed.
    """

    loss: Worst
    grad_norm: Worst
    gradient: Worst
    later_gradient: Worst
    gradients: dict[str, float] = field(default_factory=dict)
    euclidean: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether the run equals its reference within the tolerances."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it in plain types."""
        return {"passed": self.passed, **asdict(self)}


def compare(reference: Recording, run: Recording, tolerances: Tolerances) -> Comparison:
    """Compares a run with a reference that has the same model shards.

    Args:
        reference: Recording to be equal to.
        run: Recording of the run in question.
        tolerances: Largest relative errors allowed.
    """
    problems = [*_disagreements(run), *_different_starts(reference, run)]
    loss = Worst()
    expected_losses, losses = reference.losses(), run.losses()
    if not expected_losses:
        problems.append("the reference recorded no loss")
    if losses.keys() != expected_losses.keys():
        problems.append(f"losses are {sorted(losses)}, not {sorted(expected_losses)}")
    for name in expected_losses.keys() & losses.keys():
        if len(losses[name]) != len(expected_losses[name]):
            problems.append(
                f"{len(losses[name])} iterations, the reference has {len(expected_losses[name])}"
            )
        for step, (want, got) in enumerate(zip(expected_losses[name], losses[name], strict=False)):
            loss = loss.or_worse(_relative(got, want), f"{name}, iteration {step + 1}")
    grad_norm = Worst()
    for step, (want, got) in enumerate(zip(reference.grad_norms(), run.grad_norms(), strict=False)):
        grad_norm = grad_norm.or_worse(_relative(got, want), f"iteration {step + 1}")
    skipped = [i.iteration for i in run.ranks[0].iterations if i.skipped]
    if skipped:
        problems.append(f"iterations {skipped} were skipped: gradients not finite")
    gradients, euclidean = _compare_gradients(reference, run, problems)
    gradient, later_gradient = Worst(), Worst()
    for label, error in gradients.items():
        if label.endswith(", iteration 1"):
            gradient = gradient.or_worse(error, label)
        else:
            later_gradient = later_gradient.or_worse(error, label)
    for what, worst, allowed in (
        ("loss", loss, tolerances.loss),
        ("grad norm", grad_norm, tolerances.grad_norm),
        ("gradient", gradient, tolerances.gradient),
        ("gradient", later_gradient, tolerances.later_gradient),
    ):
        if worst.error > allowed:
            problems.append(f"{what} is off by {worst.error:.1e} (allowed {allowed:g}): {worst.at}")
    return Comparison(loss, grad_norm, gradient, later_gradient, gradients, euclidean, problems)


def gradient_errors(got: Tensor, want: Tensor) -> tuple[float, float]:
    """Returns the relative errors in the Euclidean and in the maximum norm.

    The second one shows an error in few elements of a large tensor.
    """
    want = want.double()
    difference = got.double() - want
    found = []
    for order in (2.0, math.inf):
        size = torch.linalg.vector_norm(want, order).item()
        off = torch.linalg.vector_norm(difference, order).item()
        if not math.isfinite(size) or not math.isfinite(off):
            return math.inf, math.inf
        # Where the reference is exactly zero nothing but zero is right.
        found.append(off / size if size else math.inf if off else 0.0)
    return found[0], found[1]


def _compare_gradients(
    reference: Recording, run: Recording, problems: list[str]
) -> tuple[dict[str, float], dict[str, float]]:
    """Returns errors by label: the larger one of both norms, and that in the Euclidean norm."""
    errors: dict[str, float] = {}
    euclidean: dict[str, float] = {}
    wanted, recorded = sorted(reference.gradients), sorted(run.gradients)
    if wanted != recorded:
        problems.append(f"recorded the gradients of iterations {recorded}, not {wanted}")
    for step in sorted(reference.gradients.keys() & run.gradients.keys()):
        at_reference, at_run = reference.gradients[step], run.gradients[step]
        if at_reference.keys() != at_run.keys():
            problems.append(
                "the runs split the model differently: give both the same TP, PP and EP"
            )
        nothing = True
        for shard in sorted(at_reference.keys() & at_run.keys()):
            want, got = at_reference[shard], at_run[shard]
            for name in sorted(want.keys() ^ got.keys()):
                problems.append(f"only one of the runs has a gradient of {name}")
            for name in sorted(want.keys() & got.keys()):
                label = name if len(at_reference) == 1 else f"{name} {_label(shard)}"
                label += f", iteration {step}"
                if want[name].shape != got[name].shape:
                    problems.append(
                        f"gradient of {label} has shape {tuple(got[name].shape)}, "
                        f"not {tuple(want[name].shape)}"
                    )
                    continue
                nothing = nothing and not want[name].any()
                euclidean[label], largest = gradient_errors(got[name], want[name])
                errors[label] = max(euclidean[label], largest)
        if nothing:
            problems.append(
                f"the reference has no gradient that is not zero at iteration {step}: "
                "nothing was compared"
            )
    return errors, euclidean


def _disagreements(run: Recording) -> list[str]:
    """Says where ranks that must hold the same values do not."""
    found = []
    first: dict[Shard, tuple[int, RankRecording]] = {}
    for number, rank in enumerate(run.ranks):
        other_number, other = first.setdefault(rank.shard, (number, rank))
        digests = [("weight", rank.weights, other.weights)]
        for step in sorted(rank.gradients.keys() | other.gradients.keys()):
            mine, theirs = rank.gradients.get(step, {}), other.gradients.get(step, {})
            digests.append((f"iteration {step} gradient", mine, theirs))
        for what, mine, theirs in digests:
            names = sorted(n for n in mine.keys() | theirs.keys() if mine.get(n) != theirs.get(n))
            if names:
                found.append(
                    f"ranks {other_number} and {number} hold different {what}s: {_few(names)}"
                )
        if [i.grad_norm for i in rank.iterations] != [i.grad_norm for i in other.iterations]:
            found.append(f"ranks {other_number} and {number} recorded different gradient norms")
    return found


def _different_starts(reference: Recording, run: Recording) -> list[str]:
    """Says whether the runs start from other weights; then nothing else can be equal."""
    starts = {rank.shard: rank.weights for rank in reference.ranks}
    for rank in run.ranks:
        want = starts.get(rank.shard, {})
        names = sorted(n for n in want.keys() & rank.weights.keys() if want[n] != rank.weights[n])
        if names:
            return [f"does not start from the weights of the reference: {_few(names)}"]
    return []


@contextmanager
def _all_reduced(model: Any) -> Iterator[None]:
    """Lets every rank have all gradients, where it would get those that its optimizer needs.

    Megatron's own switch for it, `force_all_reduce`, is not heeded by the reductions that a
    pipeline schedule starts while others still compute.
    """
    groups = [
        group
        for chunk in model
        for name in ("bucket_groups", "expert_parallel_bucket_groups")
        for group in getattr(chunk, name, [])
    ]
    for group in groups:
        group.start_grad_sync = functools.partial(_reduce_all, group.start_grad_sync)
    try:
        yield
    finally:
        for group in groups:
            del group.start_grad_sync


@contextmanager
def _counted_replays() -> Iterator[list[None]]:
    """An entry for each CUDA graph that is replayed within this context, whoever captured it."""
    replays: list[None] = []
    original = torch.cuda.CUDAGraph.replay

    def replay(graph: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        original(graph)

    torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign, assignment]
    try:
        yield replays
    finally:
        torch.cuda.CUDAGraph.replay = original  # type: ignore[method-assign]


def _reduce_all(start_grad_sync: Callable[..., None], force_all_reduce: bool = False) -> None:
    start_grad_sync(force_all_reduce=True)


def _auxiliary_losses() -> dict[str, Tensor]:
    """Returns what is added to the loss of a micro-batch, without its coefficient.

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
        for name, parameter in unwrapped(chunk).named_parameters():
            if parameter.requires_grad:
                found[prefix + name] = parameter
    return found


def _gradients(model: Any) -> dict[str, Tensor]:
    """Returns copies of the finalized gradients; Q, K and V of a fused projection apart."""
    rows = rows_of_weights(model)
    found = {}
    for name, parameter in _parameters(model).items():
        if isinstance(parameter, DTensor):
            gradient = gathered(parameter, parameter.grad)
        else:
            summed: Any = parameter  # Megatron's own data parallelism adds up elsewhere
            gradient = summed.main_grad.detach().to("cpu", copy=True)
        if name in rows:
            found.update(rows[name].split(name, gradient))
        else:
            found[name] = gradient
    return found


def _digest(tensor: Tensor) -> str:
    """Returns a hash of the bytes: equal for equal values on any rank, cheap to keep."""
    flat = tensor.detach().to("cpu").contiguous().view(-1)
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _relative(got: float, want: float) -> float:
    if not (math.isfinite(got) and math.isfinite(want)):
        return math.inf
    return abs(got - want) / abs(want) if want else math.inf if got else 0.0


def _label(shard: Shard) -> str:
    return "(pp {} tp {} ep {})".format(*shard)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
