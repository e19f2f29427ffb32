"""A context-parallel group as a grid of R rows and C columns. Pure Python."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

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
        return hash((self.rows, self.cols))

    @property
    def rows(self) -> int:
        """R."""
        return len(self.ranks)

    @property
    def cols(self) -> int:
        """C."""
        return len(self.ranks[0])

    def row(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's row, ascending."""
        return self._rows[self._places[rank][0]]

    def column(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's column, ascending."""
        return self._columns[self._places[rank][1]]

    def keys(self, rank: int) -> tuple[int, ...]:
        """Whose keys the ranks of a rank's column hold."""
        return self._keys[self._places[rank][1]]

    def crossing(self, a: int, b: int) -> int:
        """The rank in the row of one rank and the column of another."""
        return self.ranks[self._places[a][0]][self._places[b][1]]

    @cached_property
    def key_sources(self) -> dict[int, int]:
        """The rank that holds a rank's keys when columns gather them, by their owner."""
        return {owner: rank for rank, owner in enumerate(self.key_owners)}

    @cached_property
    def _rows(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(row)) for row in self.ranks)

    @cached_property
    def _columns(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(sorted(column)) for column in zip(*self.ranks, strict=True))

    @cached_property
    def _keys(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(self.key_owners[rank] for rank in column) for column in self._columns)

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        return {
            rank: (row, column)
            for row, ranks in enumerate(self.ranks)
            for column, rank in enumerate(ranks)
        }


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
