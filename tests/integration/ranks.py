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
    """Returns what body(group) returned on each rank, over gloo.

    No rank begins before all are connected, nor is its group destroyed before all have ended: gloo
    gives up a rank that still connects, or receives, when its peer closes the connection.
    """
    store = dist.HashStore()
    known = dist.distributed_c10d._world.pg_map

    def connect(number: int) -> dist.ProcessGroup:
        group = dist.ProcessGroup(store, number, size)
        gloo = dist.ProcessGroupGloo(store, number, size, timedelta(seconds=timeout_s))
        group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
        return group

    with ThreadPoolExecutor(size) as threads:
        groups = list(threads.map(connect, range(size)))
        # Those that are not in it the plugin takes for destroyed.
        known.update((group, ("gloo", store)) for group in groups)
        try:
            return list(threads.map(body, groups))
        finally:
            for group in groups:
                del known[group]
