"""A training script with a HybridModel of local layers; Megatron's are Transformer Engine's.

`--spec hybrid_job stack`
"""

from dataclasses import replace

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_layer import MoETransformerLayer


def _alone(layer: ModuleSpec) -> ModuleSpec:
    """The attention of a layer, without its MLP."""
    parts = replace(
        layer.submodules, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp
    )
    return replace(layer, submodules=parts)


_local = get_gpt_layer_local_spec(normalization="RMSNorm")
_latent = get_gpt_layer_local_spec(normalization="RMSNorm", multi_latent_attention=True)
_ahead = get_mtp_layer_spec(_local, use_transformer_engine=False)
stack = ModuleSpec(
    HybridStack,
    submodules=HybridStackSubmodules(
        attention_layer=_alone(_local),
        mla_layer=_alone(_latent),
        mlp_layer=ModuleSpec(
            MLPLayer,
            submodules=replace(
                _local.submodules,
                input_layernorm=IdentityOp,
                self_attention=IdentityOp,
                self_attn_bda=IdentityFuncOp,
            ),
        ),
        moe_layer=ModuleSpec(
            MoETransformerLayer,
            submodules=replace(
                get_gpt_layer_local_spec(num_experts=4, normalization="RMSNorm").submodules,
                input_layernorm=IdentityOp,
                self_attention=IdentityOp,
                self_attn_bda=IdentityFuncOp,
            ),
        ),
        mtp_block_spec=ModuleSpec(
            MultiTokenPredictionBlock,
            submodules=MultiTokenPredictionBlockSubmodules(
                layer_specs=[
                    replace(_ahead, submodules=replace(_ahead.submodules, mtp_model_layer=None))
                ]
            ),
        ),
    ),
)

if __name__ == "__main__":
    from megatron_cp_plugin.harness import pretrain

    hybrid_block.TENorm = WrappedTorchNorm
    pretrain.run()
