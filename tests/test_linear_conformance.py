"""Every algorithm of linear attention against the recurrence in float64: forward, all gradients."""

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.layout import document_starts
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import algorithm_class, create_linear
from tests.fla_on_cpu import fla_on_cpu, launches
from tests.linear_bytes import counted, stated
from tests.linear_calls import Found, LinearCall, run
from tests.linear_oracle import Linear, LinearExpected, linear_expected
from tests.oracle import relative_error
from tests.pairwise import pairwise
from tests.random_tests import examples
from tests.test_conformance import Case
from tests.test_random_attention import World, worlds

LAYOUTS = ("contiguous", "zigzag", "documents")


def cases() -> Iterator[Case]:
    for algo in cp.available("linear"):
        if algo not in ("lasp2", "linear_ulysses"):
            yield Case(algo)
            continue
        for layout in LAYOUTS:
            yield Case(algo, (("layout", layout),))


RATES = {
    "plain": (1.0, 1.0, 1.0, 1.0),
    "half": (0.5, 0.5, 0.5, 0.5),
    # exp(-8h/H (1 - l/L)) of TransNormerLLM, and one head that forgets almost at once.
    "slopes": (1.0, 0.8187307530779818, 0.1353352832366127, 1e-6),
    "one head": (0.9,),
    "seven heads": tuple(0.97**head for head in range(7)),
}
SIZES = (3, 2, 4, 1, 5, 8)
# Documents other than the first one begin in the middle of runs, at their edges, one token after
# another, and in one run only. fla's kernels, in stand-ins for them, take 4 tokens at a time.
DOCUMENTS = {
    "none": lambda n: (),
    "inside": lambda n: (2, 4, 5, n // 2 - 1, n // 2 + 1, n - 1),
    "edges": lambda n: (*range(6, n, 6),),
    "tokens": lambda n: (*range(1, n),),
    "one run": lambda n: (n // 2 + 2,),
    "begins with a run": lambda n: (n // 2, n // 2 + 4),
}
LENGTHS = {
    "even": lambda size: 6 * size,
    "uneven": lambda size: 7 * size + size // 2 + 1,
    "longer than a kernel's chunk": lambda size: 70 * min(size, 3),
    "chunks": lambda size: 12 * size,
    "few": lambda size: max(1, size - 1),
    "two": lambda size: 2,
}
ROWS = [(name, kernel) for name in DOCUMENTS for kernel in ("auto", "fla")]
ROWS.append(("none", "bfloat16"))


def assert_conforms(
    case: Case,
    size: int,
    seq_len: int,
    rates: str = "slopes",
    *,
    causal: bool = True,
    documents: tuple[int, ...] = (),
    states: bool = True,
    kernel: str = "auto",
    batch: int = 2,
) -> None:
    """Outputs, final states and all gradients; bytes and messages as docstrings state them.

    Args: documents: where those but the first one begin. states: there are an initial and a final
        one. kernel: "bfloat16": "auto", of tensors in bfloat16 and states in float32, and the error
        is that of rounding inputs and outputs once.
    """
    sizes = {"causal": causal, "documents": documents, "states": states, "batch": batch}
    expected, narrow = linear_expected(RATES[rates], seq_len, **sizes), kernel == "bfloat16"
    bounds = (0, *documents, seq_len) if documents else None
    call = LinearCall(case.algo, case.options, expected, bounds, begins=states, ends=states)
    how = {"dtype": torch.bfloat16} if narrow else {"kernel": kernel}
    with fla_on_cpu() if kernel == "fla" else nullcontext():
        results, log = run(replace(call, **how), size)
        assert (kernel == "fla") == bool(launches())
    bound = 6e-3 if narrow else 1e-9 if seq_len > 64 * size else 1e-10
    call.assert_equals(results, expected, bound)
    for _, final, *_ in results if states else ():
        assert final.dtype == (torch.float32 if narrow else torch.float64)
    widths = {} if narrow else {"element_bytes": 8, "wide_bytes": 8}
    shape = LinearShape(*expected.q.shape, expected.v.shape[3], **widths)
    said = {"causal": causal, "final_state": states, "documents": documents}

    def compare(topology: Topology) -> None:
        made, rank = create_linear(case.algo, topology, dict(case.options)), topology.rank
        assert counted(log, rank) == stated(made, shape, rank, **said)

    if seq_len >= size:  # formulas are for ranks that all have tokens
        run_virtual(size, compare)


def table() -> Iterator[Any]:
    """Each case with all documents and kernels, and by turns with all sizes, lengths and rates, and
    both directions.
    """
    turn = 0
    for case in cases():
        for documents, kernel in ROWS:
            turn += 1
            causal = turn // 6 % 2 == 0
            size, rates = SIZES[turn % 6], tuple(RATES)[turn % 5]
            length = "chunks" if kernel == "bfloat16" else tuple(LENGTHS)[(turn // 2) % 6]
            seq_len, states = LENGTHS[length](size), turn % 4 != 1
            if ("layout", "zigzag") in case.options:
                seq_len = -(-seq_len // (2 * size)) * 2 * size
            starts = {n for n in DOCUMENTS[documents](seq_len) if 0 < n < seq_len}
            given = {"causal": causal, "documents": tuple(sorted(starts)), "states": states}
            given |= {"kernel": kernel, "batch": 1 + turn % 2}
            name = f"{case}-P{size}-{length}-{documents}-{kernel}"
            yield pytest.param(case, size, seq_len, rates, given, id=name)


@pytest.mark.parametrize(("case", "size", "seq_len", "rates", "given"), list(table()))
def test_equals_the_recurrence(
    case: Case, size: int, seq_len: int, rates: str, given: dict[str, Any]
) -> None:
    """A state begins anew at each document; the first one alone sees the initial state."""
    assert_conforms(case, size, seq_len, rates, **given)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_an_empty_batch(case: Case, size: int) -> None:
    call = LinearCall(case.algo, case.options, linear_expected(RATES["slopes"], 6 * size, batch=0))
    for out, final, *_, dv, _, _, _ in run(call, size)[0]:
        assert final.shape == call.given.initial.shape
        assert out.shape == dv.shape == (0, 6, 4, 6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_as_many_launches_for_any_number_of_documents(case: Case, causal: bool) -> None:
    """Of each of fla's kernels."""
    with fla_on_cpu():
        found = []
        for starts in ((12,), (5, 12, 14), (*range(1, 24),)):
            sizes = {"causal": causal, "documents": starts, "batch": 1}
            expected = linear_expected((1.0, 0.9, 0.5, 1.0), 24, **sizes)
            run(LinearCall(case.algo, case.options, expected, (0, *starts, 24), kernel="fla"), 2)
            found.append(Counter(name for name, _ in launches()))
    of_both_ranks = 2 * (1 if causal else 2)  # of each direction
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
    call = LinearCall("lasp", (), turned, kernel="fla")
    with fla_on_cpu():
        call.assert_equals(run(call, 1)[0], expected, 1e-10)


# Which gates there are, and whether it is the delta rule.
FAMILIES = {
    "simple_gla": ("heads", False),
    "gla": ("channels", False),
    "delta_rule": (None, True),
    "gated_delta_net": ("heads", True),
    "kda": ("channels", True),
}
PLACES = (
    ("lasp", "contiguous"),
    *(("lasp2", layout) for layout in ("contiguous", "zigzag", "thd", "documents")),
    *(("linear_ulysses", layout) for layout in ("contiguous", "thd", "documents")),
)
# Numbers of heads of q, k and v: equal ones, groups of q and k, grouped queries, both.
HEADS = ((2, 2, 2), (1, 1, 4), (4, 2, 2), (4, 1, 2))
DIM, VALUE_DIM = 4, 3


@cache
def gated(
    family: str,
    strength: str,
    seq_len: int,
    documents: tuple[int, ...] = (),
    heads: tuple[int, int, int] = (2, 2, 2),
) -> LinearExpected:
    """Args: strength: of the gates."""
    generator = torch.Generator().manual_seed(len(family) + seq_len)
    kind, delta = FAMILIES[family]
    states, all_heads = max(heads[1:]), max(heads)

    def random(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    q, k = (random(seq_len, count, DIM) for count in heads[:2])
    k = k / k.norm(dim=-1, keepdim=True)
    v, gate, beta = random(seq_len, heads[2], VALUE_DIM), None, None
    if kind is not None:
        drawn = random(seq_len, states, DIM) if kind == "channels" else random(seq_len, states)
        gate = {
            "plain": -drawn.abs() / 4,
            "near 0 and 1": -torch.where(drawn > 0, 1e-7, 20.0) * drawn.abs(),
            "-40": torch.where(drawn > 0.5, -40.0, -drawn.abs() / 8),
            "all -40": torch.full_like(drawn, -40.0),
        }[strength]
    if delta:
        beta = (random(seq_len, states) * (9 if strength == "near 0 and 1" else 1)).sigmoid()
    initial, dfinal = (random(states, DIM, VALUE_DIM) for _ in range(2))
    dout = random(seq_len, all_heads, VALUE_DIM)
    return Linear(q, k, v, gate, beta, initial, dout, dfinal, documents=documents).expected()


def gated_call(given: Linear, algo: str, layout: str, **how: Any) -> LinearCall:
    bounds = (0, *given.documents, given.tokens) if given.documents else None
    options = () if algo == "lasp" else (("layout", layout),)
    return LinearCall(algo, options, given, bounds, **how)


# Where documents of gated linear attention begin.
STARTS = {
    "one": lambda size, n: (),
    "multiples": lambda size, n: (2 * size, 6 * size),
    "anywhere": lambda size, n: (1, 2, n // 2 - 1, n // 2, n - 3),
}


@pytest.mark.parametrize(
    ("family", "strength", "size", "place", "documents", "heads"),
    pairwise(
        tuple(FAMILIES),
        ("plain", "near 0 and 1", "-40", "all -40"),
        (1, 2, 3, 4, 8),
        PLACES,
        tuple(STARTS),
        HEADS,
    ),
    ids=str,
)
def test_gates_and_the_delta_rule_equal_the_recurrence(
    family: str,
    strength: str,
    size: int,
    place: tuple[str, str],
    documents: str,
    heads: tuple[int, int, int],
) -> None:
    """Outputs, final states, gradients of tokens, gates and the initial state."""
    seq_len = 10 * size if size > 2 else 36
    starts = STARTS["multiples" if place[1] == "thd" and documents == "anywhere" else documents](
        size, seq_len
    )
    if place[1] == "thd":
        seq_len = -(-seq_len // (2 * size)) * 2 * size
    if place[1] == "zigzag":
        seq_len = 12 * size
    given = gated(family, strength, seq_len, starts, heads)
    call = gated_call(given, *place)
    call.assert_equals(run(call, size)[0], given, 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_of_gates_are_stated(family: str) -> None:
    """In bfloat16, with states in float32: off by little more than one rounding."""
    kind, delta = FAMILIES[family]
    gates = [DIM if kind == "channels" else 1] * (kind is not None) + [1] * delta
    for algo, layout in PLACES:
        given = gated(family, "plain", 48, () if layout == "contiguous" else (12, 36))
        call = gated_call(given, algo, layout, dtype=torch.bfloat16)
        results, log = run(call, 3)
        call.assert_equals(results, given, 1e-2)
        shape = LinearShape(2, 48, 2, DIM, VALUE_DIM)
        settings = {"transition": DIM * DIM if delta else gates[0], "gates": gates}
        settings |= {"causal": True, "final_state": True, "documents": given.documents}
        for rank in range(3):
            made = create_linear(algo, VirtualWorld(3).topology(rank), dict(call.options))
            assert counted(log, rank) == stated(made, shape, rank, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["kda", "gla", "gated_delta_net"])
def test_16k_tokens_in_float32(family: str) -> None:
    """Finite and right, outputs and gradients: P = 3 against one rank in float64, which shorter
    ones are compared with.
    """
    (kind, delta), tokens = FAMILIES[family], 16384
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, tokens, 1, 8, generator=generator) for _ in range(4))
    k = k / k.norm(dim=-1, keepdim=True)
    drawn = torch.rand(1, tokens, 1, *((8,) if kind == "channels" else ()), generator=generator)
    gate = torch.where(drawn > 0.9, -40.0, -1e-6) if kind else None
    beta = torch.rand(1, tokens, 1, generator=generator) if delta else None
    given = Linear(q, k, v, gate, beta, none := torch.zeros(1, 1, 8, 8), dout, none)
    call = LinearCall("lasp2", (), given, begins=False, ends=False)
    wanted = call.whole(run(call, 1)[0])
    found = call.whole(run(replace(call, dtype=torch.float32), 3)[0])
    for got, want in zip(found, wanted, strict=True):
        if got is not None:
            assert got.isfinite().all()
            assert relative_error(got, want) < 5e-5


@st.composite
def linear_calls(draw: st.DrawFn, world: World) -> LinearCall:
    """Random options, lengths, rates and documents."""
    algo = draw(st.sampled_from(cp.available("linear")))
    options: dict[str, Any] = {}
    for option, kind in get_type_hints(algorithm_class(algo).Options).items():
        options[option] = draw(st.sampled_from(get_args(kind)))
    seq_len = draw(st.integers(1, 6 * world.size))
    if options.get("layout") == "zigzag" and draw(st.booleans()):
        seq_len = 2 * world.size * draw(st.integers(1, 4))
    rate = st.sampled_from([1.0, 0.9, 0.5, 1e-6, 1e-300])
    heads = draw(st.sampled_from([1, 3, world.size, 2 * world.size]))
    edges = draw(st.lists(st.integers(0, seq_len), max_size=5))
    bounds = (0, *sorted(edges), seq_len)
    batch, dim, value_dim = (draw(st.sampled_from(few)) for few in ((1, 2), (1, 4), (1, 3)))
    rates = tuple(draw(rate) for _ in range(heads))
    causal, begins, ends, strided = (draw(st.booleans()) for _ in range(4))
    wanted = draw(st.just((True,) * 4) | st.tuples(*[st.booleans()] * 4))
    kernel = draw(st.sampled_from(["auto", "fla"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tokens, state = (batch, seq_len, heads), (batch, heads, dim, value_dim)
    sizes = [(*tokens, dim), (*tokens, dim), (*tokens, value_dim)]
    q, k, v, initial, dout, dfinal = (
        torch.randn(size, generator=generator, dtype=torch.float64)
        for size in (*sizes, state, sizes[2], state)
    )
    how = {"rates": rates, "causal": causal, "documents": document_starts(bounds, seq_len)}
    given = Linear(q, k, v, None, None, begins * initial, dout, ends * dfinal, **how)
    choice = algo, tuple(sorted(options.items()))
    return LinearCall(*choice, given, bounds, begins, ends, wanted, strided, kernel)


@examples(15)
@given(st.data())
def test_any_calls_equal_the_recurrence(data: st.DataObject) -> None:
    """Or all ranks refuse them."""
    world = data.draw(worlds())
    calls = data.draw(st.lists(linear_calls(world), min_size=1, max_size=2))

    def body(topology: Topology) -> list[Found] | str:
        try:
            return [one.on(topology) for one in calls]
        except ContextParallelError as error:
            return str(error)

    with fla_on_cpu():
        results = world.run(body)
    if refusals := [of_rank for of_rank in results if isinstance(of_rank, str)]:
        assert len(refusals) == world.size
        event(f"refused: {refusals[0][:70]}")
        return
    for one, of_ranks in zip(calls, zip(*results, strict=True), strict=True):
        one.assert_equals(of_ranks, one.given.expected(), 1e-10)
