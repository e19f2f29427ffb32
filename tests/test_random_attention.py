"""Attention with random options, shapes and masks, against attention over the whole sequence.

Options are drawn from the types of each algorithm's `Options`, so that new ones are drawn too.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from threading import Thread
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import torch
from hypothesis import event, given
from hypothesis import strategies as st
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.algorithms import ring
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import CommunicationLog
from megatron_cp_plugin.core.layout import Layout, document_starts, shard, unshard
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import algorithm_class, create
from tests.any_kernel import ABILITIES
from tests.any_placement import registered
from tests.oracle import naive_attention
from tests.peer_world import run_virtual
from tests.plan_check import traffic_of
from tests.random_tests import examples
from tests.span_masks import dense, random_spans
from tests.test_conformance import Case

HEADS = [(4, 4), (4, 2), (4, 1), (8, 2), (2, 2), (1, 1), (7, 1), (5, 5), (6, 3), (33, 11), (33, 33)]
FEW_HEADS = [(1, 1), (2, 1), (2, 2), (4, 2), (3, 3)]
# Of what is compared, in norm: float64 exactly, half precision as far as its partial sums go.
BOUNDS = {
    torch.float64: 1e-10,
    torch.float32: 1e-5,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
}


@pytest.fixture(scope="module", autouse=True)
def foreign() -> Iterator[None]:
    """Algorithms of others; and keys stay for the backward, however few."""
    with registered(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_KEPT", (1, 2**26))
        yield


@dataclass(frozen=True)
class World:
    """Virtual ranks, see `VirtualWorld`."""

    size: int
    ranks_per_node: int
    peer_access: bool

    def run[T](self, body: Callable[[Topology], T]) -> list[T]:
        return run_virtual(self.size, body, 60.0, self.ranks_per_node, peer_access=self.peer_access)


# What each test of one call begins with; other options are drawn.
CHOICES = [
    *(Case(algo, ()) for algo in ("ring", "zigzag", "distflash", "allgather", "ulysses", "usp")),
    *(Case(algo, (("layout", "documents"),)) for algo in ("zigzag", "allgather")),
    Case("distflash", (("helpers", "distance"),)),
    *(Case("attention2d", (("variant", name),)) for name in ("zigzag", "no", "overlap")),
    *(Case("any", (("relay", name),)) for name in ("none", "either")),
    Case("halves", ()),
]


@dataclass(frozen=True)
class Attention:
    """One call.

    Attributes:
        mask: as of `cp.attention`. wanted: whether q, k, v and the sink require gradients.
        named: the length is given where it need not be.
        loud: in float64, scores of which few count. strided: inputs are not contiguous.
        summed: the loss is a sum, whose gradient takes no memory. twice: the backward is made
            again, after somebody has changed the gradients of the first one in place.
    """

    choice: Case
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
    named: bool
    loud: bool
    strided: bool
    summed: bool
    twice: bool
    seed: int

    @property
    def shape(self) -> Shape:
        """Of the whole sequence."""
        wide = 8 if self.dtype == torch.float64 else 4
        sizes = self.batch, self.seq_len, self.heads, self.kv_heads, self.head_dim
        return Shape(*sizes, self.dtype.itemsize, wide, self.value_dim)

    @property
    def layout(self) -> Layout:
        return self.choice.layout.for_documents(mask_of(self.mask, self.seq_len).resolved)

    def inputs(self) -> list[Tensor]:
        """q, k, v, dout of the whole sequence, and the sink."""
        generator = torch.Generator().manual_seed(self.seed)
        of_head = (self.heads, self.head_dim), (self.kv_heads, self.head_dim)
        of_value = (self.kv_heads, self.value_dim), (self.heads, self.value_dim)
        found = []
        for heads, dim in (*of_head, *of_value):
            shape = self.batch, self.seq_len, heads, dim
            found.append(torch.randn(shape, generator=generator, dtype=torch.float64))
        if self.loud and self.dtype == torch.float64:
            found[0] *= 100
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
            seen=seen_by(self.mask, self.seq_len),
            sink=asked[3] if self.sink else None,
        )
        gradients = torch.autograd.grad(out, asked, dout, allow_unused=True)
        zero = torch.zeros_like(sink)
        return [out.detach(), *(zero if x is None else x for x in gradients)]


def mask_of(given: tuple[tuple[str, Any], ...], seq_len: int) -> Mask:
    mask = dict(given)
    window = mask.get("window")
    documents = document_starts(mask.get("cu_seqlens", (0, seq_len)), seq_len)
    if "spans" in mask:
        return Mask.of(Slices.of(mask["spans"], seq_len, documents), window)
    return Mask(mask["causal"], window, documents)


def seen_by(given: tuple[tuple[str, Any], ...], seq_len: int) -> Tensor:
    """[N,N]: whether a query sees a key, by the definition of the mask."""
    mask = dict(given)
    kind = "causal" if mask.get("causal") else "full"
    spans = mask.get("spans", [(0, seq_len, 0, seq_len, kind)])
    return dense(spans, seq_len, mask.get("cu_seqlens"), mask.get("window")) > 0


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def worlds(draw: st.DrawFn, most: int = 8) -> World:
    # Grids and teams need sizes that divide.
    size = draw(st.integers(1, most) | st.sampled_from([4, 6, 8]))
    per_node = draw(st.just(size) | st.sampled_from(divisors(size)))
    return World(size, per_node, draw(st.booleans()))


@st.composite
def choices(draw: st.DrawFn, world: World, given: Case | None = None) -> Case:
    """Any algorithm, or a given one, with any options beside those given; some have defaults."""
    size = world.size
    numbers = {
        "chunks": [0, 1, 2, 3, 4, 9],
        "gathered_mib": [1, 1024],
        "seed": range(10),
        "steps": range(1, 10),
        "parts": [1, 2, 3],
    }
    given = given or Case(draw(st.sampled_from(cp.available("softmax"))), ())
    options: dict[str, Any] = dict(given.options)
    for option, kind in get_type_hints(algorithm_class(given.algo).Options).items():
        if option in options or draw(st.integers(0, 3)) == 0:
            continue
        if get_origin(kind) is Literal:
            values = get_args(kind)
        else:
            values = (False, True) if kind is bool else numbers.get(option, [0, *divisors(size)])
        options[option] = draw(st.sampled_from(values))
    together = world.peer_access and world.ranks_per_node == size
    if not together and options.get("transport") == "peer":
        del options["transport"]
    refused = {"no": ["layout", "transport"], "overlap": ["layout", "transport", "chunks"]}
    for option in refused.get(options.get("variant", ""), []):
        options.pop(option, None)
    return Case(given.algo, tuple(sorted(options.items())))


@st.composite
def lengths(draw: st.DrawFn, choice: Case, size: int) -> tuple[int, int]:
    """Of a sequence, and that of which lengths of documents must be multiples.

    Mostly short ones; only in blocks of 64 tokens and more may rows travel that nobody needs.
    """
    multiple = 2 * size if choice.layout.name == "thd" and size > 1 else 1
    most = 6 * size // multiple + 1
    counts = st.integers(1, most)
    if size <= 4:
        counts = counts | counts | counts | st.integers(11 * most, 14 * most)
    count = draw(counts)
    return count * multiple, multiple


@st.composite
def masks(draw: st.DrawFn, seq_len: int, multiple: int = 1) -> tuple[tuple[str, Any], ...]:
    """Args: multiple: see `lengths`."""
    kinds = draw(st.sampled_from(["", "documents", "spans", "spans, documents"]))
    mask: dict[str, Any] = {}
    if "spans" in kinds:
        mask["spans"] = tuple(random_spans(draw(st.randoms()), seq_len))
    else:
        mask["causal"] = draw(st.booleans())
    if mask.get("causal", True) and draw(st.booleans()):
        mask["window"] = draw(st.integers(1, seq_len))
    if "documents" in kinds:
        edges = st.integers(0, seq_len // multiple).map(lambda n: n * multiple)
        mask["cu_seqlens"] = (
            0,
            *sorted(draw(st.lists(edges, max_size=7 if seq_len < 100 else 40))),
            seq_len,
        )
    return tuple(mask.items())


@st.composite
def attentions(draw: st.DrawFn, world: World, choice: Case, *, lean: bool = False) -> Attention:
    """Args: lean: only what costs little: the more examples there can be."""
    seq_len, multiple = draw(lengths(choice, world.size))
    mask, lean = draw(masks(seq_len, multiple)), lean or seq_len > 100
    heads, kv_heads = draw(st.sampled_from(FEW_HEADS if lean else HEADS))
    head_dim = draw(st.sampled_from([1, 2] if lean else [8, 8, 1, 3]))
    value_dim = draw(st.sampled_from([head_dim, head_dim, 5]))
    kernels = st.sampled_from(["torch_cpu" if head_dim == value_dim else "auto", "reference"])
    any_kernels = st.integers(0, 2 ** (len(ABILITIES) + 1) - 1).map("any{}".format)
    some = st.tuples(*[st.booleans()] * 4)
    return Attention(
        choice,
        seq_len,
        1 if lean else draw(st.integers(1, 2)),
        heads,
        kv_heads,
        head_dim,
        value_dim,
        mask,
        draw(st.booleans()),
        draw(st.just((True,) * 4) | some),
        draw(kernels | any_kernels),
        torch.float64 if lean else draw(st.sampled_from([torch.float64, *BOUNDS])),
        *(draw(st.booleans()) for _ in range(5)),
        draw(st.integers(0, 99)),
    )


@dataclass(frozen=True)
class Program:
    """Calls one after another on the same ranks.

    Attributes: order: numbers of calls. later: all backwards come after all forwards, the last one
        first. threads: how many such groups of ranks there are in the process.
    """

    world: World
    calls: tuple[Attention, ...]
    order: tuple[int, ...]
    later: bool
    threads: int


@st.composite
def programs(draw: st.DrawFn) -> Program:
    world = draw(worlds())
    order = draw(st.sampled_from([(0,), (0,), (0, 1), (0, 1, 0), (0, 1, 0, 1), (0, 1, 2)]))
    calls = (draw(attentions(world, draw(choices(world)))) for _ in range(max(order) + 1))
    threads = draw(st.sampled_from([1, 1, 1, 2]))
    return Program(world, tuple(calls), order, draw(st.booleans()), threads)


Found = list[Tensor | None]  # out, dq, dk, dv, dsink


def call(one: Attention, topology: Topology) -> Callable[[], Found]:
    """Makes a call; returns what makes its backward."""
    rank, size, layout = topology.rank, topology.size, one.layout
    *whole, sink = one.inputs()
    mine = [shard(x, 1, layout, rank, size) for x in whole]
    if one.strided:
        mine = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in mine]
    *inputs, dout = mine
    if one.summed:
        dout = dout.new_ones(()).expand(dout.shape)
    before = [x.clone() for x in (*inputs, dout)]
    asked = (*inputs, sink) if one.sink else inputs
    for x, wanted in zip(asked, one.wanted, strict=False):
        x.requires_grad_(wanted)
    equal = len({layout.length(rank, size, one.seq_len) for rank in range(size)}) == 1
    out = cp.attention(
        *inputs,
        algo=one.choice.algo,
        group=topology,
        kernel=one.kernel,
        seq_len=one.seq_len if one.named or not equal else None,
        sink=sink if one.sink else None,
        **dict(one.mask),
        **dict(one.choice.options),
    )

    def backward() -> Found:
        wanted = [x for x in asked if x.requires_grad]
        if not wanted:
            return [out, None, None, None, None]
        if one.twice:
            for x in torch.autograd.grad(out, wanted, dout, retain_graph=True):
                x.fill_(torch.nan)
        gradients = iter(torch.autograd.grad(out, wanted, dout))
        found = [next(gradients) if x.requires_grad else None for x in asked]
        assert all(map(torch.equal, (*inputs, dout), before))
        return [out.detach(), *found, *([] if one.sink else [None])]

    return backward


def results_of(program: Program) -> list[list[Found] | str]:
    """By rank and call; or what the ranks say, if they refuse."""

    def body(topology: Topology) -> list[Found] | str:
        waiting: list[Callable[[], Found]] = []
        found: list[Found] = []
        try:
            for number in program.order:
                waiting.append(call(program.calls[number], topology))
                if not program.later:
                    found.append(waiting.pop()())
            while waiting:
                found.insert(0, waiting.pop()())
        except ContextParallelError as error:
            return str(error)
        return found

    return program.world.run(body)


def assert_equal(program: Program, results: list[list[Found]]) -> None:
    expected = [one.expected() for one in program.calls]
    for turn, number in enumerate(program.order):
        one = program.calls[number]
        for index, name in enumerate(("out", "dq", "dk", "dv", "dsink")):
            of_ranks = [of_rank[turn][index] for of_rank in results]
            if of_ranks[0] is None:
                assert of_ranks == [None] * len(of_ranks)
                continue
            assert {x.dtype for x in of_ranks} == {one.dtype}
            whole = (
                sum(x.double() for x in of_ranks)
                if name == "dsink"
                else unshard(of_ranks, 1, one.layout)
            )
            want = expected[number][index]
            bound = BOUNDS[one.dtype] * (100 if one.loud and one.dtype == torch.float64 else 1)
            # What sums up to nearly nothing is as exact as its parts.
            floor = 1e-3 if one.dtype == torch.float64 else want.numel() ** 0.5
            error = ((whole.double() - want).norm() / want.norm().clamp_min(floor)).item()
            assert error <= bound, f"{name} of call {turn} is off by {error:.1e}"


def assert_refused_or_equal(program: Program, results: list[list[Found] | str]) -> None:
    refusals = [of_rank for of_rank in results if isinstance(of_rank, str)]
    if refusals:
        event(f"refused: {refusals[0][:70]}")
        assert len(refusals) == program.world.size
        assert "\n" not in refusals[0]
    else:
        assert_equal(program, results)


def assert_sent(one: Attention, world: World, log: CommunicationLog) -> None:
    """Each rank has sent what its plan says."""
    mask = mask_of(one.mask, one.seq_len)

    def compare(topology: Topology) -> None:
        algorithm = create(one.choice.algo, topology, dict(one.choice.options))
        algorithm = algorithm.for_documents(mask.resolved)
        traffic, rank = traffic_of(algorithm, one.shape, mask, topology.rank), topology.rank
        assert log.bytes(rank=rank, phase="forward") == traffic.forward_bytes
        assert log.messages(rank=rank, phase="forward") == traffic.forward_messages
        if all(one.wanted[:3]):
            assert log.bytes(rank=rank, phase="backward") == traffic.backward_bytes
            assert log.messages(rank=rank, phase="backward") == traffic.backward_messages
        elif not any(one.wanted[:3]):
            assert log.bytes(rank=rank, phase="backward") == 0
        else:
            assert log.bytes(rank=rank, phase="backward") <= traffic.backward_bytes

    world.run(compare)


@pytest.mark.parametrize("given_choice", CHOICES, ids=str)
@examples(5)
@given(data=st.data())
def test_equals_unsplit_attention(given_choice: Case, data: st.DataObject) -> None:
    """And sends what the plan says, where the length is known and the backward is made once."""
    world = data.draw(worlds())
    choice = data.draw(choices(world, given_choice))
    one = data.draw(attentions(world, choice, lean=True))
    program = Program(world, (one,), (0,), False, 1)
    with cp.record_communication() as log:
        results = results_of(program)
    assert_refused_or_equal(program, results)
    if one.named and not one.twice and not isinstance(results[0], str):
        assert_sent(one, world, log)


@examples(10)
@given(programs())
def test_calls_after_one_another(program: Program) -> None:
    found: list[list[list[Found] | str]] = []
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
        assert_refused_or_equal(program, results)
