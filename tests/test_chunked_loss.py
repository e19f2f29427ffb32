"""The loss in chunks of tokens; test_log_probs.py holds the same numbers to those of all logits."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.token_losses import token_losses
from tests.integration.ranks import on_ranks

VOCABULARY, HIDDEN = 30, 8  # 1, 2 and 3 ranks have equal parts
TOKENS = (12, 2)


def tensors(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens [12,2,H], a weight with a column that dominates, labels, gradients of the losses."""
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(*TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCABULARY, TOKENS, generator=generator)
    labels[0] = torch.tensor([0, VOCABULARY - 1])
    dlosses = torch.randn(TOKENS, generator=generator, dtype=torch.float64)
    dlosses[3:5] = 0  # masked
    return hidden.to(dtype), weight.to(dtype), labels, dlosses


def whole_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, dlosses: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Losses and both gradients from all logits in float64, by PyTorch's own cross entropy."""
    hidden, weight = (x.double().requires_grad_() for x in (hidden, weight))
    logits = (hidden @ weight.t()).flatten(0, -2)
    losses = nn.functional.cross_entropy(logits, labels.flatten(), reduction="none")
    losses = losses.view(labels.shape)
    return losses.detach(), *torch.autograd.grad(losses, (hidden, weight), dlosses)


@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reductions(reduction: str) -> None:
    hidden, weight, labels, _ = tensors()
    weight.requires_grad_()
    losses = cp.chunked_cross_entropy(hidden, weight, labels, chunk_tokens=7)
    reduced = cp.chunked_cross_entropy(hidden, weight, labels, chunk_tokens=7, reduction=reduction)
    want = getattr(losses, reduction)()
    torch.testing.assert_close(reduced, want)
    for x, y in zip(*(torch.autograd.grad(x, weight) for x in (reduced, want)), strict=True):
        torch.testing.assert_close(x, y)


def test_labels_outside_the_vocabulary_have_finite_losses() -> None:
    hidden, weight, labels, dlosses = tensors()
    hidden.requires_grad_()
    labels[3:5] = torch.tensor([-100, VOCABULARY])
    losses = cp.chunked_cross_entropy(hidden, weight, labels, chunk_tokens=7)
    losses.backward(dlosses)
    assert losses.isfinite().all()
    assert torch.equal(hidden.grad[3:5], torch.zeros_like(hidden[3:5]))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
@pytest.mark.parametrize("size", [1, 3])
def test_labels_of_any_integers(size: int, dtype: torch.dtype) -> None:
    """Also those in which a rank's first id, of a vocabulary of 300, is no number."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(8, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(300, HIDDEN, generator=generator, dtype=torch.float64)
    labels = torch.arange(0, 128, 16)
    want = whole_loss(hidden.detach(), weight, labels, dlosses := hidden.new_ones(8))

    def body(group: Any) -> tuple[Tensor, Tensor]:
        part = weight.chunk(size)[group.rank()]
        losses = cp.chunked_cross_entropy(hidden, part, labels.to(dtype), tp_group=group)
        return losses.detach(), *torch.autograd.grad(losses, hidden, dlosses)

    for got in on_ranks(size, body):
        for x, y in zip(got, want, strict=False):
            torch.testing.assert_close(x, y)


@pytest.mark.parametrize("needed", ["hidden", "weight", "neither"])
def test_only_the_gradients_that_are_wanted(needed: str) -> None:
    given = dict(zip(("hidden", "weight", "labels", "dlosses"), tensors(), strict=True))
    dlosses, want = given.pop("dlosses"), whole_loss(*tensors())
    if needed == "neither":
        assert not cp.chunked_cross_entropy(**given, chunk_tokens=7).requires_grad
        return
    given[needed].requires_grad_()
    cp.chunked_cross_entropy(**given, chunk_tokens=7).backward(dlosses)
    torch.testing.assert_close(given[needed].grad, want[1 if needed == "hidden" else 2])
    assert given["weight" if needed == "hidden" else "hidden"].grad is None


def test_tied_embeddings() -> None:
    """One weight is looked up and multiplied by."""
    _, table, labels, dlosses = tensors()
    ids = labels.roll(1, 0)
    losses, dhidden, dweight = whole_loss(table[ids], table, labels, dlosses)
    want = dweight.index_add(0, ids.flatten(), dhidden.flatten(0, 1))
    table.requires_grad_()
    got = cp.chunked_cross_entropy(table[ids], table, labels, chunk_tokens=5)
    got.backward(dlosses)
    torch.testing.assert_close(got.detach(), losses)
    torch.testing.assert_close(table.grad, want)


def test_a_bfloat16_weight_with_a_float32_main_grad() -> None:
    """Products of bfloat16 are summed in float32: thousands of small ones do not get lost."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(4096, HIDDEN, generator=generator).bfloat16().requires_grad_()
    weight = nn.Parameter(torch.randn(VOCABULARY, HIDDEN, generator=generator).bfloat16())
    labels = torch.randint(VOCABULARY, (4096,), generator=generator)
    dlosses = torch.full((4096,), 1.0)
    want = whole_loss(hidden.detach(), weight.detach(), labels, dlosses.double())
    weight.main_grad = torch.full((VOCABULARY, HIDDEN), 2.0)
    losses = cp.chunked_cross_entropy(hidden, weight, labels, chunk_tokens=64, into_main_grad=True)
    assert losses.dtype == torch.float32
    losses.backward(dlosses)
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    error = (weight.main_grad - 2 - want[2]).norm() / want[2].norm()
    assert error < 1e-3  # of bfloat16 logits and their gradients; a bfloat16 sum has 7e-3
    alone = weight.detach().requires_grad_()
    cp.chunked_cross_entropy(hidden, alone, labels, chunk_tokens=64).backward(dlosses)
    torch.testing.assert_close(alone.grad, (weight.main_grad - 2).bfloat16())


def test_main_grad_of_a_float32_weight_under_autocast() -> None:
    hidden, weight, labels, dlosses = tensors(torch.float32)
    want = whole_loss(hidden.bfloat16(), weight.bfloat16(), labels, dlosses)
    weight = nn.Parameter(weight)
    weight.main_grad = torch.zeros_like(weight)
    with torch.autocast("cpu", torch.bfloat16):
        losses = cp.chunked_cross_entropy(hidden, weight, labels, into_main_grad=True)
    losses.backward(dlosses.float())
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert (weight.main_grad - want[2]).norm() < 1e-2 * want[2].norm()


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("chunk_tokens", [5, 24])
def test_predictions(size: int, chunk_tokens: int) -> None:
    hidden, weight, labels, _ = tensors()
    weight[4] = weight[25]  # the first one of equally probable ids

    def body(group: Any) -> Tensor:
        _, _, predicted = token_losses(
            hidden,
            weight.chunk(size)[group.rank()],
            labels,
            chunk_tokens=chunk_tokens,
            tp_group=group,
            sequence_parallel=False,
            into_main_grad=False,
            predict=True,
        )
        assert predicted is not None
        return predicted

    for predicted in on_ranks(size, body):
        assert torch.equal(predicted, (hidden @ weight.t()).argmax(-1))


def wrong_calls() -> Iterator[tuple[dict[str, object], str]]:
    _, weight, labels, _ = tensors()
    yield {"chunk_tokens": 0}, "chunk_tokens must be at least 1, got 0"
    yield {"reduction": "max"}, "reduction must be none, sum or mean, got 'max'"
    yield {"weight": weight.t()}, r"must have one H, got \[12, 2, 8\] and \[8, 30\]"
    yield {"weight": weight.float()}, "must have one floating dtype, got torch.float64 and"
    yield {"labels": labels[1:]}, r"labels must be whole numbers \[12, 2\] for hidden"
    yield {"labels": labels.float()}, "labels must be whole numbers"
    wanting = weight.clone().requires_grad_()
    yield {"weight": wanting, "into_main_grad": True}, "main_grad in float32, got none"


@pytest.mark.parametrize(("changes", "message"), [*wrong_calls()])
def test_wrong_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = tensors()
    given = {"hidden": hidden, "weight": weight, "labels": labels} | changes
    with pytest.raises(ContextParallelError, match=message) as error:
        cp.chunked_cross_entropy(**given)
    assert "\n" not in str(error.value)
