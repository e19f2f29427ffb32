"""A plan: who computes what in which step of one attention pass, and which blocks move.

Pure data about all ranks, made before a tensor moves. It is executed, checked, counted and drawn.
"""

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from itertools import chain
from typing import NamedTuple

from megatron_cp_plugin.core.blocks.assembly import assemble
from megatron_cp_plugin.core.call import HeadGroup, Shape, together
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.layout import TokenMap
from megatron_cp_plugin.core.ranges import Ranges, Rows, between, positions_of
from megatron_cp_plugin.core.tiles import Mask, TileTable, plan_pairs


class Side(IntEnum):
    """The two kinds of blocks: queries, and keys with values."""

    QUERIES = 0
    KEYS = 1


QUERIES, KEYS = Side
PHASES: tuple[Phase, ...] = ("forward", "backward")
# Names of tensors: q, k, v, dout, lse, delta are inputs, the others results.
TensorNames = tuple[str, ...]
TENSORS: TensorNames = ("q", "k", "v", "out", "dout", "lse", "delta", "dq", "dk", "dv")
RESULTS = frozenset(("out", "dq", "dk", "dv"))
OF_KEYS = frozenset(("k", "v", "dk", "dv"))
SIDE_OF = {name: KEYS if name in OF_KEYS else QUERIES for name in TENSORS}
PER_HEAD = frozenset(("lse", "delta"))  # one number for each head of a token: [B,H,S]
# Receive buffers of a plan with merged steps: the inputs of as many of these are under way at once.
MERGED_SLOTS = 2


class Block(NamedTuple):
    """Some of the rows that one rank owns, or several ranks own; in local order, packed.

    Attributes:
        owners: one rank, or several ranks whose blocks are joined.
        rows: numbers of these rows among all rows of the owners.
    """

    owners: tuple[int, ...]
    rows: Rows


class Compute(NamedTuple):
    """Attention of a block of queries over a block of keys, or its gradients.

    Attributes:
        heads: heads of the computation, in the rank's share of the heads.
        share: number of that share.
    """

    step: int
    rank: int
    queries: Block
    keys: Block
    heads: HeadGroup
    share: int = 0


class Move(NamedTuple):
    """Tensors of a block that are sent from one rank to another.

    Inputs of a computation are sent before the computation of step `posted` and must be there
    before that of step `needed`. Results, which are partial outputs or sums of gradients, are sent
    after the computation of step `posted` and added to the target's after that of `needed`.

    Attributes:
        messages: the tensors; those in one tuple travel as one message.
        tokens: number of tokens in each message; larger than the block where blocks are padded to
            equal lengths.
        heads, share: heads of the tensors, see Compute.
        wide: results travel in float32, not in the model's dtype.
    """

    posted: int
    needed: int
    source: int
    target: int
    messages: tuple[TensorNames, ...]
    block: Block
    tokens: int
    heads: HeadGroup
    share: int = 0
    wide: bool = False

    @property
    def result(self) -> bool:
        """Whether it carries results."""
        return self.messages[0][0] in RESULTS

    @property
    def side(self) -> Side:
        """Which block's tensors it carries."""
        return KEYS if self.messages[0][0] in OF_KEYS else QUERIES


class Time(NamedTuple):
    """A time at which some rank sends something. All ranks take part in that exchange, possibly
    without a message.

    Attributes: as of Move.
    """

    result: bool
    side: Side
    posted: int
    needed: int


class Kept(NamedTuple):
    """Tensors that a rank keeps from the forward to the backward, beside the tensors of its own
    tokens.

    Attributes:
        rows: rows of one block of another rank, which then needs no message in the backward; None:
            all rows, kept in place of the rank's own.
    """

    rank: int
    tensors: TensorNames
    owners: tuple[int, ...]
    share: int = 0
    rows: Rows | None = None


@lru_cache(maxsize=16)  # both passes of a micro-batch have the same
def _tiles_of_pairs(
    spans: TokenMap, mask: Mask, rectangular: bool, windows: bool
) -> dict[tuple[Block, Block], TileTable]:
    """Cache of the tiles of pairs of blocks."""
    return {}


@dataclass(frozen=True, eq=False)
class Plan:
    """One pass of one attention on all ranks.

    Attributes:
        groups: of heads of a share, one after another; each takes equally many of the `steps`.
        relay: results for a block go from rank to rank; each rank adds its own.
        kept: what ranks keep of the forward for the backward.
        shares: number of shares into which ranks split the heads.
        times: in a plan of one rank, the times of all ranks' moves.
        merged: steps were merged. Inputs of the first `MERGED_SLOTS` leave at the start; results
            of all steps come home after the last step but one.
        once: steps were merged, and each rank needs a block of another rank in one of them.
    """

    phase: Phase
    mask: Mask
    spans: TokenMap
    groups: tuple[HeadGroup, ...]
    steps: int
    computes: tuple[Compute, ...]
    moves: tuple[Move, ...]
    relay: bool
    kept: tuple[Kept, ...] = ()
    shares: int = 1
    times: frozenset[Time] = frozenset()
    merged: bool = False
    once: bool = False

    @property
    def slow(self) -> bool:
        """Whether messages may take several steps, on channels of their own."""
        ends = chain(
            ((one.posted, one.needed) for one in self.times),
            ((one.posted, one.needed) for one in during(self)),
        )
        return not self.merged and any(needed > posted + 1 for posted, needed in ends)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.spans)

    @property
    def heads(self) -> HeadGroup:
        """All heads of a share."""
        return together(self.groups)

    def tiles(
        self, compute: Compute, *, rectangular: bool = True, windows: bool = False
    ) -> TileTable:
        """Tiles of a computation; their rows and columns are numbered in the two packed blocks.

        Tiles are planned on demand, for all computations of the rank together, because a rank needs
        no other rank's tiles.

        Args: rectangular, windows: as in `plan_tiles`.
        """
        kind = rectangular, windows
        pair, found = compute[2:4], _tiles_of_pairs(self.spans, self.mask, *kind)
        if pair not in found:
            pairs = dict.fromkeys(one[2:4] for one in self._by_rank[compute.rank])
            new = [one for one in pairs if one not in found]
            blocks = [(self.positions(queries), self.positions(keys)) for queries, keys in new]
            tiles = plan_pairs(blocks, self.mask, rectangular=rectangular, windows=windows)
            found.update(zip(new, tiles, strict=True))
        return found[pair]

    @cached_property
    def _by_rank(self) -> dict[int, list[Compute]]:
        found: dict[int, list[Compute]] = {}
        for compute in self.computes:
            found.setdefault(compute.rank, []).append(compute)
        return found

    def positions(self, block: Block) -> Ranges:
        """Positions of a block's rows, in its order."""
        members = [self.spans[owner] for owner in block.owners]
        whole = members[0]
        if len(members) > 1:
            whole = assemble(members, max(spans.total for spans in members)).spans
        every = block.rows == between(0, whole.total)
        return whole if every else positions_of(whole, block.rows)


@lru_cache(maxsize=64)
def with_wanted_gradients(plan: Plan, *, dq: bool, dkv: bool) -> Plan:
    """The plan without moves of gradients that are not wanted; a forward's plan itself."""
    if plan.phase == "forward" or (dq and dkv):
        return plan
    wanted = dq, dkv
    moves = (move for move in plan.moves if not move.result or wanted[move.side])
    times = (time for time in plan.times if not time.result or wanted[time.side])
    return replace(plan, moves=tuple(moves), times=frozenset(times))


def row_bytes(name: str, shape: Shape, heads: HeadGroup, wide: bool) -> int:
    """Bytes of one token in a tensor. Args: wide: results are float32 (float64)."""
    if name in PER_HEAD:
        return heads.heads * shape.wide_bytes
    count = heads.kv_heads if name in OF_KEYS else heads.heads
    dim = shape.value_dim if name in ("v", "dv", "out", "dout") else shape.head_dim
    return count * dim * (shape.wide_bytes if wide and name in RESULTS else shape.element_bytes)


def during(plan: Plan) -> tuple[Move, ...]:
    """Moves inside steps: all but those `outside`."""
    if not outside(plan):
        return plan.moves
    return tuple(m for m in plan.moves if m.needed >= 0 and m.posted < plan.steps)


@lru_cache(maxsize=64)
def outside(plan: Plan) -> tuple[Move, ...]:
    """Moves that bring keys to their source ranks before the first step, or gradients to their
    owners after the last.
    """
    return tuple(m for m in plan.moves if m.needed < 0 or m.posted >= plan.steps)
