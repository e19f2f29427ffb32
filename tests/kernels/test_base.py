"""What kernels for GPUs have in common: backwards of large tensors in parts."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import KernelCall, Statistics
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import base
from megatron_cp_plugin.kernels.flash2 import Flash2


def test_gradients_of_keys_that_calls_share_are_summed_in_float32(monkeypatch):
    """Four calls, of one query head each: bfloat16 keeps none of three times 2^-9 beside 1."""
    monkeypatch.setattr(base, "MOST_ELEMENTS", 10)
    parts = iter([1.0, 2.0**-9, 2.0**-9, 2.0**-9])

    def gradients(call, dout, statistics):
        part = next(parts)
        return tuple(torch.full_like(x, part) for x in (call.q, call.k, call.v))

    q, k = (torch.zeros(1, 5, heads, 2, dtype=torch.bfloat16) for heads in (4, 1))
    statistics = Statistics(torch.zeros(1, 4, 5), out=q)
    call = KernelCall(q, k, k, 1.0, causal=False)
    _, *of_keys = base.by_heads("some", q.numel(), gradients, call, q, statistics)
    for found in of_keys:
        assert torch.equal(found, torch.full_like(k, 1 + 2.0**-7))


@pytest.mark.parametrize(("elements", "calls"), [(80, 1), (81, 2), (160, 2), (161, 4), (320, 4)])
def test_a_backward_has_as_few_calls_as_int32_allows(elements, calls, monkeypatch):
    """Of four query heads, which share two KV heads or one; a head of too many is refused."""
    monkeypatch.setattr(base, "MOST_ELEMENTS", 80)
    heads = []

    def gradients(call, dout, statistics):
        heads.append(call.q.shape[2])
        assert dout.shape == call.q.shape
        assert statistics.lse.shape[1] == call.q.shape[2]
        return call.q, call.k, call.v

    q = torch.randn(1, 5, 4, 4)
    statistics = Statistics(torch.zeros(1, 4, 5), out=q)
    for kv_heads in (2, 1):
        call = KernelCall(q, q[:, :, :kv_heads], q[:, :, :kv_heads], 1.0, causal=False)
        heads.clear()
        dq, *_ = base.by_heads("some", elements, gradients, call, q, statistics)
        assert heads == [4 // calls] * calls
        assert torch.equal(dq, q)
        with pytest.raises(ContextParallelError, match=r"some needs at most 80 .* a head, got 81"):
            base.by_heads("some", 4 * 81, gradients, call, q, statistics)


def test_offsets_that_int32_counts():
    """The last of 2^31 - 1 elements is as far as it may be."""
    memory = torch.empty(1, device="meta")
    most = base.MOST_ELEMENTS
    assert not base.far_apart(memory.as_strided((2, 1), (most - 1, 1)))
    assert base.far_apart(memory.as_strided((2, 1), (most, 1)))
    assert not base.far_apart(memory.as_strided((1, most), (most, 1)))
    assert base.far_apart(memory.as_strided((2, 2), (most - 1, 1)))


@pytest.mark.parametrize(
    ("rows", "dim", "sequences", "elements"),
    [(128, 64, 1, 128 * 64), (129, 40, 1, 256 * 64), (5, 160, 1, 128 * 192), (5, 8, 3, 389 * 32)],
)
def test_elements_of_a_float32_dq(rows, dim, sequences, elements):
    """Rows of each sequence, and head dims, as flash-attn 2 fills them up, by hand."""
    q = torch.empty(2, rows, 3, dim, device="meta")
    assert Flash2().accumulated(q, sequences) == 2 * 3 * elements
