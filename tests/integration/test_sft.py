"""--sft: packed conversations.

The reference is a ring of one rank; that it masks documents rightly is tested in
test_equal_runs.py. Megatron's data set pads conversations to a multiple of twice the number
of ranks, and what follows a conversation is a label only without padding: the lengths here need
none.
"""

from pathlib import Path

import pytest

from megatron_cp_plugin.harness.parity import Tolerances
from tests.integration.conversations import write_conversations
from tests.integration.megatron_job import LAUNCH, LAUNCHER, TINY, Job, run, run_warm

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

# Finds it beside itself.
TRAIN = "from megatron_cp_plugin.harness import pretrain\n\npretrain.run()\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations, and a script beside them."""
    folder = tmp_path_factory.mktemp("sft")
    write_conversations(folder)
    (folder / "train.py").write_text(TRAIN)
    return folder


def flags(folder: Path) -> list[str]:
    words = list(TINY)
    for flag, values in (("--mock-data", 0), ("--tokenizer-type", 1), ("--vocab-size", 1)):
        place = words.index(flag)
        del words[place : place + 1 + values]
    words += ["--sft", "--sft-tokenizer-prompt-format", "default", "--seq-length", "128"]
    words += ["--tokenizer-type", "SFTTokenizer", "--tokenizer-model", str(folder / "tokenizer")]
    words += ["--data-path", str(folder / "data.jsonl"), "--split", "8,2,0"]
    words += ["--eval-iters", "2", "--position-embedding-type", "rope"]
    return words


def train(script: Path, folder: Path, algorithm: str, size: int) -> tuple[Job, float]:
    """A run of `script` and the loss that it evaluated to."""
    words = [*flags(folder), *f"--context-parallel-algo {algorithm}".split()]
    words += ["--context-parallel-size", str(size)]
    if script == folder / "train.py":
        logs = folder / algorithm.split()[0]
        job = run_warm(logs, str(script), *words, ranks=size, script=LAUNCH).succeeded()
    else:
        job = run(*words, ranks=size, program=(*LAUNCHER, str(script))).succeeded()
    (evaluated,) = {
        line.split("lm loss value:")[1].split()[0]
        for line in job.text.splitlines()
        if "validation loss at" in line
    }
    return job, float(evaluated)


def assert_same_at_any_size(script: Path, folder: Path, *algorithms: str) -> None:
    alone, evaluated_alone = train(script, folder, "ring", 1)
    assert len(alone.losses) == 3
    bounds = Tolerances()
    for algorithm in algorithms:
        split, evaluated = train(script, folder, algorithm, 2)
        assert split.losses == pytest.approx(alone.losses, rel=bounds.loss)
        assert split.grad_norms == pytest.approx(alone.grad_norms, abs=2e-3)  # as printed
        assert evaluated == pytest.approx(evaluated_alone, rel=bounds.loss)


def test_conversations(folder: Path) -> None:
    assert_same_at_any_size(
        folder / "train.py", folder, "zigzag --cp-options layout=documents", "distflash"
    )


def test_unmodified_script_of_a_checkout(
    checkout_script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "flatten_batch_for_packed_sequences" not in checkout_script.read_text():
        pytest.skip(f"{checkout_script} is older than Megatron 0.19")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    assert_same_at_any_size(checkout_script, folder, "ulysses")
