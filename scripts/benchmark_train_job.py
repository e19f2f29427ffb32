"""One job of benchmark_train.py: a model of Megatron, trained on sequences of several lengths.

    torchrun --nproc-per-node 4 scripts/benchmark_train_job.py PLAN [flags of pretrain_gpt.py]

Starting a job takes longer than measuring it, so one job measures all lengths. Megatron builds the
model and trains as it always does; before each step all ranks change the length, if it is time for
another one, and look at the clock.
"""

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from profiles import Span, by_class, device_spans, gaps, longest, new_profiler
from torch import Tensor

from megatron_cp_plugin.document_lengths import lengths_of, random_documents
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.process_exit import one_line_errors

REPORT = "benchmark_train_job: "
OUT_OF_MEMORY = 3  # exit code
# What kernels import on first use, in seconds.
KERNEL_PACKAGES = ("flash_attn.cute", "fla.ops.common.chunk_h", "fla.ops.common.chunk_o")


@dataclass(frozen=True)
class Plan:
    """What a job measures.

    Attributes:
        lengths: global tokens, ascending. longest: after them, double until memory is exhausted.
        warmup, iters: steps of each length; the last number is also that of all further ones.
        gate: the job leaves its GPUs alone before this file exists.
        profile: all ranks profile one more step of each length.
        prefill: a step is a forward alone, up to the logits of the last token.
        documents: distribution of the lengths of packed documents, as `lengths_of` reads it.
        multiple: of documents' lengths.
    """

    lengths: tuple[int, ...]
    longest: bool
    warmup: tuple[int, ...]
    iters: tuple[int, ...]
    vocabulary: int
    gate: str
    profile: bool = False
    prefill: bool = False
    documents: str = ""
    multiple: int = 1

    def all_lengths(self) -> Iterator[int]:
        """The lengths in their order."""
        yield from self.lengths
        tokens = self.lengths[-1]
        while self.longest:
            tokens *= 2
            yield tokens

    def bounds(self, tokens: int) -> tuple[int, ...]:
        """Where the documents of a sequence begin, and its end."""
        if not self.documents:
            return (0, tokens)
        lengths = lengths_of(self.documents)
        return (0, *random_documents(tokens, lengths, multiple=self.multiple), tokens)

    def steps(self) -> Iterator[tuple[int, int]]:
        """The steps of each length, before it is measured and while it is."""
        for number in count():
            warmup, iters = (of[min(number, len(of) - 1)] for of in (self.warmup, self.iters))
            yield warmup, iters


@dataclass(frozen=True)
class Report:
    """One length.

    Attributes:
        step_ms: rank 0's. memory_bytes: the greatest of any rank.
        points_bytes: the same at points of a step, and what the GPU's driver says is in use.
        profile_ms: of one more step, of each rank: milliseconds of each class of device activity.
    """

    tokens: int
    step_ms: tuple[float, ...] = ()
    memory_bytes: int = 0
    loss: float = 0.0
    out_of_memory: bool = False
    profile_ms: tuple[dict[str, float], ...] = ()
    points_bytes: dict[str, int] = field(default_factory=dict)

    def say(self) -> None:
        """Prints what `read_reports` reads."""
        print(f"\n{REPORT}{json.dumps(asdict(self))}", flush=True)


def read_reports(text: str) -> list[Report]:
    """The reports in a job's output; one for each length, whichever rank ran out of memory."""
    found: dict[int, Report] = {}
    for line in text.splitlines():
        if line.startswith(REPORT):
            report = Report(**json.loads(line.removeprefix(REPORT)))
            found.setdefault(report.tokens, report)
    return list(found.values())


class Clock:
    """Says which batch is trained on, step for step, and measures the steps between.

    Attributes: tokens: of the present length.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.tokens = plan.lengths[0]
        self._batch: dict[str, Tensor] = {}
        self._loss = torch.zeros(2)
        self._held: dict[str, int] = {}
        self._steps = self._all_steps()

    def tick(self) -> None:
        """Begins a step, on all ranks, also those that get no batches.

        Raises: EndOfPlan after the last step.
        """
        next(self._steps)

    def timed(self, train_step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Megatron's `train_step`, with a tick before it."""
        self.tick()
        return train_step(*args, **kwargs)

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """The same random tokens on all ranks, over and over."""
        while True:
            yield dict(self._batch)

    def _all_steps(self) -> Iterator[None]:
        from megatron.training import get_args

        for tokens, (warmup, iters) in zip(
            self._plan.all_lengths(), self._plan.steps(), strict=False
        ):
            self.tokens = tokens
            get_args().seq_length = tokens  # ranks make room by it for what others send
            gc.collect()
            torch.cuda.empty_cache()
            self._batch = _batch(self._plan, tokens)
            marks = []
            for step in range(warmup + iters):
                marks.append(_now())
                if step == warmup:
                    self._held = {"before the forward": torch.cuda.memory_allocated()}
                    torch.cuda.reset_peak_memory_stats()
                yield
            marks.append(_now())
            times = [1000 * (end - start) for start, end in pairwise(marks)]
            self._note_peak("peak of the backward or the optimizer")
            free, total = torch.cuda.mem_get_info()
            self._held["in use, driver"] = total - free
            spans = (yield from self._profiled()) if self._plan.profile else []
            self._report(times[warmup:], spans)
        dist.barrier()  # whoever ends first would look like a lost rank to the others
        raise EndOfPlan

    def keep_loss(self, sum_of_losses: Any, losses: Tensor) -> Any:
        """Calls a loss function of `forward_step` and keeps its sum and number of tokens."""
        result = sum_of_losses(losses)
        self._held["after the forward"] = torch.cuda.memory_allocated()
        self._note_peak("peak of the forward")
        self._loss = result[2]["lm loss"]
        return result

    def _note_peak(self, name: str) -> None:
        peak = torch.cuda.max_memory_allocated()
        self._held[name] = max(peak, self._held.get(name, 0))
        torch.cuda.reset_peak_memory_stats()

    def _profiled(self) -> Generator[None, None, list[Span]]:
        profiler = new_profiler()
        with profiler:
            yield
            torch.cuda.synchronize()
        return device_spans(profiler.events())

    def _report(self, times: Sequence[float], spans: Sequence[Span]) -> None:
        # Of ranks without a loss, in a pipeline, some points are missing.
        points: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(points, self._held)
        names = dict.fromkeys(name for held in points for name in held)
        most = {name: max(held.get(name, 0) for held in points) for name in names}
        memory = max(size for name, size in most.items() if name.startswith("peak"))
        loss = self._loss.double().clone()
        dist.all_reduce(loss)
        profiles: list[Any] = [None] * (dist.get_world_size() if spans else 0)
        if spans:
            dist.all_gather_object(profiles, by_class(spans))
        if dist.get_rank() == 0:
            total, tokens = loss.tolist()
            for line in (*longest(spans), *(gaps(spans) if spans else ())):
                print(line)
            Report(
                self.tokens,
                tuple(times),
                memory,
                total / tokens,
                profile_ms=tuple(profiles),
                points_bytes=most,
            ).say()


class FirstToken:
    """A model as a prompt needs it: with logits of the last token alone.

    Attributes: module: Megatron's model. tokens: of the prompt, global.
    """

    def __init__(self, module: Any, tokens: int) -> None:
        self.module, self.tokens = module, tokens

    def __call__(self, text: Tensor, positions: Tensor, mask: Tensor | None, **_: Any) -> Tensor:
        """The largest logit and 1, or twice 0 on a rank without the last token, as [2]."""
        from megatron.core.utils import unwrap_model

        model = unwrap_model(self.module)
        model.post_process = False  # ends before the logits of all tokens
        hidden = model(text, positions, mask)
        # The last token is some rank's last one in every layout. Megatron's output layer gathers
        # the last rows of sequence-parallel ranks, in order, and the parts of the vocabulary.
        logits, _ = model.output_layer(hidden[-1:].contiguous(), runtime_gather_output=True)
        is_last = (positions[0, -1] == self.tokens - 1).float()
        return torch.stack((logits[-1].float().max() * is_last, is_last))


def _as_loss(logit: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """What Megatron wants of a loss function."""
    return logit[0], logit[1].int(), {"lm loss": logit.clone()}


class EndOfPlan(Exception):  # noqa: N818  (nothing went wrong)
    """All has been measured."""


def _batch(plan: Plan, tokens: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(plan.vocabulary, (1, tokens + 1), generator=generator)
    bounds = torch.tensor(plan.bounds(tokens), dtype=torch.int32)
    lengths = bounds.diff()
    positions = torch.arange(tokens) - bounds[:-1].repeat_interleave(lengths)
    batch = {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "loss_mask": torch.ones(1, tokens),
        "position_ids": positions.unsqueeze(0),
    }
    if plan.documents:
        batch |= {"cu_seqlens": bounds.unsqueeze(0), "max_seqlen": lengths.max()}
    return {key: value.cuda() for key, value in batch.items()}


def _now() -> float:
    torch.cuda.synchronize()
    return time.perf_counter()


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a GPU's memory was exhausted: torch's, or what other libraries make of it."""
    return isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error).lower()


def main() -> NoReturn:
    """Measures what the plan says."""
    plan = Plan(**json.loads(sys.argv.pop(1)))
    if torch.cuda.is_available():
        # Some packages look at the present device when they are imported.
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        for package in KERNEL_PACKAGES:
            with suppress(ImportError):
                importlib.import_module(package)
    with one_line_errors():
        sys.argv[1:] = launch.prepare(sys.argv[1:], run_file=True)
        code = _train(plan)
    # Ranks that did not run out of memory wait for the others: nobody tidies up.
    sys.stdout.flush()
    os._exit(code)


def _train(plan: Plan) -> int:
    # Not before the plugin is in force.
    from megatron.core.enums import ModelType
    from megatron.training import pretrain
    from megatron.training.argument_utils import (
        gpt_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_and_validate_args

    from megatron_cp_plugin.harness.pretrain import forward_step
    from megatron_cp_plugin.integration import compat

    args = parse_and_validate_args(args_defaults={"dataloader_type": "external"})
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    clock = Clock(plan)

    def provide(samples: list[int]) -> Any:
        return (None, clock.batches(), None) if plan.prefill else (clock.batches(), None, None)

    def step(data: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        if plan.prefill:  # a step is this call
            clock.tick()
            logit, _ = forward_step(data, FirstToken(model, clock.tokens))
            return logit, partial(clock.keep_loss, _as_loss)
        output, loss = forward_step(data, model)
        return output, partial(clock.keep_loss, loss)

    provide.is_distributed = True  # type: ignore[attr-defined]
    compat.replace({"train_step": clock.timed}, "record")
    while not Path(plan.gate).exists():
        time.sleep(0.02)
    try:
        pretrain(config, provide, ModelType.encoder_or_decoder, step)
    except EndOfPlan:
        return 0
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        Report(clock.tokens, out_of_memory=True).say()
        # torchrun ends the ranks that wait for this one.
        return OUT_OF_MEMORY
    raise AssertionError("Megatron stopped before the plan's end")


if __name__ == "__main__":
    main()
