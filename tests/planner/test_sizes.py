"""Kernels that compute nothing: their results, and the work that they note."""

from functools import partial as partial_of

import pytest
import torch

from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.kernel import KernelCall, Packing, Statistics
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.planner.dry_run import Memory, RecordedKernel
from megatron_cp_plugin.planner.sizes import OnePass, SizesOnly
from tests.planner.test_dry_run import events_of


def described(tensors) -> list[object]:
    return [(x.shape, x.dtype) for x in tensors]


def run_into(found, operation) -> None:
    found.append(operation())


def on_meta(x):
    return x.to("meta") if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("bounds", [None, (0, 1, 7, 12)])
def test_results_and_work_are_those_of_the_reference(dtype, window, bounds) -> None:
    q, dout = torch.randn(2, 12, 4, 6, dtype=dtype), torch.randn(2, 12, 4, 5, dtype=dtype)
    k, v = torch.randn(2, 12, 2, 6, dtype=dtype), torch.randn(2, 12, 2, 5, dtype=dtype)
    packing = None if bounds is None else Packing.adjacent(bounds, bounds)
    call = KernelCall(q, k, v, 1.0, causal=True, packing=packing, window=window or 0)
    empty = call._replace(q=on_meta(q), k=on_meta(k), v=on_meta(v))
    sizes, plain = SizesOnly(), call._replace(packing=None, window=0)
    out, lse = Reference().forward(plain)
    assert described(sizes.forward(empty)) == described((out, lse))
    statistics = Statistics(on_meta(lse), out=on_meta(out))
    assert described(sizes.backward(empty, on_meta(dout), statistics)) == described((q, k, v))
    (tile,) = events_of(lambda: sizes.forward(empty))
    position = torch.arange(12)
    number = torch.bucketize(position, torch.tensor((bounds or (0, 12))[1:-1]), right=True)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (window or 12)) & (number[:, None] == number)
    assert isinstance(tile, RecordedKernel)
    assert (tile.area, tile.batch, tile.phase) == (seen.sum().item(), 2, "forward")
    if window:  # what a kernel loses goes with the edges of the mask, one or two in a row
        hidden = (distance >= window) & (number[:, None] == number)
        edges = 12 + hidden.any(1).sum().item()
        assert tile.area / tile.rows == pytest.approx(edges / 2)
    (back,) = events_of(lambda: sizes.backward(empty, on_meta(dout), statistics))
    assert (back.area, back.phase) == (tile.area, "backward")
    assert tile.packed == back.packed == (packing is not None)


def test_fused_operations_make_what_others_make() -> None:
    fused, rows = OnePass(), torch.tensor([4, 0], dtype=torch.int32)
    a, out = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 3, 8).bfloat16()
    delta = partial.delta_of(a.bfloat16(), out)
    made = {
        "rows_at": ((a, rows), (partial.rows_at(a, rows),), 2 * 2 * 2 * 3 * 8 * 4),
        "delta_of": ((a.bfloat16(), out), (delta,), 2 * out.numel() * 2),
        "placeholder_out": ((out, delta), (partial.placeholder_out(out, delta),), None),
    }
    for name, (given, want, size) in made.items():
        operation, found = partial_of(getattr(fused, name), *map(on_meta, given)), []
        events = events_of(partial_of(run_into, found, operation))
        assert described(found) == described(want)
        assert [event.bytes for event in events] == ([] if size is None else [size])


def test_what_rows_take_of_memory() -> None:
    """Of three rows of five: two are read, and one is written."""
    total, lse = torch.empty(2, 5, 3, 8, device="meta"), torch.empty(2, 3, 5, device="meta")
    rows, fused = torch.tensor([4, 0, 1]), OnePass()
    (added,) = events_of(lambda: fused.add_rows_into(total, rows, total, None))
    (merged,) = events_of(lambda: fused.merge_rows_into(total, lse, rows, total, lse, None))
    assert added == Memory("sum", 3 * 3 * 2 * 3 * 8 * 4)
    assert merged == Memory("merge", 3 * 3 * (2 * 3 * 8 + 2 * 3) * 4)
