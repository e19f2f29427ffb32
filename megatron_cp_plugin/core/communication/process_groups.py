"""Topologies over torch.distributed's process groups, and how a process with groups of gloo ends.

gloo drops the tensors of an operation in a thread of its own, some time after `wait` has returned,
and takes the GIL for it. Python ends a thread that asks for the GIL while it is finalized (3.12,
3.13); in the middle of C++ destructors this aborts the process, after a right result: "terminate
called without an active exception" (torch 2.11 to 2.15, pytorch/pytorch#190489). These threads live
as long as their process group.
"""

import atexit
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache, cached_property, partial
from pathlib import Path
from socket import gethostname
from typing import Any
from uuid import uuid4
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.agree import gathered
from megatron_cp_plugin.core.comm import Communicator, Pending, Receive, Send, Topology, others_lost
from megatron_cp_plugin.core.communication.board import Board, shared_board
from megatron_cp_plugin.core.communication.peer import PeerCommunicator, Shown, SlottedCommunicator
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_topologies: dict[ref[dist.ProcessGroup], "ProcessGroupTopology"] = {}


def topology_of(group: dist.ProcessGroup | None) -> Topology:
    """Topology of a process group; None: all processes, or this process alone without
    torch.distributed. The group's ranks make further groups on demand, by themselves.

    Raises: ContextParallelError for a group that was destroyed.
    """
    if group is None:
        group = dist.group.WORLD
        if group is None:  # torch.distributed is not initialized
            return _alone()
    if _is_destroyed(group):
        raise group_destroyed()
    reference = ref(group)
    if reference not in _topologies:
        if group.size() == 1:
            return _alone()
        _topologies[reference] = ProcessGroupTopology(group)
    return _topologies[reference]


def release_topologies() -> None:
    """Frees the receive buffers of all topologies that `topology_of` made, and further groups of
    those whose group was destroyed; see functional.release.
    """
    for reference, topology in list(_topologies.items()):
        topology.drop_peer_channels()
        if _is_destroyed(reference()):
            topology.destroy_further_groups()
            del _topologies[reference]


def _timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Timeout of a group's operations; torch gives it only for a device's backend."""
    return group._get_backend(group._device_types[0]).options._timeout


def _is_destroyed(group: dist.ProcessGroup | None) -> bool:
    """Args: group: None: nobody holds it any more."""
    if group is None:
        return True
    try:
        dist.get_backend(group)
    except ValueError:  # also where torch.distributed as a whole was shut down
        return True
    return False


@cache
def _alone() -> Topology:
    """Topology of one rank, without network; always one object, for it is a key of caches."""
    return VirtualWorld(1).topology(0)


@cache
def _peer_streams(device: int) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """The streams of a GPU's copies to others, and of its offers."""
    return torch.cuda.Stream(device, priority=-1), torch.cuda.Stream(device, priority=-1)


def is_nccl(group: dist.ProcessGroup) -> bool:
    """Whether NCCL sends a group's messages between GPUs.

    `get_backend` does not tell for a group that was made without a backend's name, as a DeviceMesh
    makes it, or for CPUs as well.
    """
    return "cuda:nccl" in dist.get_backend_config(group).split(",")


def existing(reference: ref[dist.ProcessGroup]) -> dist.ProcessGroup:
    """The process group of a weak reference.

    References are weak because outputs that a program keeps hold their algorithm, which would keep
    the threads of a destroyed group alive.

    Raises: ContextParallelError if it was destroyed.
    """
    group = reference()
    if group is None:
        raise group_destroyed()
    return group


def group_destroyed() -> ContextParallelError:
    """The error for the use of a destroyed process group."""
    return ContextParallelError(
        "context parallelism needs a process group that exists, got one that was destroyed: create "
        "a new one"
    )


class ProcessGroupCommunicator(Communicator):
    """Over a torch.distributed process group (NCCL, gloo), whose ranks connect when it is used."""

    def __init__(self, channel: str, group: dist.ProcessGroup) -> None:
        super().__init__(channel, dist.get_rank(group), dist.get_world_size(group), dist.get_rank())
        self._reference = ref(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._connected = not is_nccl(group) or self.size == 1

    @property
    def _group(self) -> dist.ProcessGroup:
        group = existing(self._reference)
        if not self._connected:  # NCCL connects ranks in the first operation of all of them
            dist.all_reduce(torch.zeros(1, device="cuda"), group=group)
            self._connected = True
        return group

    def _exchange(self, sends: Sequence[Send], receives: Sequence[Receive]) -> Pending[None]:
        group, ranks = self._group, self._ranks
        ops = [dist.P2POp(dist.isend, tensor, ranks[to], group) for tensor, to in sends]
        ops += [dist.P2POp(dist.irecv, buffer, ranks[source], group) for buffer, source in receives]
        try:
            works = dist.batch_isend_irecv(ops) if ops else []
        except RuntimeError as error:  # gloo sends nothing over a connection that was closed
            raise self._lost(error) from error
        return self._after(works, None)

    def _all_gather(self, x: Tensor) -> Pending[Tensor]:
        out = x.new_empty((self.size, *x.shape))
        # all_gather_into_tensor takes dim 0 concatenated, and no tensor without dimensions.
        work = dist.all_gather_into_tensor(
            out.view(-1), x.view(-1), group=self._group, async_op=True
        )
        return self._after([work], out)

    def _reduce_scatter(self, x: Tensor) -> Pending[Tensor]:
        out = torch.empty_like(x[0])
        work = dist.reduce_scatter_tensor(
            out.view(-1), x.view(-1), group=self._group, async_op=True
        )
        return self._after([work], out)

    def _all_to_all(self, tensors: Sequence[Tensor]) -> Pending[Sequence[Tensor]]:
        outs, group = [torch.empty_like(x) for x in tensors], self._group
        works = [
            dist.all_to_all_single(out, x, group=group, async_op=True)
            for out, x in zip(outs, tensors, strict=True)
        ]
        return self._after(works, outs)

    def _after[T](self, works: Sequence[dist.Work | None], result: T) -> Pending[T]:
        def finish() -> T:
            for work in works:
                assert work is not None  # every operation is asynchronous
                try:
                    work.wait()
                except RuntimeError as error:
                    raise self._lost(error) from error
            return result

        return Pending(finish)

    def _lost(self, error: RuntimeError) -> CommunicationError:
        return others_lost(self.rank, self.size, f"on channel {self.channel!r}", error)


class ProcessGroupTopology(Topology):
    """Over a torch.distributed process group."""

    def __init__(
        self, group: dist.ProcessGroup, make: Callable[[list[int]], object] | None = None
    ) -> None:
        """Args: make: makes a further group of some world ranks, which call it; None: with the
        timeout and the backend of `group`.
        """
        super().__init__(group.rank(), group.size())
        end_after_gloo()
        self._reference = ref(group)
        self._make = make
        self._channels: dict[str, Communicator] = {}
        self._further: list[ref[dist.ProcessGroup]] = []
        self._by_hosts: dist.ProcessGroup | None = None

    @property
    def _group(self) -> dist.ProcessGroup:
        return existing(self._reference)

    def channel(self, name: str) -> Communicator:
        if name not in self._channels:
            # The first channel uses the group that was given: no further connections or buffers.
            group = self._new_group(range(self.size)) if self._channels else self._group
            self._channels[name] = ProcessGroupCommunicator(name, group)
        return self._channels[name]

    @cached_property
    def peer_access(self) -> bool:
        if self.size == 1 or not is_nccl(self._group) or len(set(self.nodes)) > 1:
            return False
        if os.environ.get("NCCL_P2P_DISABLE") == "1":
            return False  # a setting that keeps NCCL from peer memory also applies here
        mine = torch.cuda.current_device()
        devices = self.gather(mine)
        # If each process sees only one device, indices do not identify it.
        told_apart = len(set(devices)) == self.size
        reached = told_apart and all(
            other == mine or torch.cuda.can_device_access_peer(mine, other) for other in devices
        )
        return all(self.gather(reached))

    def _make_peer_channel(self, name: str, slots: int) -> SlottedCommunicator:
        streams = _peer_streams(torch.cuda.current_device())
        return PeerCommunicator(name, self._group, self._sharing[0], slots, *streams)

    @cached_property
    def _sharing(self) -> tuple[str, object]:
        """Name of a group over which torch shows the ranks each other's memory, and what it needs
        as long as this exists.
        """
        functions: Any = dist.distributed_c10d
        shown, name = Shown(self.gather), uuid4().hex
        group = dist.ProcessGroup(shown, self.rank, self.size)
        functions._register_process_group(name, group)
        return name, (shown, group)

    def _make_subgroup(self, ranks: tuple[int, ...], name: str) -> Topology:
        if len(ranks) == 1:
            return _alone()
        return ProcessGroupTopology(self._new_group(ranks), self._make)

    @cached_property
    def nodes(self) -> tuple[int, ...]:
        # NCCL uses this too: containers of one machine may share a host name, or have several.
        hosts = self.gather(os.environ.get("NCCL_HOSTID") or gethostname())
        return tuple(hosts.index(host) for host in hosts)

    @property
    def _hosts(self) -> dist.ProcessGroup:
        """The same ranks over gloo: the group itself, or a further one that its ranks make."""
        group = self._group
        if torch.device("cpu") in group._device_types:
            return group
        if self._by_hosts is None:
            if torch.cuda.is_current_stream_capturing():
                raise ContextParallelError(
                    "the first call of a process group connects its hosts, got it while a CUDA "
                    "graph was captured: make the same call once before"
                )
            self._by_hosts = _over_gloo(group)
        return self._by_hosts

    def gather[T](self, mine: T) -> list[T]:
        return gathered(mine, self._hosts)

    @cached_property
    def _board(self) -> Board | None:
        if len(set(self.nodes)) > 1:
            return None
        seconds = _timeout_of(self._hosts).total_seconds()
        return shared_board(self.rank, self.size, seconds, self.gather)

    def numbers(self, mine: tuple[int, int]) -> list[tuple[int, int]]:
        try:
            if self._board is not None:
                return self._board.compare(*mine)
            sent = torch.tensor([mine] * self.size, device="cpu")
            found = torch.empty_like(sent)
            dist.all_to_all_single(found, sent, group=self._hosts)
        except RuntimeError as error:
            raise others_lost(self.rank, self.size, "in a comparison", error) from error
        return [(first, second) for first, second in found.tolist()]

    def _new_group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        world_ranks = dist.get_process_group_ranks(self._group)
        members = [world_ranks[rank] for rank in ranks]
        make = self._make or partial(
            dist.new_group,
            timeout=_timeout_of(self._group),
            backend=dist.get_backend(self._group),
            use_local_synchronization=True,
        )
        doing = "making a process group"
        name = f"{gathered(uuid4().hex, self._hosts, doing)[0]}_{members[0]}"
        try:
            with _made_by_members(name):
                group = make(members)
        except RuntimeError as error:
            raise others_lost(self.rank, self.size, doing, error) from error
        assert isinstance(group, dist.ProcessGroup)  # this rank is a member
        self._further.append(ref(group))
        return group

    def destroy_further_groups(self) -> None:
        """Destroys the groups that it made for channels and subgroups; all its ranks call it."""
        for topology in self._subgroups.values():
            if isinstance(topology, ProcessGroupTopology):
                topology.destroy_further_groups()
        for reference in self._further:
            group = reference()
            if not _is_destroyed(group):
                dist.destroy_process_group(group)
        self._further.clear()


@contextmanager
def _made_by_members(name: str) -> Iterator[None]:
    """Lets `dist.new_group` make a group by its ranks alone, with a name that they agree about.

    torch names groups after the number of those that a rank has made, or is in: ranks for which it
    differs wait for ever, also in groups that all ranks make later. And where ranks have connected
    at the start (`init_process_group(device_id=...)`), it splits the group of all ranks, of which
    each would have to take part.
    """
    functions: Any = dist.distributed_c10d
    world = functions._get_default_group()
    naming, device = functions._process_group_name, world.bound_device_id
    functions._process_group_name, world.bound_device_id = lambda *_, **__: name, None
    try:
        yield
    finally:
        functions._process_group_name, world.bound_device_id = naming, device


def _over_gloo(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Connects the hosts of a group; a collective operation of its ranks alone."""
    rank, size = group.rank(), group.size()
    name = gathered(uuid4().hex, group)[0]
    store = dist.distributed_c10d.PrefixStore(
        f"megatron_cp_plugin/hosts/{name}", dist.distributed_c10d._get_default_store()
    )
    try:
        gloo = dist.ProcessGroupGloo(store, rank, size, _timeout_of(group))
    except RuntimeError as error:
        raise others_lost(rank, size, "connecting hosts over gloo", error) from error
    made = dist.ProcessGroup(store, rank, size)
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return made


# Longest wait of a process that ends, and the time for which it watches the threads.
_PATIENCE_S = 5.0
_WATCHED_S = 0.02
_TASKS = Path("/proc/self/task")


@cache
def end_after_gloo() -> None:
    """From now on this process waits for gloo's threads before it ends."""
    atexit.register(_wait_for_gloo)


def _wait_for_gloo() -> None:
    """Waits until no thread of gloo has anything left to do, `_PATIENCE_S` at most.

    While this thread sleeps the GIL is free, so a thread that has not been awake is not waiting for
    it.
    """
    if not _TASKS.exists():  # not Linux: the state of threads is unknown
        time.sleep(5 * _WATCHED_S)
        return
    deadline = time.monotonic() + _PATIENCE_S
    before, now = None, _threads_of_gloo()
    while now and time.monotonic() < deadline:
        if now == before and all(state.split()[0] == "S" for state, *_ in now.values()):
            return  # all are asleep
        time.sleep(_WATCHED_S)
        before, now = now, _threads_of_gloo()


def _threads_of_gloo() -> dict[str, tuple[str, ...]]:
    """State of each thread of gloo, by thread id: its run state, and its numbers of voluntary and
    involuntary context switches.
    """
    found = {}
    for task in _TASKS.iterdir():
        try:
            text = (task / "status").read_text()
        except OSError:  # it has ended
            continue
        if text.startswith("Name:\tpt_gloo_runloop\n"):
            status = dict(line.split(":", 1) for line in text.splitlines())
            switches = (status[f"{kind}voluntary_ctxt_switches"] for kind in ("", "non"))
            found[task.name] = (status["State"], *switches)
    return found
