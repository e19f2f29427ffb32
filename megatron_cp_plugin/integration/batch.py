"""Splits a batch into the tokens of this rank, and remembers what it has split.

A script may cut its batches by itself, or import the function that does it before it is replaced.
Its model would train on tokens at wrong positions, which no shape shows. So batches that are cut
here are marked, and a model refuses tensors without the mark (`integration.inputs`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.agree import Digest, SameCall
from megatron_cp_plugin.core.communication.devices import capturing
from megatron_cp_plugin.core.layout import document_starts
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask, attention_spans
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings

_OF_DOCUMENTS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_SPANS, _POSITIONS = "attention_spans", "attention_positions"
_OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
# Dimension of tokens of those tensors where it is not the second.
_DIMS = {"attention_mask": 2, "decoder_input": 0}
_ORDER = "position_ids of a whole batch must count up from 0, and may restart at 0"
_MARK = "_cut_by_megatron_cp_plugin"


@dataclass(frozen=True)
class Cut:
    """One cutting of a batch.

    Attributes:
        mask: The batch's spans; None: it had none.
        resolved: Documents and spans that the layout follows; None: it follows none.
    """

    mask: DocumentMask | None = None
    resolved: DocumentMask | None = None


@dataclass(frozen=True)
class _Mark:
    """The mark of a cut tensor: its batch and key, and the `version` of its contents."""

    key: str
    cut: Cut
    version: int | None


class Batches:
    """Cuts the batches of one run.

    Attributes:
        spans: Spans of the last batch; None: it had none.
        later: What the GPU finds out about batches that were cut, for the model's call.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.spans: DocumentMask | None = None
        self._last: dict[str, Tensor] = {}
        self._last_cut = Cut()
        self.later = LaterValues()
        self._has_compared = False

    def shard(self, batch: dict[str, Any], group: dist.ProcessGroup) -> dict[str, Any]:
        """Keeps this rank's part of every tensor of a batch, position ids included.

        Ranks compare every batch: shapes and spans before it is cut. Its elements are read then on
        CPUs, and in the first call; later a GPU sums them, and ranks compare the sums when the
        model has run. Batches of a CUDA graph's replays are not compared.

        Args:
            batch: Tensors [b, N, ...] of whole samples, the same on all ranks of the group;
                `attention_mask` [b, 1, N, N], true for later tokens, which a model looks at, see
                `integration.attention_mask`; multimodal `position_ids` [3, b, N]; `decoder_input`
                [N, b, H]; None where a pipeline stage has no use for a key.
                What tells of documents stays as it is. `attention_spans`, and
                `attention_positions`, if any: As of `documents.attention_spans`, for the next call
                of the model; every pipeline stage needs them.

        Returns: The same dict, without these two.

        Raises: ContextParallelError: On all ranks: the batch is not whole, or another one on some
        rank. The layout follows documents, and there are none, nor spans.
        """
        whole = {key: batch[key] for key in _OF_TOKENS if isinstance(batch.get(key), Tensor)}
        resolved = None
        called = SameCall(self.runtime.topology(group), "get_batch_on_this_cp_rank")
        with self.later, called as made:
            made.refusal = other_samples
            self.spans = _spans_of(batch.pop(_SPANS, None), batch.pop(_POSITIONS, None))
            if group.size() > 1:
                made.values = self._values(whole)
            if group.size() > 1 and self.runtime.follows_documents:
                if whole and self.spans is None and batch.get("cu_seqlens") is None:
                    check("batch", Settings(None, self.runtime.config))
                starts = _documents_of(batch)
                resolved = replace(self.spans or DocumentMask(), starts=starts)
        self._has_compared = True  # on all ranks, or on none
        if group.size() == 1:
            _mark(whole, Cut(self.spans))
            return batch
        for key, value in batch.items():
            if not isinstance(value, Tensor) or key in _OF_DOCUMENTS:
                continue
            dim = _dim_of(key, value)
            tokens = value.size(dim)
            documents = resolved.resolved(tokens) if resolved else ()
            local = self.runtime.positions(group, tokens, value.device, documents)
            batch[key] = value.index_select(dim, local)
        self._last = {key: batch[key] for key in whole}
        self._last_cut = Cut(self.spans, resolved)
        _mark(self._last, self._last_cut)
        return batch

    def spans_of(self, tensors: Iterable[Any]) -> DocumentMask | None:
        """Returns the spans of the batch that tensors come from; None: it had none.

        Args: tensors: that a model is given. Of others than `shard` gave, such as those of a
            pipeline stage without tokens, it is the batch that came last.
        """
        marks = (getattr(tensor, _MARK, None) for tensor in tensors)
        found = (mark.cut.mask for mark in marks if isinstance(mark, _Mark))
        return next(found, self.spans)

    def cut_of(self, key: str, tensor: Tensor) -> Cut | None:
        """Returns the cutting that a tensor comes from; None: it was not cut here, or has changed
        since.

        Args: tensor: from `shard`, or a copy of one from its last call, which is found by comparing
            elements (on a GPU the host waits).
        """
        mark = getattr(tensor, _MARK, None)
        if isinstance(mark, _Mark):
            return mark.cut if (mark.key, mark.version) == (key, _changes(tensor)) else None
        last = self._last.get(key)
        if last is None or (last.shape, last.device) != (tensor.shape, tensor.device):
            return None
        if capturing(tensor):
            raise ContextParallelError(
                "--cuda-graph-impl full_iteration needs the tensors that the plugin split, got "
                f"a copy of {key}, which cannot be compared in a CUDA graph: pass the tensors of "
                "get_batch_on_this_cp_rank to the model, or use --cuda-graph-impl local"
            )
        return self._last_cut if torch.equal(last.to(tensor.dtype), tensor) else None

    @property
    def has_cut(self) -> bool:
        """Whether a batch was cut at all."""
        return bool(self._last)

    def _values(self, whole: Mapping[str, Tensor]) -> dict[str, object]:
        """What all ranks share of a batch. Raises: ContextParallelError if it is not whole."""
        before = self.later.take()  # of a batch that no model was given
        lengths = {key: tensor.size(_dim_of(key, tensor)) for key, tensor in whole.items()}
        if len(set(lengths.values())) > 1:
            raise ContextParallelError(
                f"all tensors of a batch need the same number of tokens, got {lengths}: pass "
                "whole samples to get_batch_on_this_cp_rank"
            )
        positions = None if self.spans is None else self.spans.positions
        captured = any(map(capturing, whole.values()))
        for key, tensor in whole.items() if not captured else ():
            self.later.add(key, _checksum(tensor), int)
        ids = whole.get("position_ids")
        if positions is None and ids is not None and not is_multimodal(ids):  # else without order
            if captured:  # the host does not see the batches of replays, so the GPU ends the run
                torch._assert_async(_count_up(ids), _ORDER)
            else:
                self.later.add("order", _count_up(ids), partial(_refuse_disorder, ids))
        values: dict[str, object] = {
            "training": torch.is_grad_enabled(),
            **{f"shape of {key}": (*x.shape, x.dtype) for key, x in whole.items()},
            _SPANS: None if self.spans is None else Digest(self.spans.spans),
            _POSITIONS: Digest(positions),
            "checks": self.later.names,
            "batch before": before,
        }
        at_once = not self._has_compared or not self.later.waits
        return values | (self.later.take() if at_once else {})


def is_multimodal(position_ids: Tensor) -> bool:
    """Whether position ids are [3, b, S], of time, height and width, instead of [b, S]."""
    return position_ids.dim() == 3


def _dim_of(key: str, tensor: Tensor) -> int:
    if key == "position_ids" and is_multimodal(tensor):
        return 2
    if key == "attention_mask" and tensor.dim() < 4:
        return 1
    return _DIMS.get(key, 1)


def other_samples(name: str, words: Sequence[str], rank: int) -> str:
    """Says that ranks have other batches, as of `SameCall.refusal`."""
    name = name.removeprefix("shape of ")
    return (
        f"ranks of a context-parallel group need the same whole samples before the split, got "
        f"other {name} on rank {rank} than on rank 0: load them by data-parallel rank, and let "
        "get_batch_on_this_cp_rank split them"
    )


def _spans_of(spans: Any, positions: Any) -> DocumentMask | None:
    if spans is not None:
        return attention_spans(spans, positions)
    if positions is not None:
        raise ContextParallelError(
            f"{_POSITIONS} of a batch need {_SPANS}, got none: add them, or leave {_POSITIONS} out"
        )
    return None


def _mark(batch: Mapping[str, Tensor], cut: Cut) -> None:
    for key, tensor in batch.items():
        setattr(tensor, _MARK, _Mark(key, cut, _changes(tensor)))


def _changes(tensor: Tensor) -> int | None:
    """Number of in-place changes of a tensor; None where torch does not count them."""
    return None if tensor.is_inference() else tensor._version


def _count_up(position_ids: Tensor) -> Tensor:
    """Whether position ids [b, N] begin with 0, and go on by one or begin again: bool []."""
    following, before = position_ids[:, 1:], position_ids[:, :-1]
    steps = (following == before + 1) | (following == 0)
    return steps.all() & (position_ids[:, :1] == 0).all()


def _refuse_disorder(position_ids: Tensor, fits: Tensor) -> None:
    """Args: fits: of `_count_up`. Raises: ContextParallelError, which says where ids do not fit."""
    for row in () if fits else position_ids.tolist():
        for index, position in enumerate(row):
            if position not in (0, row[index - 1] + 1) or (not index and position):
                around = ", ".join(map(str, row[max(0, index - 2) : index + 2]))
                raise ContextParallelError(
                    f"{_ORDER}, got {around} from token {max(0, index - 2)} on: pass whole "
                    "samples to get_batch_on_this_cp_rank, which splits them"
                )


def _checksum(tensor: Tensor) -> Tensor:
    """A number int64 [] that depends on all elements and their order."""
    x = tensor.detach().flatten()
    bits = x.float().view(torch.int32) if x.is_floating_point() else x
    return (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()


def _documents_of(batch: Mapping[str, Any]) -> tuple[int, ...]:
    """Positions where documents begin, as the model will get them; of padded lengths if given."""
    padded = batch.get("cu_seqlens_padded")
    lengths = batch.get("cu_seqlens") if padded is None else padded
    if lengths is None:
        return ()
    bounds: Sequence[int] = lengths.flatten().tolist()
    return document_starts(bounds, bounds[-1])


class LaterValues:
    """Values of a call that a GPU finds, and faults: the host asks for them when it need not wait.

    All ranks add the same names in the same order; see `names`.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[str, Callable[[], Tensor], Callable[[Tensor], object]]] = []
        self.waits = False

    def add(self, name: str, x: Tensor, read: Callable[[Tensor], object]) -> None:
        """Begins to copy a tensor to the host; `read` makes a value of it, or raises
        ContextParallelError for a fault.
        """
        self._begun.append((name, _on_host(x), read))
        self.waits = self.waits or x.is_cuda

    @property
    def names(self) -> tuple[str, ...]:
        """What was added, to be compared before."""
        return tuple(name for name, *_ in self._begun)

    def take(self) -> dict[str, object]:
        """Waits for all values, and forgets them. Raises: ContextParallelError for a fault."""
        begun = self._begun
        self.clear()
        return {name: read(found()) for name, found, read in begun}

    def clear(self) -> None:
        """Forgets what was added."""
        self._begun, self.waits = [], False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Forgets what was added in a call that failed."""
        if kind is not None:
            self.clear()


def _on_host(x: Tensor) -> Callable[[], Tensor]:
    """Starts to copy a tensor to the host; the function that is returned waits for the copy."""
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def value() -> Tensor:
        copied.synchronize()
        return host

    return value
