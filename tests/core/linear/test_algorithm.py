"""Passing of states with gates and the delta rule: the recurrence in float64, and bytes."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.registry import create_linear, layout_of
from tests.linear_bytes import counted, stated
from tests.linear_oracle import gated_recurrence
from tests.oracle import relative_error
from tests.pairwise import pairwise

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


NAMES = "out", "final", "dq", "dk", "dv", "dgate", "dbeta", "dinitial"


@dataclass(frozen=True)
class Drawn:
    """Whole tensors, float64. Attributes: dtypes of tokens are those of the first three."""

    tokens: list[Tensor | None]  # q, k, v, gate, beta
    initial: Tensor
    dout: Tensor
    dfinal: Tensor
    documents: tuple[int, ...] = ()
    wanted: list[Tensor | None] = field(default_factory=list)

    @property
    def seq_len(self) -> int:
        return self.dout.shape[1]


def draw(
    family: str,
    strength: str,
    seq_len: int,
    documents: tuple[int, ...] = (),
    heads: tuple[int, int, int] = (2, 2, 2),
    *,
    expected: bool = True,
) -> Drawn:
    """Args: strength: of the gates. expected: with what the recurrence makes of it."""
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
    tokens = [q, k, v, gate, beta]
    initial, dfinal = (random(states, DIM, VALUE_DIM) for _ in range(2))
    made = Drawn(tokens, initial, random(seq_len, all_heads, VALUE_DIM), dfinal, documents)
    if not expected:
        return made
    asked = [None if x is None else x.clone().requires_grad_() for x in (*tokens, initial)]
    out, final = gated_recurrence(*asked, documents)
    some = [x for x in asked if x is not None]
    gradients = iter(torch.autograd.grad((out, final), some, (made.dout, dfinal)))
    made.wanted.extend([out.detach(), final.detach()])
    made.wanted.extend(None if x is None else next(gradients) for x in asked)
    return made


def run(
    drawn: Drawn,
    algo: str,
    layout: str,
    size: int,
    *,
    dtype: torch.dtype = torch.float64,
    states: bool = True,
) -> tuple[list[Tensor | None], CommunicationLog]:
    """The same as `Drawn.wanted` from so many virtual ranks, and what they sent."""
    options = {} if algo == "lasp" else {"layout": layout}
    bounds = (0, *drawn.documents, drawn.seq_len) if drawn.documents else None
    cut = layout_of(algo, options).for_documents(drawn.documents)

    def body(topology: Topology) -> list[Tensor | None]:
        def mine(x: Tensor | None) -> Tensor | None:
            return None if x is None else shard(x, 1, cut, topology.rank, size).to(dtype)

        asked = [mine(x) for x in drawn.tokens]
        asked = [None if x is None else x.requires_grad_() for x in asked]
        q, k, v, gate, beta = asked
        initial = drawn.initial.clone().requires_grad_() if states else None
        got = cp.linear_attention(
            *(q, k, v),
            gate=gate,
            beta=beta,
            algo=algo,
            group=topology,
            cu_seqlens=bounds,
            seq_len=drawn.seq_len,
            initial_state=initial,
            output_final_state=states,
            **options,
        )
        out, final = got if states else (got, None)
        results, like = [out], [mine(drawn.dout)]
        if states:
            # Every rank's loss takes an unequal part of the final state.
            results.append(final)
            like.append((topology.rank + 1) / (size * (size + 1) / 2) * drawn.dfinal)
        some = [x for x in (*asked, initial) if x is not None]
        gradients = iter(torch.autograd.grad(results, some, like, allow_unused=True))
        found = [None if x is None else next(gradients) for x in (*asked, initial)]
        return [out.detach(), None if final is None else final.detach(), *found]

    with cp.record_communication() as log:
        results = run_virtual(size, body)
    found: list[Tensor | None] = []
    for name, parts in zip(NAMES, zip(*results, strict=True), strict=True):
        if all(x is None for x in parts):
            found.append(None)
        elif name == "final":
            assert all(parts[0].equal(x) for x in parts)
            found.append(parts[0])
        elif name == "dinitial":
            found.append(sum(x for x in parts if x is not None))
        else:
            found.append(unshard(list(parts), 1, cut))
    return found, log


def assert_same(found: list[Tensor | None], wanted: list[Tensor | None], bound: float) -> None:
    for name, got, want in zip(NAMES, found, wanted, strict=True):
        assert (got is None) == (want is None), name
        if got is not None:
            assert got.isfinite().all(), name
            error = relative_error(got, want)
            assert error <= bound, f"{name} is off by {error:.1e}"


DOCUMENTS = {
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
        tuple(DOCUMENTS),
        HEADS,
    ),
    ids=str,
)
def test_equals_the_recurrence(
    family: str,
    strength: str,
    size: int,
    place: tuple[str, str],
    documents: str,
    heads: tuple[int, int, int],
) -> None:
    """Outputs, final states, gradients of tokens, gates and the initial state."""
    seq_len = 10 * size if size > 2 else 36
    starts = DOCUMENTS["multiples" if place[1] == "thd" and documents == "anywhere" else documents](
        size, seq_len
    )
    if place[1] == "thd":
        seq_len = -(-seq_len // (2 * size)) * 2 * size
    if place[1] == "zigzag":
        seq_len = 12 * size
    drawn = draw(family, strength, seq_len, starts, heads)
    found, _ = run(drawn, *place, size)
    assert_same(found, drawn.wanted, 1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_bytes_are_stated(family: str) -> None:
    kind, delta = FAMILIES[family]
    gates = [DIM if kind == "channels" else 1] * (kind is not None) + [1] * delta
    for algo, layout in PLACES:
        documents = () if layout == "contiguous" else (12, 36)
        drawn = draw(family, "plain", 48, documents, expected=False)
        _, log = run(drawn, algo, layout, 3, dtype=torch.bfloat16)
        shape = LinearShape(2, 48, 2, DIM, VALUE_DIM)
        of_gates = {"transition": DIM * DIM if delta else gates[0], "gates": gates}
        settings = {"causal": True, "final_state": True, "documents": documents, **of_gates}

        options = {} if algo == "lasp" else {"layout": layout}
        for rank in range(3):
            made = create_linear(algo, VirtualWorld(3).topology(rank), options)
            assert counted(log, rank) == stated(made, shape, rank, **settings)


@pytest.mark.parametrize("family", ["gla", "gated_delta_net", "kda"])
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
    whole = layout_of("lasp2", {})

    def attend(topology: Topology, dtype: torch.dtype) -> list[Tensor]:
        def mine(x: Tensor) -> Tensor:
            return shard(x, 1, whole, topology.rank, topology.size).to(dtype)

        asked = [None if x is None else mine(x).requires_grad_() for x in (q, k, v, gate, beta)]
        q_, k_, v_, gate_, beta_ = asked
        out = cp.linear_attention(
            q_, k_, v_, gate=gate_, beta=beta_, algo="lasp2", group=topology, seq_len=tokens
        )
        some = [x for x in asked if x is not None]
        return [out.detach(), *torch.autograd.grad(out, some, mine(dout))]

    (wanted,) = run_virtual(1, lambda topology: attend(topology, torch.float64))
    ranks = run_virtual(3, lambda topology: attend(topology, torch.float32))
    for parts, want in zip(zip(*ranks, strict=True), wanted, strict=True):
        got = unshard(list(parts), 1, whole)
        assert got.isfinite().all()
        assert relative_error(got, want) < 5e-5
