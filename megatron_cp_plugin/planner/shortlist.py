"""Measures the candidates that are best in simulation, on the GPUs that will run them.

All ranks of a group measure the same candidates in turns, beginning each together; the slowest
rank's time counts for each candidate. A step is measured among others, launched one behind another
as layers are, and with the documents of several batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from math import ceil, prod
from operator import mul
from statistics import mean, median
from time import perf_counter
from typing import Any, NamedTuple

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.autograd.host_memory import free_bytes
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import UNRECORDED, holding
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels import resolver
from megatron_cp_plugin.layers import Options
from megatron_cp_plugin.planner.choose import Choice, Combination, Kind, with_memory
from megatron_cp_plugin.planner.layer import DTYPES, AnyShape, input_sizes

_FEWEST, _MOST = 4, 6  # candidates
_NEAR = 1.3  # times the best simulated time: slower candidates are taken only to reach the minimum
_SERIES = 0.02  # seconds of steps that are timed together, at least
_SECONDS = 1.5  # of all series together, about
_ROUNDS = 5, 15  # least and largest number of series of a step; the host may delay two of five
_SPARE = 1.2  # memory that must be free, in times of the computed peak

Timer = Callable[[Callable[[], object]], float]
Gather = Callable[[Any], list[Any]]  # of objects of all ranks, by rank


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
    """Seconds of calls that begin on an idle GPU, until the GPU is done."""
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
    """
    if len(choice.site.nodes) == 1 or not all(isinstance(one.shape, Shape) for one in kinds):
        return (choice.best,)
    seen: dict[tuple[str, str], set[float]] = {}
    first, others = list[Combination](), list[Combination]()
    for one in choice.combinations:
        of = one.algo, one.rows[0].layout
        # Of options that change nothing here, such as a grid of two teams, the first is enough.
        if one.seconds not in seen.get(of, ()):
            (others if of in seen else first).append(one)
            seen.setdefault(of, set()).add(one.seconds)
    near = _NEAR * choice.best.seconds
    listed = [*first, *(one for one in others if one.seconds <= near)]
    found: list[Combination] = []
    for one in sorted(listed, key=lambda one: one.seconds > near):
        if len(found) >= (_MOST if one.seconds <= near else _FEWEST):
            break
        if one is not choice.best:  # which has been looked at
            if refusal(one) is not None:
                continue
            one, reason = with_memory(one, kinds, choice.site)
            if reason is not None:
                continue
        found.append(one)
    return tuple(found)


def measure(
    combinations: Sequence[Combination],
    kinds: Sequence[Kind],
    topology: Topology,
    kernel: str,
    device: torch.device,
    gather: Gather,
) -> Measured | None:
    """Measures a shortlist; a collective operation.

    Args:
        combinations: with their peak memory, the same on all ranks.
        gather: of the ranks of all groups, which measure side by side.

    Returns: Times on the slowest rank of the combinations that fit into the free memory; None if a
        rank has no GPU, or fewer than two fit.
    """
    timer = timer_on(device)
    able = gather((timer is not None, free_bytes(device)))
    if timer is None or not all(one for one, _ in able):
        return None
    room = min(bytes_free for _, bytes_free in able)
    fitting = [one for one in combinations if _needed(one, kinds, topology.size) <= room]
    if len(fitting) < 2:
        return None
    keys = [
        [(number, row.algo, row.options) for number, row in enumerate(one.rows)] for one in fitting
    ]
    steps: dict[tuple[int, str, Options], list[_Step]] = {}  # of each batch
    for number, algo, options in dict.fromkeys(chain(*keys)):
        kind, algorithm = kinds[number], registry.create(algo, topology, dict(options))
        steps[number, algo, options] = [
            _Step(algorithm, kind.shape, mask, kernel, device)
            for mask in kind.measured or (kind.mask,)
        ]
    with torch.no_grad(), holding(UNRECORDED, True):
        times = iter(_in_turns([one for own in steps.values() for one in own], gather, timer))
    seconds = {key: mean(next(times) for _ in own) for key, own in steps.items()}
    topology.drop_peer_channels()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    found = (sum(kinds[key[0]].count * seconds[key] for key in own) for own in keys)
    return Measured(tuple(fitting), tuple(found))


def _needed(combination: Combination, kinds: Sequence[Kind], size: int) -> float:
    """Bytes of a GPU for the measurement: attention's, and its inputs."""
    most = 0.0
    for row, kind in zip(combination.rows, kinds, strict=True):
        shape = kind.shape
        elements = sum(map(prod, input_sizes(shape, -(-shape.seq_len // size))))
        most = max(most, _SPARE * (elements * shape.element_bytes + (row.peak_bytes or 0)))
    return most


def _in_turns(steps: Sequence[_Step], gather: Gather, timer: Timer) -> list[float]:
    """Seconds of each step on the slowest rank, of its median series; a collective operation."""
    for step in steps:
        step.ready()()  # kernels are compiled, buffers made
    # The same numbers on all ranks: each step is a collective operation.
    alone = _slowest([step.seconds(1, timer) for step in steps], gather)
    calls = [ceil(_SERIES / seconds) for seconds in alone]
    least, most = _ROUNDS
    series: list[list[float]] = [[] for _ in steps]
    rounds = min(most, max(least, int(_SECONDS / sum(map(mul, calls, alone)))))
    for number in chain.from_iterable(order_of(turn, len(steps)) for turn in range(rounds)):
        series[number].append(steps[number].seconds(calls[number], timer))
    return _slowest(list(map(median, series)), gather)


def order_of(turn: int, count: int) -> list[int]:
    """The order of steps in a turn, so that each follows every other one equally often: behind one
    that leaves the GPU idle its clock is higher (allgather, 64K tokens, four H200: 5% faster).

    Source: E. J. Williams, Experimental designs balanced for the estimation of residual effects of
        treatments, 1949.
    """
    order = [(turn + (place + 1) // 2 * (-1) ** place) % count for place in range(count)]
    return order[::-1] if count % 2 and turn % 2 else order


def _slowest(seconds: list[float], gather: Gather) -> list[float]:
    """The longest of each number of seconds over all ranks; a collective operation."""
    return list(map(max, zip(*gather(seconds), strict=True)))


class _Step:
    """Forward and backward of a layer on this rank."""

    def __init__(
        self, algorithm: Algorithm, shape: AnyShape, mask: Mask, kernel: str, device: torch.device
    ) -> None:
        assert isinstance(shape, Shape)
        self._algorithm, topology = algorithm, algorithm.topology
        layout = algorithm.layout.for_documents(mask.resolved)
        tokens = layout.length(topology.rank, topology.size, shape.seq_len)
        self._seed, self._device, self._dtype = topology.rank, device, DTYPES[shape.element_bytes]
        self._sizes = input_sizes(shape, tokens)
        self._compiled = algorithm.compiled(
            *self._sizes[:3],
            *(self._dtype, device, torch.are_deterministic_algorithms_enabled()),
            *(shape.seq_len, mask, None),
            resolver(kernel),
        )

    def seconds(self, count: int, timer: Timer) -> float:
        """Seconds of one of `count` steps, which all ranks begin together; their tensors are freed
        after them.
        """
        steps = self.ready(count)
        self._algorithm.topology.gather(None)  # or a rank waits for those still at another step
        return timer(steps) / count

    def ready(self, count: int = 1) -> Callable[[], object]:
        """A function that runs `count` steps and holds q, k, v and dout: random numbers."""
        source = torch.Generator(self._device).manual_seed(self._seed)
        how: dict[str, Any] = {"generator": source, "dtype": self._dtype, "device": self._device}
        q, k, v, dout = (torch.randn(size, **how) for size in self._sizes)

        def steps() -> None:
            for _ in range(count):
                saved = self._compiled.forward.attend(q, k, v)[2]
                self._compiled.backward().differentiate(dout, saved)
                del saved

        return steps
