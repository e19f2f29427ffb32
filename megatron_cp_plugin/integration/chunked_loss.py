"""`--cp-chunked-loss`: the loss of Megatron's models in chunks of tokens.

A model multiplies by the output layer first, and gives the logits, with the labels that belong to
them, to a method of its own; multi-token prediction does so for each of its layers, and shifts the
labels in between. So the output layer of a model that is given labels returns what the logits will
be made of, and the method calls the layer a second time, with the labels, for the losses. It is a
call of the layer, and not of a function, for those who shard parameters and hook on to calls.

A model that is given no labels, or an output processor, computes all logits, as ever. Those of
`install` return `ChunkedLogits` where there are no labels, unless all the vocabulary is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_cp_plugin.core.chunked_loss import token_losses
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.chunked_logits import ChunkedLogits, Head


@dataclass
class PendingLogits:
    """Stands for the logits between the output layer and the loss.

    Attributes:
        hidden: [S,B,H], with sequence parallelism this rank's part of S.
        weight: [V,H] if the layer was given one.
        predicted: [S,B], ids of the largest logits, once there is a loss of multi-token
            prediction.
    """

    hidden: Tensor
    weight: Tensor | None
    predicted: Tensor | None = None


def serve_loss(model: Any, chunk_tokens: int, *, for_programs: bool = False) -> None:
    """Makes a model compute its losses in chunks.

    Args:
        model: GPTModel or HybridModel.
        chunk_tokens: How many tokens' logits there are at a time.
        for_programs: It returns `ChunkedLogits` where it is given no labels.

    Raises:
        ContextParallelError: Its output layer is of another kind.
    """
    layer = getattr(model, "output_layer", None)
    if layer is not None:  # on the last stage of a pipeline
        _check_layer(layer)
        if for_programs and getattr(model, "mtp_process", False):
            raise ContextParallelError(
                "chunked_loss of install needs a model without multi-token prediction, got "
                f"mtp_num_layers={model.config.mtp_num_layers}: leave one of the two out"
            )
        _Loss(model, layer, chunk_tokens, for_programs).install()


def _check_layer(layer: Any) -> None:
    from megatron.core.tensor_parallel import ColumnParallelLinear

    got = None
    if type(layer) is not ColumnParallelLinear:
        got = type(layer).__name__
    elif layer.bias is not None:
        got = "one with a bias"
    elif layer.gather_output:
        got = "one that gathers the vocabulary (parallel_output=False)"
    if got:
        raise ContextParallelError(
            f"--cp-chunked-loss needs an output layer that is a plain ColumnParallelLinear, got "
            f"{got}: leave it out"
        )


class _Loss:
    """Takes the place of the output layer's product and of the loss of one model."""

    def __init__(self, model: Any, layer: Any, chunk_tokens: int, for_programs: bool) -> None:
        self._model = model
        self._layer = layer
        self._chunk_tokens = chunk_tokens
        self._logits = layer.forward
        self._whole_losses = model.compute_language_model_loss
        self._for_programs = for_programs
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._has_labels = self._is_pending = False

    def install(self) -> None:
        self._model.register_forward_pre_hook(self._enter, with_kwargs=True)
        self._model.compute_language_model_loss = self._losses
        self._layer.forward = self._forward

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        # A caller's own output processor takes logits, whatever else it is given.
        own = given.get("output_processor") is None
        self._has_labels = own and given.get("labels") is not None
        infers = given.get("inference_context") or given.get("inference_params")
        self._is_pending = own and self._for_programs and not infers

    def _forward(
        self,
        input_: Tensor,
        weight: Tensor | None = None,
        runtime_gather_output: bool | None = None,
        labels: Tensor | None = None,
        **wanted: Any,
    ) -> tuple[Any, Any]:
        """The output layer: its logits, what they will be made of, or what is made of them.

        Args:
            wanted: Beside labels, a temperature, and whether entropies are wanted, as
                `token_losses` takes them; nothing: losses and predictions.
        """
        if labels is not None:
            return self._chunked(
                input_, self._layer.weight if weight is None else weight, labels, wanted
            )
        if self._has_labels:
            return PendingLogits(input_, weight), None
        if self._is_pending and not runtime_gather_output:
            return ChunkedLogits(Head(self._layer, input_, weight)), None
        return self._logits(input_, weight=weight, runtime_gather_output=runtime_gather_output)

    def _chunked(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, wanted: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        layer = self._layer
        predict = bool(self._model.config.mtp_num_layers) and self._model.training
        settings = {
            "chunk_tokens": self._chunk_tokens,
            "tp_group": layer.tp_group,
            "sequence_parallel": layer.sequence_parallel,
            "into_main_grad": _has_main_grad(weight),
            **(wanted or {"predict": predict}),
        }
        losses, entropies, predicted = token_losses(hidden, weight, labels, **settings)
        return losses, entropies if wanted else predicted

    def _losses(self, labels: Tensor, logits: PendingLogits | Tensor) -> Tensor:
        """The model's method: losses [B,S] of labels [B,S]."""
        if isinstance(logits, Tensor):
            losses: Tensor = self._whole_losses(labels, logits)
            return losses
        losses, logits.predicted = self._layer(
            logits.hidden, weight=logits.weight, labels=labels.transpose(0, 1).contiguous()
        )
        return losses.transpose(0, 1).contiguous()


def _has_main_grad(weight: Tensor) -> bool:
    """Whether Megatron's wrapper for data parallelism sums gradients of it in float32.

    Megatron-FSDP, whose `main_grad` is there at times, takes them from the parameter itself.
    """
    main_grad = getattr(weight, "main_grad", None)
    return (
        isinstance(main_grad, Tensor)
        and main_grad.dtype == torch.float32
        and not hasattr(weight, "__fsdp_param__")
    )


def acceptance_counts(
    original: Callable[..., tuple[Tensor, Tensor]],
    mtp_logits: Any,
    mtp_labels: Tensor,
    loss_mask: Tensor,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Takes the place of Megatron's `_compute_mtp_acceptance_counts`.

    Args:
        original: Megatron's.
        mtp_logits: Of multi-token prediction, pending or not.
        mtp_labels: [B,S].
        loss_mask: [B,S].
        args, kwargs: Whatever else it takes.

    Returns:
        How many tokens that count are predicted rightly, and how many there are: [], [].
    """
    if not isinstance(mtp_logits, PendingLogits):
        return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
    assert mtp_logits.predicted is not None
    counts = loss_mask.bool()
    right = (mtp_logits.predicted.transpose(0, 1) == mtp_labels) & counts
    return right.sum().float(), counts.sum().float()
