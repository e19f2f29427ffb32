"""What is measured is fitted right, and a machine's file comes back as it was written."""

import pytest
import torch

from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.kernel import KernelCall, Problem
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.planner.calibrate import Calibration, fit_rate, fit_speed, with_packed
from megatron_cp_plugin.planner.machine import KernelSpeed, Machine, Rate, machines


def test_alpha_and_beta_are_found():
    rate = Rate(2e-5, 1.5e11)
    found = fit_rate([(size, rate.time(size)) for size in (2.0**16, 2.0**22, 2.0**26)])
    assert found.seconds == pytest.approx(2e-5)
    assert found.bytes_per_second == pytest.approx(1.5e11)


def test_a_rate_is_never_below_0():
    noisy = fit_rate([(1e3, 5e-4), (1e5, 4e-4), (1e6, 3e-4)])
    assert noisy.seconds >= 0
    assert noisy.bytes_per_second == pytest.approx(1e6 / 3e-4)


@pytest.mark.parametrize("square", [True, False])
def test_the_speed_of_a_kernel_is_found(square):
    speed = KernelSpeed(6e14, 300, 0 if square else 80, 1e-5)
    tiles = [(n, n) for n in (1024, 4096, 16384)]
    tiles += [] if square else [(1024, 16384), (16384, 1024)]
    measured = [(c * r * 1e4, r, c, speed.time(c * r * 1e4, r, c)) for r, c in tiles]
    found = fit_speed(measured)
    for flop, rows, columns, seconds in measured:
        assert found.time(flop, rows, columns) == pytest.approx(seconds)
    assert found.flops == pytest.approx(6e14)
    assert found.rows == pytest.approx(300)


@pytest.mark.parametrize("packed", [0.0, 640.0])
def test_the_speed_of_packed_sequences_is_found(packed):
    speed, flop = KernelSpeed(6e14, 190, 0, 2e-5, packed), 3e11
    seconds = speed.time(flop, 1024, 1024, packed=True)
    assert seconds == pytest.approx(2e-5 + flop / 6e14 * (1 + (190 + packed) / 1024))
    found = with_packed(KernelSpeed(6e14, 190, 0, 2e-5), flop, 1024, seconds)
    assert found.packed == pytest.approx(packed, abs=1e-6)


def test_kernels_that_pack_are_measured_with_packed_sequences(monkeypatch):
    calls = []

    def measured(self, body):
        (call,) = [x.cell_contents for x in body.__closure__ if type(x.cell_contents) is KernelCall]
        calls.append(call.packing and [[*map(tuple, side)] for side in call.packing.edges.tolist()])
        return float(len(calls))

    def kernels(topology):
        found = Calibration(topology, torch.device("cpu"), (2, 1, 8))
        problem = Problem(found.device, found.dtype, *found.dims)
        vars(found)["_kernel"] = resolve("reference", problem)
        return found._kernels()

    monkeypatch.setattr(Calibration, "_seconds", measured)
    ((_, made),) = run_virtual(1, kernels)
    edges = [(0, 64, 128, 192), (64, 128, 192, 256)]
    assert [one for one in calls if one] == [[edges, edges]] * 2
    packed = {key: speed.packed > 0 for key, speed in made.by_pass.items()}
    assert packed == {f"{p} {m}": m == "causal" for p in PHASES for m in ("causal", "full")}


def test_two_nodes_of_two_are_measured(tmp_path):
    made = run_virtual(
        4,
        lambda t: Calibration(t, torch.device("cpu"), (2, 1, 8)).machine("four"),
        ranks_per_node=2,
    )
    machine = made[0]
    assert machine.gpus_per_node == 2
    assert 1 <= machine.cards_per_node <= 2
    assert set(machine.inside.collective) == {"all_gather", "reduce_scatter", "all_to_all"}
    assert set(machine.between.collective["all_gather"]) == {2}
    assert machine.kernel("torch_cpu").by_pass.keys() == {
        f"{phase} {mask}" for phase in ("forward", "backward") for mask in ("causal", "full")
    }
    machine.save(tmp_path / "four.yaml")
    again = Machine.load(tmp_path / "four.yaml")
    again.save(tmp_path / "again.yaml")
    assert (tmp_path / "four.yaml").read_text() == (tmp_path / "again.yaml").read_text()
    assert again.values() == machine.values()


def test_unequal_nodes_are_refused():
    def body(topology):
        return Calibration(topology, torch.device("cpu"), (2, 1, 8)).machine("three")

    with pytest.raises(ConfigError, match="as many ranks on one node as on another, got 2, 1"):
        run_virtual(3, body, ranks_per_node=2)


@pytest.mark.parametrize("name", machines())
def test_shipped_machines_can_be_read(name):
    machine = Machine.load(name)
    assert machine.name == name
    assert machine.source
    for kernels in machine.kernels.values():
        assert len(kernels.by_pass) == 4


def test_a_wrong_file_is_refused_in_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"no machine .h100. .did you mean"):
        Machine.load("h100")
    path = tmp_path / "m.yaml"
    path.write_text("name: m\nlinks: 1\n")
    with pytest.raises(ConfigError, match="unknown key 'links'"):
        Machine.load(path)
    path.write_text("name: m\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        Machine.load(path)
