"""Ranks with process groups of their own, as threads of the test."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class Place:
    """Stands for a process group that is asked only for its rank and size."""

    def __init__(self, rank: int, size: int) -> None:
        self._place = rank, size

    def rank(self) -> int:
        return self._place[0]

    def size(self) -> int:
        return self._place[1]


ALONE: Any = Place(0, 1)


def on_ranks[T](
    size: int, body: Callable[[dist.ProcessGroup], T], *, timeout_s: float = 30
) -> list[T]:
    """Returns what body(group) returned on each rank, over gloo."""
    store = dist.HashStore()

    def rank(number: int) -> T:
        group = dist.ProcessGroup(store, number, size)
        gloo = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=timeout_s))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        known = dist.distributed_c10d._world.pg_map
        known[group] = "gloo", store  # which the plugin takes for destroyed otherwise
        try:
            return body(group)
        finally:
            del known[group]

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(rank, range(size)))
