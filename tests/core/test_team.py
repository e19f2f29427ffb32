"""Rounds of teams: what is gathered, what is left where it is, and when the next base comes."""

from itertools import groupby

import pytest

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup, Post, RecordedKernel, Wait
from megatron_cp_plugin.planner.meta import trace_of
from megatron_cp_plugin.registry import create
from tests.core.test_loop import compare
from tests.test_conformance import Case, assert_conforms


@pytest.mark.parametrize(
    "mask", [Mask(window=5), Mask(documents=(20, 26, 61, 62, 83, 110))], ids=str
)
@pytest.mark.parametrize("options", [{}, {"chunks": 2}], ids=str)
@pytest.mark.parametrize(
    ("algo", "options_of_algo"),
    [("allgather", {}), ("attention2d", {"rows": 1})],
    ids=str,
)
def test_gathered_rows_that_a_rank_does_not_compute_with(
    algo: str, options_of_algo: dict[str, object], options: dict[str, object], mask: Mask
) -> None:
    """Their gradients are 0, and so are outputs of queries that see none of its keys."""
    compare(algo, {"transport": "group", **options_of_algo, **options}, 12, mask, 144)


def test_own_queries_that_see_keys_of_other_ranks_only() -> None:
    """Some ranks' own queries have no score of their own, and others' results alone."""
    spans = [(0, 18, 36, 72, "full"), (36, 45, 0, 18, "full")]
    case = Case("attention2d", (("rows", 1), ("transport", "group")))
    settings = {"kernel": "reference", "peer_access": False}
    assert_conforms(case, 6, seq_len=72, spans=spans, **settings)


def test_groups_of_heads_that_share_gathered_keys() -> None:
    compare("attention2d", {"chunks": 4, "rows": 2, "transport": "group"}, 4, Mask(), 16)


@pytest.mark.parametrize("keep", ["exchanged", "local"])
@pytest.mark.parametrize(("algo", "size"), [("ulysses", 2), ("usp", 4)])
def test_groups_of_heads_that_share_exchanged_keys(algo: str, size: int, keep: str) -> None:
    """What several rounds need is not overwritten by the exchanges for later rounds."""
    options = (("chunks", 4), ("keep", keep), *((("ulysses", 2),) if algo == "usp" else ()))
    assert_conforms(Case(algo, options), size, seq_len=16, batch=1, heads=16, kv_heads=2)


def events_of(
    algo: str, rank: int, size: int, options: dict[str, object], come: set[str]
) -> list[str]:
    """What a rank does in order, in each pass. c: blocks are let come, C: they have come, .: it
    computes, l: results are let leave, or come back, L: they have.

    Args: come: channels of blocks.
    """
    made = create(algo, DryRunGroup(rank, (0,) * size, peer_access=False), options)
    posted, found = dict[tuple[object, int], bool](), []
    for events in trace_of(made, Shape(1, 16 * size, 6, 6, 8), Mask()):
        order = ""
        for event in events:
            if isinstance(event, Post):
                posted[event.channel, event.number] = comes = event.channel[0] in come
                order += "c" if comes else "l"
            elif isinstance(event, Wait):
                order += "C" if posted[event.channel, event.number] else "L"
            elif isinstance(event, RecordedKernel):
                order += "."
        found.append(order)
    return found


@pytest.mark.parametrize("algo", ["allgather", "attention2d", "ulysses"])
def test_the_next_base_comes_and_the_last_results_leave_during_a_round(algo: str) -> None:
    """Of three rounds."""
    both = "cCc.lCc.lLC.lL"
    expected = ["cCc.Cc.C." if algo == "allgather" else both, both]  # its queries stay
    found = events_of(algo, 0, 2, {"chunks": 3}, {"keys", "queries", "inward"})
    assert ["".join(kind for kind, _ in groupby(order)) for order in found] == expected


@pytest.mark.parametrize(("kv_heads", "exchanges"), [(6, 3), (2, 4)])
def test_gradients_of_keys_leave_with_those_of_their_queries(kv_heads: int, exchanges: int) -> None:
    """Of three rounds, with own keys or with shared ones, which leave after the last dq."""
    made = create("ulysses", DryRunGroup(0, (0, 0), peer_access=True), {"chunks": 3})
    _, events = trace_of(made, Shape(1, 32, 6, kv_heads, 8), Mask())
    posts = [event for event in events if isinstance(event, Post)]
    assert sum(post.channel[0].startswith("outward") for post in posts) == exchanges


@pytest.mark.parametrize(
    ("algo", "rank", "options", "expected"),
    [
        # Nobody helps rank 2 of 5, which posts exchanges of results all the same; rank 4 is helped.
        ("distflash", 2, {}, ["c.Cc.lC.LlL"] * 2),
        ("distflash", 4, {}, ["c.Cc.lC.LlL"] * 2),
        ("zigzag", 0, {"keep": "local"}, ["c.Cc.Cc.Cc.C.", "c.Cc.lCc.LlCc.LlC.LlL"]),
    ],
    ids=str,
)
def test_the_next_block_comes_and_the_last_results_leave_during_a_step(
    algo: str, rank: int, options: dict[str, object], expected: list[str]
) -> None:
    found = events_of(algo, rank, 5, {"chunks": 1} | options, {"fetches"})
    assert found == expected
