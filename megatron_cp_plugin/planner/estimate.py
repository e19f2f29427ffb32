"""A quick estimate of a candidate: what a few ranks compute and get, step by step.

It says in which order candidates are worth to be simulated, where a simulation of each would take
too long. No plan of all ranks is made, so that a thousand of them are no more work than a few.

B batch, S local tokens, H query heads, G KV heads, P ranks, U ranks of a team.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron_cp_plugin.core.assembly import assemble
from megatron_cp_plugin.core.documents import Spans
from megatron_cp_plugin.core.layout import rows_of
from megatron_cp_plugin.core.pipeline import HeadGroup, together
from megatron_cp_plugin.core.placement import BlockPlacement, HeadPlacement, Placement
from megatron_cp_plugin.core.plan import row_bytes
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles
from megatron_cp_plugin.planner.machine import Machine, Operation, Pass

_INPUTS = {"forward": ("q",), "backward": ("q", "dout", "delta", "lse")}
_RESULTS = {"forward": ("out", "lse"), "backward": ("dq",)}
_ALL = HeadGroup(slice(0, 1), slice(0, 1), first=True, last=True)


@dataclass
class _Step:
    """What a rank does in a step. Attributes: tiles: of one head. queries, keys: tokens of blocks
    that come for it, by whether they come from another node; left: that leave after it.
    """

    tiles: list[Tile] = field(default_factory=list)
    queries: Counter[bool] = field(default_factory=Counter)
    keys: Counter[bool] = field(default_factory=Counter)


@dataclass(frozen=True)
class Estimator:
    """Of candidates for one layer on one machine.

    Attributes: nodes: of each rank. peer: by copy engines. kernel: of the machine.
    """

    shape: Shape
    mask: Mask
    machine: Machine
    nodes: tuple[int, ...]
    peer: bool
    kernel: str

    def seconds(self, placements: Sequence[Placement]) -> float:
        """Of forward and backward."""
        forward, backward = placements
        return self._pass(forward, "forward") + self._pass(backward, "backward")

    def _pass(self, placement: Placement, phase: Pass) -> float:
        if isinstance(placement, HeadPlacement):
            return self._by_heads(placement, phase)
        return self._by_blocks(placement, phase, 1)

    # -- blocks that meet on ranks

    def _by_blocks(self, placement: BlockPlacement, phase: Pass, members: int) -> float:
        """Args: members: ranks of a team; 1: ranks are on their own."""
        ranks = sorted({0, placement.size // 2, placement.size - 1})
        one = self._gathered if placement.assembled else self._steps
        return max(one(placement, phase, rank, members) for rank in ranks)

    def _gathered(self, placement: BlockPlacement, phase: Pass, rank: int, members: int) -> float:
        spans, groups = self._spans(placement), placement.groups
        queries, keys = (
            sorted({*owners}) for owners in zip(*placement.pairs_of(rank), strict=True)
        )
        width = max(sum(map(len, spans(owner))) for owner in (*queries, *keys))
        q, k = (assemble([spans(owner) for owner in owners], width) for owners in (queries, keys))
        tiles = plan_tiles(q.spans, k.spans, self.mask, rectangular=True)
        computing = coming = leaving = 0.0
        for group in groups:
            computing += self._computing(tiles, group, phase)
        whole = together(groups)
        inputs = self._width(_INPUTS[phase], whole), self._width(("k", "v"), whole)
        results = (
            self._width(_RESULTS[phase], whole, wide=placement.wide_partials),
            self._width(("dk", "dv"), whole) if phase == "backward" else 0,
        )
        for owners, width_in, width_out in zip((queries, keys), inputs, results, strict=True):
            if len(owners) > 1:
                tokens = self.shape.batch * width * (len(owners) - 1)
                coming += self._collective("all_gather", owners, tokens * width_in)
                if width_out:
                    leaving += self._collective("all_to_all", owners, tokens * width_out)
        return self._pipeline(len(groups), computing, coming, leaving)

    def _steps(self, placement: BlockPlacement, phase: Pass, rank: int, members: int) -> float:
        steps = self._of_rank(placement, rank, members)
        wide = placement.wide_gradients
        now = came = 0.0
        for group in placement.groups:
            q_in, kv_in = self._width(_INPUTS[phase], group), self._width(("k", "v"), group)
            q_out = self._width(_RESULTS[phase], group, wide=wide)
            kv_out = self._width(("dk", "dv"), group, wide=wide) if phase == "backward" else 0
            before = now
            for number in sorted(steps):
                step = steps[number]
                moving = 0.0
                for far in (False, True):
                    size = step.queries[far] * (q_in + q_out) + step.keys[far] * (kv_in + kv_out)
                    if size:
                        moving += self._link(placement, self.shape.batch * size, far, members)
                # Comes while the step before computes, and one step ahead at most.
                came = max(came, before) + moving
                before = max(now, came) if moving else now
                computing = self._computing(step.tiles, group, phase)
                if moving and not self.peer:
                    computing += min(computing, moving) * (1 - self.machine.group_share)
                now = before + computing
        return now + moving * bool(q_out or kv_out) * (phase == "backward")

    def _of_rank(self, placement: BlockPlacement, rank: int, members: int) -> dict[int, _Step]:
        """By step."""
        key = replace(placement, groups=(_ALL,)), rank, members
        found = self._known.get(key)
        if found is not None:
            return found
        steps: dict[int, _Step] = {}
        seen: set[tuple[str, int]] = set()
        spans = self._spans(placement)
        for query, key_owner in placement.pairs_of(rank):
            for place in placement.place(query, key_owner):
                if place.rank != rank:
                    continue
                tokens, (index, count) = sum(map(len, spans(query))), place.part
                q = rows_of(spans(query), tokens * index // count, tokens * (index + 1) // count)
                tiles = plan_tiles(q, spans(key_owner), self.mask, rectangular=True)
                if not tiles:
                    continue
                step = steps.setdefault(place.step, _Step())
                step.tiles += tiles
                for side, owner, counter, edges in (
                    ("queries", query, step.queries, [tile.q for tile in tiles]),
                    ("keys", key_owner, step.keys, [tile.kv for tile in tiles]),
                ):
                    if owner != rank and (side, owner) not in seen:
                        seen.add((side, owner))
                        far = self.nodes[owner * members] != self.nodes[rank * members]
                        rows = max(e.stop for e in edges) - min(e.start for e in edges)
                        if placement.relay:
                            rows = sum(map(len, spans(owner)))
                        counter[far] += rows
        self._known[key] = steps
        return steps

    @cached_property
    def _known(self) -> dict[tuple[BlockPlacement, int, int], dict[int, _Step]]:
        return {}

    def _link(self, placement: BlockPlacement, size: float, far: bool, members: int) -> float:
        """Seconds of a message that all ranks get at a time. Args: far: from another node."""
        machine = self.machine
        if self.peer and machine.copy is not None:
            return machine.copy.time(size)
        several = len(set(self.nodes)) > 1
        if not several or not (far or placement.relay):
            return machine.inside.exchange.time(size)
        if placement.relay and placement.lag == 1:
            return self._between(size, members if members > 1 else 1)
        if placement.relay:  # once to each node, during so many steps
            slow = self._between(size, self._local) / placement.lag
            return max(slow, machine.inside.exchange.time(size))
        return self._between(size, self._local)

    def _between(self, size: float, senders: float) -> float:
        """Args: size: of a message. senders: ranks of a node that send one at a time."""
        machine = self.machine
        cards = min(machine.cards_per_node, self._local)
        seconds = machine.between.exchange.time(size * max(1.0, senders / cards))
        if machine.between_total:
            total = size * senders * len(set(self.nodes))
            seconds = max(seconds, total / machine.between_total)
        return seconds

    # -- heads that are exchanged

    def _by_heads(self, placement: HeadPlacement, phase: Pass) -> float:
        shape, members = self.shape, placement.members
        between, count = placement.between, len(placement.exchanges)
        computing = self._by_blocks(between, phase, members)
        share = together(between.groups)
        names = _INPUTS[phase] if phase == "forward" or not placement.keep else ("dout",)
        coming = self._width(names, share)
        leaving = self._width(_RESULTS[phase], share)
        if phase == "forward" or not placement.keep:
            coming += self._width(("k", "v"), share)
        if phase == "backward":
            leaving += self._width(("dk", "dv"), share)
        tokens = shape.batch * shape.seq_len // len(self.nodes) * (members - 1)
        team = range(members)
        return self._pipeline(
            count,
            computing,
            self._collective("all_to_all", team, tokens * coming),
            self._collective("all_to_all", team, tokens * leaving),
        )

    # -- parts of both

    def _pipeline(self, count: int, computing: float, coming: float, leaving: float) -> float:
        """Groups of which one is computed while the next comes and the one before leaves."""
        c, m = computing / count, (coming + leaving) / count
        c += min(c, m) * (1 - self.machine.group_share) if count > 1 else 0.0
        return coming / count + c + leaving / count + (count - 1) * max(c, m)

    def _collective(self, operation: Operation, members: Iterable[int], size: float) -> float:
        """Args: members: ranks. size: bytes that a rank sends."""
        machine, ranks = self.machine, list(members)
        on = Counter(self.nodes[rank] for rank in ranks)
        together_, count = max(on.values()), len(ranks)
        inside = machine.inside.rate(operation, together_)
        if len(on) == 1:
            return inside.time(size)
        cards = min(machine.cards_per_node, self._local)
        if operation == "all_to_all":
            crossing = size * (count - together_) / (count - 1) * self._local
        else:
            crossing = size * self._local / together_  # rings through all nodes
        rate = machine.between.rate(operation, count)
        seconds = rate.time(crossing / cards)
        if machine.between_total:
            total = crossing * len(set(self.nodes))
            seconds = max(seconds, rate.seconds + total / machine.between_total)
        return seconds

    def _computing(self, tiles: Iterable[Tile], group: HeadGroup, phase: Pass) -> float:
        shape, speeds = self.shape, self.machine.kernel(self.kernel)
        d, e = shape.head_dim, shape.value_dim
        width = d + e if phase == "forward" else 3 * d + 2 * e
        dims = f"{d}" if d == e else f"{d}:{e}"
        factor, total = speeds.dims.get(phase, {}).get(dims, 1.0), 0.0
        for tile in tiles:
            speed = speeds.by_pass[f"{phase} {'causal' if tile.causal else 'full'}"]
            rows, columns = (edge.stop - edge.start for edge in (tile.q, tile.kv))
            flop = 2.0 * shape.batch * group.heads * float(tile.area) * width
            total += speed.time(flop / factor, rows, columns)
        return total * self.machine.ranks_per_gpu

    def _width(self, names: Iterable[str], group: HeadGroup, *, wide: bool = False) -> int:
        """Bytes of a token."""
        return sum(row_bytes(name, self.shape, group, wide) for name in names)

    def _spans(self, placement: BlockPlacement) -> Callable[[int], Spans]:
        layout = placement.layout.within(self.mask.documents)
        return lambda owner: layout.spans(owner, placement.size, self.shape.seq_len)

    @cached_property
    def _local(self) -> int:
        """Ranks of a node, at most."""
        return max(Counter(self.nodes).values())
