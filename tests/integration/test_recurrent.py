"""Megatron's gated delta net and Mamba-2 layers beside softmax attention, and what is refused.

The reference is Megatron's own layers and attention on the whole sequence; those of Mamba over a
recurrence that stands for mamba-ssm's kernels. Softmax layers beside gated delta nets have an
output gate, as those of Qwen3-Next.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm import gated_delta_net as megatron
from megatron.core.ssm import mamba_mixer
from megatron.core.ssm.gated_delta_net import common, gdn
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayerSubmodules
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard, unshard
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.recurrent import served
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_attention
from tests.integration.megatron_job import LAUNCH, TINY, run_warm
from tests.integration.ranks import ALONE, Place
from tests.integration.test_equal_runs import DELTA, MAMBA, MEGATRON
from tests.oracle import relative_error

JOBS = Path(__file__).parent
STAND_INS = JOBS.parent / "stand_ins"


@pytest.mark.parametrize("kind", ["delta", pytest.param("mamba", marks=pytest.mark.slow)])
def test_a_checkpoint_of_megatron_goes_on(kind: str, tmp_path: Path) -> None:
    """Saved by Megatron's own layers on the whole sequence, loaded on two ranks."""

    def losses(folder: str, flags: str, ranks: int) -> list[float]:
        if kind == "delta":
            script, words = JOBS / "gated_delta_net_job.py", DELTA
        else:
            script, words = LAUNCH, f"{JOBS / 'mamba_job.py'} {MAMBA} M*-M"
        words = [*words.split(), *TINY, *f"{flags} --ckpt-format torch_dist".split()]
        return run_warm(tmp_path / folder, *words, ranks=ranks, script=script).succeeded().losses

    saved = tmp_path / "saved"
    whole = losses("whole", f"{MEGATRON} --save {saved} --save-interval 2", 1)
    (saved / "latest_checkpointed_iteration.txt").write_text("2")
    split = f"--load {saved} --context-parallel-algo zigzag --context-parallel-size 2"
    (resumed,) = losses("split", split, 2)
    assert resumed == pytest.approx(whole[2], rel=1e-5)
    assert resumed != whole[0]


def test_layers_that_a_script_makes_by_itself() -> None:
    """Without the flag."""
    delta = ModuleSpec(megatron.GatedDeltaNet)
    layer = ModuleSpec(object, submodules=TransformerLayerSubmodules(self_attention=delta))
    runtime = Runtime(ContextParallelConfig("ring", 2))
    ours = with_attention(layer, runtime).submodules.self_attention
    assert issubclass(ours.module, megatron.GatedDeltaNet)
    assert ours.params == {"runtime": runtime}
    cyclic = ContextParallelConfig("attention2d", 2, options=(("variant", "no"),))
    ours = with_attention(layer, Runtime(cyclic)).submodules.self_attention
    with pytest.raises(ContextParallelError, match="got the cyclic layout of attention2d"):
        ours.module(**ours.params)


class Projection(nn.Linear):
    """Stands for Megatron's parallel linear layers, on one tensor-parallel rank."""

    def __init__(self, inputs: int, outputs: int, **others: object) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), None


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Megatron's layers with stand-ins for fla's and mamba-ssm's kernels."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for module, kernel in (
        ("modules.convolution", "causal_conv1d"),
        ("modules.l2norm", "l2norm"),
        ("ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ):
        stand_in = getattr(importlib.import_module(f"fla.{module}"), kernel)
        for place in (common, gdn):
            if hasattr(place, kernel):
                monkeypatch.setattr(place, kernel, stand_in)
    monkeypatch.setattr(common, "HAVE_FLA", True)
    triton = "mamba_ssm.ops.triton"
    kernels = importlib.import_module(f"{triton}.ssd_combined")
    for name in ("mamba_chunk_scan_combined", "mamba_split_conv1d_scan_combined"):
        monkeypatch.setattr(mamba_mixer, name, getattr(kernels, name))
    norm = importlib.import_module(f"{triton}.layernorm_gated").RMSNorm
    monkeypatch.setattr(mamba_mixer, "ExtendedRMSNorm", norm)
    monkeypatch.setattr(mamba_mixer, "HAVE_MAMBA_SSM", True)
    monkeypatch.setattr(mamba_mixer, "MAMBA_HAS_STATE_DTYPE", False)
    tracker = SimpleNamespace(fork=torch.random.fork_rng)
    monkeypatch.setattr(mamba_mixer, "get_cuda_rng_tracker", lambda: tracker)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    with torch.compiler.set_stance("force_eager"):
        yield
    for name in [name for name in sys.modules if name.partition(".")[0] in ("fla", "mamba_ssm")]:
        del sys.modules[name]


def filled(layer: Any) -> Any:
    """A layer with the same weights on every rank."""
    generator = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        parameter.data = drawn.to(parameter.dtype) / 2
    return layer


def delta_net(kind: type, place: Any, **params: object) -> Any:
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_conv_kernel_dim=4,
        linear_key_head_dim=4,
        linear_value_head_dim=6,
        activation_func=nn.SiLU(),
        perform_initialization=False,
    )
    config.activation_func.__name__ = "silu"  # type: ignore[attr-defined]
    parts = megatron.GatedDeltaNetSubmodules(Projection, WrappedTorchNorm, Projection)
    groups: Any = SimpleNamespace(cp=place, tp=ALONE)
    return filled(kind(config, parts, pg_collection=groups, **params))


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
    return filled(kind(config, parts, 8, layer_number=1, pg_collection=groups, **params).double())


LAYERS: dict[str, tuple[Callable[..., Any], type, dict[str, bool]]] = {
    "gated delta net": (delta_net, megatron.GatedDeltaNet, {}),
    "skip of heads": (mixer, mamba_mixer.MambaMixer, {"D_has_hdim": False}),
    "skip of channels": (mixer, mamba_mixer.MambaMixer, {"D_has_hdim": True}),
}


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
@pytest.mark.parametrize("layers", LAYERS)
def test_each_document_is_a_sequence(
    on_cpu: None, layers: str, algo: str, options: dict[str, str], size: int
) -> None:
    """Outputs and all gradients are those of Megatron's own layer on one document at a time."""
    make, kind, settings = LAYERS[layers]
    # Megatron takes the rates of Mamba in float32; its gated delta nets are in float32.
    dtype, bound = (torch.float64, 1e-6) if make is mixer else (torch.float32, 1e-5)
    tokens, starts = 60 if size == 5 else 48, (8, 24)
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(tokens, 2, 8, generator=generator).to(dtype) for _ in range(2))
    whole = make(kind, ALONE, **settings)
    alone = whole if make is mixer else partial(whole, attention_mask=None)
    given = x.clone().requires_grad_()
    edges = pairwise((0, *starts, tokens))
    want = torch.cat([alone(given[start:stop])[0] for start, stop in edges])
    wanted = torch.autograd.grad(want, [given, *whole.parameters()], dout)
    config = ContextParallelConfig(algo, size, options=tuple(options.items()))
    cut = config.layout.for_documents(starts)

    def body(topology: Topology) -> list[Tensor]:
        runtime = Runtime(config)
        runtime.topology = lambda group: topology  # type: ignore[method-assign]
        layer = make(served(kind), Place(topology.rank, size), runtime=runtime, **settings)
        mine = shard(x, 0, cut, topology.rank, size).requires_grad_()
        packed = DocumentMask(seq_len=tokens, starts=starts, padding=((tokens - 2, tokens),))
        out, _ = layer(mine, packed_seq_params=packed)
        part = shard(dout, 0, cut, topology.rank, size)
        assert list(layer.state_dict()) == list(whole.state_dict())
        return [out.detach(), *torch.autograd.grad(out, [mine, *layer.parameters()], part)]

    out, dx, *gradients = zip(*run_virtual(size, body), strict=True)
    found = [unshard(list(out), 0, cut), unshard(list(dx), 0, cut), *map(sum, gradients)]
    for got, want_ in zip(found, (want.detach(), *wanted), strict=True):
        assert relative_error(got, want_) < bound


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
