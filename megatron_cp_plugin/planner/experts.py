"""Time and bytes of sending tokens to the experts of a layer.

Megatron counts the GPUs of a pipeline stage a second time for experts: expert tensor parallelism
first, then expert and expert data parallelism, for any tensor and context parallelism. Two of
its dispatchers are counted (`--moe-token-dispatcher-type`):

- alltoall: a copy of each token goes to each of its experts, among the expert-parallel ranks, and
  on to all expert-tensor-parallel ones.
- allgather: each token goes once to all ranks of both.

Results come back the same way. All experts get equally many tokens here, which training only
comes near. The weights of a token's experts, which go along, are not counted; nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from megatron_cp_plugin.core.communication.record import Operation
from megatron_cp_plugin.planner.machine import Machine

Dispatcher = Literal["alltoall", "allgather"]
_ELEMENT = 2  # bytes in bfloat16


class ExpertMessage(NamedTuple):
    """A collective operation of `ranks` that are `stride` apart, and the bytes that each sends."""

    operation: Operation
    ranks: int
    stride: int
    sent_bytes: float


@dataclass(frozen=True)
class Dispatch:
    """Tokens and experts of a layer.

    Attributes:
        tokens: of a rank.
        hidden: elements of a token.
        active: experts of a token.
        expert, expert_tensor: parallel sizes.
    """

    tokens: float
    hidden: int
    active: int
    expert: int
    expert_tensor: int

    def messages(self, dispatcher: Dispatcher) -> tuple[ExpertMessage, ...]:
        """Of one pass: to the experts and back."""
        row, ranks = _ELEMENT * self.tokens * self.hidden, self.expert * self.expert_tensor
        if dispatcher == "allgather":
            gathered = row * (ranks - 1)
            found = [
                ExpertMessage("all_gather", ranks, 1, gathered),
                ExpertMessage("reduce_scatter", ranks, 1, gathered),
            ]
        else:
            copies = row * self.active
            gathered = copies * (self.expert_tensor - 1)
            exchanged = copies * (self.expert - 1) / self.expert
            exchange = ExpertMessage("all_to_all", self.expert, self.expert_tensor, exchanged)
            found = [
                exchange,
                ExpertMessage("all_gather", self.expert_tensor, 1, gathered),
                ExpertMessage("reduce_scatter", self.expert_tensor, 1, gathered),
                exchange,
            ]
        return tuple(one for one in found if one.ranks > 1)

    def bytes(self, dispatcher: Dispatcher, machine: Machine) -> tuple[float, float]:
        """That a rank sends in one pass, inside its node and to others."""
        found = self.messages(dispatcher)
        between = sum(machine.between_bytes(*one) for one in found)
        return sum(one.sent_bytes for one in found) - between, between

    def message_seconds(self, dispatcher: Dispatcher, machine: Machine) -> float:
        """Of the messages of one pass."""
        return sum(machine.collective_seconds(*one) for one in self.messages(dispatcher))

    def copy_seconds(self, dispatcher: Dispatcher, machine: Machine) -> float:
        """Of one pass: copies are made for experts, sorted by experts, and added."""
        copies = self.active * self.expert_tensor
        if dispatcher == "allgather":
            touched = 2 * (self.expert * self.expert_tensor + copies)
        else:
            touched = 2 * (1 + self.active) + 4 * copies
        size = _ELEMENT * self.tokens * self.hidden * touched
        return size / machine.memory_bytes_per_second

    def fastest(self, machine: Machine) -> Dispatcher:
        """The dispatcher that takes less time."""

        def seconds(one: Dispatcher) -> float:
            return self.message_seconds(one, machine) + self.copy_seconds(one, machine)

        return "allgather" if seconds("allgather") < seconds("alltoall") else "alltoall"
