"""Ways of states from run to run: which runs they pass, and what ranks hold of them."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.layout import LAYOUTS
from megatron_cp_plugin.core.linear.states import Route, Runs, RunStates
from megatron_cp_plugin.registry import create_linear
from tests.linear_oracle import passed_along
from tests.oracle import relative_error
from tests.random_tests import examples
from tests.test_linear_conformance import DIM, STARTS, VALUE_DIM


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("documents", list(STARTS))
@pytest.mark.parametrize(("size", "layout"), [(1, "contiguous"), (3, "zigzag"), (4, "thd")])
def test_ways_of_a_kernel_that_passes_runs_by_itself(
    monkeypatch: pytest.MonkeyPatch, size: int, layout: str, documents: str, begun: bool
) -> None:
    """States before all runs and behind the last one are those without it."""
    seq_len = 16 * size
    starts = STARTS["multiples" if layout == "thd" else documents](size, seq_len)
    made = create_linear("lasp2", VirtualWorld(size).topology(0), {"layout": layout})
    route = made.route_of(seq_len, starts)
    runs = sum(map(len, route.runs))
    states = RunStates(torch.randn(runs, 1, 2, DIM, VALUE_DIM), torch.randn(runs, 1, 2, DIM, DIM))
    first = torch.randn(1, 2, DIM, VALUE_DIM) if begun else None
    asked = route, first, range(runs)
    want = states.reaching(*asked, to_the_end=True)
    fused = SimpleNamespace(passed_along=passed_along)
    monkeypatch.setattr("megatron_cp_plugin.core.linear.states.fused_for", lambda x: fused)
    assert relative_error(states.reaching(*asked, to_the_end=True), want) < 1e-5


RUN_TOKENS = st.integers(1, 6)


DOCUMENT_STARTS = st.sets(st.integers(1, 100), max_size=6)


LAYOUT_NAMES = st.sampled_from(["contiguous", "zigzag"])


def route_of(name: str, size: int, each: int, starts: set[int]) -> Route:
    tokens = 2 * size * each
    documents = tuple(sorted(start for start in starts if start < tokens))
    return Route.of(LAYOUTS[name], size, tokens, documents)


@examples(200)
@given(LAYOUT_NAMES, st.integers(1, 5), RUN_TOKENS, DOCUMENT_STARTS)
def test_states_pass_the_runs_of_their_document(
    name: str, size: int, each: int, starts: set[int]
) -> None:
    for route in (made := route_of(name, size, each, starts), made.back, made.flipped):
        runs = [run for of_rank in route.runs for run in of_rank]
        edges = (0, *route.documents)
        for place, (passed, begin) in zip(
            (*(start for start, _ in runs), route.length), route.ways, strict=True
        ):
            document = max(edge for edge in edges if edge < place) if place else 0
            if place in edges and place < route.length:  # nothing comes here, but to the first one
                assert (passed, begin) == ((), -1 if place else 0)
                continue
            between = [
                n for n, (start, stop) in enumerate(runs) if document < stop and start < place
            ]
            assert list(passed) == sorted(between, key=lambda n: runs[n])
            assert begin == (0 if document == 0 else -1)
        assert route.lengths == tuple(stop - start for start, stop in runs)
        assert route.counts == tuple(len(of_rank) for of_rank in route.runs)


@examples(200)
@given(LAYOUT_NAMES, st.integers(1, 5), RUN_TOKENS, DOCUMENT_STARTS, st.data())
def test_what_ranks_hold(
    name: str, size: int, each: int, starts: set[int], data: st.DataObject
) -> None:
    route = route_of(name, size, each, starts)
    for rank, runs in enumerate(route.runs):
        tokens = [token for start, stop in runs for token in range(start, stop)]
        local, edges = route.local(rank), {start for start, _ in runs} | set(route.documents)
        begins = [n for n, token in enumerate(tokens) if token in edges]
        pieces = [piece for documents in local.documents for piece in documents]
        assert pieces == list(itertools.pairwise([*begins, len(tokens)]))
        assert [of_run[0] for of_run in local.documents] == list(local.firsts)
        assert [tokens[start] for start, _ in local.firsts] == [start for start, _ in runs]
        assert [tokens[stop - 1] for _, stop in local.lasts] == [stop - 1 for _, stop in runs]
    owner = {n: r for r, runs in enumerate(route.runs) for run in runs for n in range(*run)}
    assert route.last_rank == owner[route.length - 1]
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, route.length)] * 2)))
    assert route.lasts(start, stop) == (not {*range(start, stop + 1)} & {*route.documents})


def test_the_other_direction() -> None:
    """By hand: runs of two ranks, and a document that begins at token 5."""
    route = Route((((0, 2), (6, 8)), ((2, 4), (4, 6))), 8, (5,))
    assert route.back.runs == (((6, 8), (0, 2)), ((4, 6), (2, 4)))
    assert route.flipped.runs == (((0, 2), (6, 8)), ((2, 4), (4, 6)))
    assert route.back.documents == route.flipped.documents == (3,)
    assert route.local(1) == Runs((((0, 2),), ((2, 3), (3, 4))))
    assert Runs.single(3) == Runs((((0, 3),),))


def test_ranks_without_tokens() -> None:
    route = Route((((0, 0),), ((0, 3),), ((3, 3),)), 3)
    assert route.last_rank == 2
    assert route.local(0) == Runs((((0, 0),),))
