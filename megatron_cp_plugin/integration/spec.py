"""Replaces attention in Megatron's layer specs by the plugin's, and builds models of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from megatron.core.extensions.transformer_engine import TEDotProductAttention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.heterogeneous.linear_replacements import ColumnParallelLinearGathered
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import nn

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.latent_attention import send_latents
from megatron_cp_plugin.integration.linear_models import MODELS
from megatron_cp_plugin.integration.recurrent import is_gated_delta_net, is_mamba, served
from megatron_cp_plugin.integration.rope import use_layout
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime, set_up_groups
from megatron_cp_plugin.integration.settings import MAMBA, Settings

type LayerSpec = ModuleSpec | TransformerBlockSubmodules


def build_model(
    original: Callable[..., Any],
    call: inspect.BoundArguments,
    runtime: Runtime,
    settings: Any | None,
) -> Any:
    """Calls the constructor of GPTModel or HybridModel with the plugin's attention in the spec.

    Returns: the model, whose position embeddings follow the layout. Its inputs are not checked.

    Raises: ContextParallelError if the model asks for something that the algorithms do not support.
    """
    model, config = call.args[0], call.arguments["config"]
    check("model", Settings(config, runtime.config))
    given = call.arguments
    named = given.get("hybrid_layer_pattern") or ""
    set_up_groups(runtime, settings, config, given.get("pg_collection"))
    name = "hybrid_stack_spec" if "hybrid_stack_spec" in given else "transformer_layer_spec"
    given[name] = with_plugin(given[name], config, given.get("vp_stage"), runtime)
    if given.get("mtp_block_spec") is not None:
        given["mtp_block_spec"] = with_multi_token(given["mtp_block_spec"], config, runtime)
    original(*call.args, **call.kwargs)
    pattern = getattr(model, "hybrid_layer_pattern", None)
    check("model", Settings(SimpleNamespace(hybrid_layer_pattern=pattern), runtime.config))
    if MAMBA in (pattern or "") and MAMBA not in named:
        raise ContextParallelError(
            f"Mamba layers need their pattern, got --hybrid-layer-pattern {pattern} by another "
            "argument: give the model hybrid_layer_pattern"
        )
    follow(model, runtime)
    return model


def follow(model: Any, runtime: Runtime) -> None:
    """Makes the modules around attention follow the layout, in a model built from a spec of
    `with_plugin`.

    Raises: ContextParallelError if position embeddings or projections are of another kind.
    """
    use_layout(model, runtime)
    if runtime.config.send_latents:
        send_latents(model)
    for module in model.modules():
        kinds = type(module), type(getattr(module, "core_attention", None))
        if _is_sparse(*kinds) or _gathers_documents(kinds[0]):
            module.register_forward_pre_hook(_give_documents, with_kwargs=True)


def with_plugin(
    spec: LayerSpec, config: TransformerConfig, vp_stage: int | None, runtime: Runtime
) -> LayerSpec:
    """Returns a copy of a model's spec with the plugin's attention.

    Args:
        spec: of all layers, the block's or a HybridModel's stack's.
        config: of the model; linear layers change how its checkpoints are laid out, and latents
            that rotary embeddings are not fused.

    Raises: as `with_attention`.
    """
    if runtime.config.has_linear_layers:
        # Layers with different parameters cannot be stacked into one tensor of a checkpoint;
        # those of softmax attention are alike, whatever their algorithms.
        config.hetereogenous_dist_checkpoint = True
    if Settings(config).cuts_fused_rotary:
        config.apply_rope_fusion = False
    if len(runtime.config.algorithms) > 1:
        return with_pattern(spec, config, vp_stage, runtime)
    return with_attention(spec, runtime)


def with_pattern(
    spec: LayerSpec, config: TransformerConfig, vp_stage: int | None, runtime: Runtime
) -> TransformerBlockSubmodules:
    """Returns the block spec of this pipeline stage, each layer with its own algorithm.

    Raises: ContextParallelError: As `with_attention`.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        block, layers = spec, list(spec.layer_specs or [])
    else:
        block = TransformerBlockSubmodules(layer_norm=LayerNormImpl)
        layers = [spec] * get_num_layers_to_build(config, vp_stage)
    first = get_transformer_layer_offset(config, vp_stage) + 1
    served: list[Any] = [
        with_attention(layer, runtime.serving(runtime.config.algo_of_layer(number)))
        for number, layer in enumerate(layers, first)
    ]
    return replace(block, layer_specs=served)


def with_multi_token(spec: Any, config: TransformerConfig, runtime: Runtime) -> Any:
    """Returns a copy of the spec of multi-token prediction with the last layer's algorithm.

    Raises: ContextParallelError: As `with_attention`; or a layer is not Megatron's own.
    """
    if isinstance(spec, ModuleSpec):
        return replace(spec, submodules=with_multi_token(spec.submodules, config, runtime))
    served = runtime.serving(runtime.config.algo_of_layer(config.num_layers))
    layers = []
    for layer in spec.layer_specs:
        if layer.module.forward is not MultiTokenPredictionLayer.forward:
            # mcore-bridge's class shifts angles by the order of a rank's tokens.
            raise ContextParallelError(
                "multi-token prediction needs Megatron's own layers, which do not depend on "
                "the order of a rank's tokens, got "
                f"{layer.module.__module__}.{_name(layer.module)}: leave mtp_num_layers out"
            )
        parts = layer.submodules
        # Its name before Megatron 0.17.
        name = "mtp_model_layer" if hasattr(parts, "mtp_model_layer") else "transformer_layer"
        layers.append(_with(layer, **{name: with_attention(getattr(parts, name), served)}))
    return replace(spec, layer_specs=layers)


def with_attention(spec: LayerSpec, runtime: Runtime) -> LayerSpec:
    """Returns a copy of a spec with one algorithm's attention in each layer.

    Works for specs of a layer, of a block and of a HybridModel's stack, local or Transformer
    Engine's. Layers of sparse attention (DSA), those of slime that gather documents whole, and
    those of a heterogeneous model that have no attention or a linear map in its place, stay as they
    are.

    Raises: ContextParallelError: A layer's attention is neither Megatron's plain self attention
    nor, for an algorithm of softmax attention, its multi-latent one.
    """
    if isinstance(spec, TransformerBlockSubmodules):
        layers = [with_attention(layer, runtime) for layer in spec.layer_specs or []]
        return replace(spec, layer_specs=layers)
    layer: Any = getattr(spec, "submodules", None)
    linear = registry.kind_of(runtime.config.algo) == "linear"
    if hasattr(layer, "attention_layer"):
        # Linear attention serves no others: they stay, and the rules refuse a model that has some.
        others = () if linear else ("mla_layer", "gdn_layer", "mamba_layer")
        given = {kind: getattr(layer, kind, IdentityOp) for kind in ("attention_layer", *others)}
        found = {kind: one for kind, one in given.items() if one is not IdentityOp}
        return _with(spec, **{kind: with_attention(found[kind], runtime) for kind in found})
    mixer: Any = getattr(layer, "mixer", None)
    if is_mamba(getattr(mixer, "module", mixer)):
        return _with(spec, mixer=_recurrent(mixer, runtime))
    attention: Any = getattr(layer, "self_attention", None)
    module = getattr(attention, "module", attention)
    replacements = ColumnParallelLinearGathered.__module__  # Transformer Engine's is there too
    if module is IdentityOp or getattr(module, "__module__", None) == replacements:
        return spec  # tokens do not interact there
    if isinstance(module, type) and is_gated_delta_net(module):
        return _with(spec, self_attention=_recurrent(attention, runtime))
    core: Any = getattr(getattr(attention, "submodules", None), "core_attention", None)
    core = getattr(core, "module", core)
    # Only a program knows how its own layers cut tokens.
    own = getattr(core, "__module__", "").startswith("megatron.core.")
    if _is_sparse(module, core) and (own or runtime.is_cut_by_callers):
        return spec
    if _gathers_documents(module) and runtime.config.layout.name == PaddedDocuments.name:
        return spec
    kinds = (SelfAttention,) if linear else (SelfAttention, MLASelfAttention)
    if not isinstance(module, type) or not issubclass(module, kinds):
        raise ContextParallelError(
            f"{runtime.config.algo} supports layers with {' or '.join(map(_name, kinds))}, "
            f"got {_name(module)}: leave --spec out or use another model"
        )
    if linear:
        assert runtime.config.linear_model is not None  # checked at start-up
        model = MODELS[runtime.config.linear_model]
        params = {**attention.params, "runtime": runtime}
        return _with(spec, self_attention=replace(attention, module=model, params=params))
    if core is not DotProductAttention and core is not TEDotProductAttention:
        raise ContextParallelError(
            f"{runtime.config.algo} replaces DotProductAttention or TEDotProductAttention, got "
            f"{_name(core)}: leave the flag that chooses it out"
        )
    ours = ModuleSpec(module=ContextParallelAttention, params={"runtime": runtime})
    return _with(spec, self_attention=_with(attention, core_attention=ours))


def use_attention(model: Any, runtime: Runtime) -> None:
    """Gives the plugin's attention to layers that a program has built anew from its own spec.

    Raises:
        ContextParallelError: Their attention is not Megatron's plain self attention, or has sinks.
    """
    for part in (getattr(model, "decoder", None), getattr(model, "mtp", None)):
        for owner in part.modules() if isinstance(part, nn.Module) else ():
            core = getattr(owner, "core_attention", None)
            if type(core) not in (DotProductAttention, TEDotProductAttention):
                continue
            if not isinstance(owner, SelfAttention) or owner.config.softmax_type != "vanilla":
                raise ContextParallelError(
                    f"{runtime.config.algo} serves layers that are built from the model's spec, "
                    f"got {_name(type(owner))} with {_name(type(core))} instead: let "
                    "GPTModel.__init__ build the layers"
                )
            owner.core_attention = ContextParallelAttention(
                owner.config,
                owner.layer_number,
                owner.attn_mask_type,
                owner.attention_type,
                softmax_scale=getattr(owner.config, "softmax_scale", None),
                pg_collection=owner.pg_collection,
                runtime=runtime,
            )


def _with(spec: Any, **parts: Any) -> Any:
    """A copy of a spec with other submodules."""
    return replace(spec, submodules=replace(spec.submodules, **parts))


def _recurrent(spec: Any, runtime: Runtime) -> ModuleSpec:
    """The spec of a recurrent layer's part with the plugin's module."""
    return ModuleSpec(
        module=served(getattr(spec, "module", spec)),
        params={**getattr(spec, "params", {}), "runtime": runtime},
        submodules=getattr(spec, "submodules", None),
    )


def _is_sparse(*kinds: Any) -> bool:
    """Whether a class computes sparse attention (DSA), Megatron's or a program's own."""
    return any(isinstance(kind, type) and kind.__name__.startswith("DSA") for kind in kinds)


def _gathers_documents(module: Any) -> bool:
    """Whether a class is one of slime's layers, which compute whole documents on all ranks.

    Source: slime, slime_plugins/models/hf_attention.py, HuggingfaceAttention.forward; of chunks
    p and 2P-1-p of each document on rank p.
    """
    name = "slime_plugins.models.hf_attention.HuggingfaceAttention"
    bases = module.__mro__ if isinstance(module, type) else ()
    return any(f"{base.__module__}.{base.__qualname__}" == name for base in bases)


def _give_documents(
    attention: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Passes the original packed_seq_params to attention that splits documents itself."""
    packed = kwargs.get("packed_seq_params")
    if isinstance(packed, DocumentMask):
        kwargs = kwargs | {"packed_seq_params": packed.given()}
    return args, kwargs


def _name(module: Any) -> str:
    return getattr(module, "__name__", repr(module))
