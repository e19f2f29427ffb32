"""Megatron's Mamba-2 layers beside softmax attention of the plugin, and what is refused.

The reference is Megatron's own layer, and its own attention, on the whole sequence, over a
recurrence that stands for mamba-ssm's kernels.
"""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.integration.mamba import served
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_attention
from tests.integration.megatron_job import LAUNCH, TINY, run_warm
from tests.integration.ranks import ALONE, Place
from tests.integration.recurrent_layers import Projection, check_documents, with_weights

JOB = Path(__file__).with_name("mamba_job.py")
WORDS = "--position-embedding-type rope --normalization RMSNorm --spec mamba_job stack "
WORDS += "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 4 "


def train(folder: Path, flags: str, ranks: int = 1, pattern: str = "M*-M") -> Recording:
    model = (*TINY, *WORDS.split(), "--hybrid-layer-pattern", pattern)
    words = (str(JOB), *model, *flags.split(), "--cp-record", str(folder))
    run_warm(folder, *words, ranks=ranks, script=LAUNCH).succeeded()
    return Recording.load(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return train(tmp_path_factory.mktemp("whole"), "--context-parallel-algo megatron")


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--context-parallel-algo zigzag --use-distributed-optimizer", 4),
        pytest.param("--context-parallel-algo ring", 2, marks=pytest.mark.slow),
    ],
)
def test_equals_the_whole_sequence(
    whole: Recording, tmp_path: Path, flags: str, ranks: int
) -> None:
    split = train(tmp_path, f"{flags} --context-parallel-size {ranks}", ranks)
    comparison = compare(whole, split, Tolerances())
    assert comparison.passed, comparison.problems
    parts = [f"in_proj.weight[{part}]" for part in ("z", "x", "B", "C", "dt")]
    for part in (*parts, "conv1d_weight", "conv1d_bias", "A_log", "dt_bias", "D", "norm.weight"):
        assert any(f"mixer.{part}" in name for name in comparison.gradients), part


@pytest.mark.parametrize(
    ("model", "split", "pattern"),
    [
        (
            "--tensor-model-parallel-size 2 --sequence-parallel --num-experts 4 "
            "--expert-model-parallel-size 2 --expert-tensor-parallel-size 1",
            "--context-parallel-algo zigzag --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            "M*EM",
        ),
        ("--pipeline-model-parallel-size 2", "--context-parallel-algo allgather", "M*|M-"),
        ("--mtp-num-layers 1", "--context-parallel-algo zigzag", "M*-M/M*"),
    ],
    ids=["tensor", "pipeline", "mtp"],
)
def test_beside_model_parallelism(tmp_path: Path, model: str, split: str, pattern: str) -> None:
    ranks = 1 if "mtp" in model else 2
    megatron = f"{model} --context-parallel-algo megatron"
    reference = train(tmp_path / "whole", megatron, ranks, pattern)
    words = f"{model} {split} --context-parallel-size 2"
    run = train(tmp_path / "split", words, 2 * ranks, pattern)
    comparison = compare(reference, run, Tolerances())
    assert comparison.passed, comparison.problems
    assert any("mixer.A_log" in name for name in comparison.gradients)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's layer with stand-ins for mamba-ssm's kernels."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "stand_ins"))
    triton = "mamba_ssm.ops.triton"
    kernels = importlib.import_module(f"{triton}.ssd_combined")
    for name in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"):
        monkeypatch.setattr(mamba_mixer, name, getattr(kernels, name))
    norm = importlib.import_module(f"{triton}.layernorm_gated").RMSNorm
    monkeypatch.setattr(mamba_mixer, "ExtendedRMSNorm", norm)
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    tracker = SimpleNamespace(fork=torch.random.fork_rng)
    monkeypatch.setattr(mamba_mixer, "get_cuda_rng_tracker", lambda: tracker)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]


def mixer(kind: type, place: Any, **params: Any) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        mamba_num_heads=6,
        mamba_head_dim=4,
        mamba_state_dim=5,
        mamba_num_groups=3,
        params_dtype=torch.float64,
    )
    parts = mamba_mixer.MambaMixerSubmodules(Projection, Projection)
    groups: Any = SimpleNamespace(cp=place, tp=ALONE)
    layer = kind(config, parts, 8, layer_number=1, pg_collection=groups, **params)
    return with_weights(layer.double())


@pytest.mark.parametrize(
    ("algo", "options", "size"),
    [
        ("ring", {}, 1),
        ("ring", {}, 3),
        ("zigzag", {}, 5),
        ("zigzag", {"layout": "thd"}, 2),
        ("zigzag", {"layout": "documents"}, 4),
    ],
)
@pytest.mark.parametrize("wide", [False, True], ids=["skip of heads", "skip of channels"])
def test_each_document_is_a_sequence(
    on_cpu: None, algo: str, options: dict[str, str], size: int, wide: bool
) -> None:
    tokens = 60 if size == 5 else 48

    def of_rank(place: Any, runtime: Runtime) -> Any:
        return mixer(served(mamba_mixer.MambaMixer), place, runtime=runtime, D_has_hdim=wide)

    check_documents(
        mixer(mamba_mixer.MambaMixer, ALONE, D_has_hdim=wide),
        of_rank,
        ContextParallelConfig(algo, size, options=tuple(options.items())),
        tokens=tokens,
        padding=((tokens - 2, tokens),),
        bound=1e-6,  # Megatron takes rates in float32
    )


def test_what_layers_refuse(on_cpu: None) -> None:
    spec = ModuleSpec(
        MambaLayer, submodules=MambaLayerSubmodules(mixer=ModuleSpec(mamba_mixer.MambaMixer))
    )
    runtime = Runtime(ContextParallelConfig("ring", 1))
    stack = ModuleSpec(HybridStack, submodules=HybridStackSubmodules(mamba_layer=spec))
    ours = with_attention(stack, runtime).submodules.mamba_layer.submodules.mixer
    assert ours.params == {"runtime": runtime}
    layer = mixer(ours.module, ALONE, **ours.params)
    x = torch.zeros(4, 1, 8, dtype=torch.float64)
    with pytest.raises(ContextParallelError, match="Mamba layers do not support inference: leave"):
        layer(x, inference_context=object())
    with pytest.raises(ContextParallelError, match="Mamba layers do not support spans: leave it"):
        layer(x, packed_seq_params=SimpleNamespace(spans=()))
    cyclic = ContextParallelConfig("attention2d", 2, options=(("variant", "no"),))
    said = "Mamba layers need a layout of consecutive tokens, got the cyclic layout of attention2d"
    with pytest.raises(ConfigError, match=said):
        mixer(ours.module, Place(0, 2), runtime=Runtime(cyclic))


def test_a_checkpoint_of_megatron_goes_on(tmp_path: Path) -> None:
    """Saved by Megatron's own layers on the whole sequence, loaded on two ranks."""
    model = (str(JOB), *TINY, *WORDS.split(), "--hybrid-layer-pattern", "M*-M")
    saved = (*model, *f"--save {tmp_path / 'saved'} --save-interval 2 --ckpt-format".split())
    whole = (*saved, "torch_dist", "--context-parallel-algo", "megatron")
    losses = run_warm(tmp_path / "whole", *whole, script=LAUNCH).succeeded().losses
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("2")
    split = f"--load {tmp_path / 'saved'} --ckpt-format torch_dist --context-parallel-algo zigzag"
    words = (*model, *split.split(), "--context-parallel-size", "2")
    resumed = run_warm(tmp_path / "split", *words, ranks=2, script=LAUNCH).succeeded().losses
    assert len(resumed) == 1
    assert resumed[0] == pytest.approx(losses[2], rel=1e-5)
    assert resumed[0] != losses[0]
