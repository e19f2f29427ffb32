"""Rounds of teams: what is gathered, what is left where it is, and when the next base comes."""

from itertools import groupby

import pytest

from megatron_cp_plugin.core.blocks.assembly import Assembly
from megatron_cp_plugin.core.blocks.rows import Rows
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup, Post, RecordedKernel, Wait
from megatron_cp_plugin.planner.meta import trace_of
from megatron_cp_plugin.registry import create
from tests.core.test_executor import compare
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
def test_gathered_rows_that_a_rank_does_not_compute_with_are_left_where_they_are(
    algo: str, options_of_algo: dict[str, object], options: dict[str, object], mask: Mask
) -> None:
    """Their gradients are 0, and so are outputs of queries that see none of its keys."""
    excerpts = list[Rows]()
    with pytest.MonkeyPatch.context() as patch:
        within = Assembly.within

        def excerpt(order: Assembly, rows: Rows) -> Assembly:
            excerpts.append(rows)
            return within(order, rows)

        patch.setattr(Assembly, "within", excerpt)
        settings = {"transport": "group", **options_of_algo, **options}
        compare(algo, settings, 12, mask, 144)
    assert len(set(excerpts)) > 2


def test_own_queries_that_see_keys_of_other_ranks_only() -> None:
    """Some ranks' own queries have no score of their own, and others' results alone."""
    spans = [(0, 18, 36, 72, "full"), (36, 45, 0, 18, "full")]
    case = Case("attention2d", (("rows", 1), ("transport", "group")))
    settings = {"kernel": "reference", "peer_access": False}
    assert_conforms(case, 6, seq_len=72, spans=spans, **settings)


def test_groups_of_heads_that_share_gathered_keys() -> None:
    compare("attention2d", {"chunks": 4, "rows": 2, "transport": "group"}, 4, Mask(), 16)


@pytest.mark.parametrize("algo", ["allgather", "attention2d", "ulysses"])
def test_the_next_base_comes_and_the_last_results_leave_during_a_round(algo: str) -> None:
    """Of three rounds. c: is let come, C: has come, .: is computed, l: is sent, L: has left."""
    both = "cCc.lCc.lLC.lL"
    expected = ["cCc.Cc.C." if algo == "allgather" else both, both]  # its queries stay
    trace = trace_of(
        create(algo, DryRunGroup(0, (0, 0), peer_access=False), {"chunks": 3}),
        Shape(1, 32, 6, 6, 8),
        Mask(),
    )
    inward, posted = {"keys", "queries", "inward"}, dict[tuple[object, int], bool]()
    for events, steps in zip(trace, expected, strict=True):
        order = ""
        for event in events:
            if isinstance(event, Post):
                comes = event.channel[0] in inward
                posted[event.channel, event.number] = comes
                order += "c" if comes else "l"
            elif isinstance(event, Wait):
                order += "C" if posted[event.channel, event.number] else "L"
            elif isinstance(event, RecordedKernel):
                order += "."
        assert "".join(kind for kind, _ in groupby(order)) == steps
