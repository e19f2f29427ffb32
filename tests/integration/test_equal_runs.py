"""Megatron's own training loop: a split run has the losses and all gradients of the unsplit one.

One table of runs. The reference is Megatron's own attention on the whole sequence, with a mask of
N x N where documents are packed; where Megatron has none it is one rank of the plugin.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from tests.integration.megatron_job import LAUNCH, SCRIPT, SLOWLY, TINY, run_warm

pytestmark = pytest.mark.timeout(600)

JOBS = Path(__file__).parent
OPTIMIZER = "--use-distributed-optimizer"
GROUPED = "--group-query-attention --num-query-groups 2"
ROPE = f"--position-embedding-type rope {GROUPED} --swiglu --normalization RMSNorm"
# 68 tokens: divisible by 4 ranks, but not by 2 * 4, which Megatron demands of --seq-length.
LEARNED = "--position-embedding-type learned_absolute --seq-length 68"
# "DATA" stands for a data set of documents.
PACKED = f"DATA --swiglu {GROUPED} --position-embedding-type rope"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
SELECTIVE = "--recompute-granularity selective --recompute-modules core_attn"
TENSOR = "--tensor-model-parallel-size 2 --sequence-parallel"
EXPERTS = f"{TENSOR} --num-experts 4 --expert-model-parallel-size 2 --expert-tensor-parallel-size 1"
STAGES = "--pipeline-model-parallel-size 2"
INTERLEAVED = f"{STAGES} --num-layers-per-virtual-pipeline-stage 1 --num-layers 4"
UNTIED = "--untie-embeddings-and-output-weights"
SHARDED = f"{ROPE} {UNTIED} --ffn-hidden-size 33"  # 33 rows for 4 ranks
FSDP = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
FSDP += f"{OPTIMIZER} --ckpt-format fsdp_dtensor"
INSTANCES = f"--num-distributed-optimizer-instances 2 {OPTIMIZER} --overlap-grad-reduce"
WINDOWS = "--window-size 9,0 --window-attn-skip-freq 2"  # of the first layer only
LATENTS = "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12"
# Heads of three dims: 24 of q and k, of which 8 are rotated, and 12 of v.
LATENT = f"--multi-latent-attention {LATENTS} --position-embedding-type rope "
LATENT += "--normalization RMSNorm --rope-type"
FOUR = f"{LATENT} rope --num-layers 4"
YARN = f"{LATENT} yarn --rotary-scaling-factor 4 --mscale-all-dim 0.5 --q-lora-rank 12"
STACK = f"--position-embedding-type rope --normalization RMSNorm {UNTIED} "
STACK += "--spec hybrid_job stack --hybrid-layer-pattern"
MOE = "--num-experts 4 --moe-router-topk 2 --disable-bias-linear"
DELTA = "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 "
DELTA += "--linear-key-head-dim 8 --linear-value-head-dim 12 --linear-num-key-heads 4 "
DELTA += "--linear-num-value-heads 8 --attention-output-gate --qk-layernorm "
DELTA += f"{ROPE} --rotary-percent 0.5 --disable-bias-linear --spec gated_delta_net_job block"
MAMBA = "--position-embedding-type rope --normalization RMSNorm --spec mamba_job stack "
MAMBA += "--mamba-num-heads 8 --mamba-head-dim 8 --mamba-state-dim 8 --mamba-num-groups 4 "
MAMBA += "--hybrid-layer-pattern"
LINEAR = "--num-layers 4 --init-method-std 0.1 --position-embedding-type learned_absolute "
LINEAR += "--cp-linear-model"
TRANSNORMER = f"{LINEAR} transnormer"
DOCUMENTS = "--dataloader-inter-document-masking"
LASP, MEGATRON = (f"--context-parallel-algo {name}" for name in ("lasp", "megatron"))
MASKED = f"{MEGATRON} --reset-attention-mask --reset-position-ids"
FOLLOWS, GATHERS = (f"{name} --cp-options layout=documents" for name in ("zigzag", "allgather"))
CHUNKS = "zigzag --cp-chunked-loss 7"
EVALUATED = "--eval-interval 1 --eval-iters 1"
LASP2 = "lasp2 --cp-options layout=zigzag"


class Row(NamedTuple):
    """Flags of both runs, of the split one, and of the reference.

    Attributes: split: begins with an algorithm. size: context-parallel ranks. shards: ranks of the
        reference. replicas: data-parallel ranks of the split run. fast: `make test` runs it too.
    """

    model: str
    split: str
    reference: str = MEGATRON
    size: int = 2
    shards: int = 1
    replicas: int = 1
    fast: bool = False


def alone(algorithm: str) -> str:
    """One rank of the plugin, with packed documents."""
    return f"{DOCUMENTS} --context-parallel-algo {algorithm}"


def packed(model: str, split: str, reference: str = MASKED, **more: Any) -> Row:
    """Of documents. Args: split: without the flag for them."""
    return Row(f"{PACKED} {model}", f"{split} {DOCUMENTS}", reference, **more)


ROWS = [
    Row(LEARNED, "ring", size=4),
    Row(LEARNED, "zigzag"),
    Row(LEARNED, "zigzag", size=1),
    Row(f"{ROPE} {STAGES}", "zigzag", shards=2, fast=True),
    Row(SHARDED, f"zigzag {FSDP}", replicas=2),
    # Each instance, of two ranks, sums gradients in another stream than it computes in.
    Row(SHARDED, f"zigzag {INSTANCES}", replicas=2),
    Row(f"{ROPE} {WINDOWS}", "zigzag"),
    # Of attention, MLP and MoE; with more tokens predicted, or in two pipeline stages.
    Row(f"{STACK} *E*-/*-/*- {MOE} --mtp-num-layers 2", "distflash"),
    Row(f"{STACK} *-|*- {STAGES}", "attention2d", shards=2),
    Row(f"{STACK} +E+-/+- {MOE} {LATENTS} --mtp-num-layers 1", "ring"),
    Row(FOUR, "--cp-layers zigzag,attention2d,allgather,zigzag --cp-send-latents"),
    Row(FOUR, f"zigzag {RECOMPUTE} --cp-recompute-attention", size=1),
    Row(
        f"{YARN} --qk-layernorm {TENSOR} --spec latent_job layer",
        f"zigzag {RECOMPUTE} --cp-send-latents",
        shards=2,
    ),
    Row(
        f"{YARN} {STAGES} --softmax-type learnable",
        f"--cp-layers distflash,ulysses {SELECTIVE}",
        shards=2,
    ),
    Row(DELTA, "ulysses"),
    Row(DELTA, "--cp-layers allgather,usp"),
    Row(DELTA, "ring", size=1),  # every layout is that of the whole sequence
    Row(f"{DELTA} {EXPERTS}", f"zigzag {OPTIMIZER} {RECOMPUTE}", shards=2),
    Row(f"{DELTA} {STAGES}", "allgather", shards=2),
    Row(f"{MAMBA} M*-M", "ring", fast=True),
    Row(f"{MAMBA} M*EM {EXPERTS}", f"zigzag {RECOMPUTE}", shards=2),
    Row(f"{MAMBA} M*-M/M* --mtp-num-layers 1", "zigzag"),
    Row(TRANSNORMER, "lasp", LASP, fast=True),
    Row(TRANSNORMER, f"{LASP2} {OPTIMIZER}", LASP, replicas=2),
    Row(f"{LINEAR} linear_transformer {GROUPED}", LASP2, LASP),
    packed("", "ring", size=1, fast=True),
    packed("", f"zigzag --micro-batch-size 2 {RECOMPUTE}", size=4),
    packed("", f"{FOLLOWS} --micro-batch-size 2 --calculate-per-token-loss", fast=True),
    # Shifts of further tokens on one rank are those of Megatron: test_multi_token.py.
    packed("--mtp-num-layers 2", "zigzag", alone("ring")),
    packed("--mtp-num-layers 2", FOLLOWS, alone("ring")),
    packed(f"{WINDOWS} --softmax-type learnable", "ulysses", alone("ring")),
    packed(f"{INTERLEAVED} --global-batch-size 4", GATHERS, alone("ring"), shards=2),
    # States begin anew at each document, on one rank as on several.
    Row(f"{TRANSNORMER} DATA", f"{LASP2} {DOCUMENTS}", alone("lasp")),
    Row(f"{DELTA} DATA", f"zigzag {DOCUMENTS}", alone("zigzag")),
    Row(f"{MAMBA} M*-M DATA", f"{FOLLOWS} {DOCUMENTS}", alone("zigzag")),
    # Losses in chunks, beside what splits a vocabulary or a batch otherwise.
    packed(f"{TENSOR} --mtp-num-layers 2 --micro-batch-size 2", CHUNKS, alone("ring"), shards=2),
    packed(f"{INTERLEAVED} --global-batch-size 4", CHUNKS, alone("ring"), shards=2, size=1),
    Row(
        f"{ROPE} --tensor-model-parallel-size 2 {UNTIED} --seq-length 60 {EVALUATED}",
        f"{CHUNKS} {RECOMPUTE} {OPTIMIZER} --overlap-grad-reduce",
        shards=2,
        size=1,
    ),
    Row(SHARDED, f"{CHUNKS} --use-torch-fsdp2 --ckpt-format torch_dist", replicas=2),
    packed(f"{STACK} *-*-", CHUNKS),
]
# What has gradients of its own, beside a word of the model: parts of weights.
PARTS = {
    "gated_delta_net": (
        *(f"in_proj.weight[{part}]" for part in ("query", "key", "value", "gate", "beta", "alpha")),
        *(f"conv1d.weight[{part}]" for part in ("query", "key", "value")),
        *("A_log", "dt_bias", "out_norm.weight", "out_proj.weight", "linear_qkv.weight[gate]"),
    ),
    "mamba_job": (
        *(f"mixer.in_proj.weight[{part}]" for part in ("z", "x", "B", "C", "dt")),
        *("conv1d_weight", "conv1d_bias", "A_log", "dt_bias", "D", "norm.weight"),
    ),
    # Gradients of K are far smaller than those of V.
    "--multi-latent-attention": ("linear_kv_up_proj.weight[key]",),
    "--swiglu --normalization": ("linear_qkv.weight[key]",),
}

Train = Callable[[str, int], Recording]


@pytest.fixture(scope="module")
def train(tmp_path_factory: pytest.TempPathFactory, documents: list[str]) -> Train:
    """What a run of some flags on some ranks records; the same run is made once."""

    @cache
    def recording(flags: str, ranks: int) -> Recording:
        folder = tmp_path_factory.mktemp("run")
        steps = ["--train-iters", "2"]
        words = [*TINY, *SLOWLY, *steps, *flags.split(), "--cp-record", str(folder)]
        if "DATA" in words:
            words.remove("DATA")
            words.remove("--mock-data")
            words += documents
        name = words[words.index("--spec") + 1] if "--spec" in words else ""
        script = JOBS / f"{name}.py" if name else SCRIPT
        if name and name != "gated_delta_net_job":
            words, script = [str(script), *words], LAUNCH
        run_warm(folder / "printed", *words, ranks=ranks, script=script).succeeded()
        return Recording.load(folder)

    return recording


def of_split(row: Row, train: Train) -> Recording:
    algorithm = row.split if row.split.startswith("--") else f"--context-parallel-algo {row.split}"
    flags = f"{row.model} {algorithm} --context-parallel-size {row.size}"
    return train(flags, row.shards * row.size * row.replicas)


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(row, marks=() if row.fast else pytest.mark.slow, id=f"{number}-{row.split}")
        for number, row in enumerate(ROWS)
    ],
)
def test_equals_the_unsplit_run(row: Row, train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fsdp" in row.split:
        monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    reference = train(f"{row.model} {row.reference}", row.shards)
    found = compare(reference, of_split(row, train), Tolerances())
    assert found.passed, found.problems
    assert ("mtp_1 loss" in reference.losses()) == ("--mtp-num-layers" in row.model)
    for word, parts in PARTS.items():
        for part in parts if word in row.model else ():
            assert any(part in name for name in found.gradients), part


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "reference", "algorithm", "least"),
    [
        (PACKED, MASKED, "ring", 1e-3),
        (f"{DELTA} DATA", alone("zigzag"), "zigzag", 1e-4),
    ],
    ids=["attention", "delta"],
)
def test_documents_change_the_losses(
    train: Train, model: str, reference: str, algorithm: str, least: float
) -> None:
    """So that the check can fail."""
    whole = train(f"{model} --context-parallel-algo {algorithm}", 1)
    assert compare(train(f"{model} {reference}", 1), whole, Tolerances()).loss.error > least
