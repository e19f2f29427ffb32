"""A training script with a HybridModel of local layers with Mamba; Megatron's are TE's.

`--spec mamba_job stack`. Where mamba-ssm is not installed, which needs a GPU, a stand-in takes its
place.
"""

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
if importlib.util.find_spec("mamba_ssm") is None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "stand_ins"))

from hybrid_job import stack as hybrid
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.hybrid import hybrid_block
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm

if not mamba_mixer.HAVE_MAMBA_SSM:  # imported before the stand-in could be found
    importlib.reload(mamba_mixer)

_mixer = ModuleSpec(
    mamba_mixer.MambaMixer,
    submodules=mamba_mixer.MambaMixerSubmodules(ColumnParallelLinear, RowParallelLinear),
)
_layer = ModuleSpec(
    MambaLayer,
    submodules=MambaLayerSubmodules(
        norm=WrappedTorchNorm, mixer=_mixer, mamba_bda=get_bias_dropout_add
    ),
)
stack = replace(hybrid, submodules=replace(hybrid.submodules, mamba_layer=_layer))

if __name__ == "__main__":
    from megatron_cp_plugin.harness import pretrain

    hybrid_block.TENorm = WrappedTorchNorm
    pretrain.run()
