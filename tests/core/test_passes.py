"""How often a kernel is called: with documents no more often a step than without."""

from collections import Counter

import pytest
import torch

from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.autograd.function import attend
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.execution import passes
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.core.ranges import Rows, row_count
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.oracle import expected_attention, relative_error
from tests.pairwise import pairwise

SIZE, SEQ_LEN = 4, 480
# Divisible by 8, as the thd layout wants them.
DOCUMENTS = (8, 16, 40, 72, 80, 136, 176, 200, 208, 232, 320, 344, 352, 400, 424, 432, 448)


class Spy(Reference):
    """Counts its calls; a tile's and those of several are the same here."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def _called(self, what: str) -> Reference:
        self.calls[what] += 1
        return Reference()

    def forward(self, call):
        return self._called("forward").forward(call)

    def backward(self, *given):
        return self._called("backward").backward(*given)


CALLS = [
    # One call a step: what is split by documents is full, or causal as one's own block.
    ("ring", {"layout": "thd"}, 4),
    ("zigzag", {"layout": "thd", "backward": "kv"}, 4),
    ("zigzag", {"layout": "thd", "backward": "query"}, 4),
    ("distflash", {"layout": "thd"}, 4),
    # A chunk of one query is a full tile.
    ("allgather", {"layout": "thd", "chunks": 1}, 2),
    ("ulysses", {"layout": "thd", "chunks": 1}, 1),
    ("usp", {"layout": "thd", "ulysses": 2, "chunks": 1}, 2),
    # Two, where some are full and some causal.
    ("attention2d", {"layout": "thd", "rows": 2, "chunks": 1}, 2),
    ("attention2d", {"layout": "contiguous", "rows": 2, "chunks": 1}, 2),
    ("zigzag", {}, 5),
    ("distflash", {}, 4),
    ("ring", {}, 4),
    ("zigzag", {"layout": "documents"}, 5),
]


@pytest.mark.parametrize(
    ("case", "window", "gaps"), pairwise(CALLS, (None, 20), (False, True)), ids=str
)
def test_calls_of_a_pass(case: tuple[str, dict, int], window: int | None, gaps: bool) -> None:
    """Of the rank with most. A window has an upper edge, a lower one, and full tiles between."""
    algo, options, most = case
    mask = Mask(window=window, documents=DOCUMENTS)
    expected = expected_attention(
        seq_len=SEQ_LEN, causal=True, window=window, cu_seqlens=(0, *DOCUMENTS, SEQ_LEN)
    )
    whole = expected.q, expected.k, expected.v, expected.dout
    want = expected.out, expected.dq, expected.dk, expected.dv

    @torch.no_grad()
    def body(topology: Topology) -> tuple[float, Counter[str]]:
        spy = Spy()
        spy.gaps = gaps
        algorithm = create(algo, topology, options).for_documents(DOCUMENTS)
        q, k, v, dout = (shard(x, 1, algorithm.layout, topology.rank, SIZE) for x in whole)
        compiled = Compiled(algorithm, Call(Shape.of(q, k, v, SEQ_LEN), mask, 8**-0.5, spy))
        out, _, saved = compiled.forward.attend(q, k, v)
        found = out, *compiled.backward().differentiate(dout, saved)
        own = (shard(x, 1, algorithm.layout, topology.rank, SIZE) for x in want)
        return max(map(relative_error, found, own)), spy.calls

    errors, calls = zip(*run_virtual(SIZE, body), strict=True)
    assert max(errors) < 1e-12
    assert 0 < max(max(counts.values()) for counts in calls) <= most * (3 if window else 1)


@pytest.mark.parametrize("rows", [((0, 4),), ((1, 3),)], ids=["all rows", "some rows"])
def test_what_came_first_is_not_overwritten_by_what_comes_next(rows: Rows) -> None:
    """A rank may get results before it has any of its own: the next ones come in their buffers."""
    q = torch.zeros(1, 4, 2, 8, dtype=torch.float64)
    outs = [torch.randn(1, row_count(rows), 2, 8, dtype=torch.float64) for _ in range(3)]
    buffer = torch.empty_like(outs[0]), torch.zeros(1, 2, row_count(rows), dtype=torch.float64)
    total = partial.Accumulator(q, 8)
    for out in outs:  # of equal lse: their mean
        total.settle()
        buffer[0].copy_(out)
        passes._add(total, passes.Packed(rows, buffer), ((0, 4),), lent=True)
    out, _ = total.result()
    ((start, stop),) = rows
    assert relative_error(out[:, start:stop], sum(outs) / 3) < 1e-12


@pytest.mark.parametrize("algo", ["zigzag", "allgather", "ulysses"])
@pytest.mark.parametrize("size", [1, 2])
def test_vector_loads_find_tensors_where_they_need_them(algo: str, size: int) -> None:
    """Kernels for GPUs load 16 bytes at a time; a caller's views may begin anywhere."""

    def somewhere(x: torch.Tensor) -> torch.Tensor:
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    class Loads(Reference):
        def forward(self, call):
            self._load(*call[:3])
            return super().forward(call)

        def backward(self, call, dout, statistics):
            self._load(dout, *call[:3], statistics.out_for(dout))
            return super().backward(call, dout, statistics)

        @staticmethod
        def _load(*tensors: torch.Tensor) -> None:
            assert not any(x.data_ptr() % 16 for x in tensors)

    expected = expected_attention(seq_len=64, causal=True, dtype=torch.bfloat16)

    def body(topology: Topology) -> float:
        algorithm = create(algo, topology, {})
        of_rank = [algorithm.layout, topology.rank, size]
        given = (expected.q, expected.k, expected.v, expected.dout)
        *leaves, dout = (somewhere(shard(x, 1, *of_rank)) for x in given)
        for x in leaves:
            x.requires_grad_()
        out = attend(*leaves, algorithm=algorithm, seq_len=64, kernel_for=lambda _: Loads())
        found = out.detach(), *torch.autograd.grad(out, leaves, dout)
        wanted = (expected.out, expected.dq, expected.dk, expected.dv)
        return max(
            relative_error(x, shard(y, 1, *of_rank)) for x, y in zip(found, wanted, strict=True)
        )

    assert max(run_virtual(size, body)) < 8 * torch.finfo(torch.bfloat16).eps
