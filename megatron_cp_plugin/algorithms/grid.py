"""Placements on a grid of ranks: where queries meet keys, and which way blocks take.

R rows and C columns; queries of a row meet keys of a column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import product

from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.errors import ConfigError


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
        """See BlockPlacement.pairs_of."""
        return product(*self.blocks_of(rank))

    def blocks_of(self, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """See BlockPlacement.blocks_of."""
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
        """See BlockPlacement.place."""
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
