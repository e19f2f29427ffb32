"""Every algorithm of linear attention against the recurrence in float64: forward, all gradients."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import create_linear, layout_of
from tests.fla_on_cpu import fla_on_cpu, launches
from tests.linear_bytes import counted, stated
from tests.linear_oracle import LinearExpected, all_pairs, linear_expected, recurrence
from tests.oracle import relative_error
from tests.pairwise import pairwise

RATES = {
    "plain": (1.0, 1.0, 1.0, 1.0),
    "half": (0.5, 0.5, 0.5, 0.5),
    # exp(-8h/H (1 - l/L)) of TransNormerLLM, and one head that forgets almost at once.
    "slopes": (1.0, 0.8187307530779818, 0.1353352832366127, 1e-6),
}
SIZES = (1, 2, 3, 4, 8)


@dataclass(frozen=True)
class Case:
    """One algorithm with its options."""

    algo: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.algo, *(value for _, value in self.options)])


def cases() -> Iterator[Case]:
    for algo in cp.available("linear"):
        if algo in ("lasp2", "linear_ulysses"):
            yield Case(algo, (("layout", "contiguous"),))
            yield Case(algo, (("layout", "zigzag"),))
        else:
            yield Case(algo)


@dataclass(frozen=True)
class Result:
    """What one rank got."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor
    final: Tensor | None = None
    dinitial: Tensor | None = None


def run(
    case: Case,
    expected: LinearExpected,
    size: int,
    *,
    causal: bool = True,
    states: bool = False,
    dtype: torch.dtype = torch.float64,
    cu_seqlens: Sequence[int] | None = None,
    kernel: str = "auto",
) -> tuple[list[Result], CommunicationLog]:
    """The result of every virtual rank, and what they sent. states: initial and final ones too."""
    layout = layout_of(case.algo, dict(case.options))
    seq_len = expected.q.shape[1]

    def body(topology: Topology) -> Result:
        whole = (expected.q, expected.k, expected.v, expected.dout)
        *qkv, dout = (shard(x, 1, layout, topology.rank, size).to(dtype) for x in whole)
        inputs = [x.requires_grad_() for x in qkv]
        initial = expected.initial.clone().requires_grad_() if states else None
        got = cp.linear_attention(
            *inputs,
            decay=torch.tensor(expected.rates, dtype=torch.float64),
            algo=case.algo,
            group=topology,
            causal=causal,
            initial_state=initial,
            output_final_state=states,
            seq_len=seq_len,
            cu_seqlens=cu_seqlens,
            kernel=kernel,
            **dict(case.options),
        )
        if initial is None:
            assert isinstance(got, Tensor)
            return Result(got.detach(), *torch.autograd.grad(got, inputs, dout))
        out, final = got
        # Every rank's loss takes an unequal part of the final state.
        part = (topology.rank + 1) / (size * (size + 1) / 2)
        *gradients, dinitial = torch.autograd.grad(
            (out, final), (*inputs, initial), (dout, part * expected.dfinal), allow_unused=True
        )
        return Result(out.detach(), *gradients, final.detach(), dinitial)

    with cp.record_communication() as log:
        results = run_virtual(size, body)
    return results, log


def assert_matches(
    case: Case, results: list[Result], expected: LinearExpected, bound: float
) -> None:
    layout = layout_of(case.algo, dict(case.options))
    for name in ("out", "dq", "dk", "dv"):
        whole = unshard([getattr(result, name) for result in results], 1, layout)
        error = relative_error(whole, getattr(expected, name))
        assert error <= bound, f"{case}: {name} is off by {error:.1e}"


def assert_bytes_are_stated(
    case: Case, size: int, shape: LinearShape, log: CommunicationLog, *, causal: bool
) -> None:
    """What ranks sent in both passes, with the final state, is what their docstrings say."""

    def compare(topology: Topology) -> None:
        made, rank = create_linear(case.algo, topology, dict(case.options)), topology.rank
        assert counted(log, rank) == stated(made, shape, rank, causal=causal, final_state=True)

    run_virtual(size, compare)


def assert_all_match(case: Case, results: list[Result], expected: LinearExpected) -> None:
    """Final states, and the gradient of the initial one, too."""
    assert_matches(case, results, expected, bound=1e-10)
    for result in results:
        assert result.final is not None
        assert relative_error(result.final, expected.final) <= 1e-10
    # The ranks' gradients of the initial state are those of their losses' sum.
    dinitial = sum(result.dinitial for result in results if result.dinitial is not None)
    assert isinstance(dinitial, Tensor)
    assert relative_error(dinitial, expected.dinitial) <= 1e-10


@pytest.mark.parametrize(
    ("case", "size", "rates", "causal"),
    pairwise(tuple(cases()), SIZES, tuple(RATES), (True, False)),
    ids=str,
)
def test_equals_the_recurrence(case: Case, size: int, rates: str, causal: bool) -> None:
    expected = linear_expected(RATES[rates], 6 * size, causal=causal)
    results, _ = run(case, expected, size, causal=causal, states=True)
    assert_all_match(case, results, expected)


@pytest.mark.parametrize(
    ("case", "size", "heads"),
    pairwise(tuple(cases()), (2, 3, 4), (1, 2, 7, 33)),
    ids=str,
)
def test_heads_that_ranks_do_not_divide(case: Case, size: int, heads: int) -> None:
    """Outputs, states, all gradients; bytes, of linear_ulysses those of as many heads as it fills
    up to.
    """
    causal, seq_len = heads % 2 == 1, 4 * size
    rates = tuple(0.97**head for head in range(heads))
    expected = linear_expected(rates, seq_len, batch=1, head_dim=3, causal=causal)
    results, log = run(case, expected, size, causal=causal, states=True)
    assert results[0].out.shape[2] == heads
    assert_all_match(case, results, expected)
    value_dim = expected.v.shape[3]
    shape = LinearShape(1, seq_len, heads, 3, value_dim, element_bytes=8, wide_bytes=8)
    filled = -(-heads // size) * size
    others = 8 * (size - 1) * filled // size
    for rank in range(size):
        if case.algo == "linear_ulysses":  # 2 * B*S*H*(P-1)/P * (D+E) * e, and the final state
            sent = others * (2 * 4 * (3 + value_dim) + 3 * value_dim)
            assert log.bytes(rank=rank, phase="forward") == sent
            assert log.bytes(rank=rank, phase="backward") == sent
    assert_bytes_are_stated(case, size, shape, log, causal=causal)


# Where documents other than the first one begin, in runs of 6 tokens, or of 3 on zigzag: in the
# middle of runs, at their edges, one token after another, and in no or one run only.
DOCUMENTS = {
    "inside": lambda n: (2, 4, 5, n // 2 + 1, n - 1),
    "edges": lambda n: (*range(6, n, 6),),
    "tokens": lambda n: (*range(1, n),),
    "one run": lambda n: (n // 2 + 2,),
    "begins with a run": lambda n: (n // 2, n // 2 + 4),
}


@pytest.mark.parametrize(
    ("case", "size", "documents", "rates", "causal"),
    pairwise(tuple(cases()), SIZES, tuple(DOCUMENTS), tuple(RATES), (True, False)),
    ids=str,
)
def test_a_state_begins_anew_at_each_document(
    case: Case, size: int, documents: str, rates: str, causal: bool
) -> None:
    """With an initial state, which the first document alone sees; bytes as without documents."""
    seq_len = 6 * size
    starts = tuple(sorted({n for n in DOCUMENTS[documents](seq_len) if 0 < n < seq_len}))
    of_heads = RATES[rates]
    expected = linear_expected(of_heads, seq_len, causal=causal, documents=starts)
    cu_seqlens = (0, *starts, seq_len)
    results, log = run(case, expected, size, causal=causal, states=True, cu_seqlens=cu_seqlens)
    assert_all_match(case, results, expected)
    shape = LinearShape(*expected.q.shape, expected.v.shape[3], element_bytes=8, wide_bytes=8)
    assert_bytes_are_stated(case, size, shape, log, causal=causal)


@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_documents_longer_than_a_kernel_chunk(case: Case) -> None:
    starts = (3, 80, 150, 290)
    expected = linear_expected(RATES["slopes"], 300, batch=1, documents=starts)
    results, _ = run(case, expected, 2, states=True, cu_seqlens=(0, *starts, 300))
    assert_matches(case, results, expected, bound=1e-9)


@pytest.mark.parametrize("algo", cp.available("linear"))
@pytest.mark.parametrize("size", [2, 3, 8])
def test_documents_on_ranks_with_unequally_many_tokens(algo: str, size: int) -> None:
    for seq_len in (7 * size + size // 2 + 1, size - 1, 2):
        assert_states_match(Case(algo), size, seq_len, tuple(range(1, seq_len, 5)))


def assert_states_match(case: Case, size: int, seq_len: int, starts: tuple[int, ...]) -> None:
    """Outputs, states and all gradients. Args: starts: of documents but the first."""
    expected = linear_expected(RATES["slopes"], seq_len, documents=starts)
    results, _ = run(case, expected, size, states=True, cu_seqlens=(0, *starts, seq_len))
    assert_all_match(case, results, expected)


@pytest.mark.parametrize(
    ("case", "size", "causal"), pairwise(tuple(cases()), (1, 2, 3), (True, False)), ids=str
)
def test_without_states(case: Case, size: int, causal: bool) -> None:
    """No initial state is one of zeros; the final one need not be asked for."""
    slopes = RATES["slopes"]
    drawn = linear_expected(slopes, 4 * size, causal=causal, seed=1)
    results, _ = run(case, drawn, size, causal=causal)
    q, k, v = (x.clone().requires_grad_() for x in (drawn.q, drawn.k, drawn.v))
    rates = torch.tensor(drawn.rates, dtype=torch.float64)
    out, _ = recurrence(q, k, v, rates, torch.zeros_like(drawn.initial), causal=causal)
    gradients = torch.autograd.grad(out, (q, k, v), drawn.dout)
    layout = layout_of(case.algo, dict(case.options))
    for name, whole in zip(("out", "dq", "dk", "dv"), (out, *gradients), strict=True):
        got = unshard([getattr(result, name) for result in results], 1, layout)
        assert relative_error(got, whole.detach()) <= 1e-9, f"{case}: {name}"


@pytest.mark.parametrize("algo", cp.available("linear"))
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_with_unequally_many_tokens(algo: str, size: int) -> None:
    for seq_len in (7 * size + size // 2 + 1, size - 1, 1):
        assert_states_match(Case(algo), size, seq_len, ())


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_an_empty_batch(case: Case, size: int) -> None:
    expected = linear_expected(RATES["slopes"], 4 * size, batch=0)
    for result in run(case, expected, size, states=True)[0]:
        assert result.final.shape == expected.initial.shape
        assert result.out.shape == result.dv.shape == (0, 4, 4, 6)


@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_longer_than_a_kernel_chunk(case: Case) -> None:
    expected = linear_expected(RATES["slopes"], 2 * 150, batch=1)
    results, _ = run(case, expected, 2, states=True)
    assert_matches(case, results, expected, bound=1e-9)


@pytest.mark.parametrize(
    ("case", "causal"), [(case, turn % 2 == 0) for turn, case in enumerate(cases())], ids=str
)
def test_bfloat16(case: Case, causal: bool) -> None:
    """Tensors in bfloat16, states in float32: the error of rounding inputs and outputs once."""
    expected = linear_expected(RATES["slopes"], 64, causal=causal)
    results, _ = run(case, expected, 4, causal=causal, states=True, dtype=torch.bfloat16)
    assert_matches(case, results, expected, bound=6e-3)
    final = results[0].final
    assert final is not None
    assert final.dtype == torch.float32
    assert relative_error(final, expected.final) <= 6e-3


@pytest.mark.parametrize(
    ("case", "size", "causal", "states", "rates"),
    pairwise(tuple(cases()), SIZES, (True, False), (False, True), ("half", "plain")),
    ids=str,
)
def test_bytes_are_those_of_the_formula(
    case: Case, size: int, causal: bool, states: bool, rates: str
) -> None:
    expected = linear_expected(RATES[rates], 4 * size, causal=causal)
    _, log = run(case, expected, size, causal=causal, states=states, dtype=torch.bfloat16)
    shape = LinearShape(*expected.q.shape, expected.v.shape[3])

    def compare(topology: Topology) -> None:
        rank = topology.rank
        algorithm = create_linear(case.algo, topology, dict(case.options))
        settings = {"causal": causal, "final_state": states, "decays": rates != "plain"}
        assert counted(log, rank) == stated(algorithm, shape, rank, **settings)

    run_virtual(size, compare)


def test_bytes_against_the_length_of_the_sequence() -> None:
    """Table 1 of the paper: B*H*D*D elements a hop, against Ulysses and Megatron's SP."""
    size, heads, head_dim = 4, 4, 8
    state = heads * head_dim * head_dim
    for seq_len in (1024, 8192):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, seq_len, heads, head_dim, generator=generator)

        def sent(algo: str, x: Tensor = x) -> CommunicationLog:
            def body(topology: Topology) -> None:
                local = shard(x, 1, layout_of(algo, {}), topology.rank, size).requires_grad_()
                out = cp.linear_attention(local, local, local, decay=0.5, algo=algo, group=topology)
                assert isinstance(out, Tensor)
                out.sum().backward()

            with cp.record_communication() as log:
                run_virtual(size, body)
            return log

        log = sent("lasp")
        for rank in range(size):
            assert log.bytes(rank=rank, phase="forward") == (4 * state if rank < size - 1 else 0)
            assert log.bytes(rank=rank, phase="backward") == (4 * state if rank > 0 else 0)
        hidden = seq_len * heads * head_dim
        # Of 4 tensors, those of this rank's tokens whose heads are elsewhere.
        ulysses = 4 * hidden // size
        exchanged = sent("linear_ulysses").bytes(rank=1, phase="forward")
        assert exchanged == 4 * ulysses * (size - 1) // size
        megatron = 2 * hidden + ulysses
        assert state < ulysses < megatron


# Documents in 12 tokens a rank, which fla's kernels take 4 at a time: none, of one token each, cut
# into segments, or in the middle of a rank between two that others share.
ON_CPU = {
    "none": lambda n: (),
    "tokens": lambda n: (*range(1, n),),
    "long": lambda n: (1, n - 2),
    "shared": lambda n: (*range(5, n, 6),),
    "many": lambda n: (3, 4, n // 2 - 1, n // 2, n // 2 + 2, n - 1),
}


@pytest.mark.parametrize(
    ("case", "size", "documents", "rates", "causal", "batch"),
    pairwise(tuple(cases()), (1, 2, 3, 4), tuple(ON_CPU), tuple(RATES), (True, False), (1, 2)),
    ids=str,
)
def test_with_flas_kernels(
    case: Case, size: int, documents: str, rates: str, causal: bool, batch: int
) -> None:
    """With stand-ins for them; outputs, states and all gradients."""
    seq_len = 12 * size
    starts = tuple(sorted({n for n in ON_CPU[documents](seq_len) if 0 < n < seq_len}))
    of_heads = RATES[rates]
    expected = linear_expected(of_heads, seq_len, causal=causal, documents=starts, batch=batch)
    bounds = (0, *starts, seq_len)
    with fla_on_cpu():
        results, _ = run(
            case, expected, size, causal=causal, states=True, cu_seqlens=bounds, kernel="fla"
        )
        assert_all_match(case, results, expected)
        assert launches()


@pytest.mark.parametrize("algo", cp.available("linear"))
def test_flas_kernels_with_ranks_without_tokens(algo: str) -> None:
    with fla_on_cpu():
        for seq_len, starts in ((4, (1, 3)), (23, (2, 9, 10)), (1, ())):
            expected = linear_expected(RATES["slopes"], seq_len, documents=starts)
            bounds = (0, *starts, seq_len)
            results, _ = run(Case(algo), expected, 5, states=True, cu_seqlens=bounds, kernel="fla")
            assert_all_match(Case(algo), results, expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_as_many_launches_for_any_number_of_documents(case: Case, causal: bool) -> None:
    """Of each of fla's kernels."""
    seq_len = 64
    of_rates = 1.0, 0.9, 0.5, 1.0
    with fla_on_cpu():
        found = []
        for starts in ((32,), (14, 32, 34), (*range(1, 64),)):
            expected = linear_expected(of_rates, seq_len, causal=causal, documents=starts, batch=1)
            bounds = (0, *starts, seq_len)
            results, _ = run(
                case, expected, 2, causal=causal, states=True, cu_seqlens=bounds, kernel="fla"
            )
            assert_all_match(case, results, expected)
            found.append(Counter(name for name, _ in launches()))
    ways = 1 if causal else 2
    of_both_ranks = 2 * ways
    assert {name: count for name, count in found[0].items() if name != "add_decayed_"} == {
        "chunk_fwd_kernel_h": 2 * of_both_ranks,  # states that leave, and those between chunks
        "fused_chunk_fwd_kernel": of_both_ranks,
        "chunk_bwd_kernel_dh": 2 * of_both_ranks,
        "chunk_bwd_dqkwg": of_both_ranks,
        "chunk_bwd_dv": of_both_ranks,
    }
    assert all(one == found[0] for one in found)


def test_a_state_in_another_order_of_memory() -> None:
    """fla's kernels read states by their addresses."""
    expected = linear_expected(RATES["half"], 8, batch=1)
    turned = replace(expected, initial=expected.initial.mT.contiguous().mT)
    assert not turned.initial.is_contiguous()
    with fla_on_cpu():
        results, _ = run(Case("lasp"), turned, 1, states=True, kernel="fla")
    assert_all_match(Case("lasp"), results, expected)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("documents", [(), (1, 2, 9)], ids=["one", "documents"])
def test_the_reference_for_gpus(documents: tuple[int, ...], causal: bool) -> None:
    """All pairs of tokens give what the recurrence does."""
    expected = linear_expected(RATES["slopes"], 12, causal=causal, documents=documents)
    rates = torch.tensor(expected.rates, dtype=torch.float64)
    inputs = expected.q, expected.k, expected.v, rates, expected.initial
    out, final = all_pairs(*inputs, causal=causal, documents=documents)
    assert relative_error(out, expected.out) <= 1e-12
    assert relative_error(final, expected.final) <= 1e-12


# On a GPU: one document, and 500 of them in 8192 tokens, of which one is cut into segments, some
# have one token, and ranks begin and end with a document, or in the middle of one.
GPU_TOKENS = 8192
GPU_DOCUMENTS = {
    "one": (),
    "many": tuple(sorted({1, 2, 3, 2048, 2100, *range(4200, 8192, 8), 8191})),
}


@pytest.mark.gpu
@pytest.mark.parametrize("documents", GPU_DOCUMENTS)
@pytest.mark.parametrize("heads", [4, 5])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_on_a_gpu(case: Case, size: int, causal: bool, heads: int, documents: str) -> None:
    """With fla's kernels, in bfloat16, against all pairs of tokens in float64; with states."""
    pytest.importorskip("fla")
    generator = torch.Generator("cuda").manual_seed(0)
    rates = (1.0, 0.996, 0.94, 0.5, 0.98)[:heads]
    starts = GPU_DOCUMENTS[documents]

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    whole = [(random(1, GPU_TOKENS, heads, 128) / 4).bfloat16() for _ in range(4)]
    initial, dfinal = (random(1, heads, 128, 128) for _ in range(2))
    wide = [x.double().requires_grad_() for x in (*whole[:3], initial)]
    out, final = all_pairs(
        *wide[:3],
        torch.tensor(rates, dtype=torch.float64, device="cuda"),
        wide[3],
        causal=causal,
        documents=starts,
    )
    gradients = torch.autograd.grad((out, final), wide, (whole[3].double(), dfinal.double()))
    wanted = (out.detach(), *gradients[:3], final.detach(), gradients[3])
    layout = layout_of(case.algo, dict(case.options))

    def body(topology: Topology) -> tuple[Tensor | None, ...]:
        *qkv, dout = (shard(x, 1, layout, topology.rank, size) for x in whole)
        inputs = [x.requires_grad_() for x in (*qkv, initial.clone())]
        got = cp.linear_attention(
            *inputs[:3],
            decay=rates,
            algo=case.algo,
            group=topology,
            causal=causal,
            kernel="fla",
            initial_state=inputs[3],
            output_final_state=True,
            cu_seqlens=(0, *starts, GPU_TOKENS),
            **dict(case.options),
        )
        # By default one thread takes the backward of all ranks, which wait for each other in it.
        with torch.autograd.set_multithreading_enabled(False):
            like = dout, dfinal / size
            found = torch.autograd.grad(got, inputs, like, allow_unused=True)
        return (got[0].detach(), *found[:3], got[1].detach(), found[3])

    *parts, finals, dinitials = zip(*run_virtual(size, body, timeout_s=200), strict=True)
    names = ("out", "dq", "dk", "dv", "the final state", "the gradient of the initial state")
    found = [unshard(list(part), 1, layout) for part in parts]
    found += [finals[0], sum(x for x in dinitials if x is not None)]
    for name, got, want in zip(names, found, wanted, strict=True):
        error = relative_error(got, want)
        assert error < 1e-2, f"{case}: {name} is off by {error:.1e}"
