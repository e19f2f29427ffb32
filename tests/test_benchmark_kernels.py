"""The benchmark of kernels, as far as it runs without a GPU."""

from argparse import Namespace
from contextlib import nullcontext

import pytest
import torch

pytest.importorskip("triton")
import benchmark_kernels

from megatron_cp_plugin import registry
from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.partial import merge_into
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup, Memory
from megatron_cp_plugin.planner.meta import trace_of


@pytest.mark.parametrize("spec", benchmark_kernels.MERGING)
def test_a_rank_alone_computes_and_merges_its_share(
    monkeypatch: pytest.MonkeyPatch, spec: str
) -> None:
    """It merges as often as the simulated rank does."""
    merged: list[int] = []

    def counted(out: torch.Tensor, *others: torch.Tensor) -> None:
        merged.append(out.shape[1])
        merge_into(out, *others)

    monkeypatch.setattr(partial, "merge_into", counted)
    cpu = torch.device("cpu")
    forward, backward = benchmark_kernels.passes_of_a_rank(spec, 4, 64, (4, 2), 16, cpu)
    before = len(merged)
    out = forward()
    assert out[0].shape == (1, 16, 4, 16)  # type: ignore[index]
    assert [x.shape[2] for x in backward()] == [4, 2, 2]  # type: ignore[attr-defined]
    counts = before, len(merged)
    trace = trace_of(
        registry.create(spec, DryRunGroup(3, (0,) * 4, peer_access=False), {}),
        Shape(1, 64, 4, 2, 16, 4),
        Mask(),
    )
    expected = [event.name for event in trace.forward if isinstance(event, Memory)].count("merge")
    assert expected >= 3
    assert counts == (expected, 2 * expected)


def test_shares_of_merges_and_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three passes each: 2 ms of merges beside 6 of kernels forward, 1 beside 15 backward."""
    profiles = [
        [("flash_fwd", 0.0, 18e3), ("_merge_kernel", 18e3, 24e3), ("fill", 24e3, 25e3)],
        [("flash_bwd", 0.0, 45e3), ("_sum_kernel", 45e3, 48e3), ("_delta_kernel", 48e3, 49e3)],
    ]
    found = iter(profiles)

    def passes(*_: object) -> tuple[object, object]:
        return (lambda: None), (lambda: None)

    monkeypatch.setattr(benchmark_kernels, "MERGING", ("ring",))
    monkeypatch.setattr(benchmark_kernels, "passes_of_a_rank", passes)
    profiler = nullcontext(Namespace(events=tuple))
    monkeypatch.setattr(benchmark_kernels, "new_profiler", lambda: profiler)
    monkeypatch.setattr(benchmark_kernels, "device_spans", lambda events: next(found))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    rows = benchmark_kernels.share_rows([8], 64, (4, 2), 16)
    forward, backward = ["6.00", "2.000", "25.00%"], ["15.00", "1.000", "6.25%"]
    assert rows == [["ring", "8", *forward, *backward, "12.50%"]]
