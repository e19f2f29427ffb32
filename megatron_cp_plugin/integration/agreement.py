"""What context-parallel ranks tell each other, so that all of them refuse what one of them does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megatron_cp_plugin.core.comm import others_lost
from megatron_cp_plugin.errors import ContextParallelError


class FirstCallCheck:
    """The first call of training, and that of evaluation, in which ranks compare notes."""

    def __init__(self) -> None:
        self._compared: set[bool] = set()

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
    ) -> bool:
        """Refuses what is wrong: in a first call on all ranks, later on this one.

        Args:
            fault: What is wrong on this rank; None: nothing.
            group: The context-parallel group.
            held: What the ranks should have in common, in plain types.
            difference: Says what is wrong if a rank holds something else than the first one does:
                of the rank and of what both hold.

        Returns:
            Whether ranks compared notes: it is a first call, and there are several.

        Raises:
            ContextParallelError: Something is wrong.
            CommunicationError: Another rank does not come.
        """
        compared = self.is_first and group.size() > 1
        if compared:
            notes: list[Any] = [None] * group.size()
            try:
                dist.all_gather_object(notes, (fault, held), group=group)
            except RuntimeError as error:
                raise others_lost(group.rank(), group.size(), "in a check", error) from error
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
        return compared


class DeferredChecks:
    """Checks that were begun while the model runs, and whose answers are asked for later."""

    def __init__(self) -> None:
        self._begun: list[Callable[[], str | None]] = []

    def add(self, answer: Callable[[], str | None]) -> None:
        """Takes one. Args: answer: Says what is wrong, if anything; on a GPU the host may wait."""
        self._begun.append(answer)

    def clear(self) -> None:
        """Forgets them, as of a call that has failed."""
        self._begun.clear()

    def finish(self) -> None:
        """Asks for all answers.

        Raises:
            ContextParallelError: Something is wrong.
            CommunicationError: Another rank did not come to compare it.
        """
        while self._begun:
            fault = self._begun.pop(0)()
            if fault:
                raise ContextParallelError(fault)
