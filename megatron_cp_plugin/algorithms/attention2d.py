"""Attention2D: queries gathered in the rows of a grid of ranks, keys in its columns.

Every 1D scheme moves O(N) elements a rank, for any number of ranks; the grid moves O(N / sqrt(P)).
In a grid of R rows and C columns the queries of a row meet the keys of a column.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import batched, product
from typing import Literal

from megatron_cp_plugin.core.algorithm import Algorithm, PointToPoint, divisors, number
from megatron_cp_plugin.core.call import HeadGroup, Shape, flop_of_rank, group_count, head_groups
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register


@dataclass(frozen=True)
class Grid:
    """The grid of ranks.

    Attributes:
        ranks: [row][column].
        key_owners: by rank, the owner of the keys that it holds when columns gather keys.
    """

    ranks: tuple[tuple[int, ...], ...]
    key_owners: tuple[int, ...]

    def __hash__(self) -> int:
        # Few grids in one key have this shape, and hashing a thousand ranks takes long.
        return hash((len(self.ranks), len(self.key_owners)))

    def row(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's row, ascending."""
        return tuple(sorted(self.ranks[self.places[rank][0]]))

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's column, ascending."""
        column = self.places[rank][1]
        return tuple(sorted(row[column] for row in self.ranks))

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns."""
        return len(self.ranks), len(self.ranks[0])

    @cached_property
    def places(self) -> dict[int, tuple[int, int]]:
        """By rank: the numbers of its row and its column."""
        ranks = enumerate(self.ranks)
        return {rank: (row, column) for row, some in ranks for column, rank in enumerate(some)}

    @cached_property
    def key_sources(self) -> dict[int, int]:
        """The rank that holds an owner's keys when columns gather keys, by owner."""
        return {owner: rank for rank, owner in enumerate(self.key_owners)}


@lru_cache(maxsize=256)  # grids of a thousand ranks are long, and know the places of ranks
def row_major(rows: int, cols: int, nodes: tuple[int, ...]) -> Grid:
    """Rows of consecutive ranks, inside a node wherever its ranks are a multiple of `cols`.

    Args: nodes: the node of each rank.
    """
    place = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    order = sorted(range(rows * cols), key=lambda rank: (place[nodes[rank]], rank))
    return Grid(tuple(batched(order, cols)), tuple(range(rows * cols)))


@lru_cache(maxsize=256)
def column_major(rows: int, cols: int) -> Grid:
    """Rank r + R*c at (r, c), with the keys of rank r*C + c.

    On a cyclic layout every row's queries and every column's keys are evenly spaced then.
    Source: Attention2D, section 3.2.
    """
    size = rows * cols
    ranks = tuple(tuple(range(row, size, rows)) for row in range(rows))
    return Grid(ranks, tuple(rank % rows * cols + rank // rows for rank in range(size)))


def grid_shapes(size: int, rows: int) -> list[tuple[int, int]]:
    """All (R, C) with R * C = size; `rows` fixes R, 0 leaves it open."""
    return [(r, size // r) for r in divisors(size) if rows in (0, r)]


def cheapest(
    size: int, rows: int, travel_bytes: tuple[int, int], transposes: int = 0
) -> tuple[int, int]:
    """The allowed (R, C) in which the fewest bytes travel; of equals, the one with more rows.

    Args:
        travel_bytes: see Shape.
        transposes: further bytes of each token in a grid with several rows and columns.
    """
    of_query, of_key = travel_bytes

    def cost(shape: tuple[int, int]) -> tuple[int, int]:
        r, c = shape
        return (c - 1) * of_query + (r - 1) * of_key + (min(shape) > 1) * transposes, -r

    return min(grid_shapes(size, rows), key=cost)


@dataclass(frozen=True)
class GridPlacement(BlockPlacement):
    """Queries of a row of ranks meet the keys of a column on the rank where they cross.

    Attributes: backward: whether it is the backward's, if the steps differ between the passes.
    """

    grid: Grid = field(kw_only=True)
    backward: bool = field(default=False, kw_only=True)

    def key_source(self, owner: int) -> int:
        return self.grid.key_sources[owner]

    def pairs_of(self, rank: int) -> Iterator[tuple[int, int]]:
        keys = map(self.grid.key_owners.__getitem__, self.grid.column(rank))
        return product(self.grid.row(rank), keys)


@dataclass(frozen=True)
class GatheredPlacement(GridPlacement):
    """All blocks are gathered first, and computed in one step."""

    assembled = True
    masked = False

    def place(self, query: int, key: int) -> Iterator[Place]:
        places = self.grid.places
        yield Place(self.grid.ranks[places[query][0]][places[self.key_source(key)][1]], 0)


@dataclass(frozen=True)
class GridBlocksPlacement(GridPlacement):
    """Block by block, straight from rank to rank: keys in the columns, then queries in the rows.

    So a rank computes its own queries with every block of keys as it comes, and then the queries
    of others with all of them. In the backward the last block of queries comes while sums of dK
    and dV leave. Every rank has one source and one target at a time.
    """

    @property
    def most_held(self) -> int:
        """See BlockPlacement.most_held: a column's, until the last block of the row came."""
        rows, cols = self.grid.shape
        return rows + cols - 2 if min(rows, cols) > 1 else super().most_held

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place. Source: Attention2D, Algorithms 4 to 11."""
        places, (rows, cols) = self.grid.places, self.grid.shape
        (row, of_query), (of_key, column) = places[query], places[self.key_source(key)]
        rank = self.grid.ranks[row][column]
        of_query, of_key = (of_query - column) % cols, (of_key - row) % rows
        if not of_query:
            yield Place(rank, of_key)
        elif self.backward and of_query == cols - 1:
            yield Place(rank, rows + cols - 2 + (of_key - 1) % rows)
        else:
            yield Place(rank, rows - 1 + of_query)


@dataclass(frozen=True)
class GridRingPlacement(GridBlocksPlacement):
    """The same steps, but blocks go round rings, and partial results behind them."""

    relay = True


class GridAlgorithm(PointToPoint):
    """Attention on a grid of ranks; subclasses say on which, and how blocks come together.

    Attributes:
        rows: R; 0: the number with which both passes move the fewest bytes.
    """

    rows = 0

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of grids.

        Attributes:
            chunks: groups of heads, pipelined, at most as many as KV heads; 0: 4, or fewer where
                that would be too little work for each; over peer memory with one row or column half
                of that (under windows, documents and spans 1), or 4 for fewer KV heads than query
                heads and much work.
            transport: "peer" (block by block, see PointToPoint), "group" (whole blocks, gathered
                over the process group), or "auto": peer where that is possible, else group, but by
                messages from rank to rank under windows, documents and spans, unless layout is thd.
        """

    options: Options

    def kind(self, mask: Mask) -> type[GridPlacement]:
        """How blocks come together: gathered, or block by block where copy engines push them.

        Block by block also under masks that hide most rows: messages leave these out, and a
        collective operation sends every rank what any rank sees. With layout thd every rank sees
        rows of all ranks.
        """
        rows_of_all = not mask.special or self.layout.name == PaddedDocuments.name
        sparse = not rows_of_all and self.options.transport == "auto"
        return GridBlocksPlacement if sparse or self.transport.pushes else GatheredPlacement

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C."""
        transposes = isinstance(self.layout, Cyclic) * 2 * shape.kv_width * shape.element_bytes
        return cheapest(self.topology.size, self.rows, shape.travel_bytes(), transposes)

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> GridPlacement:
        rows, cols = self.grid_shape(shape)
        if isinstance(self.layout, Cyclic):
            grid = column_major(rows, cols)
        else:  # the nodes are known by a collective operation the first time
            nodes = (0,) * rows * cols if 1 in (rows, cols) else self.topology.nodes
            grid = row_major(rows, cols, nodes)
        of_all = self.layout, self.topology.size, self.head_groups(shape, mask)
        kind = self.kind(mask)
        # Gathered placements are equal in both passes, so that one plan serves both.
        backward = phase == "backward" and kind is not GatheredPlacement
        return kind(*of_all, grid=grid, backward=backward)

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        size, chunks = self.topology.size, self.options.chunks
        flop = flop_of_rank(shape, mask, size)
        count = group_count(chunks, flop)
        kind = self.kind(mask)
        gathered = kind is GatheredPlacement
        if size == 1 or kind is GridRingPlacement:
            count = 1
        elif not (gathered or chunks) and 1 in self.grid_shape(shape):
            # Blocks overlap within a group too, and a rank holds two at a time. With fewer KV
            # heads the queries take most of the memory: few groups would save none. Under documents
            # blocks of others are one kernel call: by groups if it is long, for its workspace.
            shared = shape.kv_heads < shape.heads
            more = group_count(0, flop // 4) if shared else 1
            count = more if mask.special else max(more, count // 2)
        # Where only K and V are gathered, groups that share them would have nothing to wait for.
        share_kv = gathered and self.grid_shape(shape)[1] > 1
        return head_groups(shape.heads, shape.kv_heads, count, share_kv=share_kv)


@register("attention2d")
class Attention2D(GridAlgorithm):
    """Attention on a grid of R rows and C columns, P = R * C.

    A rank computes the queries of its row against the keys of its column. R = P is exactly the
    all-gather of K and V, R = 1 exactly the all-gather of Q.

    With S = N/P tokens a rank, elements of e bytes, partial outputs and gradients of the same, and
    lse and delta of w bytes, a rank sends B*S times

        forward   (C-1) * (2HDe + Hw) + (R-1) * 2GDe
        backward  (C-1) * (3HDe + 2Hw) + (R-1) * 4GDe

    and, off the grid's diagonal, 2GDe in each for the transposes of the paper's variants; less
    under windows and documents, but for gathered blocks. Memory: docs/algorithms.md.

    Source: Attention2D. Variant "no": Algorithms 1 to 3, "overlap": Algorithms 4 to 11, on the
    cyclic layout with its transposes of K and V. Variant "zigzag" is not the paper's: on zigzag
    chunks every pair of ranks has the same causal work, each query chunk sees a prefix of the
    sorted key chunks, and nothing is transposed. Over peer memory copy engines push its blocks
    straight from their owners, and only rows that the mask lets meet.
    """

    @dataclass(frozen=True)
    class Options(GridAlgorithm.Options):
        """Options of attention2d.

        Attributes:
            variant: "zigzag" is Megatron's own layout, without transposes; "no" the paper's with
                collective operations, exactly so with chunks=1; "overlap" the paper's with rings
                in their place. The paper's need the cyclic layout, and have no transport "peer";
                "overlap" has no chunks.
            rows: R; 0: chosen so that forward and backward together move the fewest bytes. Rows
                lie inside a node where they can ("zigzag" only).
            layout: "contiguous" or "thd", see ring, of variant "zigzag"; "auto": as `variant` says.
        """

        variant: Literal["zigzag", "no", "overlap"] = "zigzag"
        rows: int = number(0, divisors)
        layout: Literal["auto", "contiguous", "thd"] = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.rows = options.rows

    def kind(self, mask: Mask) -> type[GridPlacement]:
        """See GridAlgorithm.kind; the paper's variants say it themselves."""
        paper = {"no": GatheredPlacement, "overlap": GridRingPlacement}
        return paper.get(self.options.variant) or super().kind(mask)

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        assert isinstance(options, cls.Options)
        if options.layout != "auto":
            return super().layout_for(options)
        return Zigzag() if options.variant == "zigzag" else Cyclic()

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        assert isinstance(options, cls.Options)
        if not grid_shapes(size, options.rows):
            allowed = ", ".join(map(str, divisors(size)))
            raise ConfigError(
                f"attention2d needs rows that divide context_parallel_size = {size}, got "
                f"{options.rows}: use one of {allowed}, or 0 to have it chosen"
            )
        variant, layout, chunks = options.variant, options.layout, options.chunks
        needs = f"needs variant zigzag, got {variant}"
        for wrong, message in (
            (layout != "auto", f"with layout {layout} {needs}: leave one of the two out"),
            (options.transport == "peer", f"transport peer {needs}: use transport auto"),
            (
                variant == "overlap" and chunks > 1,
                f"with variant overlap takes no chunks, got {chunks}: leave the option out, or use "
                "variant zigzag or no",
            ),
        ):
            if wrong and variant != "zigzag":
                raise ConfigError(f"attention2d {message}")
