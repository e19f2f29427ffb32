"""Numbers that should be the same on all ranks, compared while other work goes on."""

from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import others_lost

COMPARED_TOGETHER = 16
_FACTOR, _MODULUS = 1_000_003, 2**61 - 1  # primes, so that no number is lost from their sum


def same_on_all_ranks(numbers: Tensor, group: dist.ProcessGroup) -> Callable[[], bool]:
    """Begins to compare int64 numbers [n] over a group, in one collective operation.

    On a GPU neither the current stream nor the host waits for it, until the function that is
    returned is called: then the host waits for the comparison, but for nothing that was queued
    since.

    Returns: a function, to be called once, which says whether all ranks gave the same numbers.
    Raises, when that is called: CommunicationError if another rank does not come within the
    group's timeout.
    """
    extremes = torch.cat((numbers, -numbers))
    work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None  # it is asynchronous
    found: Callable[[], bool] | None = None
    if extremes.is_cuda:
        with torch.cuda.stream(_stream(extremes.device)):
            work.wait()
            found = later(_all_equal(extremes))

    def value() -> bool:
        try:
            if found is not None:
                return found()
            work.wait()
        except RuntimeError as error:
            raise others_lost(group.rank(), group.size(), "in a comparison", error) from error
        return bool(_all_equal(extremes))  # whose memory is held until here

    return value


class LaterNumbers:
    """Compares numbers, `COMPARED_TOGETHER` of them at a time, so that the host hardly ever waits.

    After so many numbers the ranks begin to compare a sum of all of them, and look at what the
    comparison before has found: a number that differs is found within the next
    2 * COMPARED_TOGETHER ones.
    """

    def __init__(self) -> None:
        self._sum = 0
        self._count = 0
        self._same: Callable[[], bool] | None = None

    def add(self, number: int, begin: Callable[[int], Callable[[], bool]]) -> bool:
        """Whether no difference was found yet; the same answer on all ranks.

        Args: begin: begins to compare a number over the ranks, see `Topology.comparison`.
        Raises: CommunicationError if another rank does not come to compare.
        """
        self._sum = (self._sum * _FACTOR + number) % _MODULUS
        self._count += 1
        if self._count % COMPARED_TOGETHER:
            return True
        same, self._same = self._same, begin(self._sum)
        return same is None or same()


def later(flag: Tensor) -> Callable[[], bool]:
    """Starts to copy a flag [] to the host; the function that is returned waits for it."""
    value = on_host(flag)
    return lambda: bool(value())


def on_host(x: Tensor) -> Callable[[], Tensor]:
    """Starts to copy a tensor to the host; the function that is returned waits for the copy."""
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def value() -> Tensor:
        copied.synchronize()
        return host

    return value


def _all_equal(extremes: Tensor) -> Tensor:
    """From the largest numbers, and the largest of their negatives: bool []."""
    largest, smallest = extremes.chunk(2)
    return (largest == -smallest).all()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
