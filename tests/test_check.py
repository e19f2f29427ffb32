"""`megatron-cp check`: what a launch would say, on this machine without GPUs."""

from pathlib import Path

import pytest

from megatron_cp_plugin.cli import main
from megatron_cp_plugin.harness.check import split_program
from tests.integration.megatron_job import run_program

SIZES = """
--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
--vocab-size 32000 --max-position-embeddings 16384 --tokenizer-type NullTokenizer
--bf16 --micro-batch-size 1 --global-batch-size 16 --train-iters 10 --lr 1e-4 --eval-iters 0
--seq-length 16384 --mock-data --tensor-model-parallel-size 2 --context-parallel-size 2
""".split()
ZIGZAG = ["--context-parallel-algo", "zigzag"]


def check(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["check", *words])
    said = capsys.readouterr().out
    return code, " ".join(said.split())


def without(flag: str, values: int = 1) -> list[str]:
    at = SIZES.index(flag)
    return SIZES[:at] + SIZES[at + 1 + values :]


def test_a_command_line_of_megatron(capsys: pytest.CaptureFixture[str]) -> None:
    before = "torchrun --nproc_per_node 8 --nnodes 2 -m megatron_cp_plugin.launch pretrain_gpt.py"
    code, said = check(capsys, *before.split(), *SIZES, *ZIGZAG)
    assert (code, said.partition(" ")[0]) == (0, "served")
    assert "gpus 16 launch context parallelism by zigzag on 2 rank(s), zigzag layout" in said
    assert "kernel flash4, the fastest measured on h100_400g" in said
    assert "memory fits: " in said


def test_words_before_a_script() -> None:
    words = "srun torchrun --nnodes=4 --nproc-per-node=8 train.py --lr 1 --config x".split()
    assert split_program(words) == (["--lr", "1", "--config", "x"], 32)
    assert split_program(["--", "--lr", "1"]) == (["--lr", "1"], None)


def test_without_an_algorithm_it_says_what_auto_would_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, said = check(capsys, *SIZES, "--machine", "h200")
    assert code == 0
    assert "no algorithm is named: Megatron's own would run" in said
    assert "gpus 4, the fewest for these flags" in said
    assert "GiB on h200" in said


@pytest.mark.parametrize("name", ["llama3_8b_128k", "qwen3_next_64k", "llama3_8b_sft"])
def test_run_files_of_the_package(capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Of which some need packages and data that this machine has not."""
    code, said = check(capsys, "--config", name)
    assert (code, said.partition(" ")[0]) == (0, "served")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--batch-invariant-mode"], "zigzag does not support batch-invariant mode"),
        (["--cp-options", "nothing=1"], "has no option 'nothing'"),
        (["--seq-length", "16382"], "zigzag needs seq_length divisible by"),
        (["--context-parallel-size", "0"], "context_parallel_size must be at least 1"),
        (["--num-query-groups", "3"], "must be divisible by num_query_groups"),
        # Of Megatron's own.
        (["--global-batch-size", "5", "--gpus", "8"], "Megatron refuses these flags: "),
        (["--train-iters", "0"], "training needs --train-iters"),
        (["--seq-length", "many"], "--seq-length takes a whole number, got 'many'"),
        (["--gpus", "6"], "must divide the number of processes, got 6"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
    ],
)
def test_refusals_are_the_launchers(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, found = check(capsys, *SIZES, *ZIGZAG, *words)
    assert (code, found.startswith("refused: "), said in found) == (1, True, True), found


def test_a_flag_that_only_a_script_may_know(capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, *SIZES, *ZIGZAG, "--swigloo")
    assert code == 0
    assert "no flag of Megatron --swigloo (did you mean '--swiglu'?)" in said
    code, said = check(capsys, "--config", "llama3_8b_128k", "--swigloo")
    assert code == 1
    assert "refused: unknown flag --swigloo" in said


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        (without("--vocab-size"), "vocab_size"),
        ([*SIZES, "--experimental-attention-variant", "dsa"], "a count of gated delta net"),
    ],
)
def test_what_the_memory_needs_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], lacking: str
) -> None:
    _, said = check(capsys, *words, *ZIGZAG)
    assert f"memory not known: the planner lacks {lacking}" in said


def test_attention_is_in_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """A machine of less memory than a long sequence needs."""
    long = ["--seq-length", "4194304", "--max-position-embeddings", "4194304"]
    code, said = check(capsys, *SIZES, *ZIGZAG, *long, "--recompute-granularity", "full",
                       "--recompute-method", "uniform", "--recompute-num-layers", "1")  # fmt: skip
    assert code == 0
    assert "memory does not fit: " in said
    assert "attention " in said


def test_nothing_stays_changed(tmp_path: Path) -> None:
    """Megatron's functions and the command line, after a check."""
    code = (
        "import sys, torch; from megatron.training import arguments as a; from megatron_cp_plugin."
        "cli import main; before = a.is_te_min_version, torch.cuda.get_device_capability, sys.argv;"
        "main(['check', '--config', 'tiny_zigzag']);"
        "assert before == (a.is_te_min_version, torch.cuda.get_device_capability, sys.argv)"
    )
    run_program(tmp_path, "-c", code).succeeded()
