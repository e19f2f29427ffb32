"""Documents that are packed into one sequence: Megatron's packed_seq_params as a document mask.

Megatron (from 0.19, `--dataloader-inter-document-masking` and `--sft`) flattens a micro-batch into
one sequence and tells the model where documents begin, in a form ("thd") that makes its own parts
cut tokens and angles by documents. Here tokens follow the run's layout, whatever the documents are:
the model gets the boundaries in a form that all but attention ignore.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_cp_plugin.core.documents import document_starts
from megatron_cp_plugin.errors import ContextParallelError


@dataclass
class DocumentMask(PackedSeqParams):
    """What the plugin's attention makes of packed_seq_params.

    Attributes:
        seq_len: Tokens of the whole sequence.
        starts: As in `core.tiles.Mask.documents`.
    """

    qkv_format: str = "bshd"
    seq_len: int = 0
    starts: tuple[int, ...] = ()


def document_mask(packed: PackedSeqParams | None, *, recurrent: bool) -> DocumentMask | None:
    """Copies the boundaries to the host, which waits for the GPU once a micro-batch.

    Args:
        packed: What a model was given.
        recurrent: Whether it has layers whose state goes on across documents.

    Raises:
        ContextParallelError: Queries and keys differ, documents are padded, the group is not that
            of the run, or layers are recurrent.
    """
    if packed is None:
        return None
    if recurrent:
        raise ContextParallelError(
            "gated delta net layers carry their state on across documents, got packed sequences: "
            "leave packed_seq_params out"
        )
    lengths = packed.cu_seqlens_q
    if packed.qkv_format != "thd" or lengths is None:
        raise ContextParallelError(
            f"packed sequences are served in the format thd with cu_seqlens_q, got "
            f"{packed.qkv_format}{'' if lengths is not None else ' without it'}"
        )
    names = ("cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    for name in names:
        other: Tensor | None = getattr(packed, name, None)
        if other is not None and other is not lengths and not other.equal(lengths):
            raise ContextParallelError(
                f"packed sequences are served with the same lengths for queries, keys and padding, "
                f"got {name} that differ from cu_seqlens_q: give the padded lengths as all of "
                "them, and mask the loss of the padding"
            )
    if packed.cp_group is not None:
        raise ContextParallelError(
            "packed sequences are served over the context-parallel group of the run, got another "
            "cp_group: leave it out"
        )
    bounds = lengths.tolist()
    mask = DocumentMask(seq_len=bounds[-1], starts=document_starts(bounds, bounds[-1]))
    if hasattr(packed, "tokens_per_sample"):
        mask.tokens_per_sample = packed.tokens_per_sample
    return mask
