"""Every registered algorithm against unsplit attention in float64: forward and all gradients."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.comm import CommunicationLog
from megatron_cp_plugin.core.documents import document_starts
from megatron_cp_plugin.core.layout import Contiguous, Layout, shard, unshard
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.core.virtual import run_virtual
from megatron_cp_plugin.registry import create, layout_of, option_names
from tests.oracle import Expected, expected_attention, relative_error

HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
HEAD_DIM = 8


@dataclass(frozen=True)
class Case:
    """One algorithm with its options."""

    algo: str
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.algo, *(f"{name}={value}" for name, value in self.options)])


def cases(size: int) -> Iterator[Case]:
    """Every registered algorithm with the options that change what it does, for P = size."""
    for algo in cp.available("softmax"):
        if algo in ("ring", "zigzag"):
            for rule in ("kv", "query"):
                yield Case(algo, (("backward", rule),))
                if algo == "zigzag" and size in (3, 4):
                    yield Case(algo, (("backward", rule), ("chunks", 2)))
        elif algo == "distflash":
            yield Case(algo)
            if size in (2, 5):
                yield Case(algo, (("balanced", False), ("overlap", False)))
            if size in (2, 4):
                yield Case(algo, (("last_step", "owner"), ("chunks", 2)))
        elif algo == "attention2d":
            yield Case(algo, (("chunks", 4),))
            if size in (4, 8):
                yield Case(algo, (("variant", "no"), ("rows", 2), ("chunks", 2)))
                yield Case(algo, (("variant", "overlap"), ("rows", 2)))
        elif algo == "ulysses":
            if HEADS["MHA"][0] % size == 0:
                yield Case(algo, (("chunks", 4),))
        elif algo == "usp":
            yield Case(algo, (("ulysses", 2), ("chunks", 4)) if size % 2 == 0 else ())
        else:
            yield Case(algo, (("chunks", 4),) if "chunks" in option_names(algo) else ())


def run(
    case: Case,
    expected: Expected,
    size: int,
    *,
    kernel: str = "auto",
    peer_access: bool = True,
    **mask: Any,
) -> tuple[list[tuple[Tensor, ...]], CommunicationLog]:
    """(out, dq, dk, dv) of every virtual rank, and what they sent.

    peer_access: blocks that visit every rank come through slots that are poisoned, see
    core.virtual. mask: causal, window, cu_seqlens of `cp.attention`.
    """
    options: Mapping[str, object] = dict(case.options)
    layout = layout_for(case, expected, mask.get("cu_seqlens"))
    seq_len = expected.q.shape[1]

    def body(topology: Topology) -> tuple[Tensor, ...]:
        mine = [
            shard(x, 1, layout, topology.rank, size)
            for x in (expected.q, expected.k, expected.v, expected.dout)
        ]
        q, k, v = (x.requires_grad_() for x in mine[:3])
        out = cp.attention(
            q,
            k,
            v,
            algo=case.algo,
            group=topology,
            kernel=kernel,
            seq_len=seq_len,
            **mask,
            **options,
        )
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), mine[3]))

    with cp.record_communication() as log:
        results = run_virtual(size, body, peer_access=peer_access)
    return results, log


def layout_for(case: Case, expected: Expected, cu_seqlens: Tensor | None = None) -> Layout:
    """The layout of a problem, which may follow its documents."""
    layout = layout_of(case.algo, dict(case.options))
    if cu_seqlens is None:
        return layout
    return layout.within(document_starts(cu_seqlens.tolist(), expected.q.shape[1]))


def assert_matches(
    case: Case,
    results: list[tuple[Tensor, ...]],
    expected: Expected,
    bound: float,
    cu_seqlens: Tensor | None = None,
) -> None:
    layout = layout_for(case, expected, cu_seqlens)
    for index, name in enumerate(("out", "dq", "dk", "dv")):
        whole = unshard([result[index] for result in results], 1, layout)
        error = relative_error(whole, getattr(expected, name))
        assert error <= bound, f"{case}: {name} is off by {error:.1e}"


def assert_plan_is_kept(
    case: Case,
    size: int,
    shape: Shape,
    mask: Mask,
    log: CommunicationLog,
    *,
    peer_access: bool = True,
) -> None:
    """Ranks sent what their plan says; it computes the pairs that the mask lets through.

    Args: peer_access: of the run.
    """

    def compare(topology: Topology) -> None:
        algorithm, rank = create(case.algo, topology, dict(case.options)), topology.rank
        traffic = algorithm.traffic(shape, mask, rank)
        assert log.bytes(rank=rank, phase="forward") == traffic.forward_bytes
        assert log.messages(rank=rank, phase="forward") == traffic.forward_messages
        assert log.bytes(rank=rank, phase="backward") == traffic.backward_bytes
        assert log.messages(rank=rank, phase="backward") == traffic.backward_messages
        plan = algorithm.plan(shape, mask)
        assert sum(map(plan.pairs, plan.computes)) == visible_pairs(shape.seq_len, mask)

    run_virtual(size, compare, peer_access=peer_access)


ALL_CASES = [
    pytest.param(case, size, id=f"{case}-P{size}")
    for size in range(1, 10)
    for case in cases(size)
    if size in (1, 2, 3, 4, 5, 8) or case.algo == "distflash"
]


class Plain(Ring):
    """As somebody else may register it: an algorithm without any options."""

    layout = Contiguous()
    Options = Algorithm.Options  # type: ignore[assignment]

    def __init__(self, topology: Topology, options: Algorithm.Options) -> None:
        super().__init__(topology, Ring.Options())

    @classmethod
    def check(cls, options: Algorithm.Options, **problem: Any) -> None:
        """It serves everything."""


def test_an_algorithm_without_options_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))
    cp.register("plain")(Plain)
    (case,) = (case for case in cases(3) if case.algo == "plain")
    test_equals_unsplit_attention(case, 3, True, "GQA")
    test_bytes_are_those_of_the_formula(case, 3, True, "GQA")


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_equals_unsplit_attention(case: Case, size: int, causal: bool, heads: str) -> None:
    n_heads, kv_heads = HEADS[heads]
    expected = expected_attention(
        batch=2,
        seq_len=6 * size,
        heads=n_heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        causal=causal,
    )
    results, _ = run(case, expected, size, causal=causal)
    assert_matches(case, results, expected, bound=1e-10)


@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_one_token_chunks(case: Case, size: int) -> None:
    """The shortest sequence that the layout divides equally: chunks of one token."""
    seq_len = layout_of(case.algo, dict(case.options)).multiple(size)
    expected = expected_attention(
        seq_len=seq_len, heads=4, kv_heads=2, head_dim=HEAD_DIM, causal=True
    )
    results, _ = run(case, expected, size, causal=True)
    assert_matches(case, results, expected, bound=1e-10)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_uneven_ranks(case: Case, size: int, causal: bool) -> None:
    """A sequence that no layout divides equally."""
    expected = expected_attention(
        seq_len=7 * size + size // 2 + 1, heads=4, kv_heads=2, head_dim=HEAD_DIM, causal=causal
    )
    results, _ = run(case, expected, size, causal=causal)
    assert_matches(case, results, expected, bound=1e-10)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_bytes_are_those_of_the_formula(case: Case, size: int, causal: bool, heads: str) -> None:
    n_heads, kv_heads = HEADS[heads]
    seq_len = 4 * size
    expected = expected_attention(
        batch=2,
        seq_len=seq_len,
        heads=n_heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        causal=causal,
        dtype=torch.bfloat16,
    )
    _, log = run(case, expected, size, causal=causal, kernel="reference")
    shape = Shape(2, seq_len, n_heads, kv_heads, HEAD_DIM)
    assert_plan_is_kept(case, size, shape, Mask(causal), log)


@pytest.mark.parametrize(("heads", "value_dim"), [("MHA", 5), ("GQA", 12)])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_values_of_another_width(
    case: Case, size: int, causal: bool, heads: str, value_dim: int
) -> None:
    """As in multi-latent attention: results, bytes and messages."""
    n_heads, kv_heads = HEADS[heads]
    seq_len = layout_of(case.algo, dict(case.options)).multiple(size) * 2
    expected = expected_attention(
        seq_len=seq_len,
        heads=n_heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        value_dim=value_dim,
        causal=causal,
    )
    # The suite's other tests have peer access.
    results, log = run(case, expected, size, causal=causal, peer_access=False)
    assert_matches(case, results, expected, bound=1e-10)
    shape = Shape(
        1,
        seq_len,
        n_heads,
        kv_heads,
        HEAD_DIM,
        element_bytes=8,
        wide_bytes=8,
        value_dim=value_dim,
    )
    assert_plan_is_kept(case, size, shape, Mask(causal), log, peer_access=False)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("case", "size"), ALL_CASES)
def test_the_plan_computes_every_visible_pair_once(case: Case, size: int, causal: bool) -> None:
    seq_len = 7 * size + 1
    options = dict(case.options)
    shape, mask = Shape(1, seq_len, 4, 4, HEAD_DIM), Mask(causal)
    plans = run_virtual(
        size, lambda topology: create(case.algo, topology, options).plan(shape, mask)
    )
    assert all((p.computes, p.moves) == (plans[0].computes, plans[0].moves) for p in plans)
    assert sum(map(plans[0].pairs, plans[0].computes)) == visible_pairs(seq_len, mask)


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("rule", ["kv", "query"])
@pytest.mark.parametrize(("algo", "causal"), [("zigzag", True), ("zigzag", False), ("ring", False)])
def test_ring_bytes_by_hand(algo: str, causal: bool, rule: str, kv_heads: int, size: int) -> None:
    """P-1 hops of K, V; back P-1 hops of K, V, dK, dV, or of Q, dO, dQ and two scalars a row."""
    heads, tokens = 4, 4
    expected = expected_attention(
        seq_len=tokens * size,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        causal=causal,
        dtype=torch.bfloat16,
    )
    case = Case(algo, (("backward", rule),))
    _, log = run(case, expected, size, causal=causal, kernel="reference")
    q, kv = tokens * heads * HEAD_DIM, tokens * kv_heads * HEAD_DIM
    g = 4 if size > 2 else 2  # two ranks pass no sums on
    # With four query heads a KV head the last block of the forward is still there.
    inputs = size - 2 if kv_heads == 1 else size - 1
    backward = {
        "kv": 2 * kv * (2 * inputs + g * (size - 1)),
        "query": (size - 1) * (q * (2 + 2 + g) + 2 * tokens * heads * 4),
    }
    for rank in range(size):
        assert log.bytes(rank=rank, phase="forward") == (size - 1) * 2 * kv * 2
        assert log.bytes(rank=rank, phase="backward") == backward[rule]
