"""Small models with all kinds of layers of public ones, by FOLDER BESIDE SIZE MODEL...

Each is built of Megatron's own local modules, split and unsplit, by a program that installs the
plugin and cuts its batches itself, and compared with the same model on one context-parallel rank.
BESIDE context parallelism there is nothing, tensor and expert parallelism of 2, or two pipeline
stages. Rank 0 prints what was off, or was refused, as JSON.
"""

import importlib.util
import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.integration.cut_batches_job import (
    BATCHES,
    VOCABULARY,
    Batch,
    Pipeline,
    Reference,
    alone,
    compare,
    compare_stages,
    gradient_of,
    gradients_off,
    places_of,
    set_up,
    weigh_further_tokens,
)
from tests.integration.public_models import MODELS

TOKENS = 48
# A small number in the place of each size, or of what a model has of these.
SMALL: dict[str, object] = {
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "kv_channels": 8,
    "vocab_size": VOCABULARY,
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_shared_expert_intermediate_size": 24,
    "first_dense_layers": 1,
    "window_size": (5, 0),
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "dsa_indexer_n_heads": 2,
    "dsa_indexer_head_dim": 8,
    "dsa_indexer_topk": 6,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
    "mamba_num_groups": 4,
}
# What a model does not say, or says for GPUs.
BESIDE: dict[str, dict[str, object]] = {
    # Megatron's local experts do not train with biases.
    "num_experts": {
        "moe_aux_loss_coeff": 0.0,
        "moe_router_dtype": "fp32",
        "add_bias_linear": False,
    },
    # The norm of a layer divides what comes of a document's first token by itself, and float32 has
    # little of it where query and key are nearly orthogonal.
    "linear_num_key_heads": {
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layernorm_epsilon": 1e-2,
    },
    # With it many scores are 0, and which of equal ones are taken depends on how many there are.
    "dsa_indexer_topk": {"dsa_indexer_rotate_activation": False, "dsa_indexer_scoring_relu": False},
    "multi_latent_attention": {"rope_type": "rope"},
    # Norms of local layers add nothing to their weights.
    "layernorm_zero_centered_gamma": {"layernorm_zero_centered_gamma": False},
}
OF_MODEL = (
    "position_embedding_type",
    "rotary_percent",
    "vocab_size",
    "first_dense_layers",
    "hybrid_layer_pattern",
)
YARN = {
    "yarn_rotary_scaling_factor": 4.0,
    "yarn_original_max_position_embeddings": 64,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
    "yarn_mscale": 1.0,
    "yarn_mscale_all_dim": 0.0,
    "yarn_correction_range_round_to_int": False,
}


def small(settings: dict[str, object]) -> dict[str, object]:
    """Settings of a model with the same kinds of layers, of few numbers."""
    found = {name: SMALL.get(name, value) for name, value in settings.items() if value is not None}
    heads, groups = settings["num_attention_heads"], settings["num_query_groups"]
    found["num_query_groups"] = 4 if heads == groups else 2
    if pattern := str(settings.get("hybrid_layer_pattern") or ""):
        found["hybrid_layer_pattern"] = "".join(dict.fromkeys(pattern))  # a layer of each kind
        found["num_layers"] = len(set(pattern))
        return found | (BESIDE["num_experts"] if "num_experts" in found else {})
    frequency = settings.get("linear_attention_freq") or settings.get("window_attn_skip_freq")
    found["num_layers"] = max(int(str(frequency or 2)), 3 if "first_dense_layers" in found else 2)
    if found["position_embedding_type"] == "mrope":
        found["mrope_section"] = [2, 1, 1]
        found["kv_channels"] = round(8 / float(str(found.get("rotary_percent", 1.0))))
    if "first_dense_layers" in found:
        found["num_layers"] = 4
    for name, others in BESIDE.items():
        if found.get(name):
            found |= others
    return found


def make_config(settings: dict[str, object], size: int) -> Any:
    from megatron.core.activations import squared_relu
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    given = {name: value for name, value in settings.items() if name not in OF_MODEL}
    if given.pop("swiglu", False):
        given |= {"gated_linear_unit": True, "activation_func": nn.functional.silu}
    if given.pop("squared_relu", False):
        given["activation_func"] = squared_relu
    given["is_hybrid_model"] = "hybrid_layer_pattern" in settings
    given.pop("untie_embeddings_and_output_weights", None)
    if "num_experts" in given:
        given["num_moe_experts"] = given.pop("num_experts")
        if "hybrid_layer_pattern" not in settings:
            dense, layers = settings.get("first_dense_layers", 0), settings["num_layers"]
            given["moe_layer_freq"] = [0] * dense + [1] * (layers - dense)  # type: ignore[operator]
        given["moe_token_dispatcher_type"] = "alltoall"
    if "linear_attention_freq" not in given:
        given.pop("attention_output_gate", None)
    kind: Any = MLATransformerConfig if given.get("multi_latent_attention") else TransformerConfig
    config = kind(
        init_method_std=0.2, context_parallel_size=size, transformer_impl="local", **given
    )
    for name, value in YARN.items():
        setattr(config, name, value)
    return config


def layers_of(config: Any) -> Any:
    """The spec of all layers, of local modules."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_dsa_module_spec_for_backend,
        get_linear_attention_pattern,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    from tests.integration.latent_job import Linear, with_whole

    variant, config.experimental_attention_variant = config.experimental_attention_variant, None
    block = get_gpt_decoder_block_spec(config, False, config.normalization)
    if config.multi_latent_attention:
        block = replace(block, layer_specs=[with_whole(layer) for layer in block.layer_specs])
    config.experimental_attention_variant = variant
    if variant is None:
        return block
    if variant == "dsa":
        from megatron.core.transformer.experimental_attention_variant import absorbed_mla

        absorbed_mla.TELinear, provider = Linear, LocalSpecProvider()
        provider.linear = lambda: Linear  # type: ignore[attr-defined]
        other, pattern = get_dsa_module_spec_for_backend(config, provider), [1] * config.num_layers
    else:
        parts = GatedDeltaNetSubmodules(ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear)
        other, pattern = (
            ModuleSpec(GatedDeltaNet, submodules=parts),
            get_linear_attention_pattern(config),
        )
    pattern = pattern[get_transformer_layer_offset(config) :][: len(block.layer_specs)]
    layers = [
        replace(layer, submodules=replace(layer.submodules, self_attention=other))
        if is_other
        else layer
        for layer, is_other in zip(block.layer_specs, pattern, strict=True)
    ]
    return replace(block, layer_specs=layers)


def make_hybrid(settings: dict[str, object], config: Any, groups: Any) -> Any:
    """Of Mamba, attention, MLP and MoE layers."""
    from megatron.core.models.hybrid import hybrid_block
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    sys.path.insert(0, str(Path(__file__).parent))
    from mamba_job import stack

    hybrid_block.TENorm = WrappedTorchNorm
    pattern = str(settings["hybrid_layer_pattern"])
    if config.mtp_num_layers:
        pattern += "/*" + ("E" if "E" in pattern else "-")
    return HybridModel(
        config=config,
        hybrid_stack_spec=stack,
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        hybrid_layer_pattern=pattern,
        position_embedding_type=settings["position_embedding_type"],
        share_embeddings_and_output_weights=not settings["untie_embeddings_and_output_weights"],
        pg_collection=groups,
    )


def make_model(settings: dict[str, object], size: int, groups: Any, **stage: bool) -> Any:
    """Args: stage: pre_process and post_process of a pipeline's."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    config = make_config(settings, size)
    if "hybrid_layer_pattern" in settings:
        return make_hybrid(settings, config, groups)
    spec, others = layers_of(config), dict[str, Any](stage)
    if config.mtp_num_layers:
        others["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type=settings["position_embedding_type"],
        rotary_percent=settings.get("rotary_percent", 1.0),
        share_embeddings_and_output_weights=not settings["untie_embeddings_and_output_weights"],
        pg_collection=groups,
        **others,
    )
    rotary = getattr(model, "rotary_pos_emb", None)
    if size == 1 and rotary is not None:
        rotary.cp_group = groups.cp  # that of YaRN takes Megatron's own
    return model


def off(ours: Any, theirs: Any, group: Any) -> float:
    """How far gradients are off, at most, relative to the largest of each parameter."""
    right = map(gradient_of, theirs.parameters())
    return gradients_off(zip(ours.parameters(), right, strict=True), group)


def by_samples(reference: Any, model: Any, size: int) -> dict[str, float]:
    """Three steps of plain gradient descent on samples of one length, cut by zigzag."""
    group, found = model.pg_collection.cp, {"loss": 0.0, "gradients": 0.0}
    draw = torch.Generator().manual_seed(1)
    for _ in range(3):
        ids, labels = torch.randint(1, VOCABULARY, (2, 2, TOKENS), generator=draw)
        images = bool(model.config.mrope_section)
        places = places_of(TOKENS, images=images)
        places = places.T[:, None].expand(3, 2, TOKENS) if images else places.expand(2, TOKENS)
        chunks = torch.arange(TOKENS).chunk(2 * size)
        mine = torch.cat((chunks[group.rank()], chunks[2 * size - 1 - group.rank()]))
        totals = []
        hidden = torch.ones(1, 1, TOKENS, TOKENS).tril() == 0
        for each, kept, mask in ((reference, torch.arange(TOKENS), hidden), (model, mine, None)):
            each.zero_grad()
            weigh_further_tokens(len(kept) / TOKENS)
            given = {"labels": labels[:, kept], "loss_mask": torch.ones(2, len(kept))}
            out = each(ids[:, kept], places[..., kept], mask, **given).sum() / labels.numel()
            torch.autograd.backward(out)
            totals.append(out.detach().clone())
        want, got = totals
        dist.all_reduce(got, group=group)
        found["loss"] = max(found["loss"], float((got - want).abs() / want))
        found["gradients"] = max(found["gradients"], off(model, reference, group))
        with torch.no_grad():
            for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                if theirs.grad is not None:
                    theirs -= 0.01 * theirs.grad
                    ours.copy_(theirs)
    return found


def by_checkpoint(reference: Any, model: Any, folder: Path) -> dict[str, float]:
    """What is saved by split ranks is read on one, and the other way round."""
    from megatron.core import dist_checkpointing

    before = {
        name: value.clone() for name, value in model.state_dict().items() if value is not None
    }
    worst = 0.0
    for number, (saved, read) in enumerate(((model, reference), (reference, model))):
        place = folder / str(number)
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        dist_checkpointing.save(saved.sharded_state_dict(), str(place))
        with torch.no_grad():
            for parameter in read.parameters():
                parameter.zero_()
        read.load_state_dict(dist_checkpointing.load(read.sharded_state_dict(), str(place)))
        for name, value in read.state_dict().items():
            if isinstance(value, Tensor) and value.is_floating_point():
                worst = max(worst, float((value - before[name]).abs().max()))
    return {"weights": worst}


def try_model(name: str, size: int, groups: Any, folder: Path) -> dict[str, Any]:
    """What was built, and of each path what was off, or why it was refused."""
    from megatron_cp_plugin import megatron as cp_megatron
    from megatron_cp_plugin.errors import ContextParallelError

    (public,) = (model for model in MODELS if model.name == name)
    settings = small(dict(public.settings))
    reference = make_model(settings, 1, alone(groups))
    further = make_model(settings | {"mtp_num_layers": 1}, 1, alone(groups))
    cp_megatron.install("zigzag", layout="thd")
    try:
        model = make_model(settings, size, groups)
        found = {"built": settings} | try_paths(reference, model, size, folder / name)
        predicting = settings | {"mtp_num_layers": 1}
        model = make_model(predicting, size, groups)
        model.load_state_dict(further.state_dict(), strict=False)
        try:
            found["off"]["multi-token prediction"] = worst_of(
                Reference(further), model, size, real=True
            )
        except ContextParallelError as error:
            found["refused"]["multi-token prediction"] = str(error)
        return found
    except ContextParallelError as error:
        return {"built": settings, "off": {}, "refused": {"all": str(error)}}
    finally:
        cp_megatron.uninstall()


class Stages(Pipeline):
    """A model in two stages."""

    def __init__(self, settings: dict[str, object], size: int, groups: Any) -> None:
        split = {
            "pipeline_model_parallel_size": 2,
            "pipeline_dtype": torch.float32,
            "variable_seq_lengths": True,
            "moe_token_dispatcher_type": "alltoall",  # else lengths may not vary
        }
        first = groups.pp.rank() == 0
        ends = {"pre_process": first, "post_process": not first}
        self.group = groups.cp
        self.chunks = [make_model(settings | split, size, groups, **ends)]


def beside(how: str, name: str, size: int, groups: Any) -> dict[str, Any]:
    """Padded packs, with another parallelism. Args: how: tensor or pipeline."""
    from megatron_cp_plugin import megatron as cp_megatron
    from megatron_cp_plugin.errors import ContextParallelError

    (public,) = (model for model in MODELS if model.name == name)
    settings = small(dict(public.settings))
    path = f"{how} parallelism"
    if how == "pipeline" and (
        {"hybrid_layer_pattern", "mrope_section", "mtp_num_layers"} & settings.keys()
        or not settings["untie_embeddings_and_output_weights"]
    ):
        return {"off": {}, "refused": {}}  # of these the job has no stages
    if how == "tensor":
        settings |= {"tensor_model_parallel_size": 2, "sequence_parallel": True}
        if "linear_num_key_heads" in settings:
            settings |= {"linear_num_key_heads": 2 * size}  # a multiple of all ranks
        if "num_experts" in settings:
            settings |= {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    reference = make_model(settings, 1, alone(groups))
    if how == "pipeline":
        dist.broadcast_object_list(weights := [reference.state_dict()])
        reference.load_state_dict(weights[0])
    cp_megatron.install("zigzag", layout="thd")
    try:
        if how == "pipeline":
            errors = compare_stages(Reference(reference), Stages(settings, size, groups), "thd")
            del errors["seen"]
        else:
            model = make_model(settings, size, groups)
            model.load_state_dict(reference.state_dict(), strict=False)
            errors = worst_of(Reference(reference), model, size, real=True)
        return {"off": {path: errors}, "refused": {}}
    except ContextParallelError as error:
        return {"off": {}, "refused": {path: str(error)}}
    finally:
        cp_megatron.uninstall()


def try_paths(reference: Any, model: Any, size: int, folder: Path) -> dict[str, Any]:
    from megatron_cp_plugin.errors import ContextParallelError

    model.load_state_dict(reference.state_dict(), strict=False)
    packs = Reference(reference)  # is asked once the samples have trained it
    paths: dict[str, Callable[[], dict[str, float]]] = {
        "samples": lambda: by_samples(reference, model, size),
        "packed documents": lambda: worst_of(packs, model, size, real=False),
        "packed documents with padding": lambda: worst_of(packs, model, size, real=True),
        "checkpoint": lambda: by_checkpoint(reference, model, folder),
    }
    found: dict[str, dict[str, Any]] = {"off": {}, "refused": {}}
    for path, run in paths.items():
        try:
            found["off"][path] = run()
        except ContextParallelError as error:
            found["refused"][path] = str(error)
    return found


def worst_of(reference: Reference, model: Any, size: int, *, real: bool) -> dict[str, float]:
    found: dict[str, float] = {}
    for lengths in BATCHES.values():
        batch = Batch(lengths, model.pg_collection.cp.rank(), size)
        errors = compare(reference, model, batch, real=real, spanned=False)
        found = {key: max(found.get(key, 0.0), value) for key, value in errors.items()}
    return found


def main() -> None:
    folder, how, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    if importlib.util.find_spec("fla") is None:
        from tests.integration.gated_delta_net_job import use_stand_in

        use_stand_in()
    if how == "nothing":
        groups = set_up(size)
    else:
        from megatron_cp_plugin.integration import cpu

        cpu.activate()  # Megatron asks for GPUs in sequence parallelism and in its schedules
        experts = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
        others = {"tensor": {"tensor": 2} | experts, "pipeline": {"stages": 2}}
        groups = set_up(size, **others[how])
    for name in sys.argv[4:]:
        try:
            if how == "nothing":
                found = try_model(name, size, groups, folder)
            else:
                found = beside(how, name, size, groups)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": f"{type(error).__name__}: {error}"}
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, found)
        for path in found.get("off", {}):
            for key in found["off"][path]:
                found["off"][path][key] = max(each["off"][path][key] for each in every)
        if dist.get_rank() == 0:
            print("FOUND" + json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
