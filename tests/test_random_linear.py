"""Linear attention with random options, lengths, rates and documents, against the recurrence."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.layout import Layout, document_starts, shard, unshard
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import algorithm_class, layout_of
from tests.fla_on_cpu import fla_on_cpu
from tests.linear_oracle import recurrence
from tests.random_tests import examples
from tests.test_random_attention import World, worlds


@dataclass(frozen=True)
class LinearAttention:
    """One call.

    Attributes: bounds: cu_seqlens. initial, final: whether there are such states. wanted: whether
        q, k, v and the initial state require gradients. strided: inputs are not contiguous.
        kernel: "fla" with stand-ins for its kernels.
    """

    algo: str
    options: tuple[tuple[str, str], ...]
    seq_len: int
    batch: int
    head_dim: int
    value_dim: int
    rates: tuple[float, ...]
    bounds: tuple[int, ...]
    causal: bool
    initial: bool
    final: bool
    wanted: tuple[bool, ...]
    strided: bool
    kernel: str
    seed: int

    @property
    def layout(self) -> Layout:
        """The layout, which may follow the documents."""
        documents = document_starts(self.bounds, self.seq_len)
        return layout_of(self.algo, dict(self.options)).for_documents(documents)

    def inputs(self) -> list[Tensor]:
        """q, k, v, initial state, and the gradients of out and of the final state."""
        generator = torch.Generator().manual_seed(self.seed)
        heads, dims = len(self.rates), (self.head_dim, self.value_dim)
        tokens, state = (self.batch, self.seq_len, heads), (self.batch, heads, *dims)
        sizes = [*((*tokens, dim) for dim in (dims[0], *dims)), state, (*tokens, dims[1]), state]
        return [torch.randn(size, generator=generator, dtype=torch.float64) for size in sizes]

    def expected(self) -> list[Tensor]:
        """Out, final state, and gradients of q, k, v and the initial state."""
        *inputs, dout, dfinal = self.inputs()
        initial = inputs[3] if self.initial else torch.zeros_like(inputs[3])
        asked = [x.requires_grad_() for x in (*inputs[:3], initial)]
        out, final = recurrence(
            *asked[:3],
            torch.tensor(self.rates, dtype=torch.float64),
            asked[3],
            causal=self.causal,
            documents=document_starts(self.bounds, self.seq_len),
        )
        loss = (out * dout).sum() + (final * dfinal).sum() * self.final
        gradients = torch.autograd.grad(loss, asked, allow_unused=True, materialize_grads=True)
        return [out.detach(), final.detach(), *gradients]


@st.composite
def linear_attentions(draw: st.DrawFn, world: World) -> LinearAttention:
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
    return LinearAttention(
        algo,
        tuple(sorted(options.items())),
        seq_len,
        draw(st.integers(1, 2)),
        draw(st.sampled_from([1, 4])),
        draw(st.sampled_from([1, 3])),
        tuple(draw(rate) for _ in range(heads)),
        (0, *sorted(edges), seq_len),
        *(draw(st.booleans()) for _ in range(3)),
        draw(st.just((True,) * 4) | st.tuples(*[st.booleans()] * 4)),
        draw(st.booleans()),
        draw(st.sampled_from(["auto", "fla"])),
        draw(st.integers(0, 99)),
    )


def call(one: LinearAttention, topology: Topology) -> list[Tensor | None]:
    """Out, final state, and gradients of q, k, v and the initial state."""
    layout, rank, size = one.layout, topology.rank, topology.size
    *whole, initial, dout, dfinal = one.inputs()
    mine = [shard(x, 1, layout, rank, size) for x in (*whole, dout)]
    if one.strided:
        mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    asked = [*mine[:3], *([initial] if one.initial else [])]
    for x, wanted in zip(asked, one.wanted, strict=False):
        x.requires_grad_(wanted)
    got = cp.linear_attention(
        *mine[:3],
        decay=one.rates,
        algo=one.algo,
        group=topology,
        causal=one.causal,
        initial_state=initial if one.initial else None,
        output_final_state=one.final,
        seq_len=one.seq_len,
        cu_seqlens=one.bounds,
        kernel=one.kernel,
        **dict(one.options),
    )
    out, final = got if isinstance(got, tuple) else (got, None)
    wanted = [x for x in asked if x.requires_grad]
    found: list[Tensor | None] = [out.detach(), None if final is None else final.detach()]
    if not wanted:
        return [*found, *[None] * 4]
    # Every rank's loss takes an unequal part of the final state.
    part = 2 * (rank + 1) / (size * (size + 1))
    results = (out,) if final is None else (out, final)
    like = (mine[3],) if final is None else (mine[3], part * dfinal)
    gradients = iter(
        torch.autograd.grad(results, wanted, like, allow_unused=True, materialize_grads=True)
    )
    found += [next(gradients) if x.requires_grad else None for x in asked]
    return [*found, *([] if one.initial else [None])]


def refusal(world: World, calls: Sequence[LinearAttention]) -> str | None:
    """Why all ranks refuse the calls; None: they make them, with the results of the recurrence."""

    def body(topology: Topology) -> list[list[Tensor | None]] | str:
        try:
            return [call(one, topology) for one in calls]
        except ContextParallelError as error:
            return str(error)

    with fla_on_cpu():
        results = world.run(body)
    refusals = [of_rank for of_rank in results if isinstance(of_rank, str)]
    if refusals:
        assert len(refusals) == world.size
        return refusals[0]
    names = "out", "final state", "dq", "dk", "dv", "dinitial"
    for number, one in enumerate(calls):
        for index, (name, want) in enumerate(zip(names, one.expected(), strict=True)):
            of_ranks = [of_rank[number][index] for of_rank in results]
            if of_ranks[0] is None:
                assert of_ranks == [None] * len(of_ranks)
                continue
            if name == "final state":
                assert all(map(of_ranks[0].equal, of_ranks))
                whole = of_ranks[0]
            else:
                whole = sum(of_ranks) if name == "dinitial" else unshard(of_ranks, 1, one.layout)
            error = (whole - want).norm() / want.norm().clamp_min(1e-3)
            assert error <= 1e-10, f"{name} of call {number} is off by {error:.1e}"
    return None


@examples(15)
@given(st.data())
def test_equals_the_recurrence(data: st.DataObject) -> None:
    world = data.draw(worlds())
    calls = data.draw(st.lists(linear_attentions(world), min_size=1, max_size=2))
    if reason := refusal(world, calls):
        event(f"refused: {reason[:70]}")
