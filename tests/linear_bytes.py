"""What ranks send in linear attention, by the formulas in the algorithms' docstrings."""

from collections.abc import Sequence

from megatron_cp_plugin.algorithms.lasp import Lasp
from megatron_cp_plugin.algorithms.lasp2 import Lasp2
from megatron_cp_plugin.algorithms.linear_ulysses import LinearUlysses
from megatron_cp_plugin.core.communication.record import CommunicationLog
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm, LinearShape, StatePassing
from megatron_cp_plugin.core.linear.states import Route
from tests.foreign_linear import Doubling

Sent = tuple[int, int, int, int]


def state_bytes(shape: LinearShape) -> int:
    """Bytes of one state of all heads."""
    return shape.batch * shape.heads * shape.head_dim * shape.value_dim * shape.wide_bytes


def counted(log: CommunicationLog, rank: int) -> Sent:
    """Bytes and messages of a rank's forward, and of its backward."""
    forward, backward = (
        (log.bytes(rank=rank, phase=phase), log.messages(rank=rank, phase=phase))
        for phase in ("forward", "backward")
    )
    return *forward, *backward


def _messages(made: StatePassing, route: Route, rank: int) -> int:
    """Along a chain one from each rank but the last; else one from all to all."""
    size = made.topology.size
    if isinstance(made, Doubling):
        return made.messages(route, rank)
    if isinstance(made, Lasp):
        return int(rank != sorted(range(size), key=lambda one: route.runs[one])[-1])
    return size - 1


def stated(
    made: LinearAlgorithm,
    shape: LinearShape,
    rank: int,
    *,
    causal: bool,
    final_state: bool,
    documents: tuple[int, ...] = (),
    transition: int = 0,
    gates: Sequence[int] = (),
) -> Sent:
    """As `counted`.

    Args: transition: how many numbers that of a run has for a head. gates: of each tensor of them,
        how many numbers a token has for a head.
    """
    size = made.topology.size
    if isinstance(made, LinearUlysses):
        heads = -(-shape.heads // size)
        width = 2 * heads * (shape.head_dim + shape.value_dim) * shape.element_bytes
        width += heads * sum(gates) * shape.wide_bytes
        tokens = max(made.layout.length(one, size, shape.seq_len) for one in range(size))
        state = shape.batch * heads * shape.head_dim * shape.value_dim * shape.wide_bytes
        directions = 1 if causal else 2
        sent = (size - 1) * (directions * shape.batch * tokens * width + final_state * state)
        messages = (size - 1) * (directions * (4 + len(gates)) + final_state)
        return sent, messages, sent, messages
    assert isinstance(made, StatePassing)
    chain = isinstance(made, Lasp)
    layout, seq_len, starts = made.layout, made.layout.multiple(size), ()
    if layout.follows_documents and documents:
        layout, seq_len, starts = layout.for_documents(documents), shape.seq_len, documents
    there = Route.of(layout, size, seq_len, starts)
    ways = [there] if causal else [there, there.flipped]
    of_run = state_bytes(shape)
    if not chain:
        of_run += shape.batch * shape.heads * transition * shape.wide_bytes

    def sent_in(ways: Sequence[Route], once: int) -> tuple[int, int]:
        """Args: once: messages of one state beside those along the ways."""
        carried = sum(_messages(made, way, rank) for way in ways)
        runs = max(there.counts)
        return carried * runs * of_run + once * state_bytes(shape), carried + once

    # From all to all, but of lasp2 every rank has the last state.
    last = final_state * (0 if isinstance(made, Lasp2) else size - 1)
    first = final_state * (size - 1)
    return *sent_in(ways, last), *sent_in([way.back for way in ways], first)
