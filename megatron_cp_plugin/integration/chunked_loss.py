"""Losses and log-probabilities in chunks: `--cp-chunked-loss`, `install(chunked_loss=...)`.

A model multiplies by the output layer first, and gives the logits, with the labels that belong to
them, to a method of its own; multi-token prediction does so for each of its layers, and shifts the
labels in between. So the output layer of a model that is given labels returns a `Head`, from which
logits can be made, and the method calls the layer a second time, with the labels, for the losses.
It calls the layer and not a function, because wrappers that shard parameters hook calls of layers.
A model that is given no labels, or an output processor, computes all logits, as ever.

Programs around Megatron give a model no labels, divide its logits by a temperature, split them by
tokens, and hand them to a function of their own that makes log-probabilities or entropies of them.
With `install`, `ChunkedLogits` stands for the logits on this path, unless the whole vocabulary is
asked for. The functions at the end of the path, of verl, slime, NeMo-RL and SkyRL, are replaced,
and multiply by the output layer. Every other use of the logits is refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never, Self

import torch
from torch import Tensor, nn

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.contract import Name
from megatron_cp_plugin.token_losses import token_losses

# Attributes and functions of tensors that `ChunkedLogits` supports: shapes and splits.
_DESCRIBED = ("shape", "device", "is_cuda", "ndim", "dim", "size")
_SPLIT = ("transpose", "squeeze", "unsqueeze", "narrow")


class LogitsTakenApartError(ContextParallelError, AttributeError):
    """The logits themselves are needed. (`hasattr` returns False on it.)"""


@dataclass(eq=False)
class Head:
    """A model's output layer and the tokens that it is to be applied to.

    Attributes:
        layer: The layer, which returns losses and entropies if it is given labels.
        hidden: [S,B,H], with sequence parallelism this rank's part of S.
        given: [V,H], the weight if the layer was given one.
        predicted: [S,B], ids of the largest logits, set once losses of multi-token prediction
            exist.
    """

    layer: Any
    hidden: Tensor
    given: Tensor | None
    predicted: Tensor | None = None

    @property
    def weight(self) -> Tensor:
        """[V,H]."""
        weight: Tensor = self.layer.weight if self.given is None else self.given
        return weight

    @property
    def shape(self) -> tuple[int, int]:
        """S, of all tensor-parallel ranks, and B."""
        parts = self.layer.tp_group.size() if self.layer.sequence_parallel else 1
        return self.hidden.size(0) * parts, self.hidden.size(1)

    def losses(self, labels: Tensor) -> Tensor:
        """Of labels [B,S]: [B,S]."""
        labels = labels.transpose(0, 1).contiguous()
        losses, self.predicted = self.layer(self.hidden, weight=self.given, labels=labels)
        of_samples: Tensor = losses.transpose(0, 1).contiguous()
        return of_samples

    def statistics(
        self, rows: Tensor, labels: Tensor, temperature: float | Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses and entropies [...] of some tokens.

        Args:
            rows: [...], their numbers in hidden, none twice.
            temperature: [...], or a number.
        """
        at, length = rows.flatten(), self.shape[0] * self.shape[1]
        of_all = len(at) == length

        def given(x: Tensor) -> Tensor:
            """[...] -> [S,B] of all tokens, or [n] of these."""
            if not of_all:
                return x.flatten()
            return x.new_empty(length).index_copy_(0, at, x.flatten()).view(self.shape)

        found: tuple[Tensor, Tensor | None] = self.layer(
            self.hidden if of_all else self._whole.flatten(0, 1)[at],
            weight=self.given,
            labels=given(labels),
            temperature=given(temperature) if isinstance(temperature, Tensor) else temperature,
            entropy=entropy,
            sequence_parallel=self.layer.sequence_parallel and of_all,
        )
        losses, entropies = (
            None if x is None else (x.flatten()[at] if of_all else x).view(rows.shape)
            for x in found
        )
        assert losses is not None
        return losses, entropies

    def sum(self) -> Tensor:
        """The sum of the logits of all tokens and this rank's vocabulary."""
        from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region

        whole = copy_to_tensor_model_parallel_region(self._whole, group=self.layer.tp_group)
        return (
            whole.sum((0, 1), dtype=torch.float32) * self.weight.sum(0, dtype=torch.float32)
        ).sum()

    @cached_property
    def _whole(self) -> Tensor:
        """[S,B,H], whose gradient is the same on all tensor-parallel ranks."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if not self.layer.sequence_parallel:
            return self.hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            self.hidden, tensor_parallel_output_grad=False, group=self.layer.tp_group
        )
        return whole


class ChunkedLogits:
    """Stands for logits [...,V] in float32, of some tokens or all, divided by a temperature.

    Attributes: entropies: of the tokens, once `log_probs` was called where they `want_entropies`.
    """

    dtype = torch.float32
    want_entropies = False
    entropies: Tensor | None = None

    def __init__(
        self, head: Head, rows: Tensor | None = None, temperature: float | Tensor = 1.0
    ) -> None:
        """Args: rows: [...,V], of a token its number in `head`, V times; None: all, [S,B,V]."""
        if rows is None:
            length, samples = head.shape
            rows = torch.arange(length * samples, device=head.hidden.device).view(length, samples)
            rows = rows[..., None].expand(-1, -1, head.weight.size(0))
        self._head, self._rows, self._temperature = head, rows, temperature

    def __getattr__(self, name: str) -> Any:
        if name in _DESCRIBED:
            return getattr(self._rows, name)
        if name in _SPLIT:
            return lambda *args: self._split(name, lambda x: getattr(x, name)(*args))
        if not name.startswith("__"):
            _refuse_feature(f".{name}")
        raise AttributeError(name)

    def __getitem__(self, index: Any) -> Self:
        parts = index if isinstance(index, tuple) else (index,)
        if not all(isinstance(x, int | slice) for x in parts):
            _refuse_feature("indexing")
        return self._split("indexing", lambda x: x[parts])

    def _split(self, what: str, view: Callable[[Tensor], Tensor]) -> Self:
        """What keeps tokens whole: the last dimension has one number, V times."""
        rows, temperature = view(self._rows), self._temperature
        if not rows.dim() or rows.stride(-1) or rows.size(-1) != self._rows.size(-1):
            _refuse_feature(f"{what} of the vocabulary")
        if isinstance(temperature, Tensor):
            temperature = view(temperature[..., None].expand_as(self._rows))[..., 0]
        return type(self)(self._head, rows, temperature)

    def contiguous(self) -> Self:
        return self

    float = contiguous

    def to(self, dtype: torch.dtype) -> Self:
        if dtype != self.dtype:
            _refuse_feature(f"to({dtype})")
        return self

    def clone(self) -> Self:
        return type(self)(self._head, self._rows, self._temperature)

    def div_(self, divisor: Any) -> Self:
        if isinstance(divisor, Tensor):
            if divisor.dim() and divisor.size(-1) != 1:
                _refuse_feature("division by ids")
            divisor = (divisor[..., 0] if divisor.dim() else divisor).expand(self.shape[:-1])
        elif not divisor > 0:
            raise ContextParallelError(
                f"logits are divided by a temperature above 0, got {divisor}: use 1.0 for none"
            )
        self._temperature = self._temperature * divisor
        return self

    def div(self, divisor: Any) -> Self:
        return self.clone().div_(divisor)

    __truediv__ = div

    def log_probs(self, labels: Tensor, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies, [...] as labels.

        Args: labels: [...], ids of the whole vocabulary.
        """
        if labels.shape != self.shape[:-1]:
            raise ContextParallelError(
                f"logits {list(self.shape)} need labels {list(self.shape[:-1])}, got "
                f"{list(labels.shape)}"
            )
        entropy = entropy or self.want_entropies
        losses, self.entropies = self._head.statistics(
            self._rows[..., 0], labels, self._temperature, entropy=entropy
        )
        return -losses, self.entropies

    def entropy(self) -> Tensor:
        """Entropies [...], by a pass of their own."""
        _, found = self.log_probs(torch.zeros_like(self._rows[..., 0]), entropy=True)
        assert found is not None
        return found

    def sum(self) -> Tensor:
        """The sum; programs add 0 times the sum to a loss of ranks without tokens."""
        if self.shape[:-1].numel() != self._head.shape[0] * self._head.shape[1]:
            _refuse_feature("the sum of some")
        if isinstance(self._temperature, Tensor):
            _refuse_feature("the sum at several temperatures")
        return self._head.sum() / self._temperature

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        _refuse_feature(getattr(function, "__name__", str(function)))


def serve_loss(model: Any, chunk_tokens: int, *, for_programs: bool = False) -> None:
    """Makes a GPTModel or HybridModel compute its losses in chunks of tokens.

    Args: for_programs: it returns `ChunkedLogits` where it is given no labels.

    Raises: ContextParallelError if its output layer is of another kind.
    """
    layer = getattr(model, "output_layer", None)
    if layer is not None:  # on the last stage of a pipeline
        _check_layer(layer)
        if for_programs and getattr(model, "mtp_process", False):
            raise ContextParallelError(
                "chunked_loss of install needs a model without multi-token prediction, got "
                f"mtp_num_layers={model.config.mtp_num_layers}: leave one of the two out"
            )
        _Loss(model, layer, chunk_tokens, for_programs)


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
    """Replaces the output layer's product and the loss of one model."""

    def __init__(self, model: Any, layer: Any, chunk_tokens: int, for_programs: bool) -> None:
        self._model = model
        self._layer = layer
        self._chunk_tokens = chunk_tokens
        self._logits = layer.forward
        self._whole_losses = model.compute_language_model_loss
        self._for_programs = for_programs
        self._parameters = tuple(inspect.signature(model.forward).parameters)
        self._has_labels = self._is_pending = False
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.compute_language_model_loss = self._losses
        layer.forward = self._forward

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._parameters, args, strict=False)) | kwargs
        # A caller's own output processor needs logits.
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
        """The output layer's call: returns logits, a `Head`, or losses.

        Args: wanted: beside labels, a temperature, and whether entropies are wanted, as
            `token_losses` takes them; nothing: losses and predictions.
        """
        head = Head(self._layer, input_, weight)
        if labels is not None:
            predicts = bool(self._model.config.mtp_num_layers) and self._model.training
            settings = {
                "chunk_tokens": self._chunk_tokens,
                "tp_group": self._layer.tp_group,
                "sequence_parallel": self._layer.sequence_parallel,
                "into_main_grad": _has_main_grad(head.weight),
                **(wanted or {"predict": predicts}),
            }
            losses, entropies, predicted = token_losses(input_, head.weight, labels, **settings)
            return losses, entropies if wanted else predicted
        if self._has_labels:
            return head, None
        if self._is_pending and not runtime_gather_output:
            return ChunkedLogits(head), None
        return self._logits(input_, weight=weight, runtime_gather_output=runtime_gather_output)

    def _losses(self, labels: Tensor, logits: Head | Tensor) -> Tensor:
        """The model's method: losses [B,S] of labels [B,S]."""
        if isinstance(logits, Head):
            return logits.losses(labels)
        losses: Tensor = self._whole_losses(labels, logits)
        return losses


def _has_main_grad(weight: Tensor) -> bool:
    """Whether Megatron's data-parallel wrapper sums the parameter's gradients in float32.

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
    """Replaces Megatron's `_compute_mtp_acceptance_counts`.

    Returns: number of counted tokens with a right prediction, and number of counted tokens: [], [].
    """
    if not isinstance(mtp_logits, Head):
        return original(mtp_logits, mtp_labels, loss_mask, *args, **kwargs)
    assert mtp_logits.predicted is not None
    counts = loss_mask.bool()
    right = (mtp_logits.predicted.transpose(0, 1) == mtp_labels) & counts
    return right.sum().float(), counts.sum().float()


def _refuse_feature(what: str) -> Never:
    raise LogitsTakenApartError(
        "logits in chunks can be split by tokens, divided by a temperature, and given to the "
        f"log-probability functions of verl, slime, NeMo-RL and SkyRL, got {what}: leave "
        "chunked_loss out"
    )


def serve_programs() -> list[compat.Replacement]:
    """Replaces functions that take logits, of the programs that run in this process.

    Raises: ContextParallelError: A program has no such function.
    """
    made = []
    for path, hook in _TAKERS.items():
        module, name = path.split(":")
        if (module if path in _OPTIONAL else module.split(".")[0]) not in sys.modules:
            continue
        try:
            made.append(compat.Replacement(Name(module, name), hook))
        except (ImportError, AttributeError) as error:
            if path in _OPTIONAL:
                continue
            raise ContextParallelError(
                f"chunked_loss needs {module}.{name}, which this version does not have ({error}): "
                "leave chunked_loss out"
            ) from None
    compat.Replacement.put(made)
    return made


def _taking(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook for `ChunkedLogits`; tensors are for the program's own function."""

    def taker(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = (*args, *kwargs.values())
        chunked = any(isinstance(each, ChunkedLogits) for each in given)
        return hook(original, *args, **kwargs) if chunked else original(*args, **kwargs)

    return taker


@_taking
def _log_probs(original: Any, logits: ChunkedLogits, labels: Tensor, *args: Any) -> Tensor:
    return logits.log_probs(labels)[0]


@_taking
def _entropy(original: Any, logits: ChunkedLogits, *args: Any, **kwargs: Any) -> Tensor:
    """A pass of its own, because programs ask for entropies without labels."""
    return logits.entropy()


@_taking
def _of_verls_engine(
    original: Any, engine: Any, logits: ChunkedLogits, *args: Any, **kwargs: Any
) -> Any:
    """Its method that has labels and wants entropies: both by one pass."""
    if not kwargs.get("calculate_entropy") or kwargs.get("distillation_only"):
        return original(engine, logits, *args, **kwargs)
    logits.want_entropies = True
    found = original(engine, logits, *args, **kwargs | {"calculate_entropy": False})
    return found | {"entropy": logits.entropies}


@_taking
def _weighted_entropy(
    original: Any, logits: ChunkedLogits, weights: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    return (logits.entropy() * weights).sum()


@_taking
def _of_slime(
    original: Any,
    logits: ChunkedLogits,
    tokens: Tensor,
    tp_group: Any,
    with_entropy: bool = False,
    chunk_size: int = -1,
    log_prob_keep_mask: Any = None,
    with_entropy_grad: bool = True,
) -> tuple[Tensor, Tensor | None]:
    if log_prob_keep_mask is not None:
        _refuse_feature("a mask of the ids that the rollout kept (top-p)")
    log_probs, entropy = logits.log_probs(tokens, entropy=with_entropy)
    if entropy is not None and not with_entropy_grad:
        entropy = entropy.detach()
    return log_probs[:, None], entropy


# Names of functions and autograd functions, after their modules.
_VERL, _NEMO = "verl.utils.megatron.tensor_parallel", "nemo_rl.distributed.model_utils"
_SKYRL = "skyrl.backends.skyrl_train.distributed.megatron.model_utils"
_VERLS_ENGINE = (
    "verl.workers.engine.megatron.transformer_impl:"
    "MegatronEngineWithLMHead._lm_head_logits_processor"
)
_TAKERS: dict[str, Callable[..., Any]] = {
    f"{_VERL}:vocab_parallel_log_probs_from_logits": _log_probs,
    f"{_VERL}:_VocabParallelEntropy.apply": _entropy,
    _VERLS_ENGINE: _of_verls_engine,
    "slime.utils.ppo_utils:calculate_log_probs_and_entropy": _of_slime,
    f"{_NEMO}:DistributedLogprob.apply": _log_probs,
    f"{_NEMO}:ChunkedDistributedLogprob.apply": _log_probs,
    f"{_SKYRL}:DistributedLogprob.apply": _log_probs,
    f"{_SKYRL}:ChunkedDistributedLogprob.apply": _log_probs,
    f"{_SKYRL}:vocab_parallel_entropy": _entropy,
    f"{_SKYRL}:vocab_parallel_entropy_weighted_sum": _weighted_entropy,
}
_OPTIONAL = {_VERLS_ENGINE}  # not in all versions: entropies take a pass of their own without it
