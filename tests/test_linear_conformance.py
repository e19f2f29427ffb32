"""Every algorithm of linear attention against the recurrence in float64: forward, all gradients."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Layout, shard, unshard
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import create_linear, layout_of
from tests.fla_on_cpu import fla_on_cpu, launches
from tests.linear_bytes import counted, stated
from tests.linear_oracle import LinearExpected, linear_expected
from tests.oracle import relative_error


@dataclass(frozen=True)
class Case:
    """One algorithm with its options."""

    algo: str
    options: tuple[tuple[str, str], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.algo, *(value for _, value in self.options)])


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
    "longer than a kernel's chunk": lambda size: 90 * min(size, 3),
    "chunks": lambda size: 12 * size,
    "few": lambda size: max(1, size - 1),
    "two": lambda size: 2,
}
ROWS = [(name, kernel) for name in DOCUMENTS for kernel in ("auto", "fla")]
ROWS.append(("none", "bfloat16"))


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
    seq_len = expected.q.shape[1]
    layout = layout_for(case, cu_seqlens)

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


def layout_for(case: Case, cu_seqlens: Sequence[int] | None) -> Layout:
    return layout_of(case.algo, dict(case.options)).for_documents(tuple(cu_seqlens or ())[1:-1])


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

    Args: documents: where those but the first one begin. kernel: "bfloat16": "auto", of tensors in
        bfloat16 and states in float32, and the error is that of rounding inputs and outputs once.
    """
    sizes = {"causal": causal, "documents": documents, "states": states, "batch": batch}
    expected = linear_expected(RATES[rates], seq_len, **sizes)
    bounds = (0, *documents, seq_len) if documents else None
    narrow = kernel == "bfloat16"
    settings = {"causal": causal, "states": states, "cu_seqlens": bounds}
    settings |= {"dtype": torch.bfloat16 if narrow else torch.float64}
    with fla_on_cpu() if kernel == "fla" else nullcontext():
        results, log = run(case, expected, size, kernel="auto" if narrow else kernel, **settings)
        assert (kernel == "fla") == bool(launches())
    bound = 6e-3 if narrow else 1e-9 if seq_len > 64 * size else 1e-10
    for name in ("out", "dq", "dk", "dv"):
        whole = unshard([getattr(x, name) for x in results], 1, layout_for(case, bounds))
        error = relative_error(whole, getattr(expected, name))
        assert error <= bound, f"{case}: {name} is off by {error:.1e}"
    for result in results if states else ():
        assert result.final.dtype == (torch.float32 if narrow else torch.float64)
        assert relative_error(result.final, expected.final) <= bound
    if states:  # the ranks' gradients of the initial state are those of their losses' sum
        dinitial = sum(result.dinitial for result in results if result.dinitial is not None)
        assert relative_error(dinitial, expected.dinitial) <= bound
    widths = {} if narrow else {"element_bytes": 8, "wide_bytes": 8}
    shape = LinearShape(*expected.q.shape, expected.v.shape[3], **widths)
    said = {"causal": causal, "final_state": states, "documents": documents}
    decays = rates != "plain" or bool(documents)  # else both directions have one total

    def compare(topology: Topology) -> None:
        made, rank = create_linear(case.algo, topology, dict(case.options)), topology.rank
        assert counted(log, rank) == stated(made, shape, rank, decays=decays, **said)

    if seq_len >= size:  # formulas are for ranks that all have tokens
        run_virtual(size, compare)


def table() -> Iterator[Any]:
    """Each case with all documents and kernels, and with all sizes, lengths and rates by turns."""
    turn = 0
    for case in cases():
        for (documents, kernel), causal in product(ROWS, (True, False)):
            turn += 1
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
    expected = linear_expected(RATES["slopes"], 6 * size, batch=0)
    for result in run(case, expected, size, states=True)[0]:
        assert result.final.shape == expected.initial.shape
        assert result.out.shape == result.dv.shape == (0, 6, 4, 6)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("case", tuple(cases()), ids=str)
def test_as_many_launches_for_any_number_of_documents(case: Case, causal: bool) -> None:
    """Of each of fla's kernels."""
    seq_len = 24
    of_rates = 1.0, 0.9, 0.5, 1.0
    with fla_on_cpu():
        found = []
        for starts in ((12,), (5, 12, 14), (*range(1, 24),)):
            expected = linear_expected(of_rates, seq_len, causal=causal, documents=starts, batch=1)
            bounds = (0, *starts, seq_len)
            run(case, expected, 2, causal=causal, states=True, cu_seqlens=bounds, kernel="fla")
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
        (found,), _ = run(Case("lasp"), turned, 1, states=True, kernel="fla")
    for name in ("out", "final", "dq", "dk", "dv", "dinitial"):
        assert relative_error(getattr(found, name), getattr(expected, name)) <= 1e-10
