"""Log-probabilities and entropies in chunks: equal to those of all logits."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ContextParallelError
from tests.integration.ranks import on_ranks
from tests.operators import Operators
from tests.pairwise import pairwise
from tests.test_chunked_loss import HIDDEN, TOKENS, VOCABULARY, tensors

# Log-probabilities, entropies, gradients of hidden and weight.
Found = tuple[Tensor, ...]


def temperatures(kind: str) -> float | Tensor:
    if kind == "one a token":
        generator = torch.Generator().manual_seed(5)
        return 0.5 + torch.rand(TOKENS, generator=generator, dtype=torch.float64)
    return float(kind)


def of_all_logits(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    dlog_probs: Tensor,
    dentropy: Tensor,
    temperature: float | Tensor = 1.0,
) -> Found:
    """In float64, by PyTorch's own functions."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    divisor = temperature[..., None] if isinstance(temperature, Tensor) else temperature
    every = torch.log_softmax(hidden @ weight.t() / divisor, -1)
    log_probs = every.gather(-1, labels[..., None])[..., 0]
    entropy = -(every.exp() * every).sum(-1)
    total = (log_probs * dlog_probs).sum() + (entropy * dentropy).sum()
    return (log_probs.detach(), entropy.detach(), *torch.autograd.grad(total, (hidden, weight)))


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    hidden, weight, labels, dlog_probs = tensors(dtype)
    return hidden, weight, labels, dlog_probs, dlog_probs.flip(0).contiguous()


@pytest.mark.parametrize(
    ("size", "chunk_tokens", "sequence_parallel", "temperature"),
    pairwise((1, 2, 3), (1, 5, 7, 24, 1000), (False, True), ("1", "0.7", "one a token")),
)
def test_equal_those_of_all_logits(
    size: int, chunk_tokens: int, sequence_parallel: bool, temperature: str
) -> None:
    whole, every, labels, dlog_probs, dentropy = problem()
    divisor = temperatures(temperature)

    def body(group: Any) -> Found:
        hidden = whole.chunk(size)[group.rank()] if sequence_parallel else whole
        weight = every.chunk(size)[group.rank()]
        hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
        found = cp.chunked_log_probs(
            hidden,
            weight,
            labels,
            temperature=divisor,
            entropy=True,
            chunk_tokens=chunk_tokens,
            tp_group=group,
            sequence_parallel=sequence_parallel,
        )
        torch.autograd.backward(found, (dlog_probs, dentropy))
        return (*(x.detach() for x in found), hidden.grad, weight.grad)

    log_probs, entropy, dhidden, dweight = zip(*on_ranks(size, body), strict=True)
    for same in (log_probs, entropy, *([] if sequence_parallel else [dhidden])):
        assert all(torch.equal(same[0], other) for other in same)
    dhidden = dhidden if sequence_parallel else dhidden[:1]
    got = log_probs[0], entropy[0], torch.cat(dhidden), torch.cat(dweight)
    want = of_all_logits(whole, every, labels, dlog_probs, dentropy, divisor)
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("entropy", [False, True])
def test_are_the_cross_entropy_negated(entropy: bool) -> None:
    """To the bit, with its gradients, whether entropies are wanted or not."""
    given = problem(torch.float32)[:3]
    found = []
    for negated in (False, True):
        hidden, weight, labels = given
        hidden, weight = (x.clone().requires_grad_() for x in (hidden, weight))
        if negated:
            result = cp.chunked_log_probs(hidden, weight, labels, chunk_tokens=7, entropy=entropy)
            losses = -(result[0] if isinstance(result, tuple) else result)
        else:
            losses = cp.chunked_cross_entropy(hidden, weight, labels, chunk_tokens=7)
        found.append((losses.detach(), *torch.autograd.grad(losses.sum(), (hidden, weight))))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("wanted", ["log_probs", "entropy"])
def test_one_of_the_two_has_a_gradient(wanted: str) -> None:
    hidden, weight, labels, dlog_probs, _ = problem()
    nothing = torch.zeros_like(dlog_probs)
    taken = (dlog_probs, nothing) if wanted == "log_probs" else (nothing, dlog_probs)
    want = of_all_logits(hidden, weight, labels, *taken)[2:]
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    log_probs, entropy = cp.chunked_log_probs(*leaves, labels, chunk_tokens=7, entropy=True)
    one = log_probs if wanted == "log_probs" else entropy
    for x, y in zip(torch.autograd.grad(one, leaves, dlog_probs), want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2)])
def test_smaller_types(dtype: torch.dtype, bound: float) -> None:
    hidden, weight, labels, dlog_probs, dentropy = problem(dtype)
    want = of_all_logits(hidden, weight, labels, dlog_probs, dentropy, 0.7)
    leaves = [x.requires_grad_() for x in (hidden, weight)]
    found = cp.chunked_log_probs(*leaves, labels, chunk_tokens=7, entropy=True, temperature=0.7)
    assert all(x.dtype == torch.float32 for x in found)
    torch.autograd.backward(found, (dlog_probs.float(), dentropy.float()))
    for x, y in zip((*found, *(x.grad for x in leaves)), want, strict=True):
        assert (x - y).norm() < bound * y.norm()


def test_certain_and_impossible_tokens() -> None:
    """Small entropies are not lost between large numbers, and no gradient is NaN."""
    hidden = torch.tensor([[1000.0], [1.0]])
    weight = torch.tensor([[20.0], [-torch.inf], *([0.0] for _ in range(28))], requires_grad=True)
    log_probs, entropy = cp.chunked_log_probs(
        hidden, weight, torch.zeros(2, dtype=torch.long), entropy=True
    )
    (log_probs + entropy).sum().backward()
    assert weight.grad.isfinite().all()
    assert log_probs[0] == 0
    assert entropy[0] == 0
    every = torch.log_softmax(weight.detach()[weight[:, 0] > -1, 0].double(), 0)
    torch.testing.assert_close(entropy[1].double(), -(every.exp() * every).sum(), rtol=0, atol=1e-7)


def test_all_logits_are_never_there() -> None:
    hidden, weight = (torch.randn(n, HIDDEN, requires_grad=True) for n in (600, 500))
    labels = torch.randint(500, (600,))
    sizes: list[int] = []
    with Operators(lambda *seen: sizes.extend(x.numel() for x in seen[2])):
        found = cp.chunked_log_probs(
            hidden, weight, labels, chunk_tokens=16, entropy=True, temperature=2.0
        )
        (found[0].sum() + found[1].sum()).backward()
    assert max(sizes) == 16 * 500


def test_no_tokens() -> None:
    hidden, weight = torch.randn(0, 2, HIDDEN), torch.randn(VOCABULARY, HIDDEN, requires_grad=True)
    found = cp.chunked_log_probs(
        hidden, weight, torch.zeros(0, 2, dtype=torch.long), entropy=True, temperature=0.5
    )
    sum(x.sum() for x in found).backward()
    assert all(x.shape == (0, 2) for x in found)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def wrong_calls() -> Iterator[tuple[dict[str, object], str]]:
    yield {"temperature": 0}, "temperature needs a positive number, or one for each of the labels"
    yield {"temperature": float("nan")}, "positive number, or one for each of the labels [12, 2]"
    yield {"temperature": "hot"}, "temperature needs a number, got 'hot'"
    yield {"temperature": torch.ones(12)}, "temperature needs a number, got"
    yield {"temperature": torch.ones(TOKENS, dtype=torch.long)}, "floating numbers without a grad"
    yield {"temperature": torch.ones(TOKENS, requires_grad=True)}, "requires_grad=True: detach"


@pytest.mark.parametrize(("changes", "message"), [*wrong_calls()])
def test_wrong_calls_are_refused(changes: dict[str, Any], message: str) -> None:
    hidden, weight, labels, _ = tensors()
    given = {"hidden": hidden, "weight": weight, "labels": labels} | changes
    with pytest.raises(ContextParallelError, match=re.escape(message)) as error:
        cp.chunked_log_probs(**given)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 250


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_on_a_gpu(temperature: float) -> None:
    """As near to float64 as all logits at once in bfloat16; memory of one chunk."""
    tokens, vocabulary, size, chunk = 8192, 12000, 512, 512
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    hidden = normal(tokens, size).bfloat16().requires_grad_()
    weight = nn.Parameter((normal(vocabulary, size) / 8).bfloat16())
    labels = torch.randint(vocabulary, (tokens,), generator=generator, device="cuda")
    dlog_probs, dentropy = normal(tokens), normal(tokens)
    want = of_all_logits(
        hidden, weight, labels, dlog_probs.double(), dentropy.double(), temperature
    )
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = cp.chunked_log_probs(
        hidden,
        weight,
        labels,
        temperature=temperature,
        entropy=True,
        chunk_tokens=chunk,
        into_main_grad=True,
    )
    torch.autograd.backward(found, (dlog_probs, dentropy))
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < hidden.nbytes + 2 * chunk * vocabulary * 2 + (64 << 20)  # cuBLAS has 32 MiB
    got = *(x.detach() for x in found), hidden.grad, weight.main_grad
    # Logits, and their gradients, are bfloat16 there as well.
    given = hidden.detach().requires_grad_(), weight.detach().requires_grad_()
    every = (given[0] @ given[1].T).float().div(temperature).log_softmax(-1)
    whole = every.gather(-1, labels[:, None])[:, 0], -(every.exp() * every).sum(-1)
    own = *(x.detach() for x in whole), *torch.autograd.grad(whole, given, (dlog_probs, dentropy))
    for x, y, unchunked in zip(got, want, own, strict=True):
        assert (x - y).norm() < 1.5 * (unchunked - y).norm() + 1e-6 * y.norm()
