"""What a model of Megatron is given: known to be cut by the run's layout, or refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_cp_plugin.core.layout_check import describe_mismatch
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import gated_delta_net
from megatron_cp_plugin.integration.batch import Batches, Cut, agree
from megatron_cp_plugin.integration.documents import document_mask
from megatron_cp_plugin.integration.features import Settings, graphs

# Arguments of a model that hold tokens, and the keys of a batch that they come from.
_ARGUMENTS = {
    "input_ids": "tokens",
    "position_ids": "position_ids",
    "labels": "labels",
    "loss_mask": "loss_mask",
}
_REMEDY = (
    "give whole samples to megatron.core.utils.get_batch_on_this_cp_rank, imported after the "
    "plugin is in force, and its results to the model as they are"
)


def serve_inputs(model: nn.Module, batches: Batches, group: dist.ProcessGroup) -> None:
    """Makes a model refuse what `batches` has not cut, and take packed_seq_params as a mask.

    In its first call for training, and for evaluation, the context-parallel ranks compare notes,
    so that all of them refuse what one of them does; later a rank refuses by itself.

    Args:
        model: GPTModel or HybridModel, whose forward pass raises ContextParallelError then.
        batches: What was cut; its runtime is told where documents begin in what comes next.
        group: The context-parallel group.
    """
    runtime = batches.runtime
    parameters = inspect.signature(model.forward)
    recurrent = gated_delta_net.has_layers(model)
    captured = graphs(Settings(model.config))
    agreed: set[bool] = set()

    def enter(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        call = parameters.bind(*args, **kwargs)
        given, fault = call.arguments, None
        try:
            cut = _cut(given, batches, group) if group.size() > 1 else None
            mask = document_mask(given.get("packed_seq_params"), recurrent=recurrent)
            runtime.documents = mask.starts if mask else ()
            if mask and captured != "none":
                raise ContextParallelError(
                    f"--cuda-graph-impl {captured} keeps the documents of the batch that was "
                    "captured, got packed sequences: leave it or packed_seq_params out"
                )
            if cut is not None:
                _check_documents(cut, runtime.documents)
        except ContextParallelError as error:
            fault = str(error)
        if torch.is_grad_enabled() not in agreed and group.size() > 1:
            agree(fault, group)
            agreed.add(torch.is_grad_enabled())
        if fault:
            raise ContextParallelError(fault)
        if mask:
            given["packed_seq_params"] = mask
        return call.args, call.kwargs

    model.register_forward_pre_hook(enter, with_kwargs=True)


def _cut(given: Mapping[str, Any], batches: Batches, group: dist.ProcessGroup) -> Cut | None:
    """The cutting that a model's tensors come from; None: there are none, as inside a pipeline."""
    config = batches.runtime.config
    found = []
    for name, key in _ARGUMENTS.items():
        tensor = given.get(name)
        if not isinstance(tensor, Tensor):
            continue
        cut = batches.cut_of(key, tensor)
        if cut is None:
            changed = "that it has not cut, or that was changed since"
            why = changed if batches.has_cut else "and cut none"
            whose = _whose(given.get("position_ids"), batches, group)
            raise ContextParallelError(
                f"{config.algo} needs batches that the plugin cuts by the {config.layout.name} "
                f"layout, got {name} {list(tensor.shape)} {why}{whose}: {_REMEDY}"
            )
        found.append(cut)
    if given.get("decoder_input") is not None and given.get("position_ids") is None:
        raise ContextParallelError(
            f"{config.algo} needs to know the tokens of decoder_input, got no position_ids "
            f"beside it: {_REMEDY}"
        )
    if any(cut is not found[0] for cut in found):
        raise ContextParallelError(
            f"a model takes tensors of one batch, got those of several: {_REMEDY}"
        )
    return found[0] if found else None


def _whose(position_ids: Any, batches: Batches, group: dist.ProcessGroup) -> str:
    """What position ids [b, S] say of the tokens beside them, in brackets."""
    if not isinstance(position_ids, Tensor) or batches.runtime.follows_documents:
        return ""
    layout, size = batches.runtime.config.layout, group.size()
    tokens = position_ids.size(1) * size
    mismatch = describe_mismatch(position_ids, layout, group.rank(), size, tokens)
    return f" ({mismatch})" if mismatch else ""


def _check_documents(cut: Cut, documents: tuple[int, ...]) -> None:
    if cut.documents not in (None, documents):
        raise ContextParallelError(
            f"a batch was cut by {len(cut.documents or ()) + 1} documents, and the model got "
            f"{len(documents) + 1} others: let both have the same cu_seqlens, or leave the "
            "option layout=documents out"
        )
