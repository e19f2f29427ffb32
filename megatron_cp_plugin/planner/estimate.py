"""A quick estimate of a candidate, from the computations and messages of a few ranks, step by step.

It gives the order in which candidates are simulated, if simulating all would take too long. No plan
of all ranks is made, so that a thousand ranks take no longer than a few.

B batch, S local tokens, H query heads, G KV heads, P ranks, U ranks of a team.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, NamedTuple

import numpy as np

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.call import HeadGroup, Shape, together
from megatron_cp_plugin.core.communication.record import Operation, Phase
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plans.plan import PHASES, row_bytes
from megatron_cp_plugin.core.ranges import Numbers, Ranges, positions_of, runs
from megatron_cp_plugin.core.tiles import Mask, TileTable, plan_pairs
from megatron_cp_plugin.planner.dry_run import RecordedKernel as Kernel
from megatron_cp_plugin.planner.event_simulation import tile_seconds
from megatron_cp_plugin.planner.machine import Machine, Rate

_INPUTS = {"forward": ("q",), "backward": ("q", "dout", "delta", "lse")}
_RESULTS = {"forward": ("out", "lse"), "backward": ("dq",)}
_Owners = tuple[tuple[int, ...], tuple[int, ...]]  # of queries and of keys


class _Tiles(NamedTuple):
    """Kernel calls of one kind in a step. Attributes: area: pairs of a query and a key."""

    rows: int
    columns: int
    area: float
    causal: bool


class _Met(NamedTuple):
    """The work of a block of queries with a block of keys. Attributes: rows, columns: rows and
    columns that tiles touch.
    """

    tiles: tuple[_Tiles, ...]
    rows: int
    columns: int


class _StepWork(NamedTuple):
    """The operations of a rank in a step.

    Attributes: queries, keys: tokens of the blocks that arrive for the step, from the rank's own
        node and from other nodes.
    """

    tiles: tuple[_Tiles, ...]
    queries: tuple[int, int]
    keys: tuple[int, int]


_Steps = tuple[tuple[_StepWork, ...], list[int]]
_Pair = tuple[int, _Met, int, int]  # step, what there is to do, owner of queries, owner of keys


# Methods of an estimator whose results are kept: they are asked for again and again.
_KEPT = (
    "_pass",
    "_spans",
    "_tokens",
    "_owners",
    "_assembled",
    "_busiest",
    "_of_rank",
    "_on",
    "_computing",
)


class Estimate(NamedTuple):
    """Estimated times of one pass, of a part of it, or of its messages.

    Attributes:
        computing: seconds of computation.
        inside, between: bytes that a rank sends in its node, and to others.
        host: seconds in which the host launches operations.
        exposed: seconds of waiting for messages.
    """

    seconds: float
    computing: float = 0.0
    inside: float = 0.0
    between: float = 0.0
    host: float = 0.0
    exposed: float = 0.0

    def plus(self, other: Estimate) -> Estimate:
        """One after the other."""
        return Estimate(*map(sum, zip(self, other, strict=True)))


@dataclass(frozen=True)
class Estimator:
    """Estimates candidates for one layer on one machine.

    Attributes:
        nodes: of each rank.
        kernel: of the machine.
    """

    shape: Shape
    mask: Mask
    machine: Machine
    nodes: tuple[int, ...]
    kernel: str

    def __post_init__(self) -> None:
        vars(self).update({name: cache(getattr(self, name)) for name in _KEPT})

    @cached_property
    def peer(self) -> bool:
        """Whether all messages go by copy engines."""
        return self.machine.copy is not None and len(set(self.nodes)) == 1

    def passes(self, placements: Sequence[Placement]) -> list[Estimate]:
        """Forward and backward."""
        return [self._pass(*one) for one in zip(placements, PHASES, strict=True)]

    def _pass(self, placement: Placement, phase: Phase) -> Estimate:
        if isinstance(placement, HeadPlacement):
            found = self._by_heads(placement, phase)
        else:
            found = self._by_blocks(placement, phase, 1)
        host = self.machine.host
        call = found.host + (host.call if phase == "forward" else host.call_backward)
        exposed = max(0.0, found.seconds - found.computing)
        return found._replace(seconds=max(found.seconds, call), exposed=exposed)

    # -- blocks that meet on ranks

    def _spans(self, layout: Layout, size: int) -> Callable[[int], Ranges]:
        """Positions by owner."""
        layout = layout.for_documents(self.mask.resolved)
        return cache(lambda owner: Ranges.of(layout.spans(owner, size, self.shape.seq_len)))

    def _tokens(self, layout: Layout, size: int) -> Sequence[int]:
        """Number of tokens of each block, by owner."""
        spans = self._spans(layout, size)
        return [spans(one).total for one in range(size)]

    def _assembled(self, layout: Layout, size: int, met: _Owners) -> tuple[int, tuple[_Tiles, ...]]:
        """Tokens of a block with padding, and the tiles of all that a rank gathers."""
        spans, tokens = self._spans(layout, size), self._tokens(layout, size)
        width = max(tokens[owner] for owners in met for owner in owners)
        q, k = (assemble([spans(one) for one in owners], width) for owners in met)
        return width, self._meet([(q.spans, k.spans)])[0].tiles

    def _owners(self, placement: BlockPlacement, rank: int) -> _Owners:
        """Owners of the queries, and of the keys, that meet on a rank."""
        queries, keys = placement.blocks_of(rank)
        return tuple(sorted(queries)), tuple(sorted(keys))

    def _pairs(self, placement: BlockPlacement, rank: int) -> tuple[_Pair, ...]:
        """Pairs that meet on a rank and see each other."""
        spans, places, blocks = self._spans(placement.layout, placement.size), list[Any](), []
        for pair in placement.pairs_of(rank):
            for place in placement.place(*pair):
                if place.rank == rank:
                    q, k = (spans(owner) for owner in pair)
                    if not place.whole:
                        q = positions_of(q, (place.rows(q.total),))
                    places.append((place.step, *pair))
                    blocks.append((q, k))
        met = zip(places, self._meet(blocks), strict=True)
        return tuple((step, found, *pair) for (step, *pair), found in met if found.tiles)

    def _meet(self, blocks: Sequence[tuple[Ranges, Ranges]]) -> list[_Met]:
        """Work of blocks of queries with blocks of keys."""
        return list(map(_met, plan_pairs(blocks, self.mask, rectangular=True)))

    def _by_blocks(self, placement: BlockPlacement, phase: Phase, members: int) -> Estimate:
        """Args: members: ranks of a team; 1: ranks are on their own."""
        ranks = {0, placement.size - 1, *self._busiest(placement.layout, placement.size)}
        one = self._gathered if placement.assembled else self._steps
        return max(one(placement, phase, rank, members) for rank in ranks)

    def _gathered(
        self, placement: BlockPlacement, phase: Phase, rank: int, members: int
    ) -> Estimate:
        groups, coming, leaving = placement.groups, Estimate(0.0), Estimate(0.0)
        met = self._owners(_headless(placement), rank)
        width, sizes = self._assembled(placement.layout, placement.size, met)
        heads = groups[0].heads, groups[0].kv_heads
        computing = len(groups) * self._computing(sizes, *heads, phase)
        whole = together(groups)
        inputs = self._width(_INPUTS[phase], whole), self._width(("k", "v"), whole)
        results = (
            self._width(_RESULTS[phase], whole),
            self._width(("dk", "dv"), whole) if phase == "backward" else 0,
        )
        for owners, width_in, width_out in zip(met, inputs, results, strict=True):
            if len(owners) > 1:
                tokens = self.shape.batch * width * (len(owners) - 1)
                gathered = self._collective("all_gather", owners, tokens * width_in)
                coming = coming.plus(gathered)
                if width_out:
                    scattered = self._collective("all_to_all", owners, tokens * width_out)
                    leaving = leaving.plus(scattered)
        host = len(groups) * self._launching(len(sizes), 4, phase)
        computed = Estimate(computing, computing, host=host)
        return self._pipeline(len(groups), computed, coming, leaving)

    def _busiest(self, layout: Layout, size: int) -> tuple[int, ...]:
        """Ranks whose queries see most keys, and ranks whose keys are seen by most queries.

        With a causal mask, or a full one, the first and the last rank have the least and the most.
        """
        if not self.mask.resolved:
            return ()
        spans = self._spans(layout, size)
        work = [
            [
                sum(int(one[span.start : span.stop : span.step].sum()) for span in spans(rank))
                for rank in range(size)
            ]
            for one in self._seen
        ]
        return tuple({one.index(max(one)) for one in work})

    @cached_property
    def _seen(self) -> tuple[Numbers, Numbers]:
        """Number of keys that each query sees, and number of queries that see each key."""
        bands, tokens = self.mask.bands, self.shape.seq_len
        return bands.keys_of(tokens), bands.transposed.keys_of(tokens)

    def _steps(self, placement: BlockPlacement, phase: Phase, rank: int, members: int) -> Estimate:
        kinds, order = self._of_rank(_headless(placement), rank, members)
        group, times = placement.groups[0], len(placement.groups)
        wide, backward = placement.wide_gradients, phase == "backward"
        query_results = self._width(_RESULTS[phase], group, wide=wide)
        key_results = self._width(("dk", "dv"), group, wide=wide) if backward else 0
        of_query = self._width(_INPUTS[phase], group) + query_results
        of_key = self._width(("k", "v"), group) + key_results
        latency = placement.latency if placement.relay else 0
        known: list[tuple[float, Estimate]] = []
        last = 0.0  # results of a step, which travel after it
        for step in kinds:
            moved, home = Estimate(0.0), 0.0
            for far in (False, True):
                size = step.queries[far] * of_query + step.keys[far] * of_key
                if size:
                    message = self._link(size * self.shape.batch, far, members, latency)
                    moved = moved.plus(message)
                    size = step.queries[far] * query_results + step.keys[far] * key_results
                    home += self._link(size * self.shape.batch, far, members, latency).seconds
            last = max(last, home)
            computing = self._computing(step.tiles, group.heads, group.kv_heads, phase)
            if not self.peer:
                computing += min(computing, moved.seconds) * (1 - self.machine.group_share)
            known.append((computing, moved))
        now = came = before = 0.0
        each = [(computing, moved.seconds) for computing, moved in known]
        for _ in placement.groups:
            for kind in order:
                computing, coming = each[kind]
                # A block arrives while the step before computes, and no sooner.
                if coming:
                    came = (before if before > came else came) + coming
                before = came if came > now else now
                now = before + computing
        computed = inside = between = host = 0.0
        for kind, count in Counter(order).items():
            computing, moved = known[kind]
            computed += count * times * computing
            inside += count * times * moved.inside
            between += count * times * moved.between
            messages = 1 + backward if moved.seconds else 0
            host += count * times * self._launching(len(kinds[kind].tiles), messages, phase)
        return Estimate(now + last * backward, computed, inside, between, host)

    def _of_rank(self, placement: BlockPlacement, rank: int, members: int) -> _Steps:
        """The distinct steps of a rank, and their order."""
        tiles: dict[int, tuple[_Tiles, ...]] = {}
        moved: dict[int, tuple[list[int], list[int]]] = {}  # tokens of queries, and of keys
        seen: tuple[set[int], set[int]] = {rank}, {rank}
        nodes, of_cut = self.nodes, (placement.layout, placement.size)
        whole = self._tokens(*of_cut) if placement.relay else None
        own_node = nodes[rank * members]
        for step, found, query, key in self._pairs(placement, rank):
            if step not in tiles:
                tiles[step], moved[step] = (), ([0, 0], [0, 0])
            tiles[step] += found.tiles
            if query not in seen[0]:
                seen[0].add(query)
                rows = found.rows if whole is None else whole[query]
                moved[step][0][nodes[query * members] != own_node] += rows
            if key not in seen[1]:
                seen[1].add(key)
                rows = found.columns if whole is None else whole[key]
                moved[step][1][nodes[key * members] != own_node] += rows
        kinds: dict[_StepWork, int] = {}
        order = []
        for number in sorted(tiles):
            (q_near, q_far), (k_near, k_far) = moved[number]
            work = _StepWork(tiles[number], (q_near, q_far), (k_near, k_far))
            order.append(kinds.setdefault(work, len(kinds)))
        return tuple(kinds), order

    def _link(self, size: float, far: bool, members: int, latency: int) -> Estimate:
        """A message that all ranks receive at once.

        Args:
            far: whether it comes from another node.
            latency: latency of a relay, in steps; 0: the message comes from the block's owner.
        """
        machine, exchange = self.machine, self.machine.between.exchange
        if self.peer and machine.copy is not None:
            return Estimate(machine.copy.time(size), inside=size)
        if len(set(self.nodes)) == 1 or not (far or latency):
            return Estimate(machine.inside.exchange.time(size), inside=size)
        if latency == 1:
            return Estimate(self._crossing(exchange, size, members), between=size)
        slow = self._crossing(exchange, size, self._local)
        if latency:  # once to each node, during this number of steps
            fast = machine.inside.exchange.time(size)
            crossing = size / latency
            return Estimate(max(slow / latency, fast), inside=size - crossing, between=crossing)
        return Estimate(slow, between=size)

    def _crossing(self, rate: Rate, size: float, senders: float) -> float:
        """Seconds of what some ranks of each node send to other nodes at a time.

        Args: size: bytes of one of them.
        """
        machine = self.machine
        cards = min(machine.cards_per_node, self._local)
        seconds = rate.time(size * max(1.0, senders / cards))
        if machine.between_total:
            total = size * senders * len(set(self.nodes))
            seconds = max(seconds, rate.seconds + total / machine.between_total)
        return seconds

    # -- heads that are exchanged

    def _by_heads(self, placement: HeadPlacement, phase: Phase) -> Estimate:
        shape, members = self.shape, placement.members
        between, count = placement.of_teams, len(placement.exchanges)
        computing = self._by_blocks(between, phase, members)
        launching = count * self._launching(0, 4, phase)
        computing = computing._replace(host=computing.host + launching)
        share = together(between.groups)
        names = _INPUTS[phase] if phase == "forward" or not placement.keep else ("dout",)
        coming = self._width(names, share)
        leaving = self._width(_RESULTS[phase], share)
        if phase == "forward" or not placement.keep:
            coming += self._width(("k", "v"), share)
        if phase == "backward":
            leaving += self._width(("dk", "dv"), share)
        tokens = shape.batch * shape.seq_len // len(self.nodes) * (members - 1)
        sizes, team, copy = (tokens * coming, tokens * leaving), range(members), self.machine.copy
        if copy is not None and len(self._on(tuple(team))) == 1:
            both = [Estimate(copy.time(size), inside=size) for size in sizes]
        else:
            both = [self._collective("all_to_all", team, size) for size in sizes]
        return self._pipeline(count, computing, *both)

    # -- parts of both

    def _launching(self, kernels: int, messages: int, phase: Phase) -> float:
        """Seconds of the host. Args: messages: exchanges, each with its copies."""
        host = self.machine.host
        kernel = host.kernel if phase == "forward" else host.kernel_backward
        message = (host.peer if self.peer else host.group) + 3 * host.operation
        return kernels * kernel + messages * message

    def _pipeline(
        self, count: int, computed: Estimate, coming: Estimate, leaving: Estimate
    ) -> Estimate:
        """Time of groups of heads: one is computed while the next arrives and the one before
        leaves.
        """
        one, moved = computed.seconds / count, coming.plus(leaving)
        moving = moved.seconds / count
        slower = min(one, moving) * (1 - self.machine.group_share) if count > 1 else 0.0
        one += slower
        seconds = one + moving + (count - 1) * max(one, moving)
        whole = computed.plus(moved)
        return whole._replace(seconds=seconds, computing=computed.computing + slower * count)

    def _collective(self, operation: Operation, members: Iterable[int], size: float) -> Estimate:
        """Args:
        members: ranks.
        size: bytes that a rank sends.
        """
        machine, ranks = self.machine, tuple(members)
        on = self._on(ranks)
        mates, count = max(on.values()), len(ranks)
        if count == 1:
            return Estimate(0.0)
        inside = size * (mates - 1) / (count - 1)
        if len(on) == 1:
            return Estimate(machine.inside.rate(operation, mates).time(size), inside=inside)
        # Else rings through all nodes.
        sent = size - inside if operation == "all_to_all" else size / mates
        seconds = self._crossing(machine.between.rate(operation, count), sent, self._local)
        return Estimate(seconds, inside=inside, between=size - inside)

    def _on(self, ranks: tuple[int, ...]) -> Counter[int]:
        """Number of these ranks on each node."""
        return Counter(self.nodes[rank] for rank in ranks)

    def _computing(
        self, tiles: tuple[_Tiles, ...], heads: int, kv_heads: int, phase: Phase
    ) -> float:
        shape = self.shape
        sizes = heads, kv_heads, shape.head_dim, shape.value_dim
        kernels = (
            Kernel(phase, shape.batch, rows, columns, area, *sizes, causal)
            for rows, columns, area, causal in tiles
        )
        seconds = sum(tile_seconds(self.machine, self.kernel, kernel) for kernel in kernels)
        return seconds * self.machine.ranks_per_gpu

    def _width(self, names: Iterable[str], group: HeadGroup, *, wide: bool = False) -> int:
        """Bytes of a token."""
        return sum(row_bytes(name, self.shape, group, wide) for name in names)

    @cached_property
    def _local(self) -> int:
        """Largest number of ranks on a node."""
        return max(Counter(self.nodes).values())


def _headless(placement: BlockPlacement) -> BlockPlacement:
    """Equal of placements whose blocks meet alike, whatever their heads."""
    return replace(placement, groups=(), wide_gradients=False)


def _met(tiles: TileTable) -> _Met:
    if not len(tiles):
        return _Met((), 0, 0)
    # Documents that follow each other are one call.
    whole = (tiles.rows == tiles.cols) & (tiles.causal | (tiles.rows == 1)) & ~tiles.reverse
    follows = whole[1:] & whole[:-1]
    for x in (tiles.q, tiles.kv):
        follows &= x.stop[:-1] == x.start[1:]
    first, last = runs(~follows, len(tiles))
    rows, columns = (x.stop[last] - x.start[first] for x in (tiles.q, tiles.kv))
    areas = np.add.reduceat(tiles.areas, first).astype(float)
    of_each = (x.tolist() for x in (rows, columns, areas, tiles.causal[first] | (last > first)))
    extents = (int(x.stop.max() - x.start.min()) for x in (tiles.q, tiles.kv))
    return _Met(tuple(map(_Tiles._make, zip(*of_each, strict=True))), *extents)
