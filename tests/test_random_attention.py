"""Attention with random options, shapes and masks, against attention over the whole sequence.

Options are drawn from the types of each algorithm's `Options`, so that new ones are drawn too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from threading import Thread
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.documents import document_starts
from megatron_cp_plugin.core.layout import Layout, shard, unshard
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.core.virtual import run_virtual
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import algorithm_class, create, layout_of
from tests.any_placement import registered
from tests.oracle import naive_attention
from tests.random_tests import examples
from tests.span_masks import dense, random_spans

HEADS = [(4, 4), (4, 2), (4, 1), (8, 2), (2, 2), (1, 1), (7, 1), (5, 5), (6, 3), (33, 11), (33, 33)]
# Of what is compared, in norm: float64 exactly, half precision as far as its partial sums go.
BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def foreign() -> Iterator[None]:
    with registered():
        yield


@dataclass(frozen=True)
class Choice:
    """An algorithm with its options, and the ranks that it runs on."""

    algo: str
    options: tuple[tuple[str, object], ...]
    size: int
    ranks_per_node: int
    peer_access: bool


@dataclass(frozen=True)
class Attention:
    """One call.

    Attributes: mask: as of `cp.attention`. wanted: of q, k, v and the sink, which require
        gradients; none: without autograd. strided: inputs that are not contiguous. summed: the loss
        is a sum, whose gradient takes no memory.
    """

    seq_len: int
    batch: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    mask: tuple[tuple[str, Any], ...]
    sink: bool
    wanted: tuple[bool, bool, bool, bool]
    kernel: str
    dtype: torch.dtype
    strided: bool
    summed: bool
    seed: int

    @property
    def seen(self) -> Tensor:
        """[N,N]: whether a query sees a key, by the definition of the mask."""
        mask, n = dict(self.mask), self.seq_len
        if "spans" in mask:
            return dense(mask["spans"], n) > 0
        i, j = torch.arange(n)[:, None], torch.arange(n)[None, :]
        seen = torch.ones(n, n, dtype=torch.bool)
        if mask.get("causal", True):
            seen &= j <= i
        if "window" in mask:
            seen &= i - j < mask["window"]
        if "cu_seqlens" in mask:
            lengths = torch.tensor(mask["cu_seqlens"]).diff()
            document = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
            seen &= document[:, None] == document[None, :]
        return seen

    @property
    def followed(self) -> Slices | tuple[int, ...]:
        mask = dict(self.mask)
        if "spans" in mask:
            return Slices.of(mask["spans"], self.seq_len)
        bounds = mask.get("cu_seqlens")
        return () if bounds is None else document_starts(bounds, self.seq_len)

    def inputs(self) -> list[Tensor]:
        """q, k, v, dout of the whole sequence, and the sink."""
        generator = torch.Generator().manual_seed(self.seed)
        of_head = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        of_value = (self.kv_heads, self.value_dim), (self.heads, self.value_dim)
        found = []
        for heads, dim in (*of_head, *of_value):
            shape = self.batch, self.seq_len, heads, dim
            found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        if self.summed:
            found[3].fill_(1)
        sink = torch.randn(self.heads, generator=generator, dtype=torch.float64)
        return [x.to(self.dtype) for x in (*found, sink)]

    def expected(self) -> list[Tensor]:
        """out, dq, dk, dv, dsink in float64."""
        *whole, dout, sink = (x.double() for x in self.inputs())
        asked = [x.requires_grad_() for x in (*whole, sink)]
        out = naive_attention(
            *asked[:3],
            causal=False,
            scale=self.head_dim**-0.5,
            seen=self.seen,
            sink=asked[3] if self.sink else None,
        )
        gradients = torch.autograd.grad(out, asked, dout, allow_unused=True)
        zero = torch.zeros_like(sink)
        return [out.detach(), *(zero if x is None else x for x in gradients)]


def value_of(draw: st.DrawFn, name: str, kind: object, size: int) -> object:
    if get_origin(kind) is Literal:
        return draw(st.sampled_from(get_args(kind)))
    if kind is bool:
        return draw(st.booleans())
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    numbers = {
        "chunks": [0, 1, 2, 3, 4, 9],
        "gathered_mib": [1, 1024],
        "seed": list(range(10)),
        "steps": list(range(1, 10)),
        "parts": [1, 2, 3],
    }
    return draw(st.sampled_from(numbers.get(name, [0, *divisors])))


@st.composite
def choices(draw: st.DrawFn, most: int = 8) -> Choice:
    size = draw(st.integers(1, most))
    algo = draw(st.sampled_from(cp.available("softmax")))
    options_of = algorithm_class(algo).Options
    kinds = get_type_hints(options_of)
    options = {
        field.name: value_of(draw, field.name, kinds[field.name], size)
        for field in fields(options_of)
        if draw(st.booleans())
    }
    if options.get("rows") and options.get("cols"):
        options["cols"] = size // int(str(options["rows"]))
    divisors = [n for n in range(1, size + 1) if size % n == 0]
    per_node = draw(st.sampled_from(divisors)) if draw(st.booleans()) else size
    peer_access = per_node == size and draw(st.booleans())
    if options.get("transport") == "peer" and not peer_access:
        del options["transport"]
    return Choice(algo, tuple(sorted(options.items())), size, per_node, peer_access)


@st.composite
def attention_masks(draw: st.DrawFn, seq_len: int, multiple: int) -> tuple[tuple[str, Any], ...]:
    """Args: multiple: of which lengths of documents are."""
    kind = draw(st.sampled_from(["plain", "documents", "spans"]))
    if kind == "spans":
        return (("spans", tuple(random_spans(draw(st.randoms()), seq_len))),)
    mask: dict[str, Any] = {"causal": draw(st.booleans())}
    if mask["causal"] and draw(st.booleans()):
        mask["window"] = draw(st.integers(1, seq_len))
    if kind == "documents":
        edges = st.integers(0, seq_len // multiple).map(lambda n: n * multiple)
        mask["cu_seqlens"] = (0, *sorted(draw(st.lists(edges, max_size=7))), seq_len)
    return tuple(mask.items())


@st.composite
def attentions(draw: st.DrawFn, choice: Choice) -> Attention:
    layout = layout_of(choice.algo, dict(choice.options))
    multiple = 1
    seq_len = draw(st.integers(1, 6 * choice.size))
    if layout.name == "thd" and choice.size > 1:
        multiple = 2 * choice.size
        seq_len = multiple * draw(st.integers(1, 4))
    heads, kv_heads = draw(st.sampled_from(HEADS))
    head_dim = draw(st.sampled_from([8, 8, 1, 3]))
    value_dim = draw(st.sampled_from([head_dim, head_dim, 5]))
    wanted = (True,) * 4
    if draw(st.integers(0, 2)) == 0:
        wanted = draw(st.tuples(*[st.booleans()] * 4))
    dtypes = [torch.float64] * 4 + [torch.float32, torch.bfloat16]
    return Attention(
        seq_len,
        draw(st.integers(1, 2)),
        heads,
        kv_heads,
        head_dim,
        value_dim,
        draw(attention_masks(seq_len, multiple)),
        draw(st.booleans()),
        wanted,
        draw(st.sampled_from(["auto", "torch_cpu", "reference"])),
        draw(st.sampled_from(dtypes)),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.integers(0, 99)),
    )


@dataclass(frozen=True)
class Program:
    """Calls of one algorithm, one after another on the same ranks.

    Attributes: later: all backwards come after all forwards, the last one first. threads: how many
        such groups of ranks there are in the process.
    """

    choice: Choice
    calls: tuple[Attention, ...]
    order: tuple[int, ...]
    later: bool
    threads: int


@st.composite
def programs(draw: st.DrawFn, most: int = 8) -> Program:
    choice = draw(choices(most))
    calls = tuple(draw(attentions(choice)) for _ in range(draw(st.sampled_from([1, 1, 2]))))
    order = (0,) if len(calls) == 1 else draw(st.sampled_from([(0, 1), (0, 1, 0), (0, 1, 0, 1)]))
    return Program(choice, calls, order, draw(st.booleans()), draw(st.sampled_from([1, 1, 1, 2])))


Found = list[Tensor | None]  # out, dq, dk, dv, dsink
Backward = Callable[[], Found]


def call_of(choice: Choice, one: Attention, layout: Layout, topology: Topology) -> Backward:
    """Makes a call; returns what makes its backward."""
    *whole, sink = one.inputs()
    mine = [shard(x, 1, layout, topology.rank, topology.size) for x in whole]
    if one.strided:
        mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    *inputs, dout = mine
    asked = (*inputs, sink)
    for x, wanted in zip(asked, one.wanted, strict=True):
        x.requires_grad_(wanted)
    out = cp.attention(
        *asked[:3],
        algo=choice.algo,
        group=topology,
        kernel=one.kernel,
        seq_len=one.seq_len,
        sink=asked[3] if one.sink else None,
        **dict(one.mask),
        **dict(choice.options),
    )
    if one.summed:
        dout = dout.new_ones(()).expand(dout.shape)

    def backward() -> Found:
        wanted = [x for x in asked[: 3 + one.sink] if x.requires_grad]
        if not wanted:
            return [out, None, None, None, None]
        found = iter(torch.autograd.grad(out, wanted, dout))
        gradients = [next(found) if x.requires_grad else None for x in asked[: 3 + one.sink]]
        return [out.detach(), *gradients, *([] if one.sink else [None])]

    return backward


def results_of(program: Program) -> list[list[Found]] | list[str]:
    """By rank and call; or what the ranks say, if they refuse."""
    choice = program.choice
    layouts = [
        layout_of(choice.algo, dict(choice.options)).within(one.followed) for one in program.calls
    ]

    def body(topology: Topology) -> list[Found] | str:
        waiting: list[Backward] = []
        found: list[Found] = []
        try:
            for number in program.order:
                waiting.append(call_of(choice, program.calls[number], layouts[number], topology))
                if not program.later:
                    found.append(waiting.pop()())
            while waiting:
                found.insert(0, waiting.pop()())
        except ContextParallelError as error:
            return str(error)
        return found

    return run_virtual(
        choice.size, body, 60.0, choice.ranks_per_node, peer_access=choice.peer_access
    )


def assert_equal(program: Program, results: list[list[Found]]) -> None:
    names = "out", "dq", "dk", "dv", "dsink"
    expected = [one.expected() for one in program.calls]
    for turn, number in enumerate(program.order):
        one = program.calls[number]
        layout = layout_of(program.choice.algo, dict(program.choice.options)).within(one.followed)
        for index, name in enumerate(names):
            of_ranks = [of_rank[turn][index] for of_rank in results]
            if of_ranks[0] is None:
                assert all(x is None for x in of_ranks)
                continue
            assert all(x is not None and x.dtype == one.dtype for x in of_ranks)
            whole = sum(of_ranks) if name == "dsink" else unshard(of_ranks, 1, layout)
            want = expected[number][index]
            floor = 1e-3 if one.dtype == torch.float64 else want.numel() ** 0.5
            error = ((whole.double() - want).norm() / want.norm().clamp_min(floor)).item()
            assert error <= BOUNDS[one.dtype], f"{name} of call {turn} is off by {error:.1e}"


@examples(40)
@given(programs())
def test_equals_unsplit_attention(program: Program) -> None:
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(results_of(program))
        except BaseException as error:
            errors.append(error)

    threads = [Thread(target=run) for _ in range(program.threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for results in found:
        if any(isinstance(of_rank, str) for of_rank in results):
            assert all(isinstance(of_rank, str) for of_rank in results), results
            event(f"refused: {results[0][:70]}")
            assert "\n" not in results[0]
        else:
            assert_equal(program, results)


@examples(40)
@given(choices(), st.data())
def test_sends_what_the_plan_says(choice: Choice, data: st.DataObject) -> None:
    one = data.draw(attentions(choice))
    program = Program(choice, (one,), (0,), False, 1)
    with cp.record_communication() as log:
        results = results_of(program)
    if isinstance(results[0], str):
        return
    width = one.dtype.itemsize
    wide = 8 if one.dtype == torch.float64 else 4
    sizes = one.batch, one.seq_len, one.heads, one.kv_heads, one.head_dim
    shape = Shape(*sizes, element_bytes=width, wide_bytes=wide, value_dim=one.value_dim)
    mask = dict(one.mask)
    seen = (
        Mask.of(one.followed)
        if "spans" in mask
        else Mask(mask["causal"], mask.get("window"), one.followed)
    )

    def compare(topology: Topology) -> None:
        algorithm = create(choice.algo, topology, dict(choice.options)).within(seen.followed)
        traffic, rank = algorithm.traffic(shape, seen, topology.rank), topology.rank
        assert log.bytes(rank=rank, phase="forward") == traffic.forward_bytes
        assert log.messages(rank=rank, phase="forward") == traffic.forward_messages
        if all(one.wanted[:3]):
            assert log.bytes(rank=rank, phase="backward") == traffic.backward_bytes
            assert log.messages(rank=rank, phase="backward") == traffic.backward_messages
        elif not any(one.wanted[:3]):
            assert log.bytes(rank=rank, phase="backward") == 0
        else:
            assert log.bytes(rank=rank, phase="backward") <= traffic.backward_bytes

    run_virtual(choice.size, compare, 60.0, choice.ranks_per_node, peer_access=choice.peer_access)
