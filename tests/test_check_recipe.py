"""Recipes of five programs, written here: served, refused or not understood, and why."""

from pathlib import Path

import pytest

from megatron_cp_plugin.cli import main

SIZES = """
--num-layers 8 --hidden-size 1024 --ffn-hidden-size 4096 --num-attention-heads 16
--group-query-attention --num-query-groups 4 --swiglu --normalization RMSNorm
--position-embedding-type rope --disable-bias-linear --attention-dropout 0 --hidden-dropout 0
--vocab-size 32000 --bf16 --micro-batch-size 1 --global-batch-size 16
""".replace("\n", " ")
MEGATRON = f"""#!/bin/bash
CP=2
MODEL=({SIZES})
SPLIT=(--tensor-model-parallel-size 2 --context-parallel-size $CP)
torchrun --nproc_per_node 8 pretrain_gpt.py \\
    "${{MODEL[@]}}" ${{SPLIT[@]}} --seq-length $((16 * 1024)) --data-path $DATA EXTRA
"""
SLIME = """
source "${HERE}/../models/small.sh"
ray job submit -- python3 train.py --actor-num-nodes 2 --actor-num-gpus-per-node 8 \\
    ${MODEL_ARGS[@]} --tensor-model-parallel-size 2 --context-parallel-size 2 \\
    --hf-checkpoint $WHERE --use-dynamic-batch-size --max-tokens-per-gpu 4096 \\
    --rollout-batch-size 8 --sglang-mem-fraction-static 0.7 --attention-backend fused EXTRA
"""
SWIFT = """
NPROC_PER_NODE=8 \\
megatron rlhf --rlhf_type grpo --model Qwen/Qwen3-30B-A3B-Instruct-2507 --lr 5e-5 \\
    --context_parallel_size 2 --tensor_model_parallel_size 2 --expert_model_parallel_size 4 \\
    --pipeline_model_parallel_size 2 --micro_batch_size 2 --max_length 8192 --finetune \\
    --attention_backend flash --padding_free true --sequence_parallel true EXTRA
"""
SWIFT_YAML = """
model: Qwen/Qwen3-8B
tensor_model_parallel_size: 2
context_parallel_size: 2
packing: true
max_length: 32768
EXTRA
"""
VERL = """
DATA=(data.train_files=$HOME/train.parquet)
python3 -m verl.trainer.main_ppo "${DATA[@]}" actor_rollout_ref.model.path=Qwen/Qwen3-8B \\
    actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \\
    actor_rollout_ref.actor.megatron.context_parallel_size=2 trainer.nnodes=1 \\
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 trainer.n_gpus_per_node=8 \\
    +actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full EXTRA
"""
VERL_YAML = """
actor_rollout_ref:
  model: {path: Qwen/Qwen3-8B}
  actor:
    ppo_max_token_len_per_gpu: 8192
    megatron: {context_parallel_size: 2, EXTRA}
"""
BRIDGE = """
recipe: llama3_8b_pretrain_config
model: {context_parallel_size: 2, cp_comm_type: a2a, seq_length: 32768, EXTRA}
train: {micro_batch_size: 1}
"""
PYTHON = """
LENGTH = 16 * 1024

def base_config():
    cfg = _common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Meta-Llama-3-8B").provider()
    cfg.model.context_parallel_size = 1
    return cfg

def long_config(length=LENGTH):
    cfg = base_config()
    cfg.model.context_parallel_size = 2
    cfg.model.seq_length = length
    EXTRA
    return cfg
"""


def check(
    capsys: pytest.CaptureFixture[str], folder: Path, name: str, text: str, *words: str
) -> tuple[int, str]:
    (folder / name.partition(":")[0]).write_text(text)
    code = main(["check", str(folder / name), *words])
    said = capsys.readouterr().out
    assert all(len(line) <= 100 or str(folder) in line for line in said.splitlines())
    return code, " ".join(said.split())


def megatron(extra: str = "") -> str:
    return MEGATRON.replace("EXTRA", extra)


def test_a_command_line_of_megatron(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = check(capsys, tmp_path, "run.sh", megatron())
    assert code == 0
    assert "run.sh: served program Megatron, served through the launcher" in said
    assert "model 8 layers, hidden size 1024, 16:4 heads" in said
    assert "ranks 8 GPUs: TP 2, CP 2; 16384 tokens of a micro-batch" in said
    assert "as plan would take on h100_400g" in said
    assert "memory fits: " in said


@pytest.mark.parametrize(
    ("flags", "lacking"),
    [
        ("--vocab-size 32000", "vocab_size"),
        ("--hidden-size 1024", "hidden_size"),
        ("--seq-length $((16 * 1024))", "the tokens of a micro-batch"),
    ],
)
def test_what_the_memory_needs_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: str, lacking: str
) -> None:
    _, said = check(capsys, tmp_path, "run.sh", megatron().replace(flags, ""))
    assert f"memory not known: the planner lacks {lacking}" in said


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ("--context-parallel-algo ring", 0, "algorithm ring, as named"),
        (
            "--batch-invariant-mode",
            1,
            "refused run.sh:6: --context-parallel-algo zigzag does not sup",
        ),
        ("--cp-comm-type magi", 2, ""),
        ("--new-flag 3", 2, "unknown --new-flag 3 (run.sh:6)"),
        ("--num-layers-per-virtual-pipeline-stage $N", 0, "is not known (run.sh:6)"),
        ("--window-size $W,0", 2, "unknown --window-size: its value (run.sh:6)"),
        ("--new-flag 3 --batch-invariant-mode", 1, "unknown --new-flag"),
        ("$MORE", 2, "unknown ?: what it stands for"),
    ],
)
def test_what_a_command_line_may_ask_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, code: int, words: str
) -> None:
    if extra.startswith("--cp-comm-type"):
        with pytest.raises(SystemExit):
            check(capsys, tmp_path, "run.sh", megatron(extra))
        assert "--cp-comm-type got 'magi'" in capsys.readouterr().err
        return
    found, said = check(capsys, tmp_path, "run.sh", megatron(extra))
    assert (found, words in said) == (code, True), said


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ("", 0, 'slime, served through install(..., layout="thd")'),
        ("", 0, "attention_backend fused is replaced"),
        ("--allgather-cp", 0, "layout contiguous"),
        ("--spec slime_plugins.models.qwen3_next spec", 0, "nets of whole documents on all ranks"),
        ("--allgather-cp --spec slime_plugins.models.qwen3_5 x", 2, "gathers by another layout"),
        ("--max-tokens-per-gpu $MOST", 0, "TP 2, CP 2"),
        ("--spec my.models spec", 2, "unknown --spec my.models: its layers"),
        ("--spec slime_plugins.models.glm5.glm5 spec", 0, "none: all layers are DSA"),
        ("--attention-dropout 0.1", 1, "add --attention-dropout 0"),
        ("--expert-model-parallel-size 32", 1, "needs that many processes, or a multiple, got 16"),
        ("--something-of-slime 3", 2, "unknown --something-of-slime 3"),
    ],
)
def test_a_script_of_slime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, code: int, words: str
) -> None:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "small.sh").write_text(f"MODEL_ARGS=({SIZES})\n")
    (tmp_path / "scripts").mkdir()
    text = SLIME.replace("EXTRA", extra)
    found, said = check(capsys, tmp_path, "scripts/run.sh", text)
    assert (found, words in said) == (code, True), said
    assert "16 GPUs: TP 2, CP 2" in said or code == 2


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ("", 0, "qwen3-8b, 36 layers"),
        ("actor_rollout_ref.model.path=nobody/knows-1b", 0, "qwen3-8b"),
        ("actor_rollout_ref.actor.megatron.dynamic_context_parallel=True", 0, "qwen3-8b"),
        ("model_engine=fsdp", 1, "fsdp builds no GPTModel"),
        (
            "+actor_rollout_ref.actor.megatron.override_transformer_config.use_flash_attn=True",
            1,
            "use_flash_attn is a flag of MindSpeed",
        ),
        ("actor_rollout_ref.actor.megatron.brand_new=1", 2, "megatron.brand_new=1 (run.sh:7)"),
        ("+actor_rollout_ref.actor.megatron.override_transformer_config.brand_new=1", 2, "new=1"),
        ("actor_rollout_ref.actor.megatron.context_parallel_size=$CP", 2, "its value"),
    ],
)
def test_a_script_of_verl(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, code: int, words: str
) -> None:
    found, said = check(capsys, tmp_path, "run.sh", VERL.replace("EXTRA", extra))
    assert (found, words in said) == (code, True), said


@pytest.mark.parametrize(
    ("extra", "code", "words"),
    [
        ("", 0, "ranks 8 GPUs: TP 2, PP 2, CP 2, EP 4; 16384 tokens of a micro-batch layout thd"),
        ("--padding_free false", 0, "8192 tokens of a micro-batch"),
        ("--mtp_num_layers 1", 1, "mcore-bridge shifts rotary angles"),
        ("--cp_partition_mode contiguous", 2, "unknown --cp_partition_mode contiguous (run.sh:6)"),
        ("--attention_dropout 0.1", 1, "got --attention-dropout 0.1"),
        ("--context_parallel_size $CP", 2, "unknown --context_parallel_size ?: its value"),
    ],
)
def test_a_script_of_swift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], extra: str, code: int, words: str
) -> None:
    found, said = check(capsys, tmp_path, "run.sh", SWIFT.replace("EXTRA", extra))
    assert (found, words in said) == (code, True), said
    found, said = check(capsys, tmp_path, "run.yaml", SWIFT_YAML.replace("EXTRA", ""))
    assert found == 0
    assert "32768 tokens of a micro-batch" in said


@pytest.mark.parametrize(
    ("name", "text", "words", "code", "said"),
    [
        ("verl.yaml", VERL_YAML.replace("EXTRA", ""), (), 0, "CP 2; 16384 tokens"),
        ("verl.yaml", VERL_YAML.replace("EXTRA", "brand_new: 1"), (), 2, "brand_new=1"),
        ("a.yaml", BRIDGE.replace("EXTRA", ""), (), 0, "cp_comm_type a2a is replaced"),
        ("a.yaml", BRIDGE.replace("EXTRA", "brand_new: 1"), (), 2, "model.brand_new=1"),
        (
            "a.yaml",
            BRIDGE.replace("EXTRA", "batch_invariant_mode: true"),
            (),
            1,
            "batch-invariant mode",
        ),
        (
            "a.yaml",
            BRIDGE.replace("EXTRA", ""),
            ("model.batch_invariant_mode=true",),
            1,
            "batch-invariant mode",
        ),
        ("a.yaml", BRIDGE.replace("llama3_8b", "unheard_of"), (), 2, "name one that is known"),
        ("a.yaml", BRIDGE.replace("llama3_8b", "wan_14b"), (), 1, "diffusion transformer"),
        ("a.yaml", BRIDGE.replace("llama3_8b", "kimi_k3"), (), 1, "Kimi delta attention"),
        ("a.py:long_config", PYTHON.replace("EXTRA", ""), (), 0, "CP 2; 16384 tokens"),
        (
            "a.py:long_config",
            PYTHON.replace("EXTRA", "cfg.model.batch_invariant_mode = True"),
            (),
            1,
            "a.py:14: --context-parallel-algo zigzag does not support batch-invariant mode",
        ),
    ],
)
def test_settings_of_verl_and_bridge(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str,
    words: tuple[str, ...],
    code: int,
    said: str,
) -> None:
    text = text.replace(", EXTRA", "")
    found, printed = check(capsys, tmp_path, name, text, *words)
    assert (found, said in printed) == (code, True), printed


def test_words_alone(capsys: pytest.CaptureFixture[str]) -> None:
    flags = f"{SIZES} --context-parallel-size 2 --seq-length 8192"
    assert main(["check", "--", *flags.split()]) == 0
    assert "at least 2: see --gpus" in " ".join(capsys.readouterr().out.split())
    experts = "--num-experts 4 --moe-router-topk 2 --expert-model-parallel-size 4"
    assert main(["check", "--", *f"{flags} {experts}".split()]) == 0
    assert "at least 4: see --gpus" in " ".join(capsys.readouterr().out.split())
    assert main(["check", "recipe=llama3_8b", "model.context_parallel_size=2"]) == 0
    assert "llama-3-8b" in capsys.readouterr().out


def test_a_run_file_of_the_plugin(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[1] / "configs" / "llama3_8b_128k.yaml"
    assert main(["check", str(path)]) == 0
    assert "as named" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere.sh"], "there is no recipe at nowhere.sh"),
        (["words"], "is neither flags of Megatron nor settings"),
        (["--model", "nothing", "model.context_parallel_size=2"], "which is not known"),
    ],
)
def test_no_recipe(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", *words])
    assert end.value.code == 2
    printed = capsys.readouterr().err
    assert said in printed
    assert printed.count("\n") == 1
