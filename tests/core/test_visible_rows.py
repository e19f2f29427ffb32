"""Only rows that the mask needs travel: bytes that ranks send, counted token by token."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.blocks.visible_rows import rows_met, rows_of_parts, visible_rows
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.document_layout import Balanced
from megatron_cp_plugin.core.layout import Contiguous, Cyclic, Layout, TokenMap, Zigzag
from megatron_cp_plugin.core.layout import document_starts as starts_of
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.ranges import Span, longest_gap, positions_of, union
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.registry import create, layout_of
from tests.plan_check import check
from tests.random_tests import examples
from tests.test_conformance import Case, assert_conforms
from tests.test_random_attention import mask_of, masks

HEADS, KV_HEADS, DIM, BATCH = 4, 2, 8, 2
# Bytes of a token in float64: k and v; q, or out; lse.
KV, Q, LSE = 2 * KV_HEADS * DIM * 8, HEADS * DIM * 8, HEADS * 8

# Lengths of documents, as parts of the whole: some are split among ranks, and some are not.
PACKINGS: dict[str, Callable[[int], list[int]]] = {
    "long and short": lambda n: [0, 3, 5, n // 2, n // 2 + 1, n // 2 + 4, n],
    "short": lambda n: [*range(0, n, 7), n],
    "two long": lambda n: [0, n // 3, n // 3 + 2, n - 1, n],
}


class Tokens:
    """Who sees whom, by the definition of a mask.

    Attributes: held: positions of each rank, in its order.
    """

    def __init__(self, held: Sequence[Sequence[int]], mask: Mask) -> None:
        self.held, self._mask = held, mask

    def sees(self, query: int, key: int) -> bool:
        starts, window = self._mask.documents, self._mask.window or 10**9
        same = sum(n <= query for n in starts) == sum(n <= key for n in starts)
        return same and key <= query < key + window

    def keys(self, owner: int, *ranks: int) -> set[int]:
        """Keys of a rank that any query of some ranks sees."""
        queries = [n for rank in ranks for n in self.held[rank]]
        return {key for key in self.held[owner] if any(self.sees(n, key) for n in queries)}

    def queries(self, owner: int, *ranks: int) -> set[int]:
        """Queries of a rank that see any key of some ranks."""
        keys = [n for rank in ranks for n in self.held[rank]]
        return {query for query in self.held[owner] if any(self.sees(query, n) for n in keys)}


Sent = tuple[list[int], list[int]]  # bytes of every rank, forward and backward; a batch of one


def straight(tokens: Tokens) -> Sent:
    """Keys go to whoever sees them, and their gradients back."""
    ranks = range(len(tokens.held))
    pairs = {(a, b): len(tokens.keys(a, b)) * KV for a in ranks for b in ranks if a != b}
    given = [sum(n for (a, _), n in pairs.items() if a == rank) for rank in ranks]
    returned = [sum(n for (_, b), n in pairs.items() if b == rank) for rank in ranks]
    return given, [a + b for a, b in zip(given, returned, strict=True)]


def ring(tokens: Tokens) -> Sent:
    """Keys go round as far as somebody sees them, fewer and fewer; sums of more follow."""
    size = len(tokens.held)
    keys, sums = [0] * size, [0] * size
    for owner in range(size):
        others = [(owner + hop) % size for hop in range(1, size)]
        needed = [tokens.keys(owner, rank) for rank in others]
        found: set[int] = set()
        for hop, (before, rank) in enumerate(pairwise((owner, *others))):
            keys[before] += KV * len(set().union(*needed[hop:]))
            found |= needed[hop]
            if any(needed[hop:]):
                sums[rank] += KV * len(found)
    return keys, [a + b for a, b in zip(keys, sums, strict=True)]


def helped(tokens: Tokens) -> Sent:
    """Of an odd number: keys to ranks up to P/2 after their own; others' queries come to them."""
    size = len(tokens.held)
    forward, backward = [0] * size, [0] * size
    for owner in range(size):
        for rank in range(size):
            distance = (rank - owner) % size
            if 0 < 2 * distance < size:  # queries of `rank`, keys of `owner`
                count = len(tokens.keys(owner, rank))
                forward[owner] += KV * count
                backward[owner] += KV * count
                backward[rank] += KV * count
            elif distance:
                count = len(tokens.queries(rank, owner))
                forward[rank] += Q * count
                forward[owner] += (Q + LSE) * count
                backward[rank] += (2 * Q + 2 * LSE) * count
                backward[owner] += Q * count
    return forward, backward


def gathered(rows: int) -> Callable[[Tokens], Sent]:
    """On a grid of `rows` rows: all rows of all ranks, padded to equal numbers."""

    def count(tokens: Tokens) -> Sent:
        size, most = len(tokens.held), max(map(len, tokens.held))
        of_row, of_column = (size // rows - 1) * most, (rows - 1) * most
        return tuple(
            [of_row * a + of_column * b] * size
            for a, b in ((2 * Q + LSE, KV), (3 * Q + 2 * LSE, 2 * KV))
        )  # type: ignore[return-value]

    return count


RING, DISTANCE = ("route", "ring"), ("helpers", "distance")
CASES = [
    (Case("zigzag", (("layout", "documents"), RING, ("backward", "kv"))), 3, ring),
    (Case("zigzag", (("layout", "documents"), RING, ("backward", "kv"))), 5, ring),
    (
        Case("zigzag", (("layout", "documents"), ("route", "straight"), ("backward", "kv"))),
        5,
        straight,
    ),
    (Case("zigzag", (RING, ("backward", "kv"))), 5, ring),
    (Case("ring", (RING, ("backward", "kv"), ("chunks", 2))), 3, ring),
    (Case("ring", (RING, ("backward", "kv"))), 5, ring),
    (Case("distflash", (DISTANCE,)), 3, helped),
    (Case("distflash", (DISTANCE,)), 5, helped),
    (Case("distflash", (("helpers", "none"), ("last_step", "owner"))), 5, straight),
    (Case("allgather"), 5, straight),  # over peer memory
    (Case("allgather", (("transport", "group"),)), 3, gathered(3)),
    (Case("allgather", (("transport", "group"), ("chunks", 2))), 5, gathered(5)),
    (Case("attention2d", (("rows", 2), ("transport", "group"))), 4, gathered(2)),
    (Case("attention2d", (("rows", 1), ("transport", "group"))), 3, gathered(1)),
    (Case("attention2d", (("rows", 3), ("transport", "group"), ("chunks", 2))), 6, gathered(3)),
]


def name_of(value: object) -> str | None:
    """For a test's id; None: pytest's own."""
    return str(value) if isinstance(value, Case) else getattr(value, "__name__", None)


@pytest.mark.parametrize(
    ("case", "size", "count", "packing"),
    [
        (*case, packing)
        for turn, case in enumerate(CASES)
        for number, packing in enumerate(PACKINGS)
        if (turn + number) % 3
    ],
    ids=name_of,
)
def test_bytes_are_those_of_tokens_that_are_seen(
    case: Case, size: int, count: Callable[[Tokens], Sent], packing: str
) -> None:
    """Counted in the virtual world, and equal to unsplit attention."""
    seq_len = 11 * size + 2
    lengths = PACKINGS[packing](seq_len)
    assert_sent(case, size, count, seq_len, lengths, None)


@pytest.mark.parametrize(
    ("case", "size", "count", "window"),
    [(*case, (3, 9, 17)[turn % 3]) for turn, case in enumerate(CASES)],
    ids=name_of,
)
def test_bytes_in_a_window(
    case: Case, size: int, count: Callable[[Tokens], Sent], window: int
) -> None:
    seq_len = 9 * size + 1
    assert_sent(case, size, count, seq_len, [0, seq_len], window)


def assert_sent(
    case: Case,
    size: int,
    count: Callable[[Tokens], Sent],
    seq_len: int,
    lengths: list[int],
    window: int | None,
) -> None:
    sizes = {"batch": BATCH, "heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM}
    settings = {"seq_len": seq_len, "window": window, "cu_seqlens": lengths}
    _, log = assert_conforms(case, size, **sizes, **settings)
    documents = starts_of(lengths, seq_len)
    layout = layout_of(case.algo, dict(case.options)).for_documents(documents)
    spans = [layout.spans(rank, size, seq_len) for rank in range(size)]
    held = [[n for span in own for n in span.positions] for own in spans]
    forward, backward = count(Tokens(held, Mask(True, window, documents)))
    ranks = range(size)
    assert [log.bytes(rank=r, phase="forward") for r in ranks] == [BATCH * n for n in forward]
    assert [log.bytes(rank=r, phase="backward") for r in ranks] == [BATCH * n for n in backward]


@pytest.mark.parametrize(("gap", "ranges"), [(10, 1), (11, 2)])
def test_short_gaps_travel_too(gap: int, ranges: int) -> None:
    """Of a block of 640 rows those of at most 10 do: they cost less than a copy more."""
    mask = Mask(False, documents=(620, 620 + gap))  # rank 1 has 320 to 959, none else the middle
    made = create("zigzag", VirtualWorld(2).topology(0), {"route": "straight"})
    for phase in PHASES:
        plan = made.plan(Shape(1, 1280, 4, 2, 8), mask, phase)
        moves = [move for move in plan.moves if move.block.owners == (1,)]
        assert {len(move.block.rows) for move in moves} == {ranges}
        assert {move.tokens for move in moves} == {640 if ranges == 1 else 640 - gap}
        check(plan)


@examples(200)
@given(
    st.sampled_from([Contiguous(), Zigzag(), Balanced(), Cyclic()]),
    st.integers(1, 7),
    st.integers(1, 150),
    st.data(),
)
def test_visible_rows_of_all_pairs(
    layout: Layout, size: int, seq_len: int, data: st.DataObject
) -> None:
    """At once, and pair by pair; with gaps that are filled."""
    mask = mask_of(data.draw(masks(seq_len)), seq_len)
    layout = layout.for_documents(mask.documents)
    spans = [layout.spans(rank, size, seq_len) for rank in range(size)]
    seeing, seen = (rows_met(layout, size, seq_len, mask, side) for side in (0, 1))
    for query in range(size):
        for key in range(size):
            rows, cols = visible_rows(spans[query], spans[key], mask)
            assert seeing[query].get(key, ()) == union((rows,), gap_of(spans[query]))
            assert seen[key].get(query, ()) == union((cols,), gap_of(spans[key]))


@examples(100)
@given(
    st.sampled_from([Contiguous(), Zigzag(), Cyclic()]),
    st.integers(1, 5),
    st.integers(1, 90),
    st.data(),
)
def test_rows_of_parts(layout: Layout, size: int, seq_len: int, data: st.DataObject) -> None:
    """At once, and each by itself, those that overlap too."""
    mask = mask_of(data.draw(masks(seq_len)), seq_len)
    blocks, rank = TokenMap.of(layout, size, seq_len), st.integers(0, size - 1)
    parts = []
    for query, key in data.draw(st.lists(st.tuples(rank, rank), max_size=6)):
        rows = st.integers(0, blocks.lengths[query])
        start, stop = sorted((data.draw(rows), data.draw(rows)))
        parts += [(query, key, start, stop)] * (start < stop)
    found = rows_of_parts(blocks, parts, mask) if parts else {}
    assert set(found) == set(parts)
    for (query, key, start, stop), met in found.items():
        rows, cols = visible_rows(positions_of(blocks[query], ((start, stop),)), blocks[key], mask)
        assert met == (tuple((start + first, start + last) for first, last in rows), cols)


def gap_of(spans: Sequence[Span]) -> int:
    return longest_gap(sum(map(len, spans)))
