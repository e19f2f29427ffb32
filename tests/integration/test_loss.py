"""The mean loss of a micro-batch, whatever tokens of it a rank holds."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron_cp_plugin.integration import loss
from megatron_cp_plugin.integration.loss import over_sequence


class Group:
    """Stands for the context-parallel group of ranks that hold `counts` tokens that count."""

    def __init__(self, counts: list[int]) -> None:
        self.counts = counts

    def size(self) -> int:
        return len(self.counts)


def all_reduce(tensor: Tensor, group: Any) -> None:
    tensor.fill_(sum(group.counts))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.randoms(use_true_random=False))
def test_gradients_of_the_ranks_average_to_those_of_the_sequence(
    counts: list[int], random: Any
) -> None:
    weight = torch.tensor(1.0, dtype=torch.float64, requires_grad=True)
    losses = [[random.uniform(1, 9) for _ in range(count)] for count in counts]
    group = Group(counts)
    gradient = 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loss.dist, "all_reduce", all_reduce)
        for mine in losses:
            count = torch.tensor(len(mine), dtype=torch.int)
            outputs = (weight * sum(mine), count, {"lm loss": torch.tensor([sum(mine)])})
            part, tokens, report = over_sequence(
                lambda outputs=outputs: outputs, group, divided=True
            )()
            assert tokens == count
            assert report is outputs[2]
            # What Megatron makes of it, and data parallelism of the gradients.
            part = part / torch.clamp(tokens, min=1)
            gradient += torch.autograd.grad(part, weight)[0].item() / len(counts)
    want = sum(map(sum, losses)) / max(sum(counts), 1)
    assert gradient == pytest.approx(want, rel=1e-6)


def test_a_loss_function_that_returns_no_sum_is_left_alone() -> None:
    outputs = (torch.tensor(2.0), {"lm loss": torch.tensor(2.0)})
    given_to = []

    def loss_func(*args: Any, **kwargs: Any) -> Any:
        given_to.append((args, kwargs))
        return outputs

    group: Any = Group([1, 2])
    assert over_sequence(loss_func, group, divided=True)(3, non_loss_data=True) is outputs
    assert given_to == [((3,), {"non_loss_data": True})]


def test_reports_are_sums_over_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss.dist, "all_reduce", lambda tensor, group: tensor.mul_(group.size()))
    group: Any = Group([1, 2, 3])
    report = {"lm loss": torch.tensor([2.0, 5.0]), "a mean": torch.tensor(4.0), "a name": "x"}
    outputs = (torch.tensor(2.0), torch.tensor(5), report)
    assert over_sequence(lambda: outputs, group, divided=False)() is outputs
    with torch.no_grad():
        *others, got = over_sequence(lambda: outputs, group, divided=False)()
        assert over_sequence(lambda: outputs[0], group, divided=False)() is outputs[0]
    assert others == list(outputs[:2])
    assert got["lm loss"].tolist() == [6.0, 15.0]
    assert report["lm loss"].tolist() == [2.0, 5.0]
    assert (got["a mean"].item(), got["a name"]) == (4.0, "x")
