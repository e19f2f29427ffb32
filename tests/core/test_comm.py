"""What all ranks must do alike, or some would wait for the others for ever."""

from collections import defaultdict

import pytest

from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.communication.virtual import _VirtualCommunicator
from tests import test_conformance as softmax
from tests import test_linear_conformance as linear
from tests.linear_calls import LinearCall, run
from tests.linear_oracle import linear_expected
from tests.oracle import expected_attention

OPERATIONS = ("exchange", "all_gather", "reduce_scatter", "all_to_all")

# By channel, members and rank: flat, so that no two threads make the same entry.
Journal = dict[tuple[str, tuple[int, ...], int], list[str]]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> Journal:
    """The operations that each rank posts, or skips, by channel; with those that send nothing."""
    journal: Journal = defaultdict(list)

    def noting(name: str, original):
        def post(self: Communicator, *args, **named):
            if isinstance(self, _VirtualCommunicator) and self.size > 1:
                journal[self.channel, tuple(self._members), self.global_rank].append(name)
            return original(self, *args, **named)

        return post

    for name in OPERATIONS:
        monkeypatch.setattr(Communicator, name, noting(name, getattr(Communicator, name)))
    return journal


def assert_alike(posted: Journal) -> None:
    assert posted
    for channel, members, _ in tuple(posted):
        of_ranks = [posted.get((channel, members, rank)) for rank in members]
        assert all(operations == of_ranks[0] for operations in of_ranks), channel


@pytest.mark.parametrize(
    ("case", "size", "causal"),
    [
        (case, size, turn % 2 == 0)
        for size in (3, 4)
        for turn, case in enumerate(softmax.few_cases(size), size)
    ],
    ids=str,
)
def test_every_rank_posts_every_operation(case, size: int, causal: bool, posted: Journal) -> None:
    expected = expected_attention(seq_len=7 * size + 1, causal=causal)
    softmax.run(case, expected, size, causal=causal, peer_access=False)
    assert_alike(posted)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", tuple(linear.cases()), ids=str)
def test_so_it_is_with_linear_attention(case, size: int, causal: bool, posted: Journal) -> None:
    expected = linear_expected(next(iter(linear.RATES.values())), 6 * size, causal=causal)
    run(LinearCall(case.algo, case.options, expected), size)
    assert_alike(posted)
