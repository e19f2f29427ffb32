"""Windows and documents: no step, no byte and no kernel call beyond what they show."""

import sys

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from tests.oracle import expected_attention
from tests.test_conformance import Case, assert_matches, few_cases, run

BLOCK, BFLOAT16 = 6, torch.bfloat16


@pytest.mark.parametrize("case", few_cases(4), ids=str)
def test_queries_that_see_only_themselves_have_no_gradients(case: Case) -> None:
    """Nor have keys, up to float32, though delta travels where kernels take a bfloat16 out."""
    expected = expected_attention(seq_len=4 * BLOCK, causal=True, window=1, dtype=BFLOAT16)
    results, _ = run(case, expected, 4, kernel="torch_cpu", window=1)
    _, *gradients = zip(*results, strict=True)
    dq, dk, dv = (torch.cat(parts, 1).abs().max().item() for parts in gradients)
    assert max(dq, dk) < 8 * 2**-23 * dv


@pytest.mark.parametrize("window", [sys.maxsize, 2**80])
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_a_window_beyond_all_numbers_is_none(algo: str, window: int) -> None:
    x = torch.randn(1, 24, 4, 8, dtype=torch.float64)

    def body(topology: Topology) -> None:
        own = cp.shard(x, 1, algo=algo, group=topology)
        got, want = (
            cp.attention(own, own, own, algo=algo, group=topology, **settings)
            for settings in ({"window": window}, {})
        )
        # In float64; with a window of 22, which hides one key of one query, they differ by 0.2.
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)

    run_virtual(3, body)


def test_what_a_layout_that_follows_documents_sends() -> None:
    """Of whole ones nothing; of others a ring no less than what goes straight to where it is
    needed, which is less than what a collective operation sends.
    """
    for lengths, size, whole in ((range(0, 49, 8), 3, True), ((0, 20, 48, 60, 72, 90), 5, False)):
        bounds, sent = torch.tensor(lengths), []
        expected = expected_attention(seq_len=lengths[-1], causal=True, cu_seqlens=bounds)
        for algo, *transport in (
            ("allgather",),
            ("zigzag",),
            ("allgather", ("transport", "group")),
        ):
            case = Case(algo, (("layout", "documents"), *transport))
            results, log = run(case, expected, size, peer_access=False, cu_seqlens=bounds)
            assert_matches(case, results, expected, 1e-12, bounds)
            sent.append(log.bytes())
        assert sent[:2] == [0, 0] if whole else 0 < sent[0] <= sent[1] < sent[2]
