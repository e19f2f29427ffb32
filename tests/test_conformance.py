"""Every registered algorithm against unsplit attention in float64: forward and all gradients."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Contiguous, Layout, document_starts, shard, unshard
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import create, layout_of, option_names
from tests.oracle import Expected, expected_attention, relative_error
from tests.span_masks import dense, mask_of

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
                yield Case(algo, (("helpers", "none"), ("overlap", False)))
            if size in (2, 4):
                yield Case(algo, (("last_step", "owner"), ("chunks", 2)))
        elif algo == "attention2d":
            yield Case(algo, (("chunks", 4),))
            if size in (4, 8):
                yield Case(algo, (("variant", "no"), ("rows", 2), ("chunks", 2)))
                yield Case(algo, (("variant", "overlap"), ("rows", 2)))
        elif algo == "ulysses":
            yield Case(algo, (("chunks", 4),))
        elif algo == "usp":
            yield Case(algo, (("ulysses", 2), ("chunks", 4)) if size % 2 == 0 else ())
            if size == 8:
                yield Case(algo, (("ulysses", 2), ("route", "grid"), ("rows", 2)))
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
    core.communication.virtual. mask: causal, window, cu_seqlens of `cp.attention`.
    """
    options: Mapping[str, object] = dict(case.options)
    layout = layout_for(case, expected, mask.get("cu_seqlens"), mask.get("spans"))
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


def layout_for(
    case: Case,
    expected: Expected,
    cu_seqlens: Tensor | None = None,
    spans: Sequence[Sequence[object]] | None = None,
) -> Layout:
    """The layout of a problem, which may follow its documents, or spans."""
    layout, seq_len = layout_of(case.algo, dict(case.options)), expected.q.shape[1]
    lengths = [0, seq_len] if cu_seqlens is None else cu_seqlens.tolist()
    documents = document_starts(lengths, seq_len)
    return layout.within(documents if spans is None else Slices.of(spans, seq_len, documents))


def assert_matches(
    case: Case,
    results: list[tuple[Tensor, ...]],
    expected: Expected,
    bound: float,
    cu_seqlens: Tensor | None = None,
    spans: Sequence[Sequence[object]] | None = None,
) -> None:
    layout = layout_for(case, expected, cu_seqlens, spans)
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
    """All ranks have one plan, sent what it says, and it computes the pairs of the mask.

    Args: peer_access: of the run.
    """

    def compare(topology: Topology) -> Plan:
        algorithm, rank = create(case.algo, topology, dict(case.options)), topology.rank
        traffic = algorithm.traffic(shape, mask, rank)
        assert log.bytes(rank=rank, phase="forward") == traffic.forward_bytes
        assert log.messages(rank=rank, phase="forward") == traffic.forward_messages
        assert log.bytes(rank=rank, phase="backward") == traffic.backward_bytes
        assert log.messages(rank=rank, phase="backward") == traffic.backward_messages
        return algorithm.plan(shape, mask)

    plan, *others = run_virtual(size, compare, peer_access=peer_access)
    assert all((p.computes, p.moves) == (plan.computes, plan.moves) for p in others)
    assert sum(map(plan.pairs, plan.computes)) == visible_pairs(shape.seq_len, mask)


def assert_conforms(
    case: Case,
    size: int,
    *,
    seq_len: int,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = HEAD_DIM,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float64,
    bound: float = 1e-10,
    kernel: str = "auto",
    peer_access: bool = True,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    spans: Sequence[Sequence[object]] | None = None,
    sink: Tensor | None = None,
) -> tuple[list[tuple[Tensor, ...]], CommunicationLog]:
    """Of `run`, whose results are right, and whose bytes, messages and pairs are the plan's."""
    documents = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    given: dict[str, Any] = {"window": window, "cu_seqlens": documents, "sink": sink}
    if spans is None:
        given["causal"] = causal
        mask = Mask(causal, window, document_starts(cu_seqlens or [0, seq_len], seq_len))
        whole = {"causal": causal, "window": window, "cu_seqlens": cu_seqlens}
    else:
        given["spans"] = spans
        mask = mask_of(spans, seq_len, cu_seqlens, window)
        whole = {"causal": False, "seen": dense(spans, seq_len, cu_seqlens, window) > 0}
    sizes = {"batch": batch, "seq_len": seq_len, "heads": heads, "kv_heads": kv_heads}
    sizes |= {"head_dim": head_dim, "value_dim": value_dim}
    expected = expected_attention(**sizes, dtype=dtype, sink=sink, **whole)
    results, log = run(case, expected, size, kernel=kernel, peer_access=peer_access, **given)
    assert_matches(case, results, expected, bound, documents, spans)
    shape = Shape.of(expected.q, expected.k, expected.v, seq_len)
    assert_plan_is_kept(case, size, shape, mask, log, peer_access=peer_access)
    return results, log


SIZES = (1, 2, 3, 4, 5, 8, 6, 7)


def tried(size: int) -> Iterator[Case]:
    """Of all algorithms up to P = 5; of larger ones grids, and helpers of an odd and even P."""
    for case in cases(size):
        if size < 6 or case.algo in {8: ("attention2d", "usp")}.get(size, ("distflash",)):
            yield case


@dataclass(frozen=True)
class Problem:
    """What is computed.

    Attributes:
        length: how the tokens are divided: "even", "uneven", or "shortest": chunks of one token.
        value_dim: of v and out. peer_access: see `run`.
    """

    causal: bool
    heads: str
    length: str = "even"
    dtype: torch.dtype = torch.float64
    value_dim: int = HEAD_DIM
    peer_access: bool = True

    def __str__(self) -> str:
        return f"{'causal' if self.causal else 'full'}-{self.heads}"

    def seq_len(self, case: Case, size: int) -> int:
        multiple = layout_of(case.algo, dict(case.options)).multiple(size)
        lengths = {"even": 6 * size, "uneven": 7 * size + size // 2 + 1, "shortest": multiple}
        return lengths[self.length]


# Each mask with each ratio of heads. In float64 a wrong value shows, in bfloat16 a wrong dtype. An
# algorithm's numbers of ranks have one half and the other by turns.
PROBLEMS = (
    [
        Problem(True, "MHA", "uneven"),
        Problem(False, "MHA", value_dim=5, peer_access=False),
        Problem(False, "MQA", dtype=torch.bfloat16, value_dim=5),
    ],
    [
        Problem(True, "MQA", "shortest", value_dim=12, peer_access=False),
        Problem(False, "GQA", "uneven", value_dim=12),
        Problem(True, "GQA", dtype=torch.bfloat16),
    ],
)
# Results that are summed in float32 and rounded once are off by up to 3.9e-3 in bfloat16.
BOUNDS = {torch.float64: 1e-10, torch.bfloat16: 5e-3}


@pytest.mark.parametrize(
    ("case", "size", "problem"),
    [
        pytest.param(case, size, problem, id=f"{case}-P{size}-{problem}")
        for turn, size in enumerate(SIZES)
        for number, case in enumerate(tried(size))
        for problem in PROBLEMS[(turn + number) % 2]
    ],
)
def test_equals_unsplit_attention_and_keeps_its_plan(
    case: Case, size: int, problem: Problem
) -> None:
    """Output, all gradients, bytes, messages and pairs."""
    n_heads, kv_heads = HEADS[problem.heads]
    assert_conforms(
        case,
        size,
        seq_len=problem.seq_len(case, size),
        heads=n_heads,
        kv_heads=kv_heads,
        value_dim=problem.value_dim,
        causal=problem.causal,
        dtype=problem.dtype,
        bound=BOUNDS[problem.dtype],
        kernel="reference" if problem.dtype == torch.bfloat16 else "auto",
        peer_access=problem.peer_access,
    )


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
    for problem in (*PROBLEMS[0], *PROBLEMS[1]):
        test_equals_unsplit_attention_and_keeps_its_plan(case, 3, problem)


@pytest.mark.parametrize(("size", "kv_heads"), [(2, 4), (5, 2), (2, 1), (3, 1)])
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
