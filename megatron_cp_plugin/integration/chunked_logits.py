"""What programs around Megatron get in the place of logits: `install(chunked_loss=...)`.

They give a model no labels, divide its logits by a temperature, split them by tokens, and hand them
to a function of their own that makes log-probabilities or entropies of them. `ChunkedLogits` stands
for the logits on this way. The functions at its end, of verl, slime, NeMo-RL and SkyRL, are
replaced, and multiply by the output layer then, in chunks of tokens. Everything else that somebody
does with the logits is refused.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Never, Self

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.contract import Name


class LogitsTakenApartError(ContextParallelError, AttributeError):
    """Somebody needs the logits themselves. (`hasattr` takes it for no.)"""


@dataclass(frozen=True)
class Head:
    """A model's output layer and the tokens that it is to be applied to.

    Attributes:
        layer: The layer, which returns losses and entropies if it is given labels, see
            `chunked_loss`.
        hidden: [S,B,H], with sequence parallelism this rank's part of S.
        given: [V,H], the weight if the layer was given one.
    """

    layer: Any
    hidden: Tensor
    given: Tensor | None

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

    def statistics(
        self, rows: Tensor, labels: Tensor, temperature: float | Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Losses and entropies [...] of some tokens.

        Args:
            rows: [...], their numbers in hidden, none twice.
            labels: [...].
            temperature: A number, or [...].
            entropy: Whether entropies are wanted.
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
        """[S,B,H], which all tensor-parallel ranks have the same gradient of."""
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        if not self.layer.sequence_parallel:
            return self.hidden
        whole: Tensor = gather_from_sequence_parallel_region(
            self.hidden, tensor_parallel_output_grad=False, group=self.layer.tp_group
        )
        return whole


class ChunkedLogits:
    """Stands for logits [...,V] in float32, of some tokens or all, divided by a temperature.

    Attributes:
        entropies: Of the tokens, once `log_probs` was called where they `want_entropies`.
    """

    dtype = torch.float32
    want_entropies = False
    entropies: Tensor | None = None

    def __init__(
        self, head: Head, rows: Tensor | None = None, temperature: float | Tensor = 1.0
    ) -> None:
        """Args: rows: [...], numbers of tokens in `head`; None: all, [S,B]."""
        if rows is None:
            length, samples = head.shape
            rows = torch.arange(length * samples, device=head.hidden.device).view(length, samples)
        self._head, self._rows, self._temperature = head, rows, temperature

    # What describes a tensor.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self._rows.shape, self._head.weight.size(0)))

    @property
    def device(self) -> torch.device:
        return self._rows.device

    @property
    def is_cuda(self) -> bool:
        return self._rows.is_cuda

    @property
    def ndim(self) -> int:
        return self._rows.dim() + 1

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    # What keeps tokens whole.

    def transpose(self, one: int, other: int) -> Self:
        return self._of_tokens(
            lambda x: x.transpose(self._dim("transpose", one), self._dim("transpose", other))
        )

    def squeeze(self, dim: int) -> Self:
        return self._of_tokens(lambda x: x.squeeze(self._dim("squeeze", dim)))

    def unsqueeze(self, dim: int) -> Self:
        if dim < 0:
            _refuse("unsqueeze")
        return self._of_tokens(lambda x: x.unsqueeze(dim))

    def narrow(self, dim: int, start: int, length: int) -> Self:
        return self._of_tokens(lambda x: x.narrow(self._dim("narrow", dim), start, length))

    def __getitem__(self, index: Any) -> Self:
        parts = index if isinstance(index, tuple) else (index,)
        if len(parts) == self.ndim and parts[-1] == slice(None):
            parts = parts[:-1]
        if len(parts) >= self.ndim or not all(isinstance(x, int | slice) for x in parts):
            _refuse("indexing")
        return self._of_tokens(lambda x: x[parts])

    def contiguous(self) -> Self:
        return self

    def float(self) -> Self:
        return self

    def to(self, dtype: torch.dtype) -> Self:
        if dtype != self.dtype:
            _refuse(f"to({dtype})")
        return self

    def clone(self) -> Self:
        return type(self)(self._head, self._rows, self._temperature)

    # Temperature.

    def div_(self, divisor: Any) -> Self:
        if isinstance(divisor, Tensor):
            if divisor.dim() and divisor.size(-1) != 1:
                _refuse("division by ids")
            divisor = (divisor[..., 0] if divisor.dim() else divisor).expand(self._rows.shape)
        self._temperature = self._temperature * divisor
        return self

    def div(self, divisor: Any) -> Self:
        return self.clone().div_(divisor)

    __truediv__ = div

    # The ends.

    def log_probs(self, labels: Tensor, *, entropy: bool = False) -> tuple[Tensor, Tensor | None]:
        """Log-probabilities and entropies, [...] as labels.

        Args:
            labels: [...], ids of the whole vocabulary.
            entropy: Whether entropies are wanted.
        """
        if labels.shape != self._rows.shape:
            raise ContextParallelError(
                f"logits {list(self.shape)} need labels {list(self._rows.shape)}, got "
                f"{list(labels.shape)}"
            )
        losses, self.entropies = self._head.statistics(
            self._rows, labels, self._temperature, entropy=entropy or self.want_entropies
        )
        return -losses, self.entropies

    def entropy(self) -> Tensor:
        """Entropies [...], by a pass of their own."""
        _, found = self.log_probs(torch.zeros_like(self._rows), entropy=True)
        assert found is not None
        return found

    def sum(self) -> Tensor:
        """The sum; programs add 0 times it to a loss that some ranks have no tokens for."""
        if self._rows.numel() != self._head.shape[0] * self._head.shape[1]:
            _refuse("the sum of some")
        return self._head.sum() / self._scalar_temperature()

    def _scalar_temperature(self) -> Any:
        if isinstance(self._temperature, Tensor):
            _refuse("the sum at several temperatures")
        return self._temperature

    def _dim(self, what: str, dim: int) -> int:
        """Which dimension of tokens, counted from 0."""
        if dim % self.ndim == self.ndim - 1:
            _refuse(f"{what} of the vocabulary")
        return dim % self.ndim

    def _of_tokens(self, view: Callable[[Tensor], Tensor]) -> Self:
        temperature = self._temperature
        if isinstance(temperature, Tensor):
            temperature = view(temperature)
        return type(self)(self._head, view(self._rows), temperature)

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(f".{name}")

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Never:
        _refuse(getattr(function, "__name__", str(function)))


def _refuse(what: str) -> Never:
    raise LogitsTakenApartError(
        "logits in chunks can be split by tokens, divided by a temperature, and given to the "
        f"log-probability functions of verl, slime, NeMo-RL and SkyRL, got {what}: leave "
        "chunked_loss out"
    )


def serve_programs() -> list[compat.Replacement]:
    """Replaces the functions of the programs that run here which take logits.

    Raises:
        ContextParallelError: A program has no such function.
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
        _refuse("a mask of the ids that the rollout kept (top-p)")
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
