"""Cross entropy and entropy of a language model's output layer, one chunk of tokens at a time.

The logits of a long sequence are its largest tensor: 262,144 tokens and a vocabulary shard of
62,080 are 33 GB in bfloat16, and 65 GB as the float32 that a softmax is taken in. Here the head's
product, the softmax and both gradients are computed for some thousand tokens at a time, so that a
chunk of logits is all there ever is.

Backward computes the logits a second time. Gradients could be had in the first pass, without that
product, only if the gradient of each token's loss were known then, but loss masks and the weights
of reinforcement learning come after it; and a gradient of the weight for each micro-batch in
flight, kept until backward, would take more memory than the chunks.

With z the logits of a token divided by its temperature, p their softmax, y its label and E the
entropy of p, the loss is lse(z) - z_y. Its gradient is p - [y], that of E is -p (z - lse + E).

Shapes: T tokens, H hidden size, V this rank's part of the vocabulary, W tensor-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, override

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.autograd.function import (
    cast_inputs,
    check_devices,
    differentiable_once,
    dtypes_as_given,
)
from megatron_cp_plugin.core.partial import accumulation_dtype, add_product, fused_for
from megatron_cp_plugin.errors import ContextParallelError

CHUNK_TOKENS = 4096
_LEAST = -1e30  # of a log-probability: 0 times it is 0
_IDS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


class TokenLosses(NamedTuple):
    """[...] as labels each, None where not wanted.

    Attributes:
        losses: Negated log-probabilities.
        entropies: In nats.
        predicted: The most probable ids.
    """

    losses: Tensor
    entropies: Tensor | None
    predicted: Tensor | None


def token_losses(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    chunk_tokens: int,
    tp_group: dist.ProcessGroup | None,
    sequence_parallel: bool,
    into_main_grad: bool,
    temperature: float | Tensor = 1.0,
    entropy: bool = False,
    predict: bool = False,
) -> TokenLosses:
    """The losses of tokens, and what else is wanted of them.

    Args:
        hidden, weight, labels, chunk_tokens, tp_group, sequence_parallel, into_main_grad: as
            `functional.chunked_log_probs` has them.
        temperature: as there; a tensor [...] as labels, or of one element.
        entropy, predict: whether entropies and predictions are wanted.
    """
    alone = tp_group is None or tp_group.size() == 1
    head = _Head(
        chunk_tokens,
        None if alone else tp_group,
        sequence_parallel and not alone,
        _main_grad(weight) if into_main_grad else None,
        predict,
        entropy,
    )
    hidden, weight = cast_inputs(hidden, weight)
    check_devices("hidden, weight, labels", hidden, weight, labels)
    head.check(hidden, weight, labels)
    scale = None  # [T], what the logits of each token are multiplied by
    wide = accumulation_dtype(hidden.dtype)
    if isinstance(temperature, Tensor):
        scale = temperature.detach().to(wide).reciprocal().expand(labels.shape).reshape(-1)
    elif temperature != 1.0:
        scale = hidden.new_full((labels.numel(),), 1 / temperature, dtype=wide)
    tokens = hidden.reshape(-1, hidden.size(-1)).contiguous()
    losses, entropies, predicted = _ChunkedCrossEntropy.apply(
        tokens, weight, labels.reshape(-1), scale, head
    )
    others = (None if x is None else x.view(labels.shape) for x in (entropies, predicted))
    return TokenLosses(losses.view(labels.shape), *others)


def _main_grad(weight: Tensor) -> Tensor | None:
    if not weight.requires_grad:
        return None
    total: Tensor | None = getattr(weight, "main_grad", None)
    if total is None or total.dtype != torch.float32:
        got = "none" if total is None else str(total.dtype)
        raise ContextParallelError(
            f"into_main_grad needs weight.main_grad in float32, got {got}: leave it out"
        )
    return total


@dataclass(frozen=True)
class _Head:
    """Settings of an output layer: chunks of tokens, ranks that share the vocabulary, wanted
    results.

    Attributes:
        chunk_tokens, sequence_parallel: as in `token_losses`.
        group: None where this rank has the whole vocabulary.
        main_grad: what the gradient of the weight is added to, if not to one of its own.
        predict, entropy: whether predictions and entropies are wanted.
    """

    chunk_tokens: int
    group: dist.ProcessGroup | None
    sequence_parallel: bool
    main_grad: Tensor | None
    predict: bool = False
    entropy: bool = False

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def parts(self) -> int:
        """How many ranks hold a part of the tokens each."""
        return self.size if self.sequence_parallel else 1

    def check(self, hidden: Tensor, weight: Tensor, labels: Tensor) -> None:
        if self.chunk_tokens < 1:
            raise ContextParallelError(
                f"chunk_tokens must be at least 1, got {self.chunk_tokens}: leave it out for "
                f"{CHUNK_TOKENS}"
            )
        if weight.dim() != 2 or hidden.dim() < 2 or hidden.size(-1) != weight.size(1):
            raise ContextParallelError(
                "hidden [...,H] and weight [V,H] must have one H, got "
                f"{list(hidden.shape)} and {list(weight.shape)}"
            )
        if hidden.dtype != weight.dtype or not hidden.is_floating_point():
            raise ContextParallelError(
                f"hidden and weight must have one floating dtype, got {hidden.dtype} and "
                f"{weight.dtype}"
            )
        whole = (hidden.size(0) * self.parts, *hidden.shape[1:-1])
        if labels.shape != whole or labels.dtype not in _IDS:
            raise ContextParallelError(
                f"labels must be whole numbers {list(whole)} for hidden {list(hidden.shape)}, got "
                f"{labels.dtype} {list(labels.shape)}"
            )

    def chunks(self, tokens: int) -> Iterator[slice]:
        """Cuts a rank's tokens so that a chunk has `chunk_tokens` tokens of all parts together."""
        step = max(1, self.chunk_tokens // self.parts)
        return (slice(at, min(at + step, tokens)) for at in range(0, tokens, step))

    def whole(self, hidden: Tensor) -> Tensor:
        """Tokens [n,H] of a chunk -> [parts*n,H], with the tokens of the other ranks."""
        return self.gathered(hidden).flatten(0, 1) if self.sequence_parallel else hidden

    def wanted(self, labels: Tensor, chunk: slice, vocabulary: int) -> Tensor:
        """Labels [T] -> labels of a chunk [parts*n], int64, counted from this rank's first id."""
        first = 0 if self.group is None else self.group.rank() * vocabulary
        return self.part(labels, chunk).long() - first

    def part(self, x: Tensor, chunk: slice) -> Tensor:
        """Numbers [T] of all tokens -> numbers of a chunk [parts*n]."""
        return x.view(self.parts, -1)[:, chunk].reshape(-1)

    def gathered(self, x: Tensor) -> Tensor:
        """[...] -> [W,...] of all ranks."""
        if self.group is None:
            return x[None]
        out = x.new_empty(self.size * x.size(0), *x.shape[1:])
        dist.all_gather_into_tensor(out, x, group=self.group)
        return out.view(self.size, *x.shape)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    @override
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | None, head: _Head
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        with dtypes_as_given(hidden.device):
            lse, target, entropy, predicted = _statistics(hidden, weight, labels, scale, head)
        ctx.save_for_backward(hidden, weight, labels, scale, lse, entropy)
        ctx.head = head
        ctx.set_materialize_grads(False)
        if predicted is not None:
            ctx.mark_non_differentiable(predicted)
        return lse - target, entropy, predicted

    @staticmethod
    @override
    @differentiable_once
    def backward(
        ctx: Any, dlosses: Tensor | None, dentropy: Tensor | None, _: None
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden, weight, labels, scale, lse, entropy = ctx.saved_tensors
        of_rows = [lse, torch.zeros_like(lse) if dlosses is None else dlosses.to(lse.dtype), scale]
        of_rows += [None, None] if dentropy is None else [entropy, dentropy.to(lse.dtype)]
        with dtypes_as_given(hidden.device):
            dhidden, dweight = _gradients(
                hidden, weight, labels, of_rows, ctx.head, ctx.needs_input_grad[:2]
            )
        # Not before the chunk of logits is gone.
        if dweight is not None:
            added = dweight is ctx.head.main_grad
            dweight = torch.zeros_like(weight) if added else dweight.to(weight.dtype)
        return dhidden, dweight, None, None, None


def _statistics(
    hidden: Tensor, weight: Tensor, labels: Tensor, scale: Tensor | None, head: _Head
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Ingredients of the losses of all tokens, their entropies and predictions.

    Returns: [T] each: the logarithm of the sum of exponentials over the whole vocabulary, the logit
        of the label, the entropy, and the id of the largest logit; None for the last two unless
        they are wanted.
    """
    vocabulary, tokens = weight.size(0), labels.numel()
    wide = accumulation_dtype(weight.dtype)
    # [:,parts,T/parts]: sum of exponentials, logit of the label, entropy, and largest logit.
    count = 2 + head.entropy + head.predict
    found = hidden.new_empty(count, head.parts, hidden.size(0), dtype=wide)
    best = labels.new_empty(head.parts, hidden.size(0))
    buffer = _logits_buffer(hidden, weight, head)
    for chunk in head.chunks(hidden.size(0)):
        x = head.whole(hidden[chunk])
        logits = torch.mm(x, weight.t(), out=buffer[: x.size(0)])
        wanted = head.wanted(labels, chunk, vocabulary)
        factors = None if scale is None else head.part(scale, chunk)
        rows = [*logit_statistics(logits, wanted, factors, head.entropy)]
        if head.predict:
            top, ids = logits.max(1)
            best[:, chunk] = ids.view(head.parts, -1)
            rows.append(top.to(wide))
        found[:, :, chunk] = torch.stack(rows).view(len(rows), head.parts, -1)
    every = head.gathered(found.view(count, tokens))  # [W,2 to 4,T]
    lse, target = torch.logsumexp(every[:, 0], 0), every[:, 1].sum(0)
    entropy = predicted = None
    if head.entropy:  # that of which rank has the id, and those within the ranks
        inside = lse - every[:, 0] + every[:, 2]
        entropy = (torch.exp(every[:, 0] - lse) * inside).sum(0)
    if head.predict:
        winner = every[:, -1].argmax(0)
        ids = head.gathered(best.view(tokens)).gather(0, winner[None])[0]
        predicted = winner * vocabulary + ids
    return lse, target, entropy, predicted


def _gradients(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    rows: Sequence[Tensor | None],
    head: _Head,
    needed: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden [T/parts,H] and of the weight [V,H], if needed.

    Args: rows: the last arguments of `logit_gradients_`, of all tokens: [T], equal on all ranks.

    Returns: the gradient of hidden in its dtype; the gradient of the weight in a wide dtype, or
    `main_grad` with it added.
    """
    wide = accumulation_dtype(weight.dtype)
    dhidden = torch.empty_like(hidden) if needed[0] else None
    total = None
    if needed[1]:
        total = head.main_grad
        if total is None:
            total = torch.zeros_like(weight, dtype=wide)
    buffer = _logits_buffer(hidden, weight, head)
    sums = []
    for chunk in head.chunks(hidden.size(0)):
        x = head.whole(hidden[chunk])
        dlogits = torch.mm(x, weight.t(), out=buffer[: x.size(0)])
        wanted = head.wanted(labels, chunk, weight.size(0))
        lse, dloss, *others = (None if x is None else head.part(x, chunk) for x in rows)
        assert lse is not None
        assert dloss is not None
        logit_gradients_(dlogits, wanted, lse, dloss, *others)
        if dhidden is not None:
            if head.sequence_parallel:
                dist.reduce_scatter_tensor(dhidden[chunk], dlogits @ weight, group=head.group)
            else:
                torch.mm(dlogits, weight, out=dhidden[chunk])
                if head.group is not None:  # while the next chunk is computed
                    sums.append(dist.all_reduce(dhidden[chunk], group=head.group, async_op=True))
        if total is not None:
            add_product(total, dlogits, x)
    for pending in sums:
        pending.wait()
    return dhidden, total


def _logits_buffer(hidden: Tensor, weight: Tensor, head: _Head) -> Tensor:
    """Memory for the logits of the largest chunk; all chunks are written into it in turn."""
    rows = max(((c.stop - c.start) * head.parts for c in head.chunks(hidden.size(0))), default=0)
    return hidden.new_empty(rows, weight.size(0))


def logit_statistics(
    logits: Tensor, wanted: Tensor, scale: Tensor | None = None, entropy: bool = False
) -> tuple[Tensor, ...]:
    """For each row of logits [n,V] the logarithm of the sum of exponentials, and one logit.

    Args:
        wanted: [n], the column of that logit; 0 is given for columns outside.
        scale: [n], what the logits of each row are multiplied by; None: 1.
        entropy: whether the entropy of the row's softmax is wanted too.

    Returns: two or three [n], in float32 or in float64.
    """
    fused = fused_for(logits)
    if fused is not None:
        return fused.logit_statistics(logits, wanted, scale, entropy)
    wide = logits.to(accumulation_dtype(logits.dtype))
    if scale is not None:
        wide = wide * scale[:, None]
    here = (wanted >= 0) & (wanted < logits.size(1))
    target = wide.gather(1, torch.where(here, wanted, 0)[:, None])[:, 0]
    lse, target = torch.logsumexp(wide, 1), torch.where(here, target, 0)
    if not entropy:
        return lse, target
    return lse, target, torch.special.entr(torch.exp(wide - lse[:, None])).sum(1)


def logit_gradients_(
    logits: Tensor,
    wanted: Tensor,
    lse: Tensor,
    dloss: Tensor,
    scale: Tensor | None = None,
    entropy: Tensor | None = None,
    dentropy: Tensor | None = None,
) -> None:
    """Puts the gradient of each row's loss, and of its entropy, in the place of its logits.

    Args:
        logits: [n,V].
        wanted, lse, scale: [n], as in `logit_statistics`, lse of the whole vocabulary.
        dloss: [n], the gradient of each loss, in the dtype of lse.
        entropy, dentropy: [n], each entropy and its gradient, likewise; None: it has none.
    """
    fused = fused_for(logits)
    if fused is not None:
        fused.logit_gradients_(logits, wanted, lse, dloss, scale, entropy, dentropy)
        return
    wide = logits.to(lse.dtype)
    if scale is not None:
        wide = wide * scale[:, None]
    wide = wide.sub(lse[:, None])
    gradient = torch.exp(wide)
    more = None
    if entropy is not None and dentropy is not None:
        more = gradient * (wide.clamp(min=_LEAST) + entropy[:, None]) * dentropy[:, None]
    here = (wanted >= 0) & (wanted < logits.size(1))
    rows = torch.arange(len(wanted), device=wide.device)
    gradient[rows, torch.where(here, wanted, 0)] -= here.to(wide.dtype)
    gradient.mul_(dloss[:, None])
    if more is not None:
        gradient.sub_(more)
    if scale is not None:
        gradient.mul_(scale[:, None])
    logits.copy_(gradient)
