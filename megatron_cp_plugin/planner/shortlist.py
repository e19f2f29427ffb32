"""Measures the candidates that are best in simulation, on the GPUs that will run them.

All ranks of a group measure the same candidates in the same order; the slowest rank's time counts
for each candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import unrecorded
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.kernels import resolver
from megatron_cp_plugin.planner.candidates import Options
from megatron_cp_plugin.planner.choose import (
    Choice,
    Combination,
    Kind,
    Row,
    too_large,
    with_memory,
)
from megatron_cp_plugin.planner.layer import DTYPES

_FEWEST, _MOST = 4, 6  # candidates
_NEAR = 1.3  # times the best simulated time: slower candidates are taken only to reach the minimum
_SECONDS = 0.2  # time for which a candidate is repeated
_TIMES = 3, 20  # least and largest number of repetitions
_SPARE = 1.2  # memory that must be free, in times of the computed peak

Timer = Callable[[Callable[[], object]], float]


class Measured(NamedTuple):
    """A shortlist with times. Attributes: seconds: of all layers, both passes, by combination."""

    combinations: tuple[Combination, ...]
    seconds: tuple[float, ...]

    @property
    def best(self) -> Combination:
        """The fastest combination; of equally fast ones the one that the simulation prefers."""
        return self.combinations[self.seconds.index(min(self.seconds))]

    def __str__(self) -> str:
        times = zip(self.combinations, self.seconds, strict=True)
        words = (f"{one.name} {seconds * 1e3:.2f} ms" for one, seconds in times)
        return f"auto measured {len(self.seconds)} candidates: {', '.join(words)}"


def timer_on(device: torch.device) -> Timer | None:
    """A function that times a call; None without a GPU, where nothing is measured."""
    return _on_gpu if device.type == "cuda" else None


def _on_gpu(body: Callable[[], object]) -> float:
    """Seconds of a call that begins on an idle GPU, until the GPU is done."""
    torch.cuda.synchronize()
    start = perf_counter()
    body()
    torch.cuda.synchronize()
    return perf_counter() - start


def shortlist(
    choice: Choice,
    kinds: Sequence[Kind],
    refusal: Callable[[Combination], str | None] = lambda combination: None,
) -> tuple[Combination, ...]:
    """Four to six combinations: the best of each algorithm and layout, then the next best.

    One combination if nothing is to be measured: on one rank, and with layers of linear attention.

    Args:
        choice: Of the simulation.
        kinds: Of the model's layers.
        refusal: As of `choose`.
    """
    if len(choice.site.nodes) == 1 or not all(isinstance(one.shape, Shape) for one in kinds):
        return (choice.best,)
    seen: set[tuple[str, str]] = set()
    first, others = list[Combination](), list[Combination]()
    for one in choice.combinations:
        of = one.algo, one.rows[0].layout
        (others if of in seen else first).append(one)
        seen.add(of)
    near = _NEAR * choice.best.seconds
    order = [
        *(one for one in first if one.seconds <= near),
        *(one for one in others if one.seconds <= near),
        *(one for one in first if one.seconds > near),
    ]
    found: list[Combination] = []
    for one in order:
        if len(found) >= (_MOST if one.seconds <= near else _FEWEST):
            break
        if one is not choice.best:  # which has been looked at
            if refusal(one) is not None:
                continue
            one = with_memory(one, kinds, choice.site)
            if too_large(one, choice.site):
                continue
        found.append(one)
    return tuple(found)


def measure(
    combinations: Sequence[Combination],
    kinds: Sequence[Kind],
    topology: Topology,
    kernel: str,
    device: torch.device,
) -> Measured | None:
    """Measures a shortlist; a collective operation of the group.

    Args:
        combinations: With their peak memory, the same on all ranks.
        kinds: Of the model's layers.
        topology: The ranks that compute attention together.
        kernel: As of `cp.attention`.
        device: Of this rank.

    Returns: Times of the combinations that fit into the free memory; None if a rank has no GPU, or
        fewer than two fit.
    """
    timer = timer_on(device)
    free = _free_bytes(device)
    able = topology.gather((timer is not None, free))
    if timer is None or not all(one for one, _ in able):
        return None
    room = min(bytes_free for _, bytes_free in able)
    fitting = [one for one in combinations if _needed(one, kinds, topology.size) <= room]
    if len(fitting) < 2:
        return None
    found = []
    with torch.no_grad(), unrecorded():
        known: dict[tuple[str, Options, int], float] = {}
        for one in fitting:
            total = 0.0
            for number, (row, kind) in enumerate(zip(one.rows, kinds, strict=True)):
                key = row.algo, row.options, number
                if key not in known:
                    known[key] = _layer(row, kind, topology, kernel, device, timer)
                total += kind.count * known[key]
            found.append(total)
    topology.drop_peer_channels()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    slowest = map(max, zip(*topology.gather(tuple(found)), strict=True))
    return Measured(tuple(fitting), tuple(slowest))


def _free_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 2**62
    free, _ = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(free + held)


def _needed(combination: Combination, kinds: Sequence[Kind], size: int) -> float:
    """Bytes of a GPU for the measurement: attention's, and its inputs."""
    most = 0.0
    for row, kind in zip(combination.rows, kinds, strict=True):
        shape = kind.shape
        assert isinstance(shape, Shape)
        widths = shape.query_width + shape.out_width
        widths += shape.kv_heads * (shape.head_dim + shape.value_dim)
        inputs = shape.batch * -(-shape.seq_len // size) * widths * shape.element_bytes
        most = max(most, _SPARE * (inputs + (row.peak_bytes or 0)))
    return most


def _layer(
    row: Row, kind: Kind, topology: Topology, kernel: str, device: torch.device, timer: Timer
) -> float:
    """Seconds of forward and backward on this rank."""
    shape, mask = kind.shape, kind.mask
    assert isinstance(shape, Shape)
    algorithm = registry.create(row.algo, topology, dict(row.options))
    layout = algorithm.layout.within(mask.followed)
    tokens = layout.length(topology.rank, topology.size, shape.seq_len)
    source = torch.Generator(device).manual_seed(topology.rank)
    dtype = DTYPES[shape.element_bytes]
    q, k, v, dout = (
        torch.randn((shape.batch, tokens, heads, dim), generator=source, dtype=dtype, device=device)
        for heads, dim in _sizes(shape)
    )
    compiled = algorithm.compiled(
        *(q.shape, k.shape, v.shape, dtype, device, torch.are_deterministic_algorithms_enabled()),
        *(shape.seq_len, mask.causal, mask.window, mask.documents, mask.slices, None),
        resolver(kernel),
    )

    def step() -> None:
        saved = compiled.forward.attend(q, k, v)[2]
        compiled.backward().differentiate(dout, saved)

    step()  # kernels are compiled, buffers made
    # The same number on all ranks: each step is a collective operation.
    least, most = _TIMES
    times = min(most, max(least, int(_SECONDS / max(topology.gather(timer(step))))))
    return median(timer(step) for _ in range(times))


def _sizes(shape: Shape) -> Iterable[tuple[int, int]]:
    """Heads and dims of q, k, v and dout."""
    dims = shape.head_dim, shape.head_dim, shape.value_dim, shape.value_dim
    heads = shape.heads, shape.kv_heads, shape.kv_heads, shape.heads
    return zip(heads, dims, strict=True)
