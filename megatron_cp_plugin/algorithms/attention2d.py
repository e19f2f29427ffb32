"""Attention2D: queries gathered in the rows of a grid of ranks, keys in its columns.

Every 1D scheme moves O(N) elements a rank whatever the number of ranks; the grid moves
O(N / sqrt(P)). Of R rows and C columns queries of a row meet keys of a column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product
from typing import Literal

from megatron_cp_plugin.core.algorithm import Algorithm, PointToPoint, divisors, number
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Phase
from megatron_cp_plugin.core.head_groups import HeadGroup, flop_of_rank, group_count, head_groups
from megatron_cp_plugin.core.layout import Cyclic, Layout, Zigzag
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register

Wire = Literal["model", "float32"]


@dataclass(frozen=True)
class Grid:
    """Which rank stands where.

    Attributes:
        ranks: [row][column]. key_owners: by rank, whose keys it holds when columns gather them.
    """

    ranks: tuple[tuple[int, ...], ...]
    key_owners: tuple[int, ...]

    def __hash__(self) -> int:
        # Of the grids in one key few have this shape: those of a thousand ranks are long.
        return hash((len(self.ranks), len(self.key_owners)))

    def row(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's row, ascending."""
        return self._lines[0][self._places[rank][0]]

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's column, ascending."""
        return self._lines[1][self._places[rank][1]]

    def keys(self, rank: int) -> tuple[int, ...]:
        """Whose keys the ranks of a rank's column hold."""
        return self._lines[2][self._places[rank][1]]

    def crossing(self, a: int, b: int) -> int:
        """The rank in the row of one rank and the column of another."""
        return self.ranks[self._places[a][0]][self._places[b][1]]

    @cached_property
    def key_sources(self) -> dict[int, int]:
        """The rank that holds a rank's keys when columns gather them, by their owner."""
        return {owner: rank for rank, owner in enumerate(self.key_owners)}

    @cached_property
    def _lines(self) -> tuple[list[tuple[int, ...]], ...]:
        """Rows, columns, and the owners of the keys of each column."""
        rows = [tuple(sorted(row)) for row in self.ranks]
        columns = [tuple(sorted(column)) for column in zip(*self.ranks, strict=True)]
        return rows, columns, [tuple(map(self.key_owners.__getitem__, one)) for one in columns]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        ranks = product(range(len(self.ranks)), range(len(self.ranks[0])))
        return {self.ranks[row][column]: (row, column) for row, column in ranks}


@lru_cache(maxsize=256)  # grids of a thousand ranks are long, and know their rows and columns
def row_major(rows: int, cols: int, nodes: tuple[int, ...]) -> Grid:
    """Rows of consecutive ranks, inside a node wherever its ranks are a multiple of `cols`.

    Args: nodes: the node of each rank.
    """
    place = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    order = sorted(range(rows * cols), key=lambda rank: (place[nodes[rank]], rank))
    ranks = tuple(tuple(order[row * cols : (row + 1) * cols]) for row in range(rows))
    return Grid(ranks, tuple(range(rows * cols)))


@lru_cache(maxsize=256)
def column_major(rows: int, cols: int) -> Grid:
    """Rank r + R*c at (r, c), with the keys of rank r*C + c.

    On a cyclic layout every row's queries and every column's keys are evenly spaced then.
    Source: Attention2D, section 3.2.
    """
    ranks = tuple(tuple(row + rows * column for column in range(cols)) for row in range(rows))
    owners = tuple(rank % rows * cols + rank // rows for rank in range(rows * cols))
    return Grid(ranks, owners)


def grid_shapes(size: int, rows: int, cols: int) -> Iterator[tuple[int, int]]:
    """All (R, C) with R * C = size; `rows`, `cols` fix one of them, 0 leaves it open."""
    for r in range(1, size + 1):
        if size % r == 0 and rows in (0, r) and cols in (0, size // r):
            yield r, size // r


def check_grid(name: str, size: int, rows: int, cols: int) -> None:
    """Raises: ConfigError if no grid of `size` ranks has that many rows and columns."""
    if any(grid_shapes(size, rows, cols)):
        return
    allowed = ", ".join(f"{r}x{c}" for r, c in grid_shapes(size, 0, 0))
    raise ConfigError(
        f"{name} needs rows * cols = context_parallel_size = {size}, got rows {rows} and cols "
        f"{cols}: use one of {allowed}, or 0 to have it chosen"
    )


def cheapest(size: int, rows: int, cols: int, cost: Callable[[int, int], int]) -> tuple[int, int]:
    """The allowed (R, C) of least cost(R, C); of equals, the one with more rows."""
    allowed = list(grid_shapes(size, rows, cols))
    if len(allowed) == 1:
        return allowed[0]
    return min(allowed, key=lambda shape: (cost(*shape), -shape[0]))


@dataclass(frozen=True)
class GridPlacement(BlockPlacement):
    """Queries of a row of ranks meet the keys of a column on the rank where they cross.

    Attributes: backward: whether it is of that pass, where this changes when blocks meet.
    """

    grid: Grid = field(kw_only=True)
    backward: bool = field(default=False, kw_only=True)

    def key_source(self, owner: int) -> int:
        """See BlockPlacement.key_source: a rank of the column that gathers the keys."""
        return self.grid.key_sources[owner]

    def pairs_of(self, rank: int) -> Iterator[tuple[int, int]]:
        return product(*self.blocks_of(rank))

    def blocks_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return self.grid.row(rank), self.grid.keys(rank)

    def crossing(self, query: int, key: int) -> int:
        """The rank in the row of the queries and the column of the keys."""
        return self.grid.crossing(query, self.key_source(key))


@dataclass(frozen=True)
class GatheredPlacement(GridPlacement):
    """Everything is gathered first, and computed in one step."""

    assembled = True
    masked = False

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield Place(self.crossing(query, key), 0)


@dataclass(frozen=True)
class GridBlocksPlacement(GridPlacement):
    """Block by block, straight from rank to rank: keys in the columns, then queries in the rows.

    So a rank computes its own queries with every block of keys as it comes, and then the queries
    of others with all of them. In the backward the last block of queries comes while sums of dK
    and dV leave. Every rank has one source and one target at a time.
    """

    def place(self, query: int, key: int) -> Iterator[Place]:
        """See BlockPlacement.place. Source: Attention2D, Algorithms 4 to 11."""
        rank = self.crossing(query, key)
        row, column = self.grid.row(rank), self.grid.column(rank)
        rows, cols = len(column), len(row)
        of_query = (row.index(query) - row.index(rank)) % cols
        of_key = (column.index(self.key_source(key)) - column.index(rank)) % rows
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

    Attributes: rows, cols: R and C; 0: whatever moves fewer bytes. partials: dtype in which partial
        outputs travel. transposed: columns need the keys of other ranks than their own.
    """

    rows = 0
    cols = 0
    partials: Wire = "model"
    transposed = False

    @dataclass(frozen=True)
    class Options(PointToPoint.Options):
        """Options of grids.

        Attributes: gradients: dtype in which partial gradients travel; summed in float32.
        """

        gradients: Wire = "model"

    options: Options

    # Looked up once a pass: at short lengths a step of training is bound by the host.
    @cached_property
    def _grid_shape(self) -> Callable[[Shape], tuple[int, int]]:
        return cached_method(self._cheapest, 256)

    @cached_property
    def kind(self) -> type[GridPlacement]:
        """How blocks come together: pushed by copy engines where these serve, else gathered."""
        return GridBlocksPlacement if self.transport.pushes else GatheredPlacement

    @cached_property
    def gathers(self) -> bool:
        """Whether blocks come by collective operations, not from rank to rank."""
        return self.kind is GatheredPlacement

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        """R and C: as set, or what moves the fewest bytes in forward and backward together."""
        return self._grid_shape(shape)

    def grid(self, shape: Shape) -> Grid:
        """The ranks that gather queries together, its rows, and keys, its columns."""
        return self._grid(*self.grid_shape(shape))

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> GridPlacement:
        return self._placed(self.kind, self.grid(shape), self.head_groups(shape, mask), phase)

    def _placed(
        self, kind: type[GridPlacement], grid: Grid, groups: tuple[HeadGroup, ...], phase: Phase
    ) -> GridPlacement:
        wide = self.partials == "float32", self.options.gradients == "float32"
        # What is gathered is so in both passes, of which one plan is derived then.
        backward = phase == "backward" and kind is not GatheredPlacement
        return kind(self.layout, self.topology.size, groups, *wide, grid=grid, backward=backward)

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        flop = flop_of_rank(shape, mask, self.topology.size)
        count = group_count(self.options.chunks, flop)
        if self.topology.size == 1 or self.kind is GridRingPlacement:
            count = 1
        elif not self.gathers and 1 in self.grid_shape(shape):
            # Blocks overlap within a group too, and two of them are all that is held at a time.
            count = self.options.chunks or (1 if mask.special else self._few_groups(shape, count))
        # Where only K and V are gathered, groups that share them would have nothing to wait for.
        share_kv = self.gathers and self.grid_shape(shape)[1] > 1
        return head_groups(shape.heads, shape.kv_heads, count, share_kv=share_kv)

    def _few_groups(self, shape: Shape, count: int) -> int:
        """Groups where blocks go from rank to rank. Args: count: where they are gathered."""
        half = max(1, count // 2)
        if shape.kv_heads == shape.heads:
            return half
        # Most of the memory is that of queries, which few groups would not make less than gathers.
        return max(half, group_count(0, shape.flop(self.topology.size) // 4))

    def slots(self, shape: Shape, size: int) -> int:
        """See Algorithm.slots: a column's blocks are held until the last one of the row came."""
        rows, cols = self.grid_shape(shape)
        return rows + cols - 2 if min(rows, cols) > 1 else super().slots(shape, size)

    def _cheapest(self, shape: Shape) -> tuple[int, int]:
        size, whole = self.topology.size, head_groups(shape.heads, shape.kv_heads, 1)

        def cost(rows: int, cols: int) -> int:
            total, grid = 0, self._grid(rows, cols)
            for phase in PHASES:
                placed = self._placed(GatheredPlacement, grid, whole, phase)
                # The last rank but one is not on the diagonal, where nothing is transposed.
                rank = max(0, size - 2)
                plan = plan_of(placed, shape.seq_len, Mask(), phase, rank=rank)
                total += plan.sent(rank, shape).bytes
            return total

        return cheapest(size, self.rows, self.cols, cost)

    def _grid(self, rows: int, cols: int) -> Grid:
        """Where ranks stand; a collective operation the first time."""
        if self.transposed:
            return column_major(rows, cols)
        alone = rows == 1 or cols == 1
        return row_major(rows, cols, (0,) * (rows * cols) if alone else self.topology.nodes)


@register("attention2d")
class Attention2D(GridAlgorithm):
    """Attention on a grid of R rows and C columns, P = R * C.

    A rank computes the queries of its row against the keys of its column. cols=1 is exactly the
    all-gather of K and V, rows=1 exactly that of Q.

    With S = N/P tokens a rank, elements of e bytes, partial outputs and gradients of the same, and
    lse and delta of w bytes, a rank sends B*S times

        forward   (C-1) * (2HDe + Hw) + (R-1) * 2GDe
        backward  (C-1) * (3HDe + 2Hw) + (R-1) * 4GDe

    and, off the grid's diagonal, 2GDe in each for the transposes of the paper's variants. With a
    window or documents, but on the cyclic layout, only rows travel that another rank of the row or
    column needs, as many of each rank as of the one with most.

    Kept for the backward: q, k, v (or their transposes), out and lse of the rank's own tokens.
    Beside these and its results a rank holds at most, with n groups of heads (`chunks`), gathered
    queries of q = B*H*S*C*D*e/n bytes and gathered keys and values of kv = 2*B*G*S*R*D*e/n a group,
    and rows of lse and delta aside,

        forward   (6 + 1/C) * q + (2 + 1/R) * kv
        backward  (8 + 2/C) * q + (6 + 4/e + 1/R) * kv

    which are two groups that are gathered at a time, results of kernels, what is sent and received
    of two groups, and float32 sums of dK and dV. With "overlap", where q = B*H*S*D*e and n is 1,

        forward   (2R + 4) * q + 2 * kv
        backward  (2R + 6) * q + (3 + 4/e) * kv

    Source: Attention2D. Variant "no": Algorithms 1 to 3, "overlap": Algorithms 4 to 11, on the
    cyclic layout with its transposes of K and V. Variant "zigzag" is not the paper's: on zigzag
    chunks every pair of ranks has the same causal work, each query chunk sees a prefix of the
    sorted key chunks, and nothing is transposed. Over peer memory it gathers nothing: copy engines
    push block by block, straight from the owner, and only rows that the mask lets meet; a rank
    holds R - 1 blocks of keys and C - 1 of queries at a time, two if there is one row or column.
    """

    @dataclass(frozen=True)
    class Options(GridAlgorithm.Options):
        """Options of attention2d.

        Attributes:
            variant: "zigzag" is Megatron's own layout, without transposes; "no" the paper's with
                collective operations, exactly so with chunks=1; "overlap" the paper's with rings
                in their place. The paper's need the cyclic layout.
            rows, cols: R and C; 0: chosen so that forward and backward together move the fewest
                bytes. Rows lie inside a node where they can ("zigzag" only).
            partials: dtype in which partial outputs travel: "model", that of q, in which kernels
                give them, or "float32".
            gradients: dtype in which partial gradients travel; they are summed in float32.
            chunks: at most so many groups of heads, pipelined; 0: 4, or fewer where that would be
                too little work for each; over peer memory with one row or column half of that, or 4
                for fewer KV heads than query heads where there is much work.
                "overlap" has none.
            transport: "peer" (block by block, "zigzag" only; see PointToPoint), "group" (over the
                process group), or "auto", peer where that is possible.
            layout: "contiguous" or "thd", see ring, of variant "zigzag"; "auto": as `variant` says.
        """

        variant: Literal["zigzag", "no", "overlap"] = "zigzag"
        rows: int = number(0, divisors)
        cols: int = 0
        partials: Wire = "model"
        layout: Literal["auto", "contiguous", "thd"] = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        check_grid(self.name, topology.size, options.rows, options.cols)
        self.rows, self.cols, self.partials = options.rows, options.cols, options.partials
        self.transposed = options.variant != "zigzag"

    @cached_property
    def kind(self) -> type[GridPlacement]:
        """See GridAlgorithm.kind; the paper's variants say it themselves."""
        paper = {"no": GatheredPlacement, "overlap": GridRingPlacement}
        return paper.get(self.options.variant) or super().kind

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
        check_grid(cls.name, size, options.rows, options.cols)
        super().check(options, size=size, heads=heads, kv_heads=kv_heads, causal=causal)
        if options.layout != "auto" and options.variant != "zigzag":
            raise ConfigError(
                f"attention2d with layout {options.layout} needs variant zigzag, got "
                f"{options.variant}: leave one of the two out"
            )
        if options.transport == "peer" and options.variant != "zigzag":
            raise ConfigError(
                f"attention2d transport peer needs variant zigzag, got {options.variant}: use "
                "transport auto"
            )
        if options.chunks > 1 and options.variant == "overlap":
            raise ConfigError(
                f"attention2d with variant overlap takes no chunks, got {options.chunks}: leave "
                "the option out, or use variant zigzag or no"
            )
