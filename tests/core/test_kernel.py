"""One call of a kernel: statistics of its rows, packed sequences, and where results go."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import KernelCall, Packing, Statistics


def test_lengths_of_sequences_with_gaps() -> None:
    packing = Packing.of((slice(0, 3), slice(5, 6)), (slice(0, 4), slice(4, 9)))
    lengths = packing.lengths(2, torch.device("cpu"))
    assert lengths.cu_q.tolist() == [0, 5, 6, 11, 12]
    assert lengths.cu_k.tolist() == [0, 4, 9, 13, 18]
    assert lengths.used_q.tolist() == [3, 1, 3, 1]
    assert lengths.used_k.tolist() == [4, 5, 4, 5]
    assert (lengths.longest_q, lengths.longest_k) == (3, 5)


@pytest.mark.parametrize("given", ["out", "delta"])
def test_statistics_of_some_rows_and_heads(given: str) -> None:
    """[B,H,S] and [B,S,H,E] are cut alike."""
    lse, out = torch.randn(2, 3, 6), torch.randn(2, 6, 3, 4)
    whole = Statistics(lse, out=out) if given == "out" else Statistics(lse, delta=lse + 1)
    numbers = torch.tensor([4, 0], dtype=torch.int32)
    for found, of_rows, of_out in (
        (whole.rows(slice(1, 4)), lse[:, :, 1:4], out[:, 1:4]),
        (whole.rows(numbers), lse[:, :, [4, 0]], out[:, [4, 0]]),
        (whole.heads(slice(1, 3)), lse[:, 1:3], out[:, :, 1:3]),
        (whole.flipped(), lse.flip(2), out.flip(1)),
        (whole.flattened(), lse.transpose(0, 1).reshape(3, 12), out.reshape(12, 3, 4)),
    ):
        assert torch.equal(found.lse, of_rows)
        assert (found.out is None, found.delta is None) == (given == "delta", given == "out")
        if found.out is not None:
            assert torch.equal(found.out, of_out)
        if found.delta is not None:
            assert torch.equal(found.delta, of_rows + 1)
    assert whole.rows(slice(0, 6)) is whole
    assert whole.heads(slice(0, 3)) is whole
    strided = whole._replace(lse=lse.transpose(1, 2).contiguous().transpose(1, 2))
    copied = 0 if given == "out" else 100
    assert [x.copied_bytes(100) for x in (whole, strided)] == [copied, copied + 2 * 3 * 6 * 4]


def test_delta_and_out_stand_for_each_other() -> None:
    dout, out = torch.randn(2, 2, 6, 3, 8, dtype=torch.float64)
    delta = (dout * out).sum(3).transpose(1, 2)
    lse = torch.zeros(2, 3, 6)
    torch.testing.assert_close(Statistics(lse, out=out).delta_for(dout), delta)
    assert Statistics(lse, out, delta).delta_for(dout) is delta
    assert Statistics(lse, out, delta).out_for(dout) is out
    other = Statistics(lse, delta=delta).out_for(dout)
    torch.testing.assert_close((dout * other).sum(3).transpose(1, 2), delta)


def test_sequences_one_behind_the_other() -> None:
    """Where they begin in a batch of two, by hand."""
    packing = Packing.adjacent((0, 3, 4), (0, 2, 7))
    assert (len(packing), packing.gaps) == (2, False)
    assert packing.q == (slice(0, 3), slice(3, 4))
    assert packing.kv == (slice(0, 2), slice(2, 7))
    lengths = packing.lengths(2, torch.device("cpu"))
    assert lengths.cu_q.tolist() == [0, 3, 4, 7, 8]
    assert lengths.cu_k.tolist() == [0, 2, 7, 9, 14]
    assert (lengths.longest_q, lengths.longest_k, lengths.used_q) == (3, 5, None)


def test_results_go_where_they_belong() -> None:
    """Those that the kernel wrote there are not copied."""
    q = torch.zeros(1, 2, 1, 4)
    places = torch.zeros(1, 2, 1, 4), torch.zeros(1, 1, 2)
    call = KernelCall(q, q, q, 1.0, causal=False, into=places)
    out = torch.ones(1, 2, 1, 4)
    found = call.placed((out, places[1]))
    assert all(one is place for one, place in zip(found, places, strict=True))
    assert torch.equal(places[0], out)
    assert call._replace(into=None).placed((out,))[0] is out
