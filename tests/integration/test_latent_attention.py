"""--multi-latent-attention: losses and all gradients are those of Megatron's own attention."""

from pathlib import Path

import pytest
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.rope import _keep_documents
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.megatron_job import SLOWLY, TINY, run_warm

pytestmark = pytest.mark.timeout(300)

# Heads of three dims: 24 of q and k, of which 8 are rotated, and 12 of v.
LATENT = (
    *TINY,
    *SLOWLY,
    *"--multi-latent-attention --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8".split(),
    *"--v-head-dim 12 --position-embedding-type rope --normalization RMSNorm".split(),
)
YARN = "--rope-type yarn --rotary-scaling-factor 4 --mscale-all-dim 0.5 --q-lora-rank 12"
# Runs with the same parts of the model on each rank start from the same weights.
REFERENCES = {
    "layers": ("--rope-type rope --num-layers 4", 1),
    "tensor": (
        f"{YARN} --qk-layernorm --tensor-model-parallel-size 2 --sequence-parallel "
        "--mtp-num-layers 1",
        2,
    ),
    "stages": (f"{YARN} --pipeline-model-parallel-size 2 --softmax-type learnable", 2),
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# Not of mla_up_proj, for which Megatron compiles something first: scripts/parity_combinations.py.
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"


def train(folder: Path, flags: str, ranks: int) -> Recording:
    words = (*flags.split(), "--cp-record", str(folder))
    run_warm(folder, *LATENT, *words, ranks=ranks).succeeded()
    return Recording.load(folder)


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Recording]:
    """Each of `REFERENCES` with Megatron's own attention."""
    return {
        kind: train(tmp_path_factory.mktemp(kind), f"{flags} --context-parallel-algo megatron", n)
        for kind, (flags, n) in REFERENCES.items()
    }


@pytest.mark.parametrize(
    ("kind", "flags", "size"),
    [
        ("layers", "--cp-layers zigzag,attention2d,allgather,usp", 4),
        ("layers", f"--cp-layers ring,distflash,ulysses,ring {SELECTIVE}", 4),
        (
            "layers",
            f"--context-parallel-algo attention2d --cp-options variant=no {FULL} "
            "--micro-batch-size 2",
            4,
        ),
        ("layers", f"--context-parallel-algo zigzag {FULL} --cp-recompute-attention", 1),
        ("tensor", f"--context-parallel-algo zigzag {FULL}", 2),
        ("stages", f"--cp-layers distflash,ulysses {SELECTIVE}", 2),
    ],
)
def test_equals_megatron(
    references: dict[str, Recording], tmp_path: Path, kind: str, flags: str, size: int
) -> None:
    same, shards = REFERENCES[kind]
    words = f"{same} {flags} --context-parallel-size {size}"
    comparison = compare(references[kind], train(tmp_path, words, shards * size), Tolerances())
    assert comparison.passed, comparison.problems
    # Gradients of K are far smaller than those of V, and are seen apart.
    assert any("linear_kv_up_proj.weight[key]" in name for name in comparison.gradients)


@pytest.mark.parametrize(
    ("twice", "checkpointed", "packed", "refused"),
    [
        (True, True, True, True),
        # Each of them alone, or without documents, is served.
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
    ],
)
def test_what_is_recomputed_alone(
    twice: bool, checkpointed: bool, packed: bool, refused: bool
) -> None:
    class Core(ContextParallelAttention):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            config = ContextParallelConfig("ring", 1, recompute_attention=twice)
            self.runtime = Runtime(config)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core_attention, self.checkpoint_core_attention = Core(), checkpointed

    layer, mask = Layer(), DocumentMask(seq_len=8, starts=(3,)) if packed else None
    if refused:
        with pytest.raises(ContextParallelError, match="cannot be recomputed alone"):
            _keep_documents(layer, (), {"packed_seq_params": mask})
        return
    assert _keep_documents(layer, (), {"packed_seq_params": mask}) == (
        (),
        {"packed_seq_params": None},
    )
    assert layer.core_attention.packed is mask
