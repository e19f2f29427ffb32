"""Ranks whose memory others write to: virtual ones on a CPU, at their strictest, and on one GPU."""

import os
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Pending, Receive, Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator, Writes
from megatron_cp_plugin.core.communication.process_groups import ProcessGroupTopology
from megatron_cp_plugin.core.communication.virtual import Address, VirtualTopology, VirtualWorld

_NAN = 0xFF  # a byte; any number of them is NaN in every floating dtype


class PeerWorld(VirtualWorld):
    """Virtual ranks with peer channels, see `VirtualPeerCommunicator`.

    Attributes: under_way: sends over peer channels, until they are waited for.
    """

    def __init__(
        self, size: int, timeout_s: float = 30.0, ranks_per_node: int | None = None
    ) -> None:
        super().__init__(size, timeout_s, ranks_per_node)
        self.under_way: set[Address] = set()

    def topology(self, rank: int) -> "_PeerTopology":
        return _PeerTopology(self, tuple(range(self.size)), rank, "")

    def run[T](self, body: Callable[[Topology], T]) -> list[T]:
        """See VirtualWorld.run. Raises: RuntimeError also if a send was not waited for."""
        results = super().run(body)
        if self.under_way:
            raise RuntimeError(f"sends that were not waited for: {sorted(self.under_way)}")
        return results


class _PeerTopology(VirtualTopology):
    _world: PeerWorld

    @property
    def peer_access(self) -> bool:
        return self.size > 1 and len(set(self.nodes)) == 1

    def _make_peer_channel(self, name: str, slots: int) -> SlottedCommunicator:
        return VirtualPeerCommunicator(
            f"{self._path}{name}", self._world, self._members, self._global_rank, slots
        )


class VirtualPeerCommunicator(SlottedCommunicator):
    """Peer memory at its strictest: it detects reads that are too late and changes that are too
    early.

    A slot is filled with NaN when an exchange that receives into it is expected or posted; its
    messages appear when that exchange is waited for. Sends must be waited for, and their tensors
    must not have changed since they were posted. It is an error if ranks do not make room in the
    same turn.
    """

    def __init__(
        self,
        channel: str,
        world: PeerWorld,
        members: Sequence[int],
        global_rank: int,
        slots: int,
    ) -> None:
        rank = list(members).index(global_rank)
        super().__init__(channel, rank, len(members), global_rank, slots)
        self._world = world
        self._members = members
        self._slab = torch.empty(0, dtype=torch.uint8, device="cpu")

    def _grow(self, slot_bytes: int) -> None:
        assert slot_bytes, "peer memory of no bytes has no address"
        mine = torch.tensor([self._turn, slot_bytes], device="cpu")
        others = [rank for rank in range(self.size) if rank != self.rank]
        for rank in others:
            self._world.post(self._address("room", 0, self.rank, rank), mine)
        for rank in others:
            theirs = self._world.take(self._address("room", 0, rank, self.rank))
            if not torch.equal(mine, theirs):
                raise RuntimeError(
                    f"on {self.channel!r} rank {self.rank} makes room in turn and of bytes "
                    f"{mine.tolist()}, rank {rank} {theirs.tolist()}"
                )
        size = self._held_slots * slot_bytes
        self._slab = torch.full((size,), _NAN, dtype=torch.uint8, device="cpu")

    def _free(self, slot: int) -> None:
        start = slot * self._slot_bytes
        self._slab[start : start + self._slot_bytes] = _NAN

    def _post(
        self, slot: int, writes: Writes, receives: Sequence[Receive], *, early: bool
    ) -> Pending[None]:
        turn, posted = self._turn, list[tuple[Tensor, Tensor]]()
        addresses = {self._address("blocks", turn, self.rank, to): to for to in writes}
        self._world.under_way.update(addresses)
        for address, to in addresses.items():
            for tensor, place in writes[to]:
                bits = _as_bytes(tensor).clone()
                posted.append((tensor, bits))
                self._world.post(address, torch.tensor([place], device="cpu"))
                self._world.post(address, bits.reshape(-1))
        begin = slot * self._slot_bytes + self._slab.storage_offset()  # larger slots may come

        def finish() -> None:
            for buffer, source in receives:
                address = self._address("blocks", turn, source, self.rank)
                bits, done = _as_bytes(buffer), 0
                while not done or done < bits.numel():  # rows may come in pieces
                    place, message = self._world.take(address).item(), self._world.take(address)
                    part = bits[done : done + message.numel()]
                    if part.numel() and part.storage_offset() != begin + place:
                        raise RuntimeError(
                            f"rank {source} writes to byte {place} of a slot on {self.channel!r}, "
                            f"rank {self.rank} reads byte {part.storage_offset() - begin}"
                        )
                    part.copy_(message)
                    done += message.numel() or 1
            self._world.under_way.difference_update(addresses)
            for tensor, bits in posted:
                if not torch.equal(_as_bytes(tensor), bits):
                    raise RuntimeError(
                        f"rank {self.rank} changed what it sent in turn {turn} on "
                        f"{self.channel!r} before it waited for it"
                    )
            posted.clear()  # which lived until now

        return Pending(finish)

    def _address(self, what: str, turn: int, source: int, to: int) -> Address:
        name = f"{self.channel}, {what} in {self._slots} slots"
        return name, turn, self._members[source], self._members[to]


def _as_bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, as a view; flat if the tensor is contiguous."""
    x = tensor.detach()
    # A view of one expanded element would keep its stride of 0, which bytes cannot have.
    return (x.as_strided((x.numel(),), (1,)) if x.is_contiguous() else x).view(torch.uint8)


def virtual_world(
    size: int,
    timeout_s: float = 30.0,
    ranks_per_node: int | None = None,
    *,
    peer_access: bool = False,
) -> VirtualWorld:
    """Virtual ranks, with peer channels or without."""
    return (PeerWorld if peer_access else VirtualWorld)(size, timeout_s, ranks_per_node)


def run_virtual[T](
    size: int,
    body: Callable[[Topology], T],
    timeout_s: float = 30.0,
    ranks_per_node: int | None = None,
    *,
    peer_access: bool = False,
) -> list[T]:
    """As the package's `run_virtual`, with peer channels or without."""
    return virtual_world(size, timeout_s, ranks_per_node, peer_access=peer_access).run(body)


def share_gpu(ranks_per_node: int) -> None:
    """Puts all ranks of this job on the first GPU, in nodes whose ranks have peer access. Call it
    before anything asks for a GPU.

    To NCCL, which refuses two ranks of one host on one GPU, each rank is a host.
    """
    alone = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NCCL_HOSTID": os.environ["RANK"]}
    os.environ.update(alone, TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES="1")

    def nodes(topology: ProcessGroupTopology) -> tuple[int, ...]:
        ranks = dist.get_process_group_ranks(topology._group)
        return tuple([rank // ranks_per_node for rank in ranks])

    def peer_access(topology: ProcessGroupTopology) -> bool:
        return topology.size > 1 and len(set(topology.nodes)) == 1

    for name, of in (("nodes", nodes), ("peer_access", peer_access)):
        setattr(ProcessGroupTopology, name, property(of))
