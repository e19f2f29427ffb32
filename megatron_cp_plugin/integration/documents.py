"""Documents that are packed into one sequence: Megatron's packed_seq_params as a document mask.

Megatron (from 0.19, `--dataloader-inter-document-masking` and `--sft`) flattens a micro-batch into
one sequence and tells the model where documents begin, in a form ("thd") that makes its own parts
cut tokens and angles by documents. Here tokens follow the run's layout, whatever the documents are:
the model gets the boundaries in a form that all but attention ignore.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cp_plugin.core.documents import document_starts
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import gated_delta_net
from megatron_cp_plugin.integration.runtime import Runtime


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


def serve_documents(model: nn.Module, runtime: Runtime) -> None:
    """Makes a model of Megatron take packed_seq_params, and tells the runtime of them."""
    parameters = inspect.signature(model.forward)
    recurrent = gated_delta_net.has_layers(model)

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = parameters.bind(*args, **kwargs)
        runtime.documents = ()
        packed = call.arguments.get("packed_seq_params")
        if packed is not None:
            if recurrent:
                raise ContextParallelError(
                    "gated delta net layers carry their state on across documents, got packed "
                    "sequences: leave packed_seq_params out"
                )
            mask = _mask_of(packed)
            call.arguments["packed_seq_params"] = mask
            runtime.documents = mask.starts
        if runtime.cut not in (None, runtime.documents):
            raise ContextParallelError(
                f"a batch was cut by {len(runtime.cut or ()) + 1} documents, and the model got "
                f"{len(runtime.documents) + 1} others: let both have the same cu_seqlens, or leave "
                "the option layout=documents out"
            )
        runtime.cut = None
        return call.args, call.kwargs

    model.register_forward_pre_hook(enter, with_kwargs=True)


def _mask_of(packed: PackedSeqParams) -> DocumentMask:
    """Copies the boundaries to the host, which waits for the GPU once a micro-batch.

    Raises:
        ContextParallelError: Queries and keys differ, or the group is not that of the run.
    """
    lengths = packed.cu_seqlens_q
    alike = lengths is packed.cu_seqlens_kv or lengths.equal(packed.cu_seqlens_kv)
    if packed.qkv_format != "thd" or not alike or packed.cp_group is not None:
        raise ContextParallelError(
            "packed sequences are served as one flat sequence of documents (thd) over the whole "
            f"context-parallel group, got {packed.qkv_format} with a group or keys of their own"
        )
    bounds = lengths.tolist()
    mask = DocumentMask(seq_len=bounds[-1], starts=document_starts(bounds, bounds[-1]))
    if hasattr(packed, "tokens_per_sample"):
        mask.tokens_per_sample = packed.tokens_per_sample
    return mask
