"""Megatron's own training loop: every split gives the losses of the unsplit run.

The reference of every comparison is Megatron's own attention on the whole sequence.
"""

import subprocess
from pathlib import Path

import pytest

from megatron_cp_plugin.harness.parity import Recording
from tests.integration.megatron_job import LAUNCH, LAUNCHER, TINY, Job, run, run_warm

pytestmark = pytest.mark.timeout(600)

ROPE = (*TINY, "--position-embedding-type", "rope", "--group-query-attention")
ROPE = (*ROPE, "--num-query-groups", "2", "--swiglu", "--normalization", "RMSNorm")


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


LATENT = "--multi-latent-attention --position-embedding-type rope --rotary-scaling-factor 4 "
LATENT += "--q-lora-rank 12 --kv-lora-rank 16 --qk-head-dim 16 --qk-pos-emb-head-dim 8 "
LATENT += "--v-head-dim 12"
LINEAR = "--position-embedding-type none --cp-linear-model transnormer"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


@pytest.mark.parametrize(
    ("algorithm", "size", "model", "more", "ranks"),
    [
        ("zigzag", 4, ROPE, "", 1),
        ("ring", 4, ROPE, RECOMPUTED, 1),
        ("attention2d", 4, ROPE, "--use-distributed-optimizer --overlap-grad-reduce", 1),
        ("lasp2", 4, TINY, LINEAR, 1),
        ("ring", 2, TINY, LATENT, 1),
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


PATCH = Path(__file__).parents[2] / "patches" / "pretrain_gpt.patch"
# The lines around the change are those of every version, and this Megatron trains.
OF_ANY_VERSION = """
from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

from megatron_cp_plugin.harness.pretrain import run

MockGPTLowLevelDataset.size = 5_000  # as in scripts/forked.py
run()
"""


@pytest.mark.slow
def test_patched_script_needs_no_launcher(
    rope: Job, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """That of `--megatron-lm`, if given; the reference is the unmodified one in the launcher."""
    folder = request.config.getoption("--megatron-lm")
    script, reference = tmp_path / "pretrain_gpt.py", rope
    if folder is None:
        kept = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith(" ")]
        script.write_text("\n".join(["import time", *kept, OF_ANY_VERSION]))
    else:
        for entry in Path(folder).iterdir():
            (tmp_path / entry.name).symlink_to(entry.resolve())
        unmodified = script.resolve()
        script.unlink()
        script.write_bytes(unmodified.read_bytes())
        reference = run(*ROPE, *algo("megatron", 1), program=(*LAUNCHER, str(unmodified)))
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    assert "megatron_cp_plugin" in script.read_text()
    job = run(*ROPE, *algo("zigzag", 1), program=(str(script),))
    assert_same_training(job.succeeded(), reference.succeeded())
    assert "zigzag on 1 rank(s)" in job.text


def test_patched_script_refuses_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "pretrain_gpt.py"
    kept = [line[1:] for line in PATCH.read_text().splitlines() if line.startswith((" ", "+"))]
    script.write_text("\n".join(["import time", *kept[1:]]))
    (process,) = run(
        *TINY, "--cp-kernel", "none", *algo("ring", 1), program=(str(script),)
    ).processes
    assert process.returncode == 2
    assert process.stderr.strip().splitlines()[-1].startswith("megatron_cp_plugin: error: ")
