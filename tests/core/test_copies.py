"""How much is copied around kernels when heads are computed in groups.

A rank runs alone, on tensors without storage; what merges and sums read and write, each in one
pass, is no copy, but a sum of one tensor is.
"""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.partial import Term
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.sizes import OnePass, SizesOnly
from megatron_cp_plugin.registry import create
from tests.operators import Operators

SHAPE = Shape(1, 4096, 16, 8, 32)


class Kernel(SizesOnly):
    windows = False
    places_outputs = places_gradients = True

    def called(self, *args, **settings) -> None:
        pass


def copied(monkeypatch, algo: str, rank: int, *, size: int, **options) -> float:
    """In units of a rank's q, in both passes, without rows of lse and delta."""
    elements = 0

    def note(outs: Sequence[Tensor]) -> None:
        nonlocal elements
        elements += sum(x.numel() for x in outs if x.dim() == 4)

    def see(name: str, _args: object, results: Sequence[Tensor]) -> None:
        if name in ("clone", "copy_", "cat", "_to_copy", "index_select"):
            note(results)

    class Counting(OnePass):
        def sum_rows(
            self, outs: Sequence[Tensor], terms: Sequence[Term], *, in_place: bool
        ) -> None:
            if [x.shape[1] for _, (x, *_) in terms] == [outs[0].shape[1]] and not in_place:
                note(outs)

    monkeypatch.setattr(partial, "_fused", {"meta": Counting})
    algorithm = create(algo, DryRunGroup(rank, (0,) * size, peer_access=True), options)
    q, k, v, dout = (
        torch.empty((1, SHAPE.seq_len // size, n, 32), dtype=torch.bfloat16, device="meta")
        for n in (SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads, SHAPE.heads)
    )
    compiled = Compiled(algorithm, Call(SHAPE, Mask(), 1.0, Kernel()))
    with Operators(see):
        saved = compiled.forward.attend(q, k, v)[2]
        compiled.backward().differentiate(dout, saved)
    return elements / q.numel()


CASES = [
    ("zigzag", {}),
    ("zigzag", {"backward": "query"}),
    ("zigzag", {"route": "straight"}),
    ("allgather", {}),
    ("attention2d", {}),
    ("distflash", {}),
]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("algo", "options"), CASES)
def test_groups_of_heads_are_computed_and_pushed_where_they_are(
    monkeypatch, algo, options, size
) -> None:
    """Only sums that end in another dtype are copied, of all heads at once or of some."""
    for rank in range(size):
        whole, *groups = (
            copied(monkeypatch, algo, rank, size=size, chunks=chunks, **options)
            for chunks in (1, 2, 4)
        )
        assert groups == [whole, whole], rank
        if size == 2 and algo != "distflash":
            assert whole == 0
