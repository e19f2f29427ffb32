"""Merging partials: exact, any order, any dtype, rows without keys, strided lse."""

from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.blocks.assembly import packed
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, RowIndex, delta_of, merge_into
from megatron_cp_plugin.kernels.reference import Reference
from tests.kernel_calls import forward_of
from tests.oracle import relative_error
from tests.random_tests import examples

BATCH, TOKENS, HEADS, DIM = 2, 7, 3, 4


def random_qkv(keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(BATCH, TOKENS, HEADS, DIM, generator=generator, dtype=dtype)
    k, v = (torch.randn(BATCH, keys, HEADS, DIM, generator=generator, dtype=dtype) for _ in "kv")
    return q, k, v


@examples(40)
@given(
    st.lists(st.tuples(st.integers(0, TOKENS - 1), st.integers(1, TOKENS)), max_size=5),
    st.sampled_from([torch.float64, torch.bfloat16]),
)
def test_partials_of_some_rows(ranges, dtype):
    """Each row ends as the merge of just the partials that cover it."""
    q, k, v = random_qkv(len(ranges) or 1, dtype)
    total = Accumulator(q, q.shape[3])
    seen = torch.zeros(TOKENS, k.shape[1], dtype=torch.bool)
    for index, (start, length) in enumerate(ranges):
        rows, keys = slice(start, min(start + length, TOKENS)), slice(index, index + 1)
        seen[rows, keys] = True
        found = forward_of(Reference(), q[:, rows], k[:, keys], v[:, keys], scale=0.5, causal=False)
        total.add(rows, *found)
    out, lse = total.result()
    assert out.dtype == dtype
    assert not out.isnan().any()
    assert not lse.isnan().any()
    scores = torch.einsum("bshd,bthd->bhst", q.double(), k.double()) * 0.5
    scores = scores.masked_fill(~seen, -torch.inf)
    expected = torch.einsum("bhst,bthd->bshd", scores.softmax(-1).nan_to_num(0), v.double())
    assert relative_error(out, expected) < (1e-13 if dtype == torch.float64 else 1e-2)
    assert torch.equal(lse == -torch.inf, (~seen.any(1)).expand_as(lse))
    finite = lse > -torch.inf
    assert torch.allclose(lse[finite].double(), scores.logsumexp(-1)[finite], atol=1e-5)


@pytest.mark.parametrize(("some", "others"), [((4, 7), (0, 3)), ((0, 3), (4, 7))])
def test_rows_that_come_again_are_merged_in_float32(some, others):
    """Also where the last partial had other rows, below or above them."""
    q, k, v = random_qkv(4, torch.bfloat16)
    total = Accumulator(q, DIM)
    again = []
    for index, rows in enumerate((slice(0, TOKENS), slice(*some), slice(*others), slice(*some))):
        keys = k[:, index : index + 1], v[:, index : index + 1]
        found = forward_of(Reference(), q[:, rows], *keys, scale=0.5, causal=False)
        if index != 2:
            again.append([x.clone() for x in found])
        total.add(rows, *found)
    (out, lse), *rest = again
    wide = out[:, slice(*some)].float(), lse[:, :, slice(*some)]
    for one in rest:
        merge_into(*wide, *wide, *one)
    assert torch.equal(total.result()[0][:, slice(*some)], wide[0].bfloat16())


def test_partials_in_float32_are_rounded_at_the_end():
    """Of some rows, which nothing else has yet."""
    q, generator = torch.zeros(1, 8, 2, 16, dtype=torch.bfloat16), torch.Generator().manual_seed(0)
    total, parts = Accumulator(q, 16), []
    for _ in range(3):
        parts.append((torch.randn(1, 5, 2, 16, generator=generator), torch.zeros(1, 2, 5)))
        total.add(slice(3, 8), *[x.clone() for x in parts[-1]])
    exact = sum(out.double() for out, _ in parts) / 3
    torch.testing.assert_close(total.result()[0][:, 3:].double(), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_sums_of_bf16_gradients_lose_nothing_but_the_last_rounding(count):
    like = torch.zeros(1, 64, 2, 8, dtype=torch.bfloat16)
    parts = torch.randn(count, 1, 64, 2, 8).bfloat16()
    total = GradientSum(like)
    for part in parts:
        total.add(slice(0, 64), part)
    assert torch.equal(total.result()[0], parts.float().sum(0).bfloat16())
    assert torch.equal(total.result(torch.float32)[0], parts.float().sum(0))


class Counted:
    """Fused operations of a CPU, in float32, that count how often they are asked for."""

    def __init__(self):
        self.asked = []

    def merge_into(self, out, lse, a, a_lse, b, b_lse):
        self.asked.append(("merge", out.dtype, out.shape[1]))
        merged = torch.logaddexp(a_lse, b_lse)
        parts = ((a, a_lse), (b, b_lse))
        out.copy_(sum(x * (x_lse - merged).exp().mT.unsqueeze(-1) for x, x_lse in parts))
        lse.copy_(merged)

    def sum_rows(self, outs, terms, *, in_place):
        for number, out in enumerate(outs):
            has = torch.zeros(out.shape[1], dtype=torch.int32)
            total = out.float() if in_place else torch.zeros(out.shape)
            for rows, tensors in terms:
                assert rows.step in (None, 1)
                total[:, rows] += tensors[number].float()
                has[rows] += 1
            self.asked.append(("sum", out.dtype, int(has.count_nonzero())))
            out.copy_(total)

    def merge_rows_into(self, out, lse, to, b, b_lse, of):
        part, part_lse = out[:, to], lse[:, :, to]
        assert of is None
        self.merge_into(part, part_lse, part.clone(), part_lse.clone(), b, b_lse)
        out[:, to], lse[:, :, to] = part, part_lse

    def add_rows_into(self, total, to, gradient, of):
        assert of is None
        part = total[:, to]
        self.sum_rows([part], [(slice(0, len(to)), [gradient])], in_place=True)
        total[:, to] = part


@pytest.fixture
def counted(monkeypatch):
    monkeypatch.setattr(partial, "_fused", {})
    operations = Counted()
    partial.register_fused("cpu", lambda: operations)
    return operations


def test_partials_of_other_rows_are_merged_where_the_output_is(counted):
    """As where one rank computes some rows of a block, and another one the rest."""
    tokens, half = 64, slice(0, 32)
    generator = torch.Generator().manual_seed(0)

    def partial(rows):
        out = torch.randn(1, rows, 2, 8, generator=generator).bfloat16()
        return out, torch.randn(1, 2, rows, generator=generator)

    own, later, earlier = partial(tokens), partial(32), partial(32)
    whole = torch.cat((earlier[0], later[0]), 1), torch.cat((earlier[1], later[1]), 2)
    total = Accumulator(own[0], 8)
    total.add(slice(0, tokens), own[0].clone(), own[1].clone())
    total.add(slice(32, tokens), *later)
    total.add(half, *earlier)
    total.borrowed = True
    out, lse = total.result()
    assert counted.asked == [("merge", torch.bfloat16, 32)] * 2
    merged = torch.empty_like(own[0]), torch.empty_like(own[1])
    counted.merge_into(*merged, *own, *whole)
    assert torch.equal(out, merged[0])
    assert torch.equal(lse, merged[1])


def test_borrowed_partials_of_other_rows_are_merged_in_time():
    q = torch.zeros(1, 4, 1, 2)
    total = Accumulator(q, 2)
    parts = [(torch.full((1, 2, 1, 2), float(i)), torch.zeros(1, 1, 2)) for i in (1, 2)]
    total.add(slice(2, 4), *parts[0])
    total.borrowed = True
    total.add(slice(0, 2), *parts[1])
    total.settle()
    parts[0][0].fill_(torch.nan)
    assert total.result()[0][0, :, 0, 0].tolist() == [2, 2, 1, 1]


FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize(
    ("few", "rows", "asked"),
    [
        # Each row gets one more: in the place of the first, rounded once.
        (True, [(32, 64), (0, 32)], [(BFLOAT16, 64)]),
        (True, [(32, 64), (16, 48)], [(BFLOAT16, 48)]),
        # Two more: one pass.
        (True, [(0, 64), (0, 64)], [(BFLOAT16, 64)]),
        # Three more likewise; of four, three at once in float32, and one that ends in bfloat16.
        (True, [(0, 64)] * 3, [(BFLOAT16, 64)]),
        (True, [(0, 64)] * 4, [(FLOAT32, 64), (BFLOAT16, 64)]),
        # With more to come: all rows in float32.
        (False, [(0, 17)], [(FLOAT32, 64)]),
        (False, [(40, 56), (0, 48)], [(FLOAT32, 64), (FLOAT32, 48)]),
    ],
)
def test_gradients_are_summed_in_as_few_passes(counted, few, rows, asked):
    """And in float32 only where rows have many."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(1, stop - start, 2, 8, generator=generator).bfloat16()
             for start, stop in [(0, 64), *rows]]  # fmt: skip
    total, expected = GradientSum(torch.zeros_like(parts[0]), few=few), parts[0].double()
    total.add(slice(0, 64), parts[0])
    for (start, stop), part in zip(rows, parts[1:], strict=True):
        expected[:, start:stop] += part
        total.add(slice(start, stop), part)
    assert torch.equal(total.result()[0], expected.bfloat16())
    assert counted.asked == [("sum", *each) for each in asked]


def by_number(numbers, *, known=True):
    edges = np.add(numbers, [[0], [1]]) if known else None
    return RowIndex(torch.tensor(numbers, dtype=torch.int32), None, edges)


def drawn_rows(draw, most):
    """Some of twelve rows, and their numbers."""
    if draw.random() < 0.3:
        numbers = sorted(draw.sample(range(12), draw.randint(1, most)))
        return by_number(numbers, known=draw.random() < 0.8), numbers
    start, stop = sorted(draw.sample(range(13), 2))
    rows = slice(start, min(stop, start + most), draw.choice([None, 1, 1, 2]))
    return rows, [*range(12)[rows]]


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
@pytest.mark.parametrize("fused", [False, True])
def test_gradients_of_any_rows_are_summed_and_not_read_later(dtype, few, fused, request):
    """But those that are kept as they are, which belong to the sum from then on."""
    draw = Random(0)
    if fused:
        request.getfixturevalue("counted")
    for _ in range(400):
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        total = GradientSum(torch.zeros(1, 12, 1, 2, dtype=dtype), few=few)
        expected = torch.zeros(12, 2, dtype=torch.float64)
        for number in range(draw.randint(1, 6)):
            rows, numbers = drawn_rows(draw, 3)
            if draw.random() < (0.2 if number else 0.7):
                rows, numbers = slice(0, 12), [*range(12)]
            part = torch.randn(1, len(numbers), 1, 2, generator=generator).to(dtype)
            expected[numbers] += part[0, :, 0]
            kept = total.keeps
            total.add(rows, part)
            if not kept and not few:
                part.fill_(torch.nan)
        wide = draw.random() < 0.5
        got = total.final(FLOAT32)[0] if wide else total.result()[0]
        bound = 1e-5 if wide or dtype == FLOAT32 else 2**-8
        torch.testing.assert_close(got[0, :, 0].double(), expected, rtol=bound, atol=bound)


# As where a helper computes some of a rank's rows, and others belong to documents of earlier ranks.
HELPED = [(0, 40), (48, 64), (0, 8), (40, 48)]


@pytest.mark.parametrize("holes", [False, True])
def test_rows_with_two_partials_at_most_are_written_once(counted, holes):
    """Without zeros that are read again; of gradients nothing in float32."""
    generator = torch.Generator().manual_seed(0)
    rows = HELPED[:-1] if holes else HELPED
    total, both = GradientSum(torch.zeros(1, 64, 2, 8).bfloat16(), few=True), torch.zeros(64)
    merged = Accumulator(torch.zeros(1, 64, 2, 8).bfloat16(), 8)
    expected, weights = torch.zeros(1, 64, 2, 8).double(), torch.full((1, 2, 64), -torch.inf)
    sums = torch.zeros(1, 64, 2, 8).double()
    for start, stop in rows:
        part = torch.randn(1, stop - start, 2, 8, generator=generator).bfloat16()
        lse = torch.randn(1, 2, stop - start, generator=generator)
        merged.add(slice(start, stop), part.clone(), lse)
        total.add(slice(start, stop), part)
        sums[:, start:stop] += part
        expected[:, start:stop] += part * lse.exp().mT[..., None]
        weights[:, :, start:stop] = torch.logaddexp(weights[:, :, start:stop], lse)
        both[start:stop] += 1
    counted.asked.clear()
    (dq,) = total.result()
    assert {dtype for _, dtype, _ in counted.asked} == {BFLOAT16}
    assert sum(count for _, _, count in counted.asked) == both.count_nonzero()
    out, lse = merged.result()
    expected = (expected * (-weights).exp().mT[..., None]).nan_to_num()
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7)
    torch.testing.assert_close(lse, weights)
    assert torch.equal(dq, sums.bfloat16())


@pytest.mark.parametrize("own", [True, False])
def test_rows_by_number_that_others_do_not_have_stay_narrow(counted, own):
    """As of several kernel calls of one joint block."""
    generator = torch.Generator().manual_seed(0)
    like, rows = torch.zeros(1, 12, 2, 8).bfloat16(), [[1, 2, 8], [*range(4, 7)], [3, 10]]
    total, merged = GradientSum(like, few=True), Accumulator(like, 8)
    sums, wide = torch.zeros(1, 12, 2, 8).double(), Accumulator(like.double(), 8)
    for numbers in ([[*range(12)]] if own else []) + rows:
        part = torch.randn(1, len(numbers), 2, 8, generator=generator).bfloat16()
        lse = torch.randn(1, 2, len(numbers), generator=generator)
        adjacent = slice(numbers[0], numbers[-1] + 1)
        some = adjacent if len(numbers) == adjacent.stop - adjacent.start else by_number(numbers)
        total.add(some, part.clone())
        merged.add(some, part.clone(), lse)
        wide.add(by_number(numbers), part.double(), lse.double())
        sums[:, numbers] += part
    (dq,), (out, _) = total.result(), merged.result()
    assert {dtype for _, dtype, _ in counted.asked} == {BFLOAT16}
    assert torch.equal(dq, sums.bfloat16())
    torch.testing.assert_close(out.double(), wide.result()[0], rtol=2**-8, atol=2**-8)


def test_partials_of_any_rows_are_merged():
    draw = Random(0)
    for _ in range(300):
        generator = torch.Generator().manual_seed(draw.randrange(2**31))
        q = torch.zeros(1, 12, 1, 2, dtype=torch.float64)
        place = (q.new_empty(q.shape), q.new_empty(1, 1, 12)) if draw.random() < 0.5 else None
        total = Accumulator(q, 2, place)
        expected, weights = torch.zeros_like(q), torch.full((1, 1, 12), -torch.inf).double()
        for _ in range(draw.randint(1, 6)):
            rows, numbers = drawn_rows(draw, 6)
            if draw.random() < 0.2:
                rows, numbers = slice(0, 12), [*range(12)]
            part = torch.randn(1, len(numbers), 1, 2, generator=generator).double()
            lse = torch.randn(1, 1, part.shape[1], generator=generator).double()
            expected[:, numbers] += part * lse.exp().mT[..., None]
            weights[:, :, numbers] = torch.logaddexp(weights[:, :, numbers], lse)
            total.add(rows, part, lse)
            if draw.random() < 0.2:
                total.borrowed = True
                total.settle()
        out, lse = total.result()
        expected = (expected * (-weights).exp().mT[..., None]).nan_to_num()
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(lse, weights)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_delta(dtype):
    """Only what comes in is rounded, not what is summed."""
    dout, out = torch.randn(2, 2, 5, 3, 4).to(dtype)
    delta = delta_of(dout, out)
    assert delta.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = torch.einsum("bshd,bshd->bhs", dout.double(), out.double())
    assert torch.allclose(delta.double(), expected, rtol=1e-6, atol=1e-6)


class Recorded:
    """Fused operations that only note that they were asked for."""

    def __init__(self):
        self.asked = []

    def __getattr__(self, name):
        return lambda *tensors, **_: self.asked.append(name)


def test_fused_operations_take_all_but_float64(monkeypatch):
    recorded = Recorded()
    monkeypatch.setattr(partial, "_fused", {})
    partial.register_fused("cpu", lambda: recorded)
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        x, lse = torch.zeros(1, 2, 1, 4, dtype=dtype), torch.zeros(1, 1, 2, dtype=wide)
        merge_into(x, lse, x, lse, x, lse)
        delta_of(x, x)
        total = GradientSum(x)
        total.add(slice(0, 2), x)
        total.add(slice(0, 2), x)
        assert recorded.asked == ["merge_into", "delta_of", "sum_rows"]


def test_rows_in_float64_are_not_taken_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fused operations compute in float32: rows of other dtypes, or dimensions, are PyTorch's."""
    operations = SimpleNamespace(
        rows_at=lambda x, rows: x.float().index_select(1, rows).to(x.dtype)
    )
    monkeypatch.setattr(partial, "fused_for", lambda _: operations)
    rows, generator = torch.tensor([3, 0, 2], dtype=torch.int32), torch.Generator().manual_seed(0)
    x = torch.randn((2, 4, 3, 5), generator=generator, dtype=torch.float64)
    assert not torch.equal(operations.rows_at(x, rows), x[:, [3, 0, 2]])
    assert torch.equal(partial.rows_at(x, rows), x[:, [3, 0, 2]])
    assert torch.equal(packed(x, 1, ((0, 1), (2, 3), (3, 4)), ((0, 4),)), x[:, [0, 2, 3]])
    assert torch.equal(partial.taken(x.float(), 2, rows[1:]), x.float()[:, :, [0, 2]])
    monkeypatch.setattr(operations, "rows_at", lambda x, rows: None)
    assert partial.rows_at(x.bfloat16(), rows) is None


@pytest.mark.parametrize("written", [False, True])
@pytest.mark.parametrize("own", ["whole", "pieces", "sums"])
def test_gradients_that_come_last(own: str, written: bool) -> None:
    """Slices that overlap, and rows by number: rounded once, where rows have many of them too."""
    torch.manual_seed(0)
    like = torch.empty(1, 12, 2, 4, dtype=torch.bfloat16)
    total, exact = GradientSum(like, few=own != "sums"), torch.zeros(1, 12, 2, 4).double()

    def gradient(rows: slice) -> torch.Tensor:
        x = torch.randn(1, rows.stop - rows.start, 2, 4).to(torch.bfloat16)
        exact[:, rows] += x.double()
        return x

    first = {"whole": [slice(0, 12)], "pieces": [slice(0, 5), slice(5, 12)]}
    for rows in first.get(own, [slice(0, 12), slice(0, 12)]):
        total.add(rows, gradient(rows))
    last = [slice(0, 12), slice(0, 8), slice(2, 6), slice(2, 12), slice(3, 4)]
    others = [(rows, (gradient(rows),)) for rows in last]
    numbers = torch.tensor([1, 7, 9], dtype=torch.int32)
    some = torch.randn(1, 3, 2, 4).to(torch.bfloat16)
    exact[:, numbers] += some.double()
    others.append((RowIndex(numbers), (some,)))
    if written:
        found = torch.full((1, 12, 3, 4), torch.nan).bfloat16()[:, :, 1:]
        total.write((found,), others)
    else:
        (found,) = total.result(others=others)
    error = (found.double() - exact).abs() / exact.abs().clamp(min=1)
    assert error.max() <= 2**-8 * 1.01
