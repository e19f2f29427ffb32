"""Packed documents: converts Megatron's packed_seq_params to a document mask.

Megatron (from 0.19, `--dataloader-inter-document-masking` and `--sft`) flattens a micro-batch into
one sequence and tells the model where documents begin, in a form ("thd") that makes its own parts
cut tokens and angles by documents. Here tokens follow the run's layout, whatever the documents are:
the model gets the boundaries in a form that all but attention ignore.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp_plugin.core.blocks.visible_rows import sees
from megatron_cp_plugin.core.document_layout import NAMED, PaddedDocuments
from megatron_cp_plugin.core.layout import Documents, Layout, document_starts
from megatron_cp_plugin.core.layout import positions as positions_of
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask, mask_of
from megatron_cp_plugin.errors import ContextParallelError

# Layouts by which programs cut batches; the last one is for whole packs, which no algorithm takes
# from callers.
_OF_CALLERS = ("thd", "contiguous", "zigzag")

RawSpans = tuple[tuple[object, ...], ...]


class OneRank:
    """Stands for a context-parallel group if there is nothing to split."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


ALONE: Any = OneRank()


@dataclass
class DocumentMask(PackedSeqParams):
    """The mask that the plugin's attention derives from packed_seq_params.

    Attributes:
        seq_len: Tokens of the whole sequence.
        starts: As in `core.tiles.Mask.documents`.
        padding: Ranges [start, stop) of tokens at the end of documents that other tokens must not
            see.
        spans: The keys of their documents that queries see, as in `megatron_cp_plugin.attention`;
            None: the model's causal mask applies.
        positions: Positions of all tokens [N], for rotary embeddings; None: their order.
        packed: Documents that are not in the fields above yet, as a model would get them without
            spans.
        group: The context-parallel ranks of this micro-batch; None: those of the run.
    """

    qkv_format: str = "bshd"
    seq_len: int = 0
    starts: tuple[int, ...] = ()
    padding: tuple[tuple[int, int], ...] = ()
    spans: RawSpans | None = None
    positions: Tensor | None = None
    packed: PackedSeqParams | None = None
    group: dist.ProcessGroup | None = None
    _checked: tuple[int, Slices] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def has_documents(self) -> bool:
        """Whether it has documents, not only spans."""
        return self.spans is None or self.seq_len > 0

    def given(self) -> PackedSeqParams | None:
        """Returns the model's own argument, for layers that cut by documents themselves."""
        if self.cu_seqlens_q is None:
            return None
        given = copy(self)  # with all that callers may have added to it
        given.qkv_format = "thd"
        return given

    def resolved(self, seq_len: int) -> Documents:
        """Returns what a layout follows, see `Layout.for_documents`; otherwise as `slices`."""
        slices = self.slices(seq_len)
        return self.starts if slices is None else slices

    def slices(self, seq_len: int) -> Slices | None:
        """Returns the spans of a sequence.

        Raises: ContextParallelError: They do not fit, or name a query and a key twice.
        """
        if self.spans is None:
            return None
        if self._checked is None or self._checked[0] != seq_len:  # every layer asks
            self._checked = seq_len, Slices.of(self.spans, seq_len, self.starts)
        return self._checked[1]

    def sample_starts(self, seq_len: int) -> tuple[int, ...]:
        """Returns where samples other than the first one begin: documents, or what spans make.

        Raises: ContextParallelError: Spans have samples that part, as answers to one prompt.
        """
        slices = self.slices(seq_len)
        return self.starts if slices is None else _samples(slices, seq_len)

    def without_padding(self, mask: Mask) -> Mask:
        """Returns the mask of queries that are no padding, from the mask of a layer."""
        if not self.padding or self.spans is not None:
            return mask
        return _without_padding(mask, self.padding, self.seq_len)

    def beside(self, documents: DocumentMask | None) -> DocumentMask:
        """Returns these spans of such documents."""
        if documents is None:
            return self
        both = copy(documents)  # with all that callers may have added to it
        both.spans, both.positions = self.spans, self.positions
        return both


def attention_spans(
    spans: Tensor | Iterable[Iterable[object]],
    positions: Tensor | Sequence[int] | None = None,
    packed_seq_params: PackedSeqParams | None = None,
) -> DocumentMask:
    """Returns what a model takes as packed_seq_params, so that its attention sees these spans only.

    Args:
        spans: As in `megatron_cp_plugin.attention`; a tensor may be [b, n, 5], with the same spans
            for all samples of a micro-batch. Empty ones, such as (0, 0, 0, 0, 0), fill up.
        positions: Of all tokens of the whole sequence, integers [N] or the same ones [b, N], for
            rotary embeddings, such as `spans.shared_prefix_positions`. Default: 0 to N - 1, or of
            packed documents those in each.
        packed_seq_params: Packed documents, as a model takes them: of what spans name queries see
            keys of their own document only. Positions are those of the pack, with its padding.

    Raises: ContextParallelError: Samples have different spans or positions.
    """
    if isinstance(spans, Tensor):
        spans = _of_all_samples("attention_spans", spans, dims=2).tolist()
    if positions is not None:
        positions = _of_all_samples("attention_positions", torch.as_tensor(positions), dims=1)
        if positions.is_floating_point():
            raise ContextParallelError(
                f"attention_positions need whole numbers, got {positions.dtype}: round them"
            )
    return DocumentMask(
        spans=tuple(map(tuple, spans)), positions=positions, packed=packed_seq_params
    )


def _of_all_samples(name: str, tensor: Tensor, *, dims: int) -> Tensor:
    """The tensor of one sample that stands for all, if the samples are equal."""
    if tensor.dim() == dims:
        return tensor
    if tensor.dim() != dims + 1 or not len(tensor) or not tensor.eq(tensor[0]).all():
        raise ContextParallelError(
            f"{len(tensor) if tensor.dim() else 0} samples of a micro-batch need the same {name}, "
            f"got different ones {list(tensor.shape)}: use --micro-batch-size 1, or pack them into "
            "one sequence"
        )
    return tensor[0]


def document_mask(packed: PackedSeqParams | None, group: dist.ProcessGroup) -> DocumentMask | None:
    """Copies the boundaries of documents, which may be padded, to the host.

    It waits for the GPU, once a micro-batch. The result keeps everything that the caller added to
    packed_seq_params.

    Raises: ContextParallelError if the numbers contradict each other.
    """
    if isinstance(packed, DocumentMask):
        return packed.beside(document_mask(packed.packed, group))
    if packed is None:
        return None
    lengths, padded = packed.cu_seqlens_q, packed.cu_seqlens_q_padded
    if packed.qkv_format != "thd" or lengths is None:
        raise ContextParallelError(
            "packed sequences need the format thd and cu_seqlens_q, got "
            f"{packed.qkv_format}{'' if lengths is not None else ' without it'}"
        )
    pairs = ((lengths, packed.cu_seqlens_kv), (padded, packed.cu_seqlens_kv_padded))
    for of_queries, of_keys in pairs:
        if of_keys is None or of_keys is of_queries:
            continue
        if of_queries is None or not of_queries.equal(of_keys):
            raise ContextParallelError(
                "packed sequences need the same lengths for queries and keys, got "
                "cu_seqlens_kv that differ from cu_seqlens_q: use one of them for both"
            )
    real = lengths.flatten().tolist()
    bounds = real if padded is None else padded.flatten().tolist()
    starts = document_starts(bounds, bounds[-1])
    mask = DocumentMask(
        seq_len=bounds[-1], starts=starts, padding=_padding(real, bounds), group=group
    )
    longest = packed.max_seqlen_q
    needed = max((stop - start for start, stop in pairwise(real)), default=0)
    if longest is not None and int(longest) < needed:
        raise ContextParallelError(
            f"max_seqlen_q needs to be the length of the longest document, {needed} or more, got "
            f"{int(longest)}: give lengths of whole documents, not of a rank's part"
        )
    for name, value in vars(packed).items():
        # With these fields, layers and embeddings would cut angles, or refuse them.
        if name not in ("qkv_format", "cp_group", "local_cp_size"):
            setattr(mask, name, value)
    return mask


def group_of(packed: PackedSeqParams | None, own: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the context-parallel ranks of a micro-batch: as packed_seq_params say, or its own.

    Raises: ContextParallelError if `local_cp_size` and `cp_group` contradict each other.
    """
    if isinstance(packed, DocumentMask):
        return packed.group or group_of(packed.packed, own)
    size, group = getattr(packed, "local_cp_size", None), getattr(packed, "cp_group", None)
    if group is None:
        group = ALONE if size == 1 else own
    if size is not None and size != group.size():
        raise ContextParallelError(
            f"packed_seq_params need the cp_group of their local_cp_size {size}, got one of "
            f"{group.size()} ranks: pass both, as of parallel_state"
        )
    return group


def mask_of_layer(packed: Any, seq_len: int, *, causal: bool, window: int | None) -> Mask:
    """Returns the mask of attention for what a layer was given, see `starts_of`.

    Args: causal, window: the mask without spans; window None: all earlier keys.

    Raises: as `starts_of`.
    """
    starts = starts_of(packed, seq_len, causal=causal)
    slices = None if packed is None else packed.slices(seq_len)
    return mask_of(causal, window, starts if slices is None else slices)


@lru_cache(maxsize=16)  # every layer asks
def _without_padding(mask: Mask, padding: tuple[tuple[int, int], ...], seq_len: int) -> Mask:
    documents = _documents(mask.documents, padding, seq_len)
    slices = Slices.of([(*each, *each, "causal") for each in documents], seq_len)
    return mask_of(mask.causal, mask.window, slices)


def _documents(
    starts: tuple[int, ...], padding: tuple[tuple[int, int], ...], seq_len: int
) -> list[tuple[int, int]]:
    """Where documents begin, and where they end without padding."""
    ends = {stop: start for start, stop in padding}
    return [(start, ends.get(stop, stop)) for start, stop in pairwise((0, *starts, seq_len))]


def starts_of(packed: Any, seq_len: int, *, causal: bool) -> tuple[int, ...]:
    """Where documents begin in what a layer was given: a `DocumentMask`, or None.

    Args: causal: whether tokens see earlier ones only, where no spans say whom they see.

    Raises: ContextParallelError if it is something else, or of another number of tokens; or if
    tokens would see the padding of documents.
    """
    if packed is None:
        return ()
    if not isinstance(packed, DocumentMask):
        raise ContextParallelError(
            f"packed sequences need a GPTModel or HybridModel, got {type(packed).__name__}: "
            "pass packed_seq_params to the model"
        )
    if packed.has_documents and packed.seq_len != seq_len:
        raise ContextParallelError(
            f"documents need to fill the {seq_len} tokens of the whole sequence, got "
            f"cu_seqlens that end at {packed.seq_len}"
        )
    slices = packed.slices(seq_len) if packed.padding else None
    if packed.padding and slices is None and not causal:
        raise ContextParallelError(
            "padded documents need causal attention, in which no token attends to the padding, "
            "got full attention: pack documents without padding"
        )
    if slices is not None and _padding_is_seen(slices, packed.padding, seq_len):
        raise ContextParallelError(
            "padding of documents needs to be seen by none of their tokens, got spans that name "
            "it as keys of other queries: leave it out of the spans"
        )
    return packed.starts


@lru_cache(maxsize=16)  # every layer asks
def _padding_is_seen(slices: Slices, padding: tuple[tuple[int, int], ...], seq_len: int) -> bool:
    """Whether tokens that are no padding see some that are."""
    edges = (0, *(edge for one in padding for edge in one), seq_len)
    tokens = tuple(Span(*edges[at : at + 2]) for at in range(0, len(edges), 2))
    return sees(tokens, tuple(Span(*one) for one in padding), Mask.of(slices))


@lru_cache(maxsize=16)  # every layer of multi-token prediction asks, for several tensors
def _samples(slices: Slices, seq_len: int) -> tuple[int, ...]:
    """Positions of tokens that do not see the token before them.

    Raises: ContextParallelError: One of them sees others before it.
    """
    sees_before, earliest = np.zeros(seq_len, np.bool_), np.arange(seq_len)
    for q_start, q_stop, k_start, k_stop, kind in slices:
        # Diagonals are parallel to the diagonal of each token and the token before it.
        later = kind in ("causal", "bi_causal") and k_stop - q_stop < -1
        sooner = kind in ("inverse_causal", "bi_causal") and q_start - k_start < 1
        if not later and not sooner:
            sees_before[max(q_start, k_start + 1) : min(q_stop, k_stop + 1)] = True
        queries = np.arange(q_start, q_stop)
        first = np.full(len(queries), k_start)
        if kind in ("inverse_causal", "bi_causal"):
            first = k_start + queries - q_start
        last = np.full(len(queries), k_stop - 1)
        if kind in ("causal", "bi_causal"):
            last = k_stop - q_stop + queries
        some = earliest[q_start:q_stop]
        np.minimum(some, np.where(first <= last, first, queries), out=some)
    for start in slices.documents:
        sees_before[start] = False
        earliest[start:] = np.maximum(earliest[start:], start)
    starts = np.flatnonzero(~sees_before)
    parting = starts[earliest[starts] < starts]
    if len(parting):
        raise ContextParallelError(
            "multi-token prediction needs samples each of which goes on by one token, got "
            f"attention_spans by which token {parting[0]} sees token {earliest[parting[0]]}, and "
            "not the one before it: leave --mtp-num-layers out, or pack whole samples"
        )
    return tuple(starts[starts > 0].tolist())


class PositionsOfPacks:
    """Refuses position ids that show that a pack was cut in another layout.

    Position ids may count through a document or through the whole sequence. Ids of padding, and ids
    that show nothing, are ignored: some callers pass arbitrary ones.
    """

    def __init__(self, layout: Layout, group: dist.ProcessGroup) -> None:
        """Args: layout: the layout of packs."""
        self._layout = layout
        self._group = group
        self._means_nothing = False

    def check(self, row: Tensor, mask: DocumentMask | None, seq_len: int) -> None:
        """Checks the position ids [S] of a pack.

        Raises: ContextParallelError if they are from another layout or another rank.
        """
        row, size = row.long(), self._group.size()
        documents = _documents(*((mask.starts, mask.padding) if mask else ((), ())), seq_len)
        starts, ends = (torch.tensor(column) for column in zip(*documents, strict=True))
        own, mine = self._layout.name, self._group.rank()

        def fits(name: str, rank: int, *, telling: bool = False) -> bool:
            """Whether these are position ids of a rank in a layout.

            Args: telling: false for ids that are all equal, as of documents of one token, or of
                no tokens.
            """
            try:
                cut = NAMED[name].for_documents(tuple(starts[1:].tolist()))
                places = positions_of(cut, rank, size, seq_len)
            except ContextParallelError:
                return False  # it cannot have been cut so
            document = torch.bucketize(places, starts, right=True) - 1
            inside, counts = places - starts[document], places < ends[document]
            if len(row) != len(places):
                return False
            given = row[counts]
            if telling and not (given != given[:1]).any():
                return False
            return any(torch.equal(given, expected[counts]) for expected in (inside, places))

        if fits(own, mine):
            self._means_nothing = False
            return
        if self._means_nothing:
            return  # as the ids before, in which a long search has found nothing
        if torch.equal(row, torch.arange(len(row))):
            return  # counted through what this rank has
        ranks = (mine, *(rank for rank in range(size) if rank != mine))
        for rank, name in product(ranks, (own, *_OF_CALLERS)):
            if not fits(name, rank, telling=True):
                continue
            if name == own:
                raise ContextParallelError(
                    f"context-parallel rank {mine} needs its own part of each batch, got "
                    f"position_ids of rank {rank}: split by the rank in the context-parallel group"
                )
            instead = "" if name == "zigzag" else f", or use layout={name}"
            raise ContextParallelError(
                f"the {own} layout needs batches that are split by it, got position_ids of the "
                f"{name} layout: split them so{instead}"
            )
        self._means_nothing = True


def check_cutting(packed: Any, layout: Layout) -> None:
    """Raises: ContextParallelError if packed_seq_params say that a batch was cut otherwise."""
    given: Any = getattr(getattr(packed, "packed", None) or packed, "cp_partition_mode", None)
    mode = "zigzag" if layout.name == PaddedDocuments.name else layout.name
    if given not in (None, mode):
        raise ContextParallelError(
            f"the {layout.name} layout needs batches with cp_partition_mode {mode}, got "
            f"{given}: let the framework split them so, or use "
            f"layout={'thd' if given == 'zigzag' else given}"
        )


def _padding(real: list[int], bounds: list[int]) -> tuple[tuple[int, int], ...]:
    """Where documents are padded. Args: cumulative lengths without and with padding."""
    if real == bounds:
        return ()
    lengths = [[stop - start for start, stop in pairwise(edges)] for edges in (real, bounds)]
    if len(real) != len(bounds) or any(a > b for a, b in zip(*lengths, strict=True)):
        raise ContextParallelError(
            f"cu_seqlens_q_padded needs for each document at least its length, got "
            f"{len(bounds) - 1} documents of {bounds[-1]} tokens for {len(real) - 1} of "
            f"{real[-1]}: pad each one at its end"
        )
    ends = zip(bounds[:-1], lengths[0], bounds[1:], strict=True)
    return tuple((start + length, stop) for start, length, stop in ends if start + length < stop)
