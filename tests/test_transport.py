"""Which way messages may go, and what the virtual peer memory sees; none of it needs a GPU."""

import json
import operator

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.communication.virtual import (
    VirtualPeerCommunicator,
    VirtualWorld,
    run_virtual,
)
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from tests import stress_transport
from tests.integration.megatron_job import run_program


def attend(topology: Topology, **settings):
    """Forward and backward of a small problem."""
    q = torch.randn(1, 8, 2, 8, requires_grad=True)
    out = cp.attention(q, q, q, group=topology, **settings)
    return torch.autograd.grad(out.sum(), q)


def test_peer_transport_without_peer_access_is_refused():
    with pytest.raises(ConfigError, match="zigzag transport peer needs GPUs of one node"):
        run_virtual(2, lambda topology: attend(topology, algo="zigzag", transport="peer"))


def test_one_process_has_one_topology():
    """It is the key of caches."""
    assert topology_of(None) is topology_of(None)


def test_nodes_are_those_that_nccl_tells_apart(tmp_path):
    """By NCCL_HOSTID, which some clusters set and which emulates nodes of one machine."""
    program = """if True:
        import os, torch.distributed as dist, megatron_cp_plugin as cp
        from megatron_cp_plugin.core.communication.process_groups import topology_of
        os.environ["NCCL_HOSTID"] = ("here", "there", "")[int(os.environ["RANK"])]
        dist.init_process_group("gloo")
        print(topology_of(None).nodes)
        dist.destroy_process_group()
        cp.release()
    """
    job = run_program(tmp_path, "-c", program, ranks=3).succeeded()
    assert [process.stdout.strip() for process in job.processes] == ["(0, 1, 2)"] * 3


def test_groups_that_a_program_makes_and_destroys_leave_nothing(tmp_path):
    """Nor do the further ones that algorithms make for their channels and subgroups."""
    program = """if True:
        import os, torch, torch.distributed as dist, megatron_cp_plugin as cp
        from megatron_cp_plugin.errors import ContextParallelError
        dist.init_process_group("gloo")
        x = torch.ones(1, 4, 2, 8, requires_grad=True)
        found = []
        for _ in range(6):
            group = dist.new_group([0, 1])
            for algo, options in (
                ("usp", {"ulysses": 2}),
                ("distflash", {}),
                ("auto", {"machine": "h100"}),
                ("lasp", {}),
            ):
                if algo == "lasp":
                    cp.linear_attention(x, x, x, decay=(0.9, 1.0), group=group)[0].sum().backward()
                else:
                    cp.attention(x, x, x, algo=algo, group=group, **options).sum().backward()
            kept = cp.attention(x, x, x, algo="ring", group=group)
            dist.barrier(group)
            dist.destroy_process_group(group)
            cp.release()
            found.append((len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
        try:
            cp.attention(x, x, x, algo="ring", group=group)
        except ContextParallelError as error:
            # One more of either may still be closing; a leak is one or more of each of four groups.
            least = min(4 + b - a for a, b in zip(found[-1], found[1], strict=True))
            print(least > 0, found, error, flush=True)
        del group
        try:
            kept.sum().backward()
        except ContextParallelError as error:
            print("its gradient:", error, flush=True)
        dist.destroy_process_group()
        cp.release()
    """
    job = run_program(tmp_path, "-c", program, ranks=2).succeeded()
    for process in job.processes:
        assert "True [" in process.stdout, process.stdout
        assert process.stdout.count("got one that was destroyed: create a new one") == 2
        assert "its gradient: context parallelism needs a process group" in process.stdout


def channels(topology: Topology, *slots: int):
    return [topology.peer_channel("blocks", count) for count in slots]


def test_channels_of_one_name_have_the_slots_that_were_asked_for():
    """Each with memory and turns of its own."""

    def body(topology: Topology):
        one, two = channels(topology, 1, 2)
        assert topology.peer_channel("blocks", 2) is two
        other = 1 - topology.rank
        got = []
        for channel, value in ((one, 1.0), (two, 2.0), (two, 3.0)):
            described = [((4,), torch.float32)]
            (buffer,) = channel.buffers(described, torch.device("cpu"))
            sent = torch.full((4,), value + topology.rank)
            channel.exchange([(sent, other)], [(buffer, other)]).wait()
            got.append(buffer)
        return torch.stack(got)

    for rank, got in enumerate(run_virtual(2, body, peer_access=True)):
        assert got[:, 0].tolist() == [1.0 + 1 - rank, 2.0 + 1 - rank, 3.0 + 1 - rank]


def test_memory_of_subgroups_counts():
    def body(topology: Topology):
        attend(topology, algo="usp", ulysses=2, kernel="reference")
        inner = topology.subgroup(range(topology.rank % 2, 4, 2), "ring")
        return topology.peer_bytes, inner.peer_bytes

    for whole, inner in run_virtual(4, body, peer_access=True):
        assert whole == inner > 0


@pytest.mark.parametrize(
    ("algo", "name"),
    [
        ("zigzag", "fetches"),
        ("distflash", "fetches"),
        ("allgather", "fetches"),
        ("attention2d", "fetches"),
    ],
)
def test_one_slot_too_few_is_seen(algo: str, name: str, monkeypatch: pytest.MonkeyPatch):
    """Blocks are overwritten while they are read or sent on: NaN, or an error."""
    original = VirtualPeerCommunicator.__init__

    def with_fewer(self, channel, world, members, rank, slots):
        original(self, channel, world, members, rank, slots - (channel == name))

    settings = {"algo": algo, "transport": "peer", "causal": algo == "distflash"}
    if algo == "attention2d":
        settings["rows"] = 2

    def body(topology: Topology):
        return attend(topology, **settings)[0].isfinite().all().item()

    assert all(run_virtual(4, body, peer_access=True))
    monkeypatch.setattr(VirtualPeerCommunicator, "__init__", with_fewer)
    try:
        fine = all(run_virtual(4, body, peer_access=True, timeout_s=5))
    except RuntimeError as error:
        fine = "before it waited for it" not in str(error)
    assert not fine


def test_a_message_that_is_changed_too_early_is_seen():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        other = 1 - topology.rank
        (buffer,) = channel.buffers([((4,), torch.float32)], torch.device("cpu"))
        sent = torch.zeros(4)
        pending = channel.exchange([(sent, other)], [(buffer, other)])
        sent[2] = 1
        pending.wait()

    with pytest.raises(RuntimeError, match="changed what it sent in turn 0"):
        run_virtual(2, body, peer_access=True)


def test_one_number_is_sent_whatever_its_strides():
    """As the gradient of a sum is, of one token, head and element."""

    def body(topology: Topology) -> float:
        channel, other = topology.peer_channel("blocks", 2), 1 - topology.rank
        sent = torch.full((), 3.0 + topology.rank, dtype=torch.float64).expand(1, 1, 1, 1)
        (received,) = channel.buffers([(sent.shape, sent.dtype)], torch.device("cpu"))
        channel.exchange([(sent, other)], [(received, other)]).wait()
        return received.item()

    assert run_virtual(2, body, peer_access=True) == [4.0, 3.0]


def test_a_block_that_is_read_too_late_is_not_there():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        other = 1 - topology.rank
        received = []
        for turn in range(3):
            (buffer,) = channel.buffers([((4,), torch.bfloat16)], torch.device("cpu"))
            sent = torch.full((4,), float(turn), dtype=torch.bfloat16)
            pending = channel.exchange([(sent, other)], [(buffer, other)])
            if turn == 2:
                assert received[0].isnan().all()
                assert received[1].eq(1).all()
            pending.wait()
            received.append(buffer)

    run_virtual(2, body, peer_access=True)


def test_a_send_that_is_not_waited_for_is_seen():
    """Its memory would be free, and written to, before it is copied."""

    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        (buffer,) = channel.buffers([((4,), torch.float32)], torch.device("cpu"))
        if topology.rank:
            channel.exchange([(torch.zeros(4), 0)], [])
        else:
            channel.exchange([], [(buffer, 1)]).wait()

    with pytest.raises(RuntimeError, match="sends that were not waited for"):
        run_virtual(2, body, peer_access=True)


def test_ranks_that_make_room_in_different_turns_are_seen():
    def body(topology: Topology):
        (channel,) = channels(topology, 2)
        if topology.rank:
            channel.exchange([], []).wait()
        channel.buffers([((4,), torch.float32)], torch.device("cpu"))

    with pytest.raises(RuntimeError, match="makes room in turn and of bytes"):
        run_virtual(2, body, peer_access=True)


def test_stress_finds_nothing_and_a_planted_fault(tmp_path, monkeypatch, capsys):
    """The stress test for GPUs, on threads; the fault is one wrong number in one message."""
    words = ["--virtual", "2", "--rounds", "6", "--minutes", "1", "--json", str(tmp_path / "x")]
    assert stress_transport.main(words) == 0
    found = json.loads((tmp_path / "x").read_text())
    assert found["passed"]
    assert found["cases"] >= 6
    assert found["wrong_elements"] == 0
    original = VirtualPeerCommunicator._post

    def faulty(self, slot, sends, receives):
        pending = original(self, slot, sends, receives)
        if self._turn == 5 and receives and self.rank == 1:
            return pending.then(lambda _: receives[0][0].view(-1)[0].mul_(3))
        return pending

    monkeypatch.setattr(VirtualPeerCommunicator, "_post", faulty)
    assert stress_transport.main(words) == 1
    found = json.loads((tmp_path / "x").read_text())
    assert not found["passed"]
    assert found["wrong_elements"] > 0
    assert found["failures"]
    assert "wrong elements" in capsys.readouterr().out.splitlines()[-1]


def test_receive_buffers_are_made_once():
    channel = VirtualWorld(1).topology(0)._make_peer_channel("blocks", 2)

    def buffers(tokens):
        """Of the next two exchanges."""
        found = []
        for _ in range(2):
            found += channel.buffers([((tokens, 3), torch.float32)], torch.device("cpu"))
            channel.exchange([], []).wait()
        return found

    first, other = buffers(4)
    assert first.data_ptr() != other.data_ptr()
    assert all(map(operator.is_, buffers(4), (first, other)))
    larger = buffers(400)
    assert all(x.shape == (400, 3) for x in larger)
    grown = buffers(4)
    assert [x.data_ptr() for x in grown] == [x.data_ptr() for x in larger]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_training_after_inference_mode(size: int):
    """Receive buffers that evaluation has made are written to by training."""
    q, k, v, dout = torch.randn(4, 1, 8 * size, 2, 8, dtype=torch.float64)

    def body(topology: Topology) -> bool:
        settings = {"algo": "zigzag", "group": topology}
        inputs = [cp.shard(x, 1, **settings).requires_grad_() for x in (q, k, v)]
        with torch.inference_mode():
            cp.attention(*inputs, **settings, transport="peer")
        found = []
        for transport in ("peer", "group"):
            out = cp.attention(*inputs, **settings, transport=transport)
            found.append((out, *torch.autograd.grad(out, inputs, cp.shard(dout, 1, **settings))))
        return all(map(torch.equal, *found))

    assert all(run_virtual(size, body, peer_access=True))
