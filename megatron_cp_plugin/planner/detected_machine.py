"""Finds out which machine this is, and how the ranks of a group are placed on it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from math import exp, log, log2, sqrt
from typing import Any

import torch

from megatron_cp_plugin.core.agree import check_same
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import Lengths, LogNormal, random_documents
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.layers import Options
from megatron_cp_plugin.planner.choose import GIB, CallSite, Combination, Kind, choose
from megatron_cp_plugin.planner.explain import sentence
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.shortlist import Gather, measure, shortlist, timer_on
from megatron_cp_plugin.registry import AUTO, layout_of

_OF_GPU = {
    "h200": "h200_nvlink",
    "h100": "h100_400g",
    "a800": "a800_4x200g",
    "a100": "a100_8x200g",
    "b200": "b200",
}
_DEFAULT = "h200"
_KERNEL = "flash4"
_DRAWS = 32  # of documents
_MEASURED, _OF_CALL = 8, 3  # draws for a run, and for calls of one kind, which are more alike
_KEPT = 256  # choices of a group
SPARE = 0.1  # share of a GPU's memory, for everything that is not counted
_EQUAL = 0.05  # log2 of the ratio of two means of documents of equal length, the last one cut

_log = logging.getLogger(__name__)


def machine_named(name: str) -> Machine:
    """A machine by a GPU's name, by its file's name or by a path.

    Raises: ConfigError if there is none.
    """
    return Machine.load(_OF_GPU.get(name.lower(), name))


def machine_here(name: str | None, gpu: str | None) -> tuple[Machine, str]:
    """The machine of that name, else of the GPU, and how it was found.

    Raises: ConfigError if there is none of that name.
    """
    if name is not None:
        return machine_named(name), "as it was named"
    words = (gpu or "").lower().replace("-", " ").split()
    for known in _OF_GPU:
        if known in words:
            return machine_named(known), f"by the name of the GPU, {gpu}"
    why = f"no machine is known for {gpu}" if gpu else "there is no GPU here"
    return machine_named(_DEFAULT), f"by default, for {why}: name yours"


def kernel_on(machine: Machine, name: str) -> str:
    """The machine's kernel of that name; where it does not know it the usual one, or its first."""
    return next(one for one in (name, _KERNEL, *machine.kernels) if one in machine.kernels)


@dataclass(frozen=True)
class Example:
    """A mask that stands for many, so that a choice need not be made again for every batch.

    Examples are equal where choices would be: of documents where the statistics are, of spans
    where about the same share of the pairs is seen.

    Attributes:
        words: the assumptions; empty: none.
        drawn: documents of several batches, for which candidates are measured.
    """

    mask: Mask = field(compare=False)
    words: str = field(compare=False)
    key: tuple[object, ...]
    drawn: tuple[tuple[int, ...], ...] = field(default=(), compare=False)


@lru_cache(maxsize=64)  # all layers of a batch have the same mask
def example_of(mask: Mask, seq_len: int, layout: Layout, size: int) -> Example:
    """The example that stands for a call's mask."""
    if mask.slices is not None:
        share = max(1, mask.bands.area(seq_len)) / seq_len**2
        words = (
            f"; spans as of the first such call, {len(mask.slices)} slices with {share:.1%} of all "
            "pairs"
        )
        return Example(mask, words, ("spans", mask.causal, round(log2(share))))
    if not mask.documents:
        return Example(mask, "", (mask,))
    found = statistics_of(mask.documents, seq_len)
    over_tokens = min(seq_len, found.mean * exp(found.sigma**2))
    drawn = documents_like(found, seq_len, layout, size, over_tokens)
    like = replace(mask, documents=drawn[0])
    return Example(like, f"; documents {found.label}, as in this call", (like,), drawn[1:])


def statistics_of(documents: Sequence[int], seq_len: int) -> LogNormal:
    """Lengths with about the same mean over tokens, to powers of two, and about the same spread.

    The mean over tokens says how many keys a query sees. A log-normal length is exp(sigma^2) times
    as long in the mean over tokens as in the mean over documents; that ratio is a power of two, or
    the root of two for lengths that differ by less. Lengths are equal only if the call's
    are: equal ones may all end where ranks do, so that no algorithm sends anything.

    Args: documents: as of `document_starts`.
    """
    over_tokens = _over_tokens(documents, seq_len)
    spread = log2(over_tokens * (len(documents) + 1) / seq_len)
    doublings = round(spread) or (0.5 if spread > _EQUAL else 0)
    mean = 2.0 ** (round(log2(over_tokens)) - doublings)
    return LogNormal(mean, sqrt(log(2) * doublings))


@lru_cache(maxsize=64)  # every micro-batch has new documents, most of them of such lengths
def documents_like(
    lengths: Lengths | int, seq_len: int, layout: Layout, size: int, over_tokens: float = 0.0
) -> tuple[tuple[int, ...], ...]:
    """Draws of documents of such lengths, or of such a mean, padded as the layout needs them.

    A few long documents, on which most depends, are a matter of chance: of many draws the first one
    comes nearest to the mean of all. Eight others follow, as different as all draws are: in
    simulations the fastest algorithm of one draw takes up to 1.24 times as long as the best of 320.

    Args: over_tokens: the length to come near to in the mean over tokens, not over documents: the
        three nearest draws follow the first one. 0: the mean of all draws.
    """
    multiple = layout.multiple(size) if layout.name == PaddedDocuments.name else 1
    drawn = [
        random_documents(seq_len, lengths, multiple=multiple, seed=seed) for seed in range(_DRAWS)
    ]
    means = [_over_tokens(documents, seq_len) for documents in drawn]
    wanted = over_tokens or sum(means) / len(means)
    near = sorted(range(_DRAWS), key=lambda one: abs(log(means[one] / wanted)))
    spread, apart = sorted(near, key=means.__getitem__), _DRAWS // _MEASURED
    others = near[:_OF_CALL] if over_tokens else spread[apart // 2 :: apart]
    return tuple(drawn[one] for one in (near[0], *others))


def _over_tokens(documents: Sequence[int], seq_len: int) -> float:
    """The mean over tokens of the length of their document."""
    return sum((b - a) ** 2 for a, b in pairwise((0, *documents, seq_len))) / seq_len


def choose_for(
    topology: Topology,
    shape: Shape,
    mask: Mask,
    kernel: str,
    given: Mapping[str, object],
    device: torch.device,
) -> tuple[str, Options]:
    """Algorithm and options for one attention call; a collective operation, once for each shape.

    Args: given: options of `AUTO`: layout, machine.

    Raises: ConfigError if another option is given; as `chosen_by_first`.
    """
    layout = layout_of(AUTO, given)
    example = example_of(mask, shape.seq_len, layout, topology.size)
    question = shape, example, kernel, layout.name, given.get("machine"), device
    # With the topology, so that no process group is held that nobody uses any more.
    choices = topology.choices
    if question not in choices:
        if len(choices) >= _KEPT:
            choices.clear()
        masks = tuple(replace(example.mask, documents=one) for one in example.drawn)
        best = chosen_by_first(
            [Kind("attention", shape, example.mask, measured=masks)],
            topology,
            kernel,
            given.get("machine"),
            device,
            gather=topology.gather,
            first=topology.rank == 0,
            assumed=example.words,
            layouts=(layout.name,),
        )
        choices[question] = best.algo, best.options
    return choices[question]


def chosen_by_first(
    kinds: Sequence[Kind],
    topology: Topology,
    kernel: str,
    machine: object,
    device: torch.device,
    *,
    gather: Gather,
    first: bool,
    assumed: str,
    **how: Any,
) -> Combination:
    """The choice of one rank for all; a collective operation of all these ranks.

    On GPUs the best candidates of the simulation are measured, unless a machine is named.

    Args:
        topology: the ranks that compute attention together.
        machine: its name; None: by the GPU of the rank that chooses.
        gather: gathers the objects of all ranks that need one choice.
        first: whether this rank is the first of them, which chooses.
        assumed: of the masks, for the log.
        how: further arguments of `choose`.

    Raises: ContextParallelError on all ranks, if nothing serves, or ranks ask otherwise.
    """
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            f"a CUDA graph cannot compare the ranks' choices, got algo {AUTO} for a new shape "
            "while it was captured: make the same call once before"
        )
    name = None if machine is None else str(machine)
    check_agreement(gather(repr((kinds, kernel, name, how["layouts"]))))
    nodes, near = topology.nodes, topology.near
    answer: tuple[Combination, ...] | ContextParallelError | None = None
    if first:
        try:
            gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
            found, why = machine_here(name, gpu)
            if near is None:
                found = replace(found, copy=None)
            memory_bytes = found.memory_gib * GIB * (1 - SPARE)
            site = CallSite(found, nodes, kernel_on(found, kernel), memory_bytes)
            choice = choose(kinds, site, **how)
            _log.info("%s (machine found %s%s)", sentence(choice), why, assumed)
            measures = name is None and timer_on(device) is not None
            refusal = how.get("refusal", lambda combination: None)
            answer = shortlist(choice, kinds, refusal) if measures else (choice.best,)
        except ContextParallelError as error:
            answer = error
    answer = gather(answer)[0]
    if isinstance(answer, ContextParallelError):
        raise answer
    assert answer is not None  # the first rank has one
    if len(answer) == 1:
        return answer[0]
    measured = measure(answer, kinds, topology, kernel, device, gather)
    best = answer[0] if measured is None else measured.best
    if first and measured is not None:
        options = "".join(f", {key}={value!r}" for key, value in best.options)
        _log.info('%s; to pin the fastest one: algo="%s"%s', measured, best.algo, options)
    return best


def check_agreement(asked: Sequence[str]) -> None:
    """Raises: ContextParallelError on all ranks if not all ask, or have chosen, the same."""
    advice = "start all with the same settings and versions, or name an algorithm"
    check_same(f"all ranks need the same choice of {AUTO}", asked, advice)
