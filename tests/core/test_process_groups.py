"""How long a process that ends waits for threads of gloo, by what the system says of them."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_cp_plugin.core.communication import process_groups
from megatron_cp_plugin.core.communication.process_groups import topology_of
from tests.integration.megatron_job import run_program

# The name of a thread, its state, and how often it fell asleep.
Thread = tuple[str, str, int]
LOOP = "pt_gloo_runloop"
ASLEEP, AWAKE, BLOCKED = (LOOP, "S", 1), (LOOP, "R", 1), (LOOP, "D", 1)
SLEPT_AGAIN = (LOOP, "S", 2)
OTHER = ("python", "R", 1)


@pytest.mark.parametrize(
    ("seen", "sleeps"),
    [
        ([()], 0),
        ([(OTHER,)], 0),  # no thread of gloo
        ([(ASLEEP,)], 1),  # it may have run before
        ([(ASLEEP, OTHER)], 1),
        ([(AWAKE,), (AWAKE,), (ASLEEP,)], 3),
        ([(ASLEEP,), (SLEPT_AGAIN,)], 2),  # it was awake in between
        ([(ASLEEP, AWAKE), (ASLEEP, AWAKE), (ASLEEP, ASLEEP)], 3),  # one of two works
        ([(BLOCKED,), (BLOCKED,), ()], 2),
        ([(AWAKE,)], 5),  # and never ends: no longer than the patience
    ],
)
def test_a_process_waits_until_all_threads_of_gloo_have_slept(
    seen: list[tuple[Thread, ...]],
    sleeps: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Args: seen: threads before each sleep, the last ones for ever."""
    tasks, slept = tmp_path / "task", list[float]()

    def show() -> None:
        shutil.rmtree(tasks, ignore_errors=True)
        (tasks / "0").mkdir(parents=True)  # a thread that has ended meanwhile has no status
        for number, (name, state, times) in enumerate(seen[min(len(slept), len(seen) - 1)], 1):
            (tasks / str(number)).mkdir()
            status = f"Name:\t{name}\nState:\t{state} (so)\nvoluntary_ctxt_switches:\t{times}\n"
            status += "nonvoluntary_ctxt_switches:\t0\n"
            (tasks / str(number) / "status").write_text(status)

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        assert len(slept) < 9
        show()

    clock = SimpleNamespace(sleep=sleep, monotonic=lambda: float(len(slept)))
    monkeypatch.setattr(process_groups, "_TASKS", tasks)
    monkeypatch.setattr(process_groups, "time", clock)
    show()
    process_groups._wait_for_gloo()
    assert len(slept) == sleeps


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


def test_further_groups_are_made_by_their_ranks_alone(tmp_path):
    """Ranks of two groups make more of them than others, and then all ranks make one. None is split
    from the group of all ranks, though these have connected at the start.
    """
    program = """if True:
        import datetime, torch, torch.distributed as dist, megatron_cp_plugin as cp
        dist.init_process_group("gloo")
        soon = datetime.timedelta(seconds=9)
        world, x = dist.group.WORLD, torch.ones(1, 4, 4, 8, requires_grad=True)
        groups = [(ranks, dist.new_group(ranks, soon)) for ranks in ([0, 1], [0, 2])]
        new_group, device, bound = dist.new_group, torch.device("cpu", 0), []
        def noted(*args, **settings):
            bound.append(world.bound_device_id)
            return new_group(*args, **settings)
        dist.new_group, world.bound_device_id = noted, device
        for algo in ("zigzag", "ulysses", "attention2d"):
            for ranks, group in groups:
                if dist.get_rank() in ranks and (algo, ranks[1]) != ("ulysses", 2):
                    cp.attention(x, x, x, algo=algo, group=group).sum().backward()
        assert set(bound) == {None} and world.bound_device_id == device, bound
        world.bound_device_id, total = None, torch.ones(1)
        dist.all_reduce(total, group=new_group([0, 1, 2]))
        print("all", int(total))
        dist.destroy_process_group()
        cp.release()
    """
    job = run_program(tmp_path, "-c", program, ranks=3).succeeded()
    assert all(process.stdout.endswith("all 3\n") for process in job.processes)


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
