"""Every registered algorithm against unsplit attention in float64: forward and all gradients.

One table: algorithms with their options, by masks; numbers of ranks, lengths, heads, dtypes,
kernels and transports by turns.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import CommunicationLog
from megatron_cp_plugin.core.layout import Contiguous, Layout, document_starts, shard, unshard
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.plans.plan import Plan
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create, layout_of, option_names
from tests.oracle import Expected, expected_attention, relative_error
from tests.pairwise import pairwise
from tests.peer_world import run_virtual
from tests.plan_check import traffic_of
from tests.span_masks import dense, mask_of, random_lengths, random_spans, random_window

HEAD_DIM = 8


pytestmark = pytest.mark.usefixtures("keys_stay")


@dataclass(frozen=True)
class Case:
    """One algorithm with its options."""

    algo: str
    options: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        return "-".join([self.algo, *(f"{name}={value}" for name, value in self.options)])

    @property
    def layout(self) -> Layout:
        return layout_of(self.algo, dict(self.options))

    def fits(self, size: int) -> bool:
        """Whether teams and rows divide among `size` ranks, and nodes have half of them."""
        options: dict[str, Any] = dict(self.options)
        team = options.get("ulysses") or 1
        lines = options.get("rows") or 1
        halves = options.get("route") != "double" or (size > 2 and size // team % 2 == 0)
        return size % (team * lines) == 0 and halves


# Options that change what an algorithm does, the most important ones first.
OPTIONS: dict[str, list[dict[str, object]]] = {
    "ring": [
        {"backward": "kv"},
        {"backward": "query"},
        {"layout": "thd"},
        {"route": "double", "backward": "kv"},
        {"route": "double", "backward": "query"},
    ],
    "zigzag": [
        {"backward": "kv"},
        {"backward": "query"},
        {"backward": "kv", "chunks": 2},
        {"backward": "query", "chunks": 2},
        {"route": "straight", "backward": "kv"},
        {"route": "straight", "backward": "query", "chunks": 2},
        {"route": "double", "backward": "kv", "chunks": 2},
        {"route": "double", "backward": "query"},
        {"layout": "documents", "backward": "kv"},
        {"layout": "documents", "backward": "query", "chunks": 2},
        {"layout": "documents", "backward": "query", "route": "straight"},
        {"layout": "thd", "backward": "kv"},
        {"layout": "thd", "backward": "query", "chunks": 2},
        {"layout": "thd", "route": "straight"},
        {"layout": "contiguous"},
    ],
    "distflash": [
        {},
        {"last_step": "owner", "chunks": 2},
        {"helpers": "none"},
        {"helpers": "distance"},
        {"helpers": "distance", "last_step": "owner"},
        {"layout": "thd"},
    ],
    "allgather": [
        {"chunks": 4},
        {"chunks": 2, "transport": "group"},
        {"layout": "documents", "chunks": 2},
        {"layout": "documents", "transport": "group"},
        {"layout": "thd", "chunks": 2},
        {"layout": "thd", "transport": "group"},
        {"layout": "contiguous"},
    ],
    "attention2d": [
        {"chunks": 4},
        {"variant": "no", "rows": 2, "chunks": 2},
        {"variant": "overlap", "rows": 2},
        *({"rows": rows, "chunks": rows} for rows in (1, 2, 3, 4)),
        *({"rows": rows, "chunks": 3, "transport": "group"} for rows in (0, 1, 2, 3)),
        *({"variant": "no", "rows": rows, "chunks": rows} for rows in (1, 3, 4)),
        *({"variant": "overlap", "rows": rows} for rows in (0, 1, 3, 4)),
        {"layout": "thd", "rows": 2},
        {"layout": "thd", "chunks": 2, "transport": "group"},
        {"layout": "contiguous", "rows": 2},
    ],
    "ulysses": [
        {"chunks": 4},
        {"keep": "local", "chunks": 4, "layout": "zigzag"},
        {"layout": "thd"},
        {"layout": "thd", "keep": "local"},
    ],
    "usp": [
        {"ulysses": 2, "chunks": 4},
        {"ulysses": 2, "route": "grid", "rows": 2},
        {},
        {"ulysses": 2, "layout": "contiguous", "backward": "query", "keep": "local"},
        {"ulysses": 2, "route": "grid"},
        {"ulysses": 1, "route": "grid", "rows": 3},
        {"ulysses": 3, "route": "grid", "rows": 3, "layout": "contiguous"},
        {"ulysses": 3, "keep": "local", "backward": "kv"},
        {"ulysses": 2, "route": "double"},
        {"ulysses": 4, "backward": "query"},
        {"layout": "thd", "ulysses": 2},
        {"layout": "documents", "ulysses": 2, "backward": "kv"},
        {"layout": "documents", "ulysses": 2, "backward": "query", "keep": "local"},
        {"layout": "documents", "ulysses": 3, "route": "straight"},
        {"layout": "documents", "ulysses": 2, "route": "grid"},
        {"layout": "contiguous", "ulysses": 2, "backward": "kv"},
    ],
}
# Settings of papers, which nobody gets who does not ask for them.
PUBLISHED = ("burst", "attention2d-no", "attention2d-o", "distflash-paper", "distflash-unbalanced")


def cases() -> Iterator[Case]:
    """Every registered algorithm; of one that has no row in `OPTIONS` the defaults."""
    for algo in cp.available("softmax"):
        default = {"chunks": 4} if "chunks" in option_names(algo) else {}
        for options in OPTIONS.get(algo, [default]):
            yield Case(algo, tuple(options.items()))
    yield from map(Case, PUBLISHED)


def few_cases(size: int) -> list[Case]:
    """The first three of each algorithm, of those that serve any documents on one node."""
    by_name: dict[str, list[Case]] = {}
    for case in cases():
        if not {("layout", "thd"), ("route", "double")} & set(case.options):
            by_name.setdefault(case.algo, []).append(case)
    return [case for each in by_name.values() for case in each[:3] if case.fits(size)]


def run(
    case: Case,
    expected: Expected,
    size: int,
    *,
    kernel: str = "auto",
    peer_access: bool = True,
    ranks_per_node: int | None = None,
    sink: Tensor | None = None,
    **mask: Any,
) -> tuple[list[tuple[Tensor, ...]], CommunicationLog]:
    """(out, dq, dk, dv, and with sinks dsink) of every virtual rank, and what they sent.

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
        of_all = {} if sink is None else {"sink": sink.clone()}
        leaves = [x.requires_grad_() for x in (*mine[:3], *of_all.values())]
        settings = {"algo": case.algo, "group": topology, "kernel": kernel, "seq_len": seq_len}
        out = cp.attention(*leaves[:3], **settings, **of_all, **mask, **options)
        return (out.detach(), *torch.autograd.grad(out, leaves, mine[3]))

    with cp.record_communication() as log:
        results = run_virtual(size, body, 60.0, ranks_per_node, peer_access=peer_access)
    return results, log


def layout_for(
    case: Case,
    expected: Expected,
    cu_seqlens: Tensor | None = None,
    spans: Sequence[Sequence[object]] | None = None,
) -> Layout:
    """The layout of a problem, which may follow its documents, or spans."""
    seq_len = expected.q.shape[1]
    lengths = [0, seq_len] if cu_seqlens is None else cu_seqlens.tolist()
    documents = document_starts(lengths, seq_len)
    resolved = documents if spans is None else Slices.of(spans, seq_len, documents)
    return case.layout.for_documents(resolved)


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
    if expected.dsink is not None:
        # The ranks' gradients are those of their losses' sum.
        error = relative_error(sum(result[4].double() for result in results), expected.dsink)
        assert error <= bound, f"{case}: dsink is off by {error:.1e}"


def assert_plan_is_kept(
    case: Case,
    size: int,
    shape: Shape,
    mask: Mask,
    log: CommunicationLog,
    *,
    peer_access: bool = True,
    ranks_per_node: int | None = None,
) -> None:
    """All ranks have one plan, sent what it says, and it computes the pairs of the mask.

    Args: peer_access, ranks_per_node: of the run.
    """

    def compare(topology: Topology) -> Plan:
        algorithm, rank = create(case.algo, topology, dict(case.options)), topology.rank
        traffic = traffic_of(algorithm, shape, mask, rank)
        assert log.bytes(rank=rank, phase="forward") == traffic.forward_bytes
        assert log.messages(rank=rank, phase="forward") == traffic.forward_messages
        assert log.bytes(rank=rank, phase="backward") == traffic.backward_bytes
        assert log.messages(rank=rank, phase="backward") == traffic.backward_messages
        return algorithm.plan(shape, mask)

    plan, *others = run_virtual(size, compare, 60.0, ranks_per_node, peer_access=peer_access)
    assert all((p.computes, p.moves) == (plan.computes, plan.moves) for p in others)
    pairs = sum(int(plan.tiles(one).areas.sum()) * one.heads.heads for one in plan.computes)
    assert pairs == mask.bands.area(shape.seq_len) * plan.heads.heads * plan.shares


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
    ranks_per_node: int | None = None,
    causal: bool = True,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    spans: Sequence[Sequence[object]] | None = None,
    sink: Tensor | None = None,
) -> tuple[list[tuple[Tensor, ...]], CommunicationLog]:
    """Of `run`, whose results are right, and whose bytes, messages and pairs are the plan's."""
    documents = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    given: dict[str, Any] = {"window": window, "cu_seqlens": documents}
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
    world: dict[str, Any] = {"peer_access": peer_access, "ranks_per_node": ranks_per_node}
    results, log = run(case, expected, size, kernel=kernel, sink=sink, **world, **given)
    assert_matches(case, results, expected, bound, documents, spans)
    shape = Shape.of(expected.q, expected.k, expected.v, seq_len)
    assert_plan_is_kept(case, size, shape, mask, log, **world)
    return results, log


# Where documents among n tokens start: in chunks and at their edges; some have one token, or none.
STARTS: dict[str, Callable[[int], Sequence[int]]] = {
    "odd": lambda n: [1, n // 3, n // 3 + 1, n - 5, n - 5],
    "tokens": lambda n: range(1, n),
    "long and short": lambda n: [2, 3, n - 6, n - 4],
}
MASKS: dict[str, dict[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "window of one": {"window": 1},
    "window": {"window": 9},
    "odd": {"documents": "odd"},
    "tokens": {"documents": "tokens"},
    "documents, full": {"documents": "odd", "causal": False},
    "documents, window": {"documents": "long and short", "window": 6},
    "spans": {"spans": "alone"},
    "spans, documents, window": {"spans": "beside"},
}
SIZES = (3, 4, 2, 5, 4, 3, 2, 8, 4, 3, 2, 6, 1)
# Results that are summed in float32 and rounded once are off by up to 3.9e-3 in bfloat16.
BOUNDS = {torch.float64: 1e-10, torch.bfloat16: 5e-3}
HEADS = ((4, 4), (4, 2), (4, 1), (8, 2), (9, 3), (7, 1), (2, 2))
LENGTHS = ("uneven", "even", "a token a chunk", "fewer tokens than ranks")
# Some kernels take square causal tiles only, the reference any.
KERNELS = ("auto", "reference")
# Lengths, heads, kernels, width of values, peer access, sinks.
NUMBERS = pairwise(LENGTHS, HEADS, KERNELS, (HEAD_DIM, 5, 12), (True, False), (True, False))


def length_of(name: str, case: Case, size: int) -> tuple[int, int]:
    """Tokens, and the multiple that documents need."""
    multiple = 2 * size if case.layout.name == "thd" and size > 1 else 1
    lengths = {
        "uneven": 7 * size + size // 2 + 1,
        "even": 6 * size,
        "a token a chunk": case.layout.multiple(size),
        "fewer tokens than ranks": max(1, size - 1),
    }
    count = lengths[name] if multiple == 1 else 2 * lengths[name]
    return -(-count // multiple) * multiple, multiple


def mask_for(name: str, seq_len: int, multiple: int, source: Random) -> dict[str, Any]:
    """Settings of `assert_conforms`."""
    given = dict(MASKS[name])
    kind, starts = given.pop("spans", None), given.pop("documents", None)
    if kind is not None:
        given["spans"] = random_spans(source, seq_len)
    if kind == "beside":
        given["cu_seqlens"] = random_lengths(source, seq_len, multiple)
        given["window"] = random_window(source, seq_len)
    if starts is not None:
        edges = (n // multiple * multiple for n in STARTS[starts](seq_len))
        given["cu_seqlens"] = [0, *sorted(n for n in edges if 0 < n <= seq_len), seq_len]
    return given


def table() -> Iterator[Any]:
    """Each case with four of ten masks, others than its neighbours, and with all sizes and numbers
    by turns.
    """
    for row, case in enumerate(cases()):
        sizes = [size for size in SIZES if case.fits(size)] or [9]
        for turn in range(3 * row, 3 * row + 4):
            mask = list(MASKS)[turn % len(MASKS)]
            size = sizes[(row + turn) % len(sizes)]
            numbers = NUMBERS[(5 * row + turn) % len(NUMBERS)]
            yield pytest.param(case, size, mask, numbers, id=f"{case}-P{size}-{mask}")


@pytest.mark.parametrize(("case", "size", "mask", "numbers"), list(table()))
def test_equals_unsplit_attention_and_keeps_its_plan(
    case: Case, size: int, mask: str, numbers: tuple[Any, ...]
) -> None:
    """Output, all gradients, bytes, messages and pairs."""
    length, (heads, kv_heads), kernel, value_dim, peer_access, sinks = numbers
    # In float64 a wrong value shows, in bfloat16 a wrong dtype.
    dtype = torch.float64
    if (mask, size % 2) in (("causal", 0), ("full", 1)):
        length, kernel, sinks, dtype = "uneven", "reference", False, torch.bfloat16
    seq_len, multiple = length_of(length, case, size)
    double = dict(case.options).get("route") == "double"
    assert_conforms(
        case,
        size,
        seq_len=seq_len,
        batch=Random(f"{case} {mask}").choice((1, 2)),  # copy engines send pieces in the first
        heads=heads,
        kv_heads=kv_heads,
        value_dim=value_dim,
        kernel=kernel,
        dtype=dtype,
        bound=BOUNDS[dtype],
        peer_access=peer_access and not double,
        ranks_per_node=size // 2 if double else None,
        sink=torch.linspace(-3, 6, heads, dtype=dtype) if sinks else None,
        **mask_for(mask, seq_len, multiple, Random(f"{case} {size}")),
    )


def test_own_outputs_that_are_complete_before_those_of_others() -> None:
    """A rank goes on with queries of others when all results for its own ones have come."""
    case = Case("attention2d", (("variant", "overlap"), ("rows", 1)))
    assert_conforms(case, 8, seq_len=19, cu_seqlens=[0, 2, 5, 15, 18, 19], kernel="reference")


def test_rows_in_several_pieces_are_one_message() -> None:
    """Which copy engines send one by one."""
    documents = [0, 21, 22, 31]
    assert_conforms(Case("distflash"), 7, seq_len=31, batch=1, cu_seqlens=documents, causal=False)


def test_sums_that_wait_for_some_steps_are_not_overwritten() -> None:
    """Where a mask shortens a relay, results of other ranks come in between."""
    case = Case("attention2d", (("variant", "overlap"), ("rows", 2)))
    assert_conforms(case, 8, seq_len=16, cu_seqlens=[0, 2, 4, 6, 16], kernel="reference")


def test_results_of_a_relay_before_its_last_computation() -> None:
    """dK and dV of keys that few queries see are complete elsewhere before the owner's are."""
    case = Case("attention2d", (("variant", "overlap"), ("rows", 4)))
    spans = [(0, 16, 0, 8, "causal")]
    assert_conforms(case, 8, seq_len=16, heads=8, kv_heads=1, kernel="reference", spans=spans)


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
    (row,) = (row for row, case in enumerate(cases()) if case.algo == "plain")
    for param in list(table())[4 * row : 4 * row + 4]:
        test_equals_unsplit_attention_and_keeps_its_plan(*param.values)
