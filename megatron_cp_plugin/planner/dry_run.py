"""A single rank without peers: its messages go nowhere, but are noted, as all that it launches.

So an algorithm's own code runs for one rank of any number, on tensors without storage.
"""

from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator, Pending, Receive, Send, Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator, Writes
from megatron_cp_plugin.core.communication.record import Operation, Phase

ChannelId = tuple[str, tuple[int, ...]]  # its name, and the global ranks of its group


class Post(NamedTuple):
    """Begins an operation of a channel.

    Attributes:
        channel, number: the channel, and the index of the operation in it.
        operation: None: by copy engines.
        sends, receives: (global rank, bytes) of each message.
        bytes: that this rank sends in a collective operation.
        early: see Communicator.exchange.
    """

    channel: ChannelId
    number: int
    operation: Operation | None
    sends: tuple[tuple[int, int], ...]
    receives: tuple[tuple[int, int], ...]
    bytes: int
    early: bool = False


class Offer(NamedTuple):
    """Lets others write the messages of an operation that is yet to be posted."""

    channel: ChannelId
    number: int


class Mark(NamedTuple):
    """Early messages of the channel that are posted after it wait for computations before it."""

    channel: ChannelId


class Wait(NamedTuple):
    """Waits for the posted messages."""

    channel: ChannelId
    number: int


class RecordedKernel(NamedTuple):
    """An attention kernel.

    Attributes:
        rows, columns: Of a document, in the mean over pairs: harmonic, because what a kernel loses
            is in inverse proportion. Under a causal window rows are fewer: a kernel loses at both
            edges of the mask.
        area: Pairs of a query and a key, for each head.
        packed: Several sequences in one call.
    """

    phase: Phase
    batch: int
    rows: float
    columns: float
    area: float
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    causal: bool
    packed: bool = False


class Linear(NamedTuple):
    """A part of a kernel of linear attention."""

    phase: Phase
    flop: float


class Memory(NamedTuple):
    """An operation that is bound by memory. Attributes: name: of torch's operator, or ours."""

    name: str
    bytes: int


Event = RecordedKernel | Linear | Memory | Post | Offer | Mark | Wait
# The record of this thread, if it is recording.
recording: ContextVar[list[Event] | None] = ContextVar("recording", default=None)


def note(event: Event) -> None:
    """Records the operations of a rank."""
    events = recording.get()
    if events is not None:
        events.append(event)


class DryRunGroup(Topology):
    """The topology of a rank alone."""

    def __init__(
        self,
        rank: int,
        nodes: Sequence[int],
        *,
        peer_access: bool,
        ranks: tuple[int, ...] | None = None,
        plans_all: bool = False,
    ) -> None:
        """Stands for one rank. Args: ranks: global, of the group; None: these are all."""
        super().__init__(rank, len(nodes))
        self.plans_all = plans_all
        self._nodes, self._peer_access = tuple(nodes), peer_access
        self._ranks = tuple(range(len(nodes))) if ranks is None else ranks
        self._channels: dict[str, Communicator] = {}

    def slabs(self) -> Iterator[Tensor]:
        """Receive buffers in peer memory, here and in subgroups."""
        for channel in self._peer_channels.values():
            assert isinstance(channel, _PeerChannel)
            yield channel.slab
        for topology in self._subgroups.values():
            assert isinstance(topology, DryRunGroup)
            yield from topology.slabs()

    def channel(self, name: str) -> Communicator:
        posting = _Posting((name, self._ranks))
        return self._channels.setdefault(name, _Channel(self.rank, posting))

    @property
    def peer_access(self) -> bool:
        return self._peer_access and self.size > 1 and len(set(self._nodes)) == 1

    def _make_peer_channel(self, name: str, slots: int) -> SlottedCommunicator:
        posting = _Posting((f"{name} by copy engines", self._ranks))
        return _PeerChannel(self.rank, posting, slots)

    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> Topology:
        return DryRunGroup(
            ranks.index(self.rank),
            [self._nodes[rank] for rank in ranks],
            peer_access=self._peer_access,
            ranks=tuple(self._ranks[rank] for rank in ranks),
            plans_all=self.plans_all,
        )

    @property
    def nodes(self) -> tuple[int, ...]:
        return self._nodes

    def gather[T](self, mine: T) -> list[T]:
        return [mine] * self.size

    def numbers(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        return [mine] * self.size


class _Posting:
    """Notes the operations of a channel. Tensors that are sent live until the wait."""

    def __init__(self, channel: ChannelId) -> None:
        self.channel = channel
        self.number = 0  # of the next operation

    def __call__[T](
        self,
        operation: Operation | None,
        sends: Sequence[Send],
        receives: Sequence[Receive],
        result: T,
        sent: Tensor | None = None,
        block: Tensor | None = None,
        *,
        early: bool = False,
    ) -> Pending[T]:
        """Args:
        sent: by a collective operation.
        block: of it, that goes to each other rank.
        early: see Communicator.exchange.
        """
        number, ranks = self.number, self.channel[1]
        self.number += 1
        leave, come = (
            tuple((ranks[rank], x.nbytes) for x, rank in each) for each in (sends, receives)
        )
        of_block = 0 if block is None else block.nbytes * (len(ranks) - 1)
        note(Post(self.channel, number, operation, leave, come, of_block, early))
        living = [sends, sent]

        def finish() -> T:
            living.clear()
            note(Wait(self.channel, number))
            return result

        return Pending(finish)


class _Channel(Communicator):
    """Results take memory when an operation is posted."""

    def __init__(self, rank: int, posting: _Posting) -> None:
        name, ranks = posting.channel
        super().__init__(name, rank, len(ranks), ranks[rank])
        self._posting = posting

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        return self._posting("exchange", sends, receives, None)

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        return self._posting("all_gather", (), (), x.new_empty((self.size, *x.shape)), x, x)

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        return self._posting("reduce_scatter", (), (), x.new_empty(x.shape[1:]), x, x[0])

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        post = self._posting
        each = [post("all_to_all", (), (), x.new_empty(x.shape), x, x[0]) for x in tensors]
        return Pending(lambda: [one.wait() for one in each])


class _PeerChannel(SlottedCommunicator):
    def __init__(self, rank: int, posting: _Posting, slots: int) -> None:
        name, ranks = posting.channel
        super().__init__(name, rank, len(ranks), ranks[rank], slots)
        self._slab = torch.empty(0, dtype=torch.uint8, device="meta")
        self._posting = posting

    @property
    def slab(self) -> Tensor:
        """All slots, one after another."""
        return self._slab

    def _grow(self, slot_bytes: int) -> None:
        self._slab = torch.empty(self._held_slots * slot_bytes, dtype=torch.uint8, device="meta")

    def mark(self) -> None:
        note(Mark(self._posting.channel))

    def _free(self, slot: int) -> None:
        note(Offer(self._posting.channel, self._posting.number))

    def _post(
        self, slot: int, writes: Writes, receives: Sequence[Receive], *, early: bool
    ) -> Pending[None]:
        sends = [(x, to) for to, each in writes.items() for x, _ in each]
        return self._posting(None, sends, receives, None, early=early)
