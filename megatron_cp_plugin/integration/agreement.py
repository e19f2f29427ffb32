"""What context-parallel ranks tell each other, so that all of them refuse what one of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError

# Of later calls each of so many is compared too, by one small message.
COMPARED_EVERY = 32


class FirstCalls:
    """The first call of training, and that of evaluation, in which ranks compare notes."""

    def __init__(self) -> None:
        self._compared: set[bool] = set()
        self._later_calls = 0

    @property
    def is_first(self) -> bool:
        """Whether none with, or without, gradients was compared yet."""
        return torch.is_grad_enabled() not in self._compared

    def compare(
        self,
        fault: str | None,
        group: dist.ProcessGroup,
        held: object = None,
        difference: Callable[[int, Any, Any], str] = lambda rank, theirs, first: "",
    ) -> None:
        """Refuses what is wrong: in a first call on all ranks, later on this one.

        Args:
            fault: What is wrong on this rank; None: nothing.
            group: The context-parallel group.
            held: What the ranks should have in common, in plain types.
            difference: Says what is wrong if a rank holds something else than the first one does:
                of the rank and of what both hold.

        Raises:
            ContextParallelError: Something is wrong.
        """
        if self.is_first and group.size() > 1:
            notes: list[Any] = [None] * group.size()
            dist.all_gather_object(notes, (fault, held), group=group)
            faults = [note[0] for note in notes]
            for rank, found in enumerate(faults):
                if found:
                    raise ContextParallelError(found if all(faults) else f"{found} (rank {rank})")
            first = notes[0][1]
            for rank, (_, theirs) in enumerate(notes):
                if theirs != first:
                    raise ContextParallelError(difference(rank, theirs, first))
            self._compared.add(torch.is_grad_enabled())
        if fault:
            raise ContextParallelError(fault)

    def is_turn(self) -> bool:
        """Whether this one of the later calls is to be compared; counts it."""
        self._later_calls += 1
        return self._later_calls % COMPARED_EVERY == 0


def later(flag: Tensor) -> Callable[[], bool]:
    """Starts to copy a flag [] to the host; the function that is returned waits for it."""
    if not flag.is_cuda:
        return lambda: bool(flag)
    host = torch.empty((), dtype=torch.bool, pin_memory=True)
    host.copy_(flag, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def value() -> bool:
        copied.synchronize()
        return bool(host)

    return value


def same_on_all_ranks(numbers: Tensor, group: dist.ProcessGroup) -> Callable[[], bool]:
    """Begins to compare int64 numbers [n]; the function that is returned waits for the result.

    A collective operation of the group, for which no host waits on a GPU.
    """
    extremes = torch.cat((numbers, -numbers))
    dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes.chunk(2)
    return later((largest == -smallest).all())
