"""The event simulation against what follows by hand."""

import pytest

from megatron_cp_plugin.planner.dry_run import Memory, Post, RecordedKernel, Wait
from megatron_cp_plugin.planner.event_simulation import play
from megatron_cp_plugin.planner.machine import Host, Kernels, KernelSpeed, Links, Machine, Rate
from megatron_cp_plugin.planner.meta import Trace

FLOPS, BYTES = 1e12, 1e9
ALL = (0, 1, 2, 3)
KERNELS = Kernels(
    {f"{p} {m}": KernelSpeed(FLOPS) for p in ("forward", "backward") for m in ("causal", "full")}
)


def machine(**values):
    known = {
        "name": "made up",
        "source": "here",
        "gpus_per_node": 8,
        "memory_gib": 80,
        "memory_bytes_per_second": 1e18,
        "matmul_flops": FLOPS,
        "kernels": {"flash": KERNELS},
        "inside": Links(Rate(0, BYTES)),
        "between": Links(Rate(0, BYTES / 10)),
        "operation_seconds": 0.0,
        "linear_flops": {"forward": FLOPS, "backward": FLOPS},
        "cards_per_node": 8,
    }
    return Machine(**(known | values))


def post(channel, number, sends=(), receives=(), operation="exchange", size=0):
    return Post(channel, number, operation, tuple(sends), tuple(receives), size)


def tile(flop):
    return RecordedKernel("forward", 1, 1, 1, flop / 4, 1, 1, 1, 1, False)


def played(traces, of=None, nodes=(0, 0), **options):
    traces = {rank: Trace(tuple(events), ()) for rank, events in traces.items()}
    return play(of or machine(), nodes, traces, "flash", **({"captured": True} | options))


PAIR = ("c", (0, 1))


def test_packed_sequences_take_a_kernel_longer():
    speeds = KERNELS.by_pass | {"forward full": KernelSpeed(FLOPS, rows=1.0, packed=2.0)}
    of = machine(kernels={"flash": Kernels(speeds)})
    for packed, seconds in ((False, 2), (True, 4)):
        found = played({0: [tile(1e12)._replace(packed=packed)]}, of, nodes=(0,))
        assert found.forward.seconds == pytest.approx(seconds)


def test_a_message_waits_for_both_ranks_and_takes_alpha_and_beta():
    slow = machine(inside=Links(Rate(1.0, BYTES)))
    first = [post(PAIR, 0, [(1, 2 * 10**9)]), Wait(PAIR, 0)]
    second = [tile(5e12), post(PAIR, 0, (), [(0, 2 * 10**9)]), Wait(PAIR, 0)]
    found = played({0: first, 1: second}, slow)
    assert found.forward.seconds == pytest.approx(5 + 1 + 2)
    assert found.forward.bytes == {"inside": 2 * 10**9}
    assert found.forward.exposed_communication == pytest.approx(8)  # of rank 0, which only waits


def test_messages_travel_beside_computation_and_slow_it():
    def events(rank):
        other, size = 1 - rank, 3 * 10**9
        return [post(PAIR, 0, [(other, size)], [(other, size)]), tile(5e12), Wait(PAIR, 0)]

    traces = {rank: events(rank) for rank in (0, 1)}
    assert played(traces).forward.seconds == pytest.approx(5)
    # For 3 seconds half as fast: 1.5 of 5 are done then.
    halved = played(traces, machine(group_share=0.5)).forward
    assert halved.seconds == pytest.approx(3 + 3.5)


def test_kernels_are_slower_only_while_data_moves():
    """Rank 1 receives in the first second, and sends in the fifth one, when rank 2 comes."""
    three, size = ("c", (0, 1, 2)), 10**9
    traces = {
        0: [post(three, 0, [(1, size)])],
        1: [post(three, 0, [(2, size)], [(0, size)]), tile(6e12), Wait(three, 0)],
        2: [tile(4e12), post(three, 0, [], [(1, size)])],
    }
    found = played(traces, machine(group_share=0.5), (0, 0, 0))
    assert found.forward.seconds == pytest.approx(6 + 2 * 0.5)


def test_copies_wait_for_room_and_leave_kernels_alone():
    def events(rank, before):
        other, size = 1 - rank, 10**9
        sends = post(PAIR, 0, [(other, size)], [(other, size)], None)
        return [tile(before), sends, tile(4e12), Wait(PAIR, 0)]

    copying = machine(copy=Rate(0, BYTES), group_share=0.1)
    found = played({0: events(0, 1e12), 1: events(1, 3e12)}, copying)
    assert found.forward.seconds == pytest.approx(7)
    assert found.forward.bytes == {"copy": 10**9}
    # Rank 0 writes from second 3 on, when rank 1 says that it may, and computes after second 4.
    sent, came = [(1, 10**9)], [(0, 10**9)]
    sender = [tile(1e12), post(PAIR, 0, sent, [], None), Wait(PAIR, 0), tile(4e12)]
    receiver = [tile(3e12), post(PAIR, 0, [], came, None), Wait(PAIR, 0)]
    assert played({0: sender, 1: receiver}, copying).forward.seconds == pytest.approx(4 + 4)


def test_ranks_of_a_node_share_its_card():
    pairs = [("c", (0, 2)), ("c", (1, 3))]

    def events(rank):
        channel = pairs[rank % 2]
        other = next(r for r in channel[1] if r != rank)
        message = [(other, 10**8)]
        return [post(channel, 0, message, message), Wait(channel, 0)]

    traces = {rank: events(rank) for rank in ALL}
    nodes = (0, 0, 1, 1)
    assert played(traces, machine(cards_per_node=2), nodes).seconds == pytest.approx(1)
    assert played(traces, machine(cards_per_node=1), nodes).seconds == pytest.approx(2)
    shared = machine(cards_per_node=2, between_total=10**8)
    assert played(traces, shared, nodes).seconds == pytest.approx(4)


def test_the_host_launches_one_thing_after_another():
    host = Host(operation=1.0, kernel=2.0, call=4.0, call_backward=8.0)
    events = [tile(1e12), Memory("add", 0), Memory("add", 0)]
    eager = played({0: events}, machine(host=host), (0,), captured=False)
    assert eager.forward.seconds == pytest.approx(4 + 2 + 1 + 1)
    assert played({0: events}, machine(host=host), (0,)).forward.seconds == pytest.approx(1)
