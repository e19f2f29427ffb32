"""Many ranges as arrays, int64 [2,n]: where they start, and where they stop."""

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
Flags = NDArray[np.bool_]


def offsets(lengths: Numbers) -> Numbers:
    """Where each begins if one follows the other: (3, 1, 2) -> (0, 3, 4)."""
    return np.cumsum(lengths) - lengths


def offsets_of_each(whose: Numbers, lengths: Numbers) -> Numbers:
    """As `offsets`, among those of the same one. Args: whose: each is, in ascending order."""
    all_of_them = offsets(lengths)
    return all_of_them - all_of_them[np.searchsorted(whose, whose)]


def expanded(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Of so many elements each: whose it is, and its number there.

    (2, 0, 3) -> (0, 0, 2, 2, 2), (0, 1, 0, 1, 2).
    """
    whose = np.repeat(np.arange(len(counts)), counts)
    return whose, np.arange(len(whose)) - np.repeat(offsets(counts), counts)


def runs(apart: Flags, count: int) -> tuple[Numbers, Numbers]:
    """The first one, and the last one, of each run of elements.

    Args: apart: of all but the first element, whether it begins a run. count: of the elements.
    """
    begins = np.ones(count, np.bool_)
    begins[1:] = apart
    first = np.flatnonzero(begins)
    after = np.empty_like(first)
    after[:-1], after[-1:] = first[1:], count
    return first, after - 1
