"""Matrix products by their rows: beside published figures, and what experts have of it."""

import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_cp_plugin.planner.detected_machine import machine_here
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.products import Product, passes_seconds, product_seconds

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import predictions as page

H100 = Machine.load("h100_400g")


def test_what_few_rows_cost_is_what_was_published() -> None:
    """As a share of the rate with 8192 rows, for both matrices."""
    found = {}
    for one in page.products():
        _, rows, inner, _ = map(int, one.row.split(" x "))
        found[inner, rows] = one.measured, one.predicted
    for inner in (7168, 2048):
        many = found[inner, 8192]
        for rows, bound in ((256, 0.12), (512, 0.12), (1024, 0.12)):
            published, predicted = (
                few / of_many for few, of_many in zip(found[inner, rows], many, strict=True)
            )
            assert predicted == pytest.approx(published, rel=bound)
            assert published < 0.97


def test_the_same_rows_in_many_matrices_take_longer() -> None:
    """Of 128 experts, whose matrices are read, and their gradients summed, whatever the rows."""
    whole = Product(2048, 1536)
    one = passes_seconds(H100, whole, 65536.0, again=False)
    flop = 6 * 65536 * whole.parameters
    assert one == pytest.approx(flop / H100.matmul_flops, rel=0.1)
    times = [passes_seconds(H100, whole, 65536 / n, n, again=False) for n in (8, 32, 128)]
    assert one < times[0] < times[1] < times[2]
    assert times[2] > 1.5 * one
    free = replace(H100, memory_bytes_per_second=1e30)
    padded = passes_seconds(free, whole, 65536 / 128, 128, again=False)
    assert padded == pytest.approx(flop / H100.matmul_flops * (512 + 64) / 512)


def test_a_part_of_a_matrix() -> None:
    assert Product(4096, 14336).split(8) == Product(4096, 1792)
    assert Product(14336, 4096, by_inner=True).split(8) == Product(1792, 4096, by_inner=True)
    assert Product(64, 10).split(4).outer == 3  # padded


@pytest.mark.gpu
def test_this_gpu_takes_what_is_predicted() -> None:
    """Of products of 16384 rows in all, with one matrix or one for each expert."""
    machine, _ = machine_here(None, torch.cuda.get_device_name())
    errors = []
    for inner, outer in ((4096, 14336), (2048, 1536), (768, 2048)):
        for experts in (1, 8, 32, 128):
            rows = 16384 // experts
            x, matrices = (
                torch.randn(experts, *shape, device="cuda", dtype=torch.bfloat16)
                for shape in ((rows, inner), (inner, outer))
            )
            found = _seconds(lambda x=x, matrices=matrices: torch.bmm(x, matrices))
            flop = 2.0 * experts * rows * inner * outer
            moved = 2.0 * (x.numel() + matrices.numel() + experts * rows * outer)
            predicted = product_seconds(
                flop, moved, machine.matmul_flops, machine.memory_bytes_per_second
            )
            errors.append(predicted / found - 1)
            print(
                f"{experts} x {rows} rows, {inner} x {outer}: {flop / found / 1e12:.0f} TFLOP/s, "
                f"predicted {flop / predicted / 1e12:.0f}, {errors[-1]:+.0%} of the time"
            )
    assert statistics.median(map(abs, errors)) < 0.25


def _seconds(body: Callable[[], object]) -> float:
    for _ in range(5):
        body()
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
    start.record()
    for _ in range(20):
        body()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 20 / 1e3
