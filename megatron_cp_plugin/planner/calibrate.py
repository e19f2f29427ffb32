"""Measures links, kernels, memory and host of a machine on torchrun's ranks, for the simulator.

B batch, S tokens, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from statistics import median
from time import perf_counter

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin import functional
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Communicator, Pending, Room, Topology
from megatron_cp_plugin.core.communication.record import Operation
from megatron_cp_plugin.core.kernel import KernelCall, Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.linear.kernel import Cache, LinearInputs, LinearProblem
from megatron_cp_plugin.core.linear.states import Decay, Runs
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.linear import resolve_linear
from megatron_cp_plugin.planner.event_simulation import launched
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.planner.machine import Host, Kernels, KernelSpeed, Links, Machine, Rate
from megatron_cp_plugin.planner.simulate import traces_of

_REPEATS = 5


@dataclass(frozen=True)
class Sizes:
    """How much is measured with.

    Attributes:
        tiles: rows and columns.
        messages: bytes.
        memory: bytes of a copy.
        matrix: rows of a matrix product.
        linear: tokens.
    """

    tiles: tuple[tuple[int, int], ...]
    messages: tuple[int, ...]
    memory: int
    matrix: int
    linear: int


_ON_GPU = Sizes(
    (
        *((n, n) for n in (1024, 2048, 4096, 8192, 16384)),
        (1024, 8192),
        (2048, 16384),
        (8192, 1024),
        (16384, 2048),
    ),
    (2**16, 2**22, 2**26),
    2**30,
    8192,
    2**15,
)
_ON_CPU = Sizes(
    ((64, 64), (128, 128), (64, 256), (256, 64)), (2**10, 2**16, 2**18), 2**22, 256, 256
)


class Calibration:
    """Measures the machine that this rank runs on."""

    def __init__(
        self, topology: Topology, device: torch.device, dims: tuple[int, int, int]
    ) -> None:
        """Args: dims: heads, KV heads and head dim with which attention kernels are measured.

        Raises: ConfigError if nodes have unequally many ranks.
        """
        self.topology, self.device, self.dims = topology, device, dims
        self.cuda = device.type == "cuda"
        self.sizes = _ON_GPU if self.cuda else _ON_CPU
        self.dtype = torch.bfloat16 if self.cuda else torch.float32
        nodes = topology.nodes
        by_node = {node: [r for r, n in enumerate(nodes) if n == node] for node in nodes}
        self.by_node = list(by_node.values())
        if len({len(ranks) for ranks in self.by_node}) > 1:
            counts = ", ".join(str(len(ranks)) for ranks in self.by_node)
            raise ConfigError(
                f"calibrate needs as many ranks on one node as on another, got {counts}: start it "
                "with the same --nproc-per-node on all"
            )
        self.per_node = len(self.by_node[0])
        gpu = str(torch.cuda.get_device_properties(device).uuid) if self.cuda else topology.rank
        sharing = [r for r, other in enumerate(topology.gather(gpu)) if other == gpu]
        self.turn, self.ranks_per_gpu = sharing.index(topology.rank), len(sharing)

    def machine(self, name: str) -> Machine:
        """Measures it; a collective operation of all ranks."""
        of_gpu: tuple[tuple[str, Kernels], dict[str, float], float, float, float] | None = None
        for turn in range(self.ranks_per_gpu):  # those that share a GPU one after another
            if turn == self.turn:
                of_gpu = (
                    self._kernels(),
                    self._linear(),
                    self._memory(),
                    self._operation(),
                    self._matrix(),
                )
            self._meet()
        assert of_gpu is not None
        (kernel, speeds), linear, memory, operation, matrix = self.topology.gather(of_gpu)[0]
        inside, between, copy, cards = self._network()
        if self.cuda:
            gpu = torch.cuda.get_device_name()
            gib = torch.cuda.get_device_properties(self.device).total_memory / 2**30
        else:
            host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
            gpu, gib = "CPU", host / self.per_node / 2**30  # a rank's part of the host's memory
        source = f"megatron-cp calibrate on {self.topology.size} ranks, {len(self.by_node)} node(s)"
        source += f" of {self.per_node}: {gpu}, torch {torch.__version__}"
        if len(self.by_node) == 1:
            source += "; links between nodes not measured, taken as those inside"
        machine = Machine(
            name,
            source,
            self.per_node,
            gib,
            memory,
            matrix,
            {kernel: speeds},
            inside,
            between,
            copy,
            linear,
            operation,
            cards,
            ranks_per_gpu=self.ranks_per_gpu,
        )
        if not self.cuda:
            return machine
        machine = replace(machine, group_share=self._share(), host=self._host(copy is not None))
        return replace(machine, host=self._calls(machine))

    # -- clocks

    def _meet(self) -> None:
        self._wait()
        self.topology.gather(0)

    def _wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _seconds(self, body: Callable[[], object], count: int = 1) -> float:
        """Seconds on the GPU of `count` calls that are queued before they begin: the median."""
        times = []
        for _ in range(_REPEATS + 2):
            if self.cuda:
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                torch.cuda._sleep(10**7)  # some milliseconds, in which all is launched
                start.record()
                for _ in range(count):
                    body()
                stop.record()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop) / 1e3 / count)
            else:
                begin = perf_counter()
                for _ in range(count):
                    body()
                times.append((perf_counter() - begin) / count)
        return median(times[2:])

    def together(self, body: Callable[[], object]) -> float:
        """Seconds on the GPU of an operation of all ranks, the median; on the slowest rank."""
        self._meet()
        return max(self.topology.gather(self._seconds(body)))

    def _launching(self, body: Callable[[], object], count: int = 20) -> float:
        """Seconds of the host for a call."""
        times = []
        for _ in range(4):
            self._wait()
            begin = perf_counter()
            for _ in range(count):
                body()
            times.append((perf_counter() - begin) / count)
        self._wait()
        return min(times)

    # -- one GPU

    @cached_property
    def _kernel(self) -> SoftmaxKernel:
        """The kernel that is measured."""
        return resolve("auto", Problem(self.device, self.dtype, *self.dims))

    def _kernels(self) -> tuple[str, Kernels]:
        measured: dict[str, list[tuple[float, int, int, float]]] = {}
        for rows, columns in self.sizes.tiles:
            for causal in (False, True) if rows == columns else (False,):
                for key, flop, seconds in self._timed(rows, columns, causal=causal):
                    measured.setdefault(key, []).append((flop, rows, columns, seconds))
        speeds = {key: fit_speed(rows) for key, rows in measured.items()}
        if self._kernel.packs:  # the longest tile's rows as sequences of the first one's
            each, tokens = self.sizes.tiles[0][0], max(self.sizes.tiles)[0]
            for key, flop, seconds in self._timed(tokens, tokens, causal=True, packed=each):
                speeds[key] = with_packed(speeds[key], flop, each, seconds)
        return self._kernel.name, Kernels(speeds)

    def _timed(
        self, rows: int, columns: int, *, causal: bool, packed: int = 0
    ) -> Iterator[tuple[str, float, float]]:
        """Which pass, FLOP and seconds, of both passes. Args: packed: as of `_passes`."""
        heads, _, dim = self.dims
        area = rows * ((packed or rows) + 1) / 2 if causal else float(rows * columns)
        passes = self._passes(rows, columns, causal=causal, packed=packed)
        for phase, body in zip(PHASES, passes, strict=True):
            flop = 2.0 * heads * area * dim * (2 if phase == "forward" else 5)
            yield f"{phase} {'causal' if causal else 'full'}", flop, self._seconds(body)

    def _passes(
        self, rows: int, columns: int, *, causal: bool, packed: int = 0
    ) -> list[Callable[[], object]]:
        """The kernel's forward and backward of a tile, or of sequences of `packed` tokens."""
        kernel, (q, k, v, dout) = self._kernel, self._inputs(rows, columns)
        edges = range(0, rows + 1, packed or rows)
        packing = Packing.adjacent(edges, edges) if packed else None
        call = KernelCall(q, k, v, q.shape[3] ** -0.5, causal, packing)
        out, lse = kernel.forward(call)
        statistics = Statistics(lse, out=out)
        return [lambda: kernel.forward(call), lambda: kernel.backward(call, dout, statistics)]

    def _inputs(self, rows: int, columns: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        heads, kv_heads, dim = self.dims
        counts = (rows, heads), (columns, kv_heads), (columns, kv_heads), (rows, heads)
        q, k, v, dout = (
            torch.randn((1, tokens, count, dim), device=self.device, dtype=self.dtype)
            for tokens, count in counts
        )
        return q, k, v, dout

    def _linear(self) -> dict[str, float]:
        heads, dim, tokens = 16, 128 if self.cuda else 16, self.sizes.linear
        problem = LinearProblem(self.device, self.dtype, heads, dim, dim)
        kernel = resolve_linear("auto", problem)
        q, k, v, dout = (
            torch.randn((1, tokens, heads, dim), device=self.device, dtype=self.dtype)
            for _ in range(4)
        )
        given = LinearInputs(q, k, v, Decay((1.0,) * heads), Runs.single(tokens))

        def forward() -> Cache:
            running = kernel.forward(given)
            running.intra()
            return running.finish(None)[1]

        cache = forward()

        def backward() -> None:
            running = kernel.backward(given, dout, cache)
            running.intra()
            running.finish(None)

        flop = 4.0 * q.numel() * dim
        return {
            "forward": flop / self._seconds(forward),
            "backward": flop / self._seconds(backward),
        }

    def _memory(self) -> float:
        x, y = (torch.empty(self.sizes.memory, dtype=torch.uint8, device=self.device) for _ in "ab")
        return 2 * self.sizes.memory / self._seconds(lambda: y.copy_(x))

    def _operation(self) -> float:
        x = torch.zeros(64, device=self.device)
        return self._seconds(lambda: x.add_(1), count=100)

    def _matrix(self) -> float:
        n = self.sizes.matrix
        x, y = (torch.randn((n, n), device=self.device, dtype=self.dtype) for _ in "ab")
        return 2.0 * n**3 / self._seconds(lambda: x @ y)

    # -- links

    def _network(self) -> tuple[Links, Links, Rate | None, int]:
        """Links inside a node and between nodes, copies, and network cards of a node."""
        mine = next(ranks for ranks in self.by_node if self.topology.rank in ranks)
        place = mine.index(self.topology.rank)
        across = [ranks[place] for ranks in self.by_node]
        inside = self._links(mine) if self.per_node > 1 else None
        between, cards = (self._links(across), self.per_node) if len(across) > 1 else (None, 1)
        if between is not None and self.per_node > 1:
            alone = self._rate_of_exchange(across, idle=place > 0)
            share = between.exchange.bytes_per_second / alone.bytes_per_second
            cards = min(self.per_node, max(1, round(self.per_node * share)))
            between = replace(between, exchange=alone)
        known = inside or between or Links(Rate(0.0, self._memory()))
        copy = self._copies() if self.topology.peer_access else None
        return inside or known, between or known, copy, cards

    def _links(self, ranks: Sequence[int]) -> Links:
        """Of all groups like these ranks at a time."""
        collective: dict[Operation, dict[int, Rate]] = {}
        counts = {n for n in (2, 4, 8) if not len(ranks) % n} | {len(ranks)}
        for count in sorted(counts - {1}):
            first = ranks.index(self.topology.rank) // count * count
            group = self.topology.subgroup(ranks[first : first + count], "calibration")
            comm = group.channel("links")
            for operation in ("all_gather", "reduce_scatter", "all_to_all"):
                rate = self._rate(comm, operation)
                collective.setdefault(operation, {})[count] = rate
        return Links(self._rate_of_exchange(ranks), collective)

    def _rate_of_exchange(self, ranks: Sequence[int], *, idle: bool = False) -> Rate:
        """Of pairs of these ranks, both ways. Args: idle: this rank only looks on."""
        # One channel of all ranks: ranks that take no part make no groups of their own either.
        comm, place = self.topology.channel("pairs"), ranks.index(self.topology.rank)
        alone = idle or place == len(ranks) // 2 * 2  # the last of an odd number
        other = None if alone else ranks[place ^ 1]
        return self._fitted(lambda size: self._exchange(comm, size, other))

    def _exchange(self, comm: Communicator, size: int, other: int | None) -> float:
        x, y = (torch.zeros(size, dtype=torch.uint8, device=self.device) for _ in "ab")
        sends, receives = ([], []) if other is None else ([(x, other)], [(y, other)])
        return self.together(lambda: comm.exchange(sends, receives).wait())

    def _rate(self, comm: Communicator, operation: Operation) -> Rate:
        def seconds(size: int) -> float:
            x = torch.zeros(size // 4, device=self.device)
            given = x if operation == "all_gather" else x.expand(comm.size, -1).contiguous()
            return self.together(lambda: getattr(comm, operation)(given).wait())

        return self._fitted(seconds, comm.size - 1)

    def _copies(self) -> Rate:
        """By copy engines, round all ranks of the node at a time."""

        def seconds(size: int) -> float:
            x = torch.zeros(size, dtype=torch.uint8, device=self.device)
            return self.together(partial(self._push, x))

        return self._fitted(seconds)

    def _fitted(self, seconds: Callable[[int], float], copies: int = 1) -> Rate:
        """Of messages of all sizes, of which a rank sends this number of copies."""
        return fit_rate([(float(n * copies), seconds(n)) for n in self.sizes.messages])

    def _push(self, x: Tensor) -> None:
        comm = self.topology.peer_channel("calibration", 1)
        (y,) = comm.buffers(Room.of([(tuple(x.shape), x.dtype)]), self.device)
        self._round(comm, x, y).wait()

    def _round(self, comm: Communicator, x: Tensor, y: Tensor) -> Pending[None]:
        """x goes to the next rank, and y comes from the one before."""
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        return comm.exchange([(x, after)], [(y, before)])

    # -- the host, and the part of a GPU that the process group takes

    def _share(self) -> float:
        """Of a kernel's speed that is left while the process group moves data."""
        if self.topology.size == 1:
            return 1.0
        comm, (alone, _) = self.topology.channel("share"), self._passes(4096, 4096, causal=False)
        x, y = (torch.zeros(2**28, dtype=torch.uint8, device=self.device) for _ in "ab")

        def beside() -> float:
            times = []
            for _ in range(_REPEATS):
                self._meet()
                start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
                torch.cuda._sleep(10**7)
                pending = self._round(comm, x, y)
                torch.cuda._sleep(10**6)  # until all ranks are there
                start.record()
                alone()
                stop.record()
                pending.wait()
                torch.cuda.synchronize()
                times.append(start.elapsed_time(stop) / 1e3)
            return median(times)

        share = self.together(alone) / max(self.topology.gather(beside()))
        return min(1.0, max(0.3, share))

    def _host(self, peer: bool) -> Host:
        of_kernel, of_backward = map(self._launching, self._passes(64, 64, causal=True))
        x = torch.zeros(64, device=self.device)
        of_group = of_peer = 0.0
        if self.topology.size > 1:
            comm, y = self.topology.channel("share"), torch.zeros_like(x)
            self._meet()
            of_group = self._launching(lambda: self._round(comm, x, y).wait())
            if peer:
                self._meet()
                of_peer = self._launching(lambda: self._push(x))
        operation = self._launching(lambda: x.add_(1), 100)
        found = operation, of_kernel, of_backward, of_peer, of_group
        return Host(*(max(times) for times in zip(*self.topology.gather(found), strict=True)))

    def _calls(self, machine: Machine) -> Host:
        """Seconds of the host for a call of attention, without its launches."""
        heads, kv_heads, dim = self.dims
        tokens = 256
        q, k, v, dout = self._inputs(tokens, tokens)
        q, k, v = (x.requires_grad_() for x in (q, k, v))
        whole = tokens * self.topology.size

        def forward() -> Tensor:
            return functional.attention(q, k, v, algo="zigzag", seq_len=whole)

        forward()
        torch.autograd.grad(forward(), (q, k, v), dout)
        times = []
        for _ in range(_REPEATS):
            self._meet()
            begin = perf_counter()
            out = forward()
            middle = perf_counter()
            torch.autograd.grad(out, (q, k, v), dout)
            times.append((middle - begin, perf_counter() - middle))
        shape = Shape(1, whole, heads, kv_heads, dim)
        nodes = self.topology.nodes
        layer = Layer("zigzag", (), shape, Mask(), nodes, machine.copy is not None)
        known = [launched(machine, events) for events in traces_of(layer, (0,))[0]]
        call, backward = (
            max(0.0, median(column) - one)
            for column, one in zip(zip(*times, strict=True), known, strict=True)
        )
        found = self.topology.gather((call, backward))
        return replace(
            machine.host,
            call=max(one for one, _ in found),
            call_backward=max(one for _, one in found),
        )


def fit_rate(times: Sequence[tuple[float, float]]) -> Rate:
    """alpha and beta of (bytes, seconds) by least squares of relative errors."""
    alpha, slope = _not_negative([(1.0, size) for size, _ in times], [t for _, t in times])
    if slope == 0:  # of noise: the largest message says how fast it is at least
        size, seconds = max(times)
        return Rate(0.0, size / seconds)
    return Rate(alpha, 1 / slope)


def fit_speed(measured: Sequence[tuple[float, int, int, float]]) -> KernelSpeed:
    """The speed of (FLOP, rows, columns, seconds) by least squares of relative errors."""
    terms = [(flop, flop / rows, flop / columns, 1.0) for flop, rows, columns, _ in measured]
    if all(rows == columns for _, rows, columns, _ in measured):
        terms = [(flop, by_row, 0.0, one) for flop, by_row, _, one in terms]
    slope, rows, columns, seconds = _not_negative(terms, [t for *_, t in measured])
    slope = max(slope, 1e-18)
    return KernelSpeed(1 / slope, rows / slope, columns / slope, seconds)


def with_packed(speed: KernelSpeed, flop: float, rows: int, seconds: float) -> KernelSpeed:
    """The speed with which sequences of `rows` tokens, packed in one call, take these seconds."""
    missing = (seconds - speed.time(flop, rows, rows)) * speed.flops / flop
    return replace(speed, packed=max(0.0, missing * rows))


def _not_negative(terms: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients, none below 0, that give the values with the least relative errors."""
    weights = 1 / np.array(values)
    table = np.array(terms) * weights[:, None]
    scale = np.abs(table).max(0)
    used = [index for index in range(table.shape[1]) if scale[index] > 0]
    while True:
        found, *_ = np.linalg.lstsq(table[:, used] / scale[used], np.ones(len(values)), rcond=None)
        if (found >= 0).all() or len(used) == 1:
            break
        used.pop(int(found.argmin()))
    result = [0.0] * table.shape[1]
    for index, value in zip(used, found, strict=True):
        result[index] = max(0.0, float(value / scale[index]))
    return result
