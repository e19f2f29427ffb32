"""P virtual ranks as threads of one process: same code, same counters, no network.

For tests and for trying an algorithm in a notebook; nothing here is fast.
"""

from collections.abc import Callable, Sequence
from operator import itemgetter
from pickle import dumps, loads
from queue import Empty, SimpleQueue
from threading import Event, Lock, Thread
from time import monotonic

import torch
from torch import Tensor

from megatron_cp_plugin.core.comm import Communicator, Pending, Receive, Send, Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator

Address = tuple[str, int, int, int]  # channel, number of the operation, from, to


class VirtualWorld:
    """Mailboxes of `size` virtual ranks.

    Args:
        timeout_s: how long a rank waits for a message.
        ranks_per_node: default: all on one node.
    """

    def __init__(
        self, size: int, timeout_s: float = 30.0, ranks_per_node: int | None = None
    ) -> None:
        self.size = size
        self.ranks_per_node = ranks_per_node or size
        self.failed = Event()
        self._timeout_s = timeout_s
        self._lock = Lock()
        self._mailboxes: dict[Address, SimpleQueue[Tensor]] = {}

    def topology(self, rank: int) -> "VirtualTopology":
        return VirtualTopology(self, tuple(range(self.size)), rank, "")

    def run[T](self, body: Callable[[Topology], T]) -> list[T]:
        """See `run_virtual`."""
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = body(self.topology(rank))
            except BaseException as error:
                errors.append(error)
                self.failed.set()

        names = {rank: f"rank {rank}" for rank in range(self.size)}
        threads = [Thread(target=run, args=(rank,), name=name) for rank, name in names.items()]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            # A rank that only waited for the failed one is not the cause.
            raise next((e for e in errors if not isinstance(e, TimeoutError)), errors[0])
        if self.unread():
            raise RuntimeError(f"messages that nobody received: {self.unread()}")
        return [results[rank] for rank in range(self.size)]

    def post(self, address: Address, message: Tensor) -> None:
        self._mailbox(address).put(message.detach().clone())

    def take(self, address: Address) -> Tensor:
        """The next message. Raises: TimeoutError if none comes, or another rank has failed."""
        deadline = monotonic() + self._timeout_s
        while monotonic() < deadline and not self.failed.is_set():
            try:
                return self._mailbox(address).get(timeout=0.05)
            except Empty:
                continue
        channel, _, source, to = address
        raise TimeoutError(f"no message on {channel!r} from virtual rank {source} to {to}")

    def unread(self) -> list[Address]:
        """Addresses of messages that were sent but never received."""
        return [address for address, box in self._mailboxes.items() if not box.empty()]

    def _mailbox(self, address: Address) -> "SimpleQueue[Tensor]":
        with self._lock:
            return self._mailboxes.setdefault(address, SimpleQueue())


class VirtualTopology(Topology):
    """One virtual rank's view of a group of them."""

    def __init__(
        self, world: VirtualWorld, members: Sequence[int], global_rank: int, path: str
    ) -> None:
        super().__init__(list(members).index(global_rank), len(members))
        self._world = world
        self._members = tuple(members)
        self._global_rank = global_rank
        self._path = path
        self._channels: dict[str, Communicator] = {}

    def channel(self, name: str) -> Communicator:
        if name not in self._channels:
            self._channels[name] = _VirtualCommunicator(
                f"{self._path}{name}", self._world, self._members, self._global_rank
            )
        return self._channels[name]

    def gather[T](self, mine: T) -> list[T]:
        return self._gathered("gather", mine)

    def numbers(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        return self._gathered("numbers", mine)

    def _gathered[T](self, name: str, mine: T) -> list[T]:
        message = torch.frombuffer(bytearray(dumps(mine)), dtype=torch.uint8)
        name = f"{self._path}{name}"
        for to in self._members:
            self._world.post((name, 0, self._global_rank, to), message)
        sources = ((name, 0, source, self._global_rank) for source in self._members)
        return [loads(self._world.take(address).numpy().tobytes()) for address in sources]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(rank // self._world.ranks_per_node for rank in self._members)

    @property
    def peer_access(self) -> bool:
        return False

    def _make_peer_channel(self, name: str, slots: int) -> SlottedCommunicator:
        raise NotImplementedError("threads have no copy engines")

    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> Topology:
        members = [self._members[rank] for rank in ranks]
        return type(self)(self._world, members, self._global_rank, f"{self._path}{name}/")


class _VirtualCommunicator(Communicator):
    def __init__(
        self, channel: str, world: VirtualWorld, members: Sequence[int], global_rank: int
    ) -> None:
        super().__init__(channel, list(members).index(global_rank), len(members), global_rank)
        self._world = world
        self._members = members
        self._operations = 0

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        turn = self._next()
        for tensor, to in sends:
            assert tensor.is_contiguous(), "messages are contiguous tensors"
            self._post(turn, tensor, to)

        def finish() -> None:
            for buffer, source in receives:
                message = self._take(turn, source)
                if message.shape != buffer.shape or message.dtype != buffer.dtype:
                    raise RuntimeError(
                        f"rank {self.rank} expected {tuple(buffer.shape)} {buffer.dtype} from "
                        f"rank {source}, got {tuple(message.shape)} {message.dtype}"
                    )
                buffer.copy_(message)

        return Pending(finish)

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        return self._all_to_all([x.expand(self.size, *x.shape)]).then(itemgetter(0))

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        return self._all_to_all([x]).then(lambda received: received[0].sum(0))

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        turn, ranks = self._next(), range(self.size)
        for x in tensors:
            for to in ranks:
                self._post(turn, x[to], to)
        return Pending(
            lambda: [torch.stack([self._take(turn, source) for source in ranks]) for _ in tensors]
        )

    def _next(self) -> int:
        """Number of the next operation; messages carry it, for waits may come in any order."""
        self._operations += 1
        return self._operations

    def _post(self, turn: int, message: Tensor, to: int) -> None:
        self._world.post((self.channel, turn, self.global_rank, self._members[to]), message)

    def _take(self, turn: int, source: int) -> Tensor:
        return self._world.take((self.channel, turn, self._members[source], self.global_rank))


def run_virtual[T](
    size: int,
    body: Callable[[Topology], T],
    timeout_s: float = 30.0,
    ranks_per_node: int | None = None,
) -> list[T]:
    """Runs body(topology) on `size` virtual ranks, each a thread; other settings: VirtualWorld.

    Returns: the results by rank. Raises: the first error of any rank; RuntimeError if messages
    were sent that nobody received.
    """
    return VirtualWorld(size, timeout_s, ranks_per_node).run(body)
