"""Megatron's own training loop: every split gives the losses of the unsplit run.

The reference of every comparison is Megatron's own attention on the whole sequence.
"""

from pathlib import Path

import pytest

from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from tests.integration.megatron_job import (
    LAUNCH,
    LAUNCHER,
    SLOWLY,
    TINY,
    Job,
    run,
    run_warm,
)

pytestmark = pytest.mark.timeout(600)

HYBRID = Path(__file__).with_name("hybrid_job.py")
ROPE = (*TINY, "--position-embedding-type", "rope", "--group-query-attention")
ROPE = (*ROPE, "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm")
# 68 tokens: divisible by 4 ranks, but not by 2 * 4, which Megatron demands of --seq-length.
LEARNED = (*TINY, "--position-embedding-type", "learned_absolute", "--seq-length", "68")


def assert_same_training(job: Job, reference: Job) -> None:
    assert len(reference.losses) == 3
    assert job.losses == pytest.approx(reference.losses, rel=1e-5)
    # Megatron prints three digits: one unit in the last place.
    assert job.grad_norms == pytest.approx(reference.grad_norms, abs=1.1e-3)


def algo(name: str, size: int) -> tuple[str, ...]:
    return ("--context-parallel-algo", name, "--context-parallel-size", str(size))


@pytest.fixture(scope="module")
def rope(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("rope")
    return run_warm(folder, *ROPE, "--context-parallel-algo", "megatron").succeeded()


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Job:
    folder = tmp_path_factory.mktemp("learned")
    return run_warm(folder, *LEARNED, "--context-parallel-algo", "megatron").succeeded()


def test_a_run_file(rope: Job, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("megatron:\n  context_parallel_size: 2\ncontext_parallel:\n  algo: zigzag\n")
    job = run_warm(tmp_path, "--config", str(file), *ROPE, ranks=2).succeeded()
    assert_same_training(job, rope)
    assert "zigzag on 2 rank(s), zigzag layout" in job.text


def test_ring_through_the_launcher_beside_data_parallel_with_recompute(
    rope: Job, tmp_path: Path
) -> None:
    script = tmp_path / "their_script.py"
    script.write_text("import gpt_program\n\nif __name__ == '__main__':\n    gpt_program.run()\n")
    # A script may import modules that lie beside it.
    (tmp_path / "gpt_program.py").write_text(
        "from megatron_cp_plugin.harness.pretrain import run\n"
    )
    recompute = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    flags = (*algo("ring", 2), *recompute.split(), "--use-distributed-optimizer")
    job = run_warm(tmp_path, str(script), *ROPE, *flags, ranks=4, script=LAUNCH)
    assert_same_training(job.succeeded(), rope)


@pytest.mark.slow
def test_ring_with_learned_positions_on_a_length_that_megatron_refuses(
    learned: Job, tmp_path: Path
) -> None:
    job = run_warm(tmp_path, *LEARNED, *algo("ring", 4), ranks=4)
    assert_same_training(job.succeeded(), learned)


def test_zigzag_with_learned_positions(learned: Job, tmp_path: Path) -> None:
    job = run_warm(tmp_path, *LEARNED, *algo("zigzag", 2), ranks=2)
    assert_same_training(job.succeeded(), learned)


def test_one_rank(learned: Job, tmp_path: Path) -> None:
    assert_same_training(run_warm(tmp_path, *LEARNED, *algo("zigzag", 1)).succeeded(), learned)


@pytest.mark.parametrize(
    "split",
    [
        "--pipeline-model-parallel-size 2",
        pytest.param(
            "--tensor-model-parallel-size 2 --sequence-parallel --recompute-granularity full "
            "--recompute-method uniform --recompute-num-layers 1",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_model_parallel_beside_context_parallel(split: str, tmp_path: Path) -> None:
    flags = (*ROPE, *split.split())
    reference = run_warm(
        tmp_path / "reference", *flags, "--context-parallel-algo", "megatron", ranks=2
    )
    job = run_warm(tmp_path / "split", *flags, *algo("zigzag", 2), ranks=4)
    assert_same_training(job.succeeded(), reference.succeeded())


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        pytest.param("distflash", "*E*-/*-/*-", marks=pytest.mark.slow),
        pytest.param("attention2d", "*-|*-", marks=pytest.mark.slow),
        ("ring", "+E+-/+-"),
    ],
)
def test_hybrid_model(name: str, pattern: str, tmp_path: Path) -> None:
    """Of attention, MLP and MoE; with more tokens predicted, or in two pipeline stages."""
    words = "--position-embedding-type rope --normalization RMSNorm --spec hybrid_job stack"
    stages = 1 + pattern.count("|")
    flags = [*TINY, *words.split(), "--hybrid-layer-pattern", pattern]
    flags += [
        "--pipeline-model-parallel-size",
        str(stages),
        "--untie-embeddings-and-output-weights",
    ]
    if "E" in pattern:
        flags += "--num-experts 4 --moe-router-topk 2 --disable-bias-linear".split()
    if "+" in pattern:
        flags += (
            "--kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 12".split()
        )
    if "/" in pattern:
        flags += ["--mtp-num-layers", str(pattern.count("/"))]
    words = (str(HYBRID), *flags)
    megatron = (*words, "--context-parallel-algo", "megatron")
    reference = run_warm(tmp_path / "reference", *megatron, ranks=stages, script=LAUNCH)
    split = (*words, *algo(name, 2))
    job = run_warm(tmp_path / "split", *split, ranks=2 * stages, script=LAUNCH)
    assert_same_training(job.succeeded(), reference.succeeded())


@pytest.mark.slow
@pytest.mark.parametrize(
    "sharding",
    [
        "--use-torch-fsdp2 --ckpt-format torch_dist",
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--use-distributed-optimizer --ckpt-format fsdp_dtensor",
        # Each of them, of two ranks, sums gradients in another stream than it computes in.
        "--num-distributed-optimizer-instances 2 --use-distributed-optimizer --overlap-grad-reduce",
    ],
    ids=["torch", "megatron", "instances"],
)
def test_sharded_data_parallelism(
    sharding: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data parallel 2 x context parallel 2 against neither, with 33 rows for 4 ranks."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    flags = (*ROPE, *SLOWLY, "--untie-embeddings-and-output-weights", "--ffn-hidden-size", "33")
    recordings = []
    for name, ranks, words in (
        ("reference", 1, ("--context-parallel-algo", "megatron")),
        ("split", 4, (*sharding.split(), *algo("zigzag", 2))),
    ):
        folder = tmp_path / name
        run_warm(folder, *flags, *words, "--cp-record", str(folder), ranks=ranks).succeeded()
        recordings.append(Recording.load(folder))
    comparison = compare(*recordings, Tolerances())
    assert comparison.passed, comparison.problems
    assert any("[key]" in name for name in comparison.gradients)


@pytest.mark.slow
def test_recorded_weights_of_sharded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, where what Megatron-FSDP calls a model's parameters are its main weights."""
    monkeypatch.delenv("CUDA_DEVICE_MAX_CONNECTIONS", raising=False)
    flags = [*ROPE, "--untie-embeddings-and-output-weights", "--bf16", *algo("zigzag", 2)]
    megatron = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    megatron += "--use-distributed-optimizer --ckpt-format fsdp_dtensor"
    recordings = []
    for name, words in (("replicas", ""), ("shards", megatron)):
        folder = tmp_path / name
        job = run_warm(folder, *flags, *words.split(), "--cp-record", str(folder), ranks=2)
        job.succeeded()
        recordings.append(Recording.load(folder))
    replicas, shards = ([rank.weights for rank in each.ranks] for each in recordings)
    assert len(replicas[0]) > 10
    assert shards == replicas


def test_sliding_windows(tmp_path: Path) -> None:
    """Of the first layer only, as in models that alternate."""
    flags = (*ROPE, "--window-size", "9,0", "--window-attn-skip-freq", "2")
    reference = run_warm(tmp_path / "reference", *flags, "--context-parallel-algo", "megatron")
    for name in ("zigzag", "allgather"):
        job = run_warm(tmp_path / name, *flags, *algo(name, 2), ranks=2)
        assert_same_training(job.succeeded(), reference.succeeded())


LATENT = "--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 4 "
LATENT += "--q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
LATENT += "--v-head-dim 12 --tensor-model-parallel-size 2"
LINEAR = "--position-embedding-type none --cp-linear-model transnormer"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("algorithm", "size", "model", "more", "ranks"),
    [
        ("zigzag", 4, ROPE, "", 1),
        ("ring", 4, ROPE, RECOMPUTED, 1),
        ("attention2d", 4, ROPE, "--use-distributed-optimizer --overlap-grad-reduce", 1),
        ("lasp2", 4, TINY, LINEAR, 1),
        ("ring", 2, TINY, LATENT, 2),
        # In a pipeline, whose last stage embeds tokens too.
        ("distflash", 2, ROPE, "--mtp-num-layers 1 --pipeline-model-parallel-size 2", 2),
    ],
)
def test_unmodified_script_of_a_checkout(
    checkout_script: Path,
    algorithm: str,
    size: int,
    model: tuple[str, ...],
    more: str,
    ranks: int,
) -> None:
    """Of any version: its own Megatron is the reference, or one rank of linear attention."""
    program, flags = (*LAUNCHER, str(checkout_script)), (*model, *more.split())
    alone = algo("lasp2" if more == LINEAR else "megatron", 1)
    reference = run(*flags, *alone, ranks=ranks, program=program)
    job = run(*flags, *algo(algorithm, size), ranks=ranks * size, program=program)
    assert_same_training(job.succeeded(), reference.succeeded())
