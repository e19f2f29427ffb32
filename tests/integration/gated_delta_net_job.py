"""A training script with gated delta net layers of local modules; Megatron has TE's.

`--spec gated_delta_net_job block --experimental-attention-variant gated_delta_net`. Where
flash-linear-attention is not installed, which needs GPUs, a stand-in takes its place.
"""

import importlib
import importlib.util
import runpy
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]


def block(config: Any, vp_stage: int | None = None) -> Any:
    """The block spec of this pipeline stage, for Megatron to call."""
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_linear_attention_pattern,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.torch_norm import WrappedTorchNorm
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    config = config.transformer
    softmax = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    delta = ModuleSpec(
        GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            ColumnParallelLinear, WrappedTorchNorm, RowParallelLinear
        ),
    )
    kinds = (
        softmax,
        replace(softmax, submodules=replace(softmax.submodules, self_attention=delta)),
    )
    layers = [kinds[kind] for kind in get_linear_attention_pattern(config)]
    first = get_transformer_layer_offset(config, vp_stage)
    mine = layers[first : first + get_num_layers_to_build(config, vp_stage)]
    return TransformerBlockSubmodules(layer_specs=mine, layer_norm=WrappedTorchNorm)


def use_stand_in() -> None:
    """Gives Megatron the stand-in, also where it has been imported already."""
    sys.path.insert(0, str(TESTS / "stand_ins"))
    kernels = {
        name: getattr(importlib.import_module(f"fla.{module}"), name)
        for module, name in (
            ("modules.convolution", "causal_conv1d"),
            ("modules.l2norm", "l2norm"),
            ("ops.gated_delta_rule", "chunk_gated_delta_rule"),
        )
    }
    package = "megatron.core.ssm.gated_delta_net"
    for name in [name for name in sys.modules if name.startswith(package)]:
        module = sys.modules[name]
        for kernel in kernels.keys() & vars(module).keys():
            setattr(module, kernel, kernels[kernel])
        if hasattr(module, "HAVE_FLA"):
            module.HAVE_FLA = True


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if importlib.util.find_spec("fla") is None:
        use_stand_in()
    sys.argv[0] = str(TESTS.parent / "scripts" / "pretrain_gpt.py")
    runpy.run_path(sys.argv[0], run_name="__main__")
