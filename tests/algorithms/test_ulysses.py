"""Ulysses: results, bytes and messages on any number of ranks and heads."""

import pytest

from tests.algorithms.test_collective_conformance import RATIOS, SIZES, heads_for, length_for
from tests.pairwise import pairwise
from tests.test_conformance import Case, assert_conforms


@pytest.mark.parametrize(
    ("size", "layout", "keep", "ratio", "causal"),
    pairwise(SIZES, ("contiguous", "zigzag"), ("exchanged", "local"), RATIOS, (True, False)),
)
def test_ulysses(size: int, layout: str, keep: str, ratio: str, causal: bool) -> None:
    heads = heads_for(size)
    few = heads // 2 if heads % 2 == 0 else heads // 3
    assert_conforms(
        Case("ulysses", (("layout", layout), ("keep", keep), ("chunks", 4))),
        size,
        peer_access=False,
        causal=causal,
        seq_len=length_for(size, causal),
        heads=heads,
        kv_heads={"MQA": 1, "GQA": few, "MHA": heads}[ratio],
    )


def test_ulysses_where_neither_kv_heads_nor_ranks_divide_each_other() -> None:
    for chunks in (1, 3):
        for heads, kv_heads in ((12, 6), (24, 3)):
            case, few = (
                Case("ulysses", (("chunks", chunks),)),
                {"heads": heads, "kv_heads": kv_heads},
            )
            assert_conforms(case, 4, seq_len=20, **few)
