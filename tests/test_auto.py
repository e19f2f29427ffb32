"""`algo="auto"`: what is chosen, by whom, and what never is."""

import logging
from typing import Any

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from tests.oracle import naive_attention
from tests.span_masks import dense


def tensors(tokens: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    return tuple(torch.randn(1, tokens, n, 16, dtype=torch.float64) for n in (8, 4, 4))


BOUNDS = (0, 40, 48, 96)
# The arguments of two calls: the second has what the choice for the first one stands for.
GIVEN: dict[str, list[dict[str, Any]]] = {
    "causal": [{}, {}],
    "documents": [{"cu_seqlens": BOUNDS}, {"cu_seqlens": BOUNDS}],
    "spans": [{"spans": cp.spans.prefix_lm(prefix, 96)} for prefix in (20, 24)],
}


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *(("causal", layout) for layout in ("zigzag", "contiguous")),
        *(("documents", layout) for layout in ("zigzag", "thd", "documents")),
        *(("spans", layout) for layout in ("zigzag", "contiguous", "documents")),
    ],
)
def test_calls_are_right_and_chosen_once(
    kind: str, layout: str, caplog: pytest.LogCaptureFixture
) -> None:
    """By documents of lengths that suit the layout, and by the spans of the first call."""
    q, k, v = tensors(96)

    def job(topology: Topology) -> list[torch.Tensor]:
        found = []
        for given in GIVEN[kind]:
            how = {"algo": "auto", "group": topology, "layout": layout, **given}
            shards = [cp.shard(x, 1, **how) for x in (q, k, v)]
            found.append(cp.unshard(cp.attention(*shards, **how), 1, **how))
        return found

    with caplog.at_level(logging.INFO):
        wholes = run_virtual(4, job)
    for given, of_ranks in zip(GIVEN[kind], zip(*wholes, strict=True), strict=True):
        seen = dense(given.get("spans", [(0, 96, 0, 96, "causal")]), 96, given.get("cu_seqlens"))
        expected = naive_attention(q, k, v, causal=False, scale=0.25, seen=seen > 0)
        for whole in of_ranks:
            torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-10)
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("auto chose ")]
    assert len(said) == 1
    assert f"({layout} layout" in said[0]
    if kind == "spans":
        assert "; spans as of the first such call, 2 slices with 52" in said[0]


def test_what_auto_does_not_take() -> None:
    q, k, v = tensors(8)
    with pytest.raises(ConfigError, match="has no option 'chunks': it takes layout, machine"):
        cp.attention(q, k, v, algo="auto", chunks=2)
    with pytest.raises(ConfigError, match=r"got 'zigzg' \(did you mean 'zigzag'\?\)"):
        cp.shard(q, 1, algo="auto", layout="zigzg")
    with pytest.raises(ConfigError, match=r"no option 'layot' \(did you mean 'layout'\?\)"):
        cp.shard(q, 1, algo="auto", layot="contiguous")
    with pytest.raises(ConfigError, match="no machine 'h300'"):
        cp.attention(q, k, v, algo="auto", machine="h300")


def test_ranks_that_ask_otherwise_are_told() -> None:
    """Before auto chooses."""
    q, k, v = tensors(64)

    def job(topology: Topology) -> None:
        how = {"algo": "auto", "group": topology}
        shards = [cp.shard(x, 1, **how) for x in (q, k, v)]
        for lengths in (64, 2 << topology.rank):
            cp.attention(*shards, cu_seqlens=[*range(0, 64, lengths), 64], **how)

    with pytest.raises(ContextParallelError, match="all ranks need one cu_seqlens"):
        run_virtual(2, job)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize(
    ("tokens", "layout", "given"),
    [
        *((tokens, layout, {}) for tokens in (0, 1, 2, 3) for layout in ("contiguous", "zigzag")),
        (16, "contiguous", {"spans": []}),
    ],
    ids=str,
)
def test_fewer_tokens_than_ranks_and_keys_that_nobody_sees(
    size: int, tokens: int, layout: str, given: dict[str, object]
) -> None:
    q, k, v = (torch.randn(1, tokens, 4, 8, dtype=torch.float64) for _ in range(3))
    want = torch.zeros_like(q)
    if tokens and not given:
        want = naive_attention(q, k, v, causal=True, scale=8**-0.5)

    def job(topology: Topology) -> torch.Tensor:
        how = {"algo": "auto", "layout": layout, "group": topology}
        shards = [cp.shard(x, 1, **how) for x in (q, k, v)]
        out = cp.attention(*shards, seq_len=tokens, **how, **given)
        return cp.unshard(out, 1, seq_len=tokens, **how)

    # In float64. No tokens at all are compared for their shape, and for not being refused.
    for got in run_virtual(size, job):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("given", [{"spans": []}, {"window": 3}, {}], ids=str)
def test_gathers_of_no_tokens(size: int, given: dict[str, object]) -> None:
    def job(topology: Topology) -> None:
        x = torch.zeros(1, 0, 4, 8, requires_grad=True)
        how = {"algo": "allgather", "layout": "thd", "group": topology}
        cp.attention(x, x, x, seq_len=0, **how, **given).sum().backward()

    run_virtual(size, job)
