"""Ranks the ways to split a model over GPUs: tensor, context, pipeline, data, expert parallel.

Each expert is whole. Parameters are whole, or sharded by Megatron-FSDP where it is supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import inf
from typing import NamedTuple

from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, near_multiples
from megatron_cp_plugin.planner.choose import GIB, CallSite, Choice, Kind, choose
from megatron_cp_plugin.planner.dry_run import RecordedKernel
from megatron_cp_plugin.planner.event_simulation import tile_seconds
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.model import Model, Recompute, Split
from megatron_cp_plugin.planner.step import TrainingStep, check_split, nodes_of_split, step

STEP_TOKENS = 2**22  # of a step, where nobody says
_CLOSER = 6  # whose attention is simulated, and not only estimated


class Proposal(NamedTuple):
    """A way to split a model, with the time of a step."""

    step: TrainingStep
    choice: Choice

    @property
    def split(self) -> Split:
        """How the model is split."""
        return self.step.split

    @property
    def rate(self) -> float:
        """Tokens a second and GPU."""
        return self.step.tokens / self.step.seconds / self.split.gpus


@dataclass(frozen=True)
class Job:
    """The model, data and machine of a training job.

    Attributes:
        tokens: tokens of a sequence.
        sequences: sequences of a step, over all data-parallel ranks.
    """

    model: Model
    tokens: int
    gpus: int
    machine: Machine
    kernel: str
    mask: Mask
    sequences: int


def proposals(job: Job, most: int) -> list[Proposal]:
    """The fastest ways that fit, the fastest first. Raises: ConfigError if nothing fits."""
    ways, choices = list(_ways(job)), dict[tuple[int, int], Choice]()
    if not ways:
        raise ConfigError(
            f"{job.model.name} has no way to split {job.sequences} sequences of {job.tokens} "
            f"tokens among {job.gpus} GPUs: tensor, context and pipeline parallelism are powers of "
            "two, --tokens is a multiple of 2 * TP * CP, and data parallelism a divisor of "
            f"--batch: use {_nearest(job)}"
        )
    open_ = sorted((_small_enough(job, one, _least(job, one)) for one in ways), key=_time)
    fitting = [best for best in open_ if best.fits(job.machine)]
    if not fitting:
        raise _too_large(job, open_)
    found: list[TrainingStep] = []
    for best in _worth_it(fitting):
        if len(found) >= most and best.seconds > sorted(found, key=_time)[most - 1].seconds:
            break
        seconds = _choice_for(job, best.split, choices, quick=True).best.seconds
        found.append(_training_step(job, best.split, seconds))
    found.sort(key=_time)
    closer: dict[tuple[int, int], Choice] = {}
    made, with_attention = [], list[TrainingStep]()
    for split in (one.split for one in found[: 2 * most]):
        if len(closer) < _CLOSER or (split.tensor, split.context) in closer:
            choice = _choice_for(job, split, closer, quick=False)
            gib = max(row.peak_bytes or 0 for row in choice.best.rows) / GIB
            taken = _small_enough(job, split, choice.best.seconds, gib)
            with_attention.append(taken)
            if taken.fits(job.machine):
                made.append(Proposal(taken, choice))
    if not made:
        raise _too_large(job, with_attention)
    made.sort(key=lambda one: (-one.rate, one.split.tensor * one.split.pipeline))
    return made[:most]


def _too_large(job: Job, found: Sequence[TrainingStep]) -> ConfigError:
    least = min(one.gib for one in found)
    return ConfigError(
        f"{job.model.name} of {job.tokens} tokens does not fit {job.gpus} GPUs of "
        f"{job.machine.memory_gib:g} GiB, got {least:.0f} GiB at least: use more GPUs or "
        "fewer tokens"
    )


def _worth_it(found: Iterable[TrainingStep]) -> Iterator[TrainingStep]:
    """Drops proposals that another split of the experts, or sharding or not sharding parameters,
    would improve in time and memory.

    Args: found: the fastest first.
    """
    least: dict[Split, float] = {}
    for best in found:
        alike = replace(best.split, expert=1, chunked_loss=False, sharded=False)
        if best.gib < least.get(alike, inf):
            least[alike] = best.gib
            yield best


def _nearest(job: Job) -> str:
    """Flags of the ways to split a model: by context parallelism alone, at least."""
    gpus = 2 ** (job.gpus.bit_length() - 1)
    found = [f"--gpus {gpus}"] if gpus != job.gpus else []
    if job.tokens % (2 * gpus):
        found.append(f"--tokens {near_multiples(job.tokens, 2 * gpus)}")
    return " and ".join(found)


def _small_enough(job: Job, split: Split, seconds: float, gib: float = 0.0) -> TrainingStep:
    """As `_training_step`; the loss is chunked if the whole logits do not fit."""
    found = _training_step(job, split, seconds, gib)
    if split.chunked_loss or found.fits(job.machine):
        return found
    return _training_step(job, replace(split, chunked_loss=True), seconds, gib)


def _time(one: TrainingStep) -> tuple[float, int, int, bool]:
    split = one.split
    return one.seconds, split.tensor * split.pipeline, split.context, split.sharded


def _ways(job: Job) -> Iterator[Split]:
    """All splits that the model, the tokens and the GPUs allow."""
    powers = [2**n for n in range(job.gpus.bit_length())]
    experts = powers if job.model.experts else [1]
    for tensor, context, pipeline in product(powers, powers, powers):
        ranks = tensor * context * pipeline
        if tensor > job.machine.gpus_per_node or job.gpus % ranks:
            continue
        data = job.gpus // ranks
        if job.sequences % data or job.tokens % (2 * context * tensor):
            continue
        recomputes: tuple[Recompute, ...] = ("none", "full")
        for expert, recompute, sharded in product(experts, recomputes, (False, True)):
            split = Split(
                *(tensor, context, pipeline, data, expert),
                micro_batches=job.sequences // data,
                recompute=recompute,
                sharded=sharded,
            )
            try:
                check_split(job.model, split, job.tokens)
            except ConfigError:
                continue
            yield split


def _training_step(job: Job, split: Split, seconds: float, gib: float = 0.0) -> TrainingStep:
    """Args: seconds: of one layer's attention."""
    return step(job.model, split, job.tokens, job.machine, attention=seconds, attention_gib=gib)


def _least(job: Job, split: Split) -> float:
    """Seconds of a layer's attention without waiting for messages."""
    shape = job.model.shape(job.tokens, split.tensor)
    if isinstance(shape, LinearShape):
        return 0.0
    pairs = job.mask.bands.area(job.tokens)
    sizes = shape.heads, shape.kv_heads, shape.head_dim, shape.value_dim
    tiles = (
        RecordedKernel(p, 1, job.tokens, job.tokens, pairs, *sizes, job.mask.causal) for p in PHASES
    )
    return sum(tile_seconds(job.machine, job.kernel, tile) for tile in tiles) / split.context


def _choice_for(
    job: Job, split: Split, known: dict[tuple[int, int], Choice], *, quick: bool
) -> Choice:
    key = split.tensor, split.context
    if key not in known:
        kind = Kind("attention", job.model.shape(job.tokens, split.tensor), job.mask)
        site = CallSite(job.machine, nodes_of_split(split, job.machine), job.kernel)
        known[key] = choose([kind], site, quick=quick)
    return known[key]
