"""The memory of a GPU in a step of training, by purpose, roughly."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_cp_plugin.planner.model import Model, Split
from megatron_cp_plugin.token_losses import CHUNK_TOKENS

_GIB = 2**30
# Of Megatron-FSDP, in elements: layers are gathered ahead up to this size, and gradients
# wait for their reduce-scatter as long as they have no more; or one layer, and two, if larger.
_GATHERED_AHEAD, _GRADIENTS_WAITING = 5e8, 1e9


def memory(model: Model, split: Split, tokens: int) -> dict[str, float]:
    """GiB of the stage of a pipeline that needs most.

    That is the first one, which holds the most micro-batches, the first whose layers all have
    experts, or the last one, which has the logits.

    Args: tokens: of a micro-batch, on all context-parallel ranks.
    """
    later = 0
    while sum(layers_of(model, split, stage) for stage in range(later)) < model.dense:
        later += 1
    stages = sorted({0, min(later, split.pipeline - 1), split.pipeline - 1})
    found = [memory_of_stage(model, split, tokens, stage) for stage in stages]
    return max(found, key=lambda parts: sum(parts.values()))


def memory_of_stage(model: Model, split: Split, tokens: int, stage: int) -> dict[str, float]:
    """GiB of a stage of a pipeline. Args: as of `memory`."""
    parameters = list(own_parameters(model, split, stage))
    of_rank = sum(own for own, _ in parameters)
    part = sum(own / copies for own, copies in parameters)
    states = part if split.distributed_optimizer or split.sharded else of_rank
    local = tokens / split.context / split.tensor
    held = min(split.pipeline - stage, split.micro_batches)
    layers = layers_of(model, split, stage)
    layer = activation_bytes(model, split) * local
    kept = 2 * model.hidden * local
    if split.recompute == "full":
        kept += 2 * model.heads * model.value_dim * local  # of attention
    at_a_time = min(CHUNK_TOKENS / split.tensor, local) if split.chunked_loss else local
    logits = 6 * model.vocabulary * at_a_time
    activations = held * layers * (layer if split.recompute == "none" else kept)
    if stage < split.pipeline - 1:
        logits = 0.0
    working = max(logits, layer if split.recompute == "full" else 0.0)
    gathered = {}
    if split.sharded:
        gathered = {"layers gathered": _gathered_bytes(model, split, of_rank) / _GIB}
    return {
        "parameters and gradients": (part if split.sharded else of_rank) * 6 / _GIB,
        **gathered,
        "optimizer": states * 12 / _GIB,
        "activations": activations / _GIB,
        "logits, or a layer run again": working / _GIB,
    }


def _gathered_bytes(model: Model, split: Split, of_rank: float) -> float:
    """Of whole parameters in bfloat16, and of gradients in float32 that were not scattered yet.

    Embedding and logits, which are not in a layer, stay gathered. Source: Megatron-FSDP's
    `suggested_AG_prefetch_size` and `suggested_RS_queue_capacity`.

    Args: of_rank: parameters that are a GPU's own without sharding.
    """
    ends = model.embedding_parameters / split.tensor
    experts = model.experts * model.expert_parameters
    layer = (model.layer_parameters - experts) / split.tensor
    layer += experts / (split.expert * split.expert_tensor)
    ahead = layer * -(-max(_GATHERED_AHEAD, layer) // layer)
    gathered = ends + min(layer + ahead, of_rank - ends)
    waiting = min(layer + max(_GRADIENTS_WAITING, 2 * layer), of_rank)
    return 2 * gathered + 4 * waiting


def activation_bytes(model: Model, split: Split) -> float:
    """Of a token, that a layer keeps for its backward, in bfloat16."""
    width = (model.heads + model.kv_heads) * model.head_dim + model.kv_heads * model.value_dim
    width += model.query_rank + model.key_rank + model.rotary_dim
    out = model.heads * model.value_dim
    if model.linear:
        # The projections, gates among them, are kept beside attention's inputs; so is the
        # output beside that which is normalised and gated.
        width, out = 2 * width + out, 2 * out
    of_ffn = 3 if model.gated else 2
    mlp: float = of_ffn * (model.dense_ffn or model.ffn)
    if model.experts:
        # The tokens as they come to experts, too: whole, to each part of an expert.
        of_experts = of_ffn * (model.ffn * model.active + model.shared)
        of_experts += model.hidden * model.active * split.expert_tensor
        mlp += model.expert_share * (of_experts - mlp)
    return 2.0 * (4 * model.hidden + width + out + mlp)


def own_parameters(model: Model, split: Split, stage: int = 0) -> Iterator[tuple[float, int]]:
    """Of a GPU of a stage, and how many GPUs have the same: experts, and all others."""
    layers, copies = layers_of(model, split, stage), split.data * split.context
    before = sum(layers_of(model, split, earlier) for earlier in range(stage))
    dense = min(layers, max(0, model.dense - before)) if model.experts else layers
    with_experts = layers - dense
    experts = model.experts * model.expert_parameters
    whole: float = dense * (model.dense_parameters if model.dense_ffn else model.layer_parameters)
    whole += with_experts * (model.layer_parameters - experts)
    if stage in (0, split.pipeline - 1):
        whole += model.embedding_parameters / min(2, split.pipeline)
    yield whole / split.tensor, copies
    if model.experts:
        ways = split.expert * split.expert_tensor
        yield with_experts * experts / ways, split.stage_gpus // ways


def layers_of(model: Model, split: Split, stage: int) -> int:
    """Of a stage of a pipeline."""
    if 0 < stage == split.pipeline - 1:
        return split.last_layers(model)
    return -(-model.layers // split.pipeline)
