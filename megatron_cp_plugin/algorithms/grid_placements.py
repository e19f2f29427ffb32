"""Placements on a grid of ranks: where queries meet keys, and which way blocks take.

R rows and C columns; queries of a row meet keys of a column.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.plans.grid import Grid


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
