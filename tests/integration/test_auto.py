"""`--context-parallel-algo auto`: a name takes its place before anything asks for one."""

import argparse
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.ring import Ring
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.layout import Layout, Zigzag
from megatron_cp_plugin.core.masks.slices import Slice
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration import auto
from megatron_cp_plugin.integration.args import PluginFlags, add_arguments, split_flags
from megatron_cp_plugin.integration.auto import resolve_auto
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv
from megatron_cp_plugin.planner.choose import Kind
from megatron_cp_plugin.planner.command import megatron_settings, write_run_file
from megatron_cp_plugin.planner.machine import Host, Machine
from megatron_cp_plugin.planner.model import MODELS, Model, Split
from megatron_cp_plugin.planner.shortlist import Measured
from megatron_cp_plugin.planner.splits import Job

CPU = torch.device("cpu")
Choosing = Callable[..., tuple[PluginFlags, list[str]]]
TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
TINY += "--attention-dropout 0 --position-embedding-type rope --micro-batch-size 1 "
LLAMA = "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 --swiglu "
LLAMA += "--group-query-attention --num-query-groups 8 --attention-dropout 0 "
LLAMA += "--position-embedding-type rope --micro-batch-size 1 "


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def choose(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Choosing:
    # Its kernels are fast, so that messages decide; calibrated ones may change.
    machine = Machine.load("h200_nvlink")
    replace(machine, host=Host()).save(tmp_path / "machine.yaml")

    def of(
        words: str, size: int, world_size: int = 0, **more: str
    ) -> tuple[PluginFlags, list[str]]:
        given = ["--context-parallel-algo", "auto", "--cp-machine", str(tmp_path / "machine.yaml")]
        given += [f"--context-parallel-size={size}", *words.split()]
        for name, value in more.items():
            given += [f"--cp-{name.replace('_', '-')}", value]
        flags, rest = split_flags(given)
        flags.check()
        args = parser.parse_args(rest)
        args.world_size = world_size or size
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(8, args.world_size)))
        found = resolve_auto(flags, args, CPU)
        named, said = found.flags, found.said
        assert not named.is_auto
        check_arguments(args, named.config(size), CPU)  # what comes next finds nothing to refuse
        assert [*found.contenders.values()] == [named]  # a machine was named
        return named, said

    return of


def test_models_differ_and_so_do_choices(choose: Choosing) -> None:
    """Heads enough; nodes of one GPU each that have all of a rank's heads; linear attention."""
    one, _ = choose(LLAMA + "--seq-length 65536", 8)
    far, _ = choose(LLAMA + "--seq-length 131072 --tensor-model-parallel-size 8", 8, 64)
    linear = TINY.replace("rope", "none") + "--cp-linear-model transnormer"
    states, _ = choose(linear, 4)
    assert len({one.algo, far.algo, states.algo}) == 3
    assert one.layers == ()
    assert registry.kind_of(states.algo) == "linear"


def test_a_hybrid_of_both_kinds(choose: Choosing) -> None:
    named, (said,) = choose(TINY, 4, layers="linear*3, softmax", linear_model="transnormer")
    kinds = [registry.kind_of(named.config(4).algo_of_layer(n)) for n in (1, 2, 3, 4)]
    assert kinds == ["linear", "linear", "linear", "softmax"]
    assert "linear attention" in said


@pytest.mark.parametrize(
    ("words", "size"),
    [
        (TINY, 1),
        (TINY + "--seq-length 68", 4),  # no multiple of 2P
        (TINY + "--num-attention-heads 2", 4),  # fewer heads than ranks
        (TINY + "--dataloader-inter-document-masking", 4),
        (TINY + "--multi-latent-attention --no-rope-fusion", 4),
        (LLAMA + "--seq-length 131072 --recompute-granularity full", 8),
    ],
)
def test_what_is_chosen_is_served(choose: Choosing, words: str, size: int) -> None:
    """`choose` itself checks it."""
    assert choose(words, size) == choose(words, size)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            TINY + "--attention-dropout 0.1",
            r"--context-parallel-algo \w+ does not support attention dr",
        ),
        (TINY + "--num-attention-heads 9", "num_attention_heads must be divisible by tensor_model"),
        (TINY.replace("--hidden-size 64", ""), "auto needs the size of the model, got no --hidden"),
        (TINY + "--window-size 8,8", "--window-size needs LEFT,0"),
        (TINY + "--cp-options chunks=2", "auto chooses options too, got --cp-options chunks=2"),
        (TINY + "--cp-layers zigzag", "layers whose algorithms auto chooses are softmax or linear"),
        (TINY + "--cp-layers linear,softmax", "choose --cp-linear-model transnormer or"),
        (TINY + "--cp-comm-type a2a", "means ulysses, got also --context-parallel-algo auto"),
        (
            TINY + "--cp-mean-document 0",
            "--cp-mean-document takes a mean such as 16K.*, got .0.: leav",
        ),
        (TINY + "--cp-machine h300", "there is no machine 'h300'"),
        (TINY + "--seq-length 61", r"\w+ needs seq_length divisible by"),
    ],
)
def test_refusals_are_those_of_a_named_algorithm(
    choose: Choosing, words: str, message: str
) -> None:
    tensor = " --tensor-model-parallel-size 2" if "heads 9" in words else ""
    with pytest.raises(ContextParallelError, match=message) as error:
        choose(words + tensor, 4, 8)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "flag",
    [
        "--cp-machine h200",
        "--cp-explain",
        "--cp-mean-document 8",
        "--cp-example-spans spans.json",
    ],
)
def test_what_is_for_a_choice_needs_one(flag: str) -> None:
    flags, _ = split_flags(f"--context-parallel-algo zigzag {flag}".split())
    with pytest.raises(ConfigError, match="needs --context-parallel-algo auto, got zigzag"):
        flags.check()


def test_the_log_says_what_was_assumed_and_explains(choose: Choosing, tmp_path: Path) -> None:
    _, (said,) = choose(TINY + "--dataloader-inter-document-masking", 4)
    assert "documents of 4096 tokens on average, by default" in said
    _, said = choose(TINY + "--dataloader-inter-document-masking --cp-explain", 4)
    assert "│ algorithm " in said[1]
    table = said[1].partition("\nMiB")[0]
    assert max(map(len, table.splitlines())) <= 100
    _, (said,) = choose(TINY + "--dataloader-inter-document-masking", 4, mean_document="16")
    assert "on average" not in said
    assert "; documents exponential, mean 16)" in said
    file = str(tmp_path / "lengths.csv")
    Path(file).write_text("upper_edge,share\n8,3\n64,1\n")
    _, (said,) = choose(TINY + "--dataloader-inter-document-masking", 4, mean_document=file)
    assert "; documents as in lengths.csv)" in said


def test_packed_batches_are_also_dealt_to_teams() -> None:
    job: Any = SimpleNamespace(ranks=8, tokens=64, is_recurrent=False)
    in_order = {*auto.possible_layouts(job, packed=False)}
    packed = {*auto.possible_layouts(job, packed=True)}
    assert packed - in_order == {"documents", "documents/2", "documents/4"}


def example(tmp_path: Path, spans: object) -> str:
    path = tmp_path / "spans.json"
    path.write_text(spans if isinstance(spans, str) else json.dumps(spans))
    return str(path)


def test_spans_of_an_example_choose(choose: Choosing, tmp_path: Path) -> None:
    """A long prompt of short rollouts: three quarters of the pairs that a causal mask has."""
    words = LLAMA + "--seq-length 65536"
    prompt = example(tmp_path, cp.spans.shared_prefix((32768, [4096] * 8)))
    named, (said,) = choose(words, 8, example_spans=prompt)
    assert re.search(r"; spans as in spans\.json, with 39\.1% of all pairs\)$", said)
    assert named.config(8).for_spans
    without, (causal,) = choose(words, 8)
    assert "spans" not in causal
    assert not without.config(8).for_spans
    of_spans, of_all = (float(re.findall(r"([\d.]+) ms", words)[0]) for words in (said, causal))
    assert 0.7 * of_all < of_spans < 0.9 * of_all


def test_spans_of_an_example_are_in_windows_and_documents(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kinds: list[Kind] = []

    def stop(found: Sequence[Kind], *_: object, **__: object) -> None:
        kinds.extend(found)
        raise ConfigError("seen")

    monkeypatch.setattr(auto, "choose", stop)
    spans = example(tmp_path, [[0, 64, 0, 64, 1]])
    words = TINY + "--dataloader-inter-document-masking --window-size 7,0 "
    words += "--window-attn-skip-freq 2 --context-parallel-size 2 --context-parallel-algo auto "
    words += f"--cp-machine h100 --cp-mean-document 16 --cp-example-spans {spans}"
    flags, rest = split_flags(words.split())
    args = parser.parse_args(rest)
    args.world_size = 2
    with pytest.raises(ConfigError, match="seen"):
        resolve_auto(flags, args, CPU)
    masks = [kind.mask for kind in kinds]
    assert [mask.window for mask in masks] == [8, None]
    for mask in masks:
        assert mask.slices is not None
        assert mask.slices == (Slice(0, 64, 0, 64, "causal"),)
        assert mask.slices.documents


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (None, "spans.json cannot be read, No such file or directory: name a JSON file"),
        ("[[0, 64", "spans.json cannot be read, .*: name a JSON file with a list of slices"),
        (
            {"spans": []},
            r"must have a list of slices such as \[\[0, 64, 0, 64, 1\]\]: write",
        ),
        ([1], "must have a list of slices"),
        ([[0, 64, 0, 64]], "--cp-example-spans spans.json: spans need"),
        ([[0, 65, 0, 64, 0]], "--cp-example-spans spans.json: "),
        ([[0, 64, 0, 64, 0], [0, 8, 0, 8, 0]], "--cp-example-spans spans.json: "),
    ],
)
def test_examples_that_are_none(
    choose: Choosing, tmp_path: Path, spans: object, message: str
) -> None:
    path = str(tmp_path / "spans.json") if spans is None else example(tmp_path, spans)
    with pytest.raises(ConfigError, match=message) as error:
        choose(TINY, 4, example_spans=path)
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_model_leaves_memory_for_attention(choose: Choosing) -> None:
    """8B on 8 GPUs: at 440K tokens so little is left that the fastest one does not fit."""
    words = LLAMA + "--vocab-size 128256 --ffn-hidden-size 14336 --use-distributed-optimizer "
    words += "--recompute-granularity full --untie-embeddings-and-output-weights --cp-explain "
    fast, (_, table) = choose(words + "--seq-length 262144", 8)
    assert "attention needs" not in table
    small, (_, table) = choose(words + "--seq-length 450560", 8)
    assert re.search(rf"^not {fast.algo}( .*)?: attention needs", table, re.M)
    assert (small.algo, small.options) != (fast.algo, fast.options)


def test_parts_of_experts_count_as_megatron_makes_them(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as tensor parallelism has, where nobody says."""
    splits: list[Split] = []

    def memory(model: object, split: Split, tokens: int) -> dict[str, float]:
        splits.append(split)
        return {}

    monkeypatch.setattr(auto, "memory", memory)
    words = LLAMA + "--seq-length 8192 --vocab-size 128 --num-experts 8 --moe-router-topk 2 "
    words += "--tensor-model-parallel-size 4 --expert-model-parallel-size 2 --cp-machine h100 "
    words += "--context-parallel-size 2 --context-parallel-algo auto "
    for more in ("", "--expert-tensor-parallel-size 1"):
        flags, rest = split_flags((words + more).split())
        args = parser.parse_args(rest)
        args.world_size = 16
        resolve_auto(flags, args, CPU)
    assert [(one.expert, one.expert_tensor) for one in splits] == [(2, 4), (2, 1)]


def test_memory_is_that_of_all_parts_of_a_model(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of DeepSeek-V3, with sharded parameters."""
    found: list[tuple[Model, Split]] = []

    def memory(model: Model, split: Split, tokens: int) -> dict[str, float]:
        found.append((model, split))
        return {}

    monkeypatch.setattr(auto, "memory", memory)
    words = "--num-layers 8 --hidden-size 4096 --num-attention-heads 32 --bf16 --swiglu "
    words += "--attention-dropout 0 --position-embedding-type rope --micro-batch-size 1 "
    words += "--seq-length 8192 --vocab-size 128 --num-experts 8 --moe-router-topk 2 "
    words += "--moe-ffn-hidden-size 512 --ffn-hidden-size 2048 --moe-layer-freq [0]*3+[1]*5 "
    words += "--moe-shared-expert-intermediate-size 1024 --multi-latent-attention "
    words += "--q-lora-rank 96 --kv-lora-rank 64 --qk-head-dim 128 --qk-pos-emb-head-dim 64 "
    words += "--v-head-dim 128 --no-rope-fusion --context-parallel-size 2 --cp-machine h100 "
    words += "--context-parallel-algo auto "
    fsdp = "--use-megatron-fsdp --ckpt-format fsdp_dtensor"
    for more in ("", fsdp, f"{fsdp} --data-parallel-sharding-strategy optim"):
        flags, rest = split_flags((words + more).split())
        args = parser.parse_args(rest)
        args.world_size = 4
        resolve_auto(flags, args, CPU)
    expected = Model(
        *("this model", 8, 4096, 512, 32, 32, 192, 128),
        experts=8,
        active=2,
        shared=1024,
        dense=3,
        dense_ffn=2048,
        value_dim=128,
        query_rank=96,
        key_rank=64,
        rotary_dim=64,
        tied=True,
    )
    assert [model for model, _ in found] == [expected] * 3
    assert [split.sharded for _, split in found] == [False, True, False]


@pytest.mark.parametrize(
    ("frequency", "expected"), [(1, 8), (2, 4), (3, 3), ([0, 0, 0, 1, 1, 1, 1, 1], 5), (None, 8)]
)
def test_layers_with_experts(frequency: Any, expected: int) -> None:
    assert auto.layers_with_experts(frequency, 8) == expected


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "tnl-1b"])
def test_written_choices_are_run_files(tmp_path: Path, name: str, sharded: bool) -> None:
    """`plan --model --yaml` names flags that Megatron has, options that the algorithm has, and what
    a run may have.
    """
    machine = Machine.load("h100_400g")
    experts = 2 if MODELS[name].experts else 1
    split = Split(2, 4, 2, 2, experts, 1, 4, "full")
    if sharded:
        split = replace(split, tensor=1 if MODELS[name].linear else 2, pipeline=1, sharded=True)
    job = Job(MODELS[name], 65536, 32, machine, "flash4", Mask(), 8)
    options: tuple[tuple[str, object], ...] = (("route", "straight"), ("chunks", 2))
    settings = megatron_settings(job, split)
    write_run_file(tmp_path / "run.yaml", settings, "zigzag", options)
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    words = yaml_to_argv(tmp_path / "run.yaml", add_arguments(parser))
    flags, rest = split_flags(words)
    assert (flags.algo, dict(flags.options)) == ("zigzag", {"route": "straight", "chunks": "2"})
    args = parser.parse_args(rest)
    assert (args.hidden_size, args.context_parallel_size) == (MODELS[name].hidden, 4)
    assert (args.num_experts or 0) == MODELS[name].experts
    assert args.expert_tensor_parallel_size == (1 if MODELS[name].experts else None)
    assert args.use_megatron_fsdp == sharded
    args.world_size, args.rank = split.gpus, 0
    if not MODELS[name].linear:
        check_arguments(args, flags.config(args.context_parallel_size), CPU)


def test_an_algorithm_of_somebody_else_with_its_own_layout(
    choose: Choosing, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclass(frozen=True)
    class Mirrored(Zigzag):
        name = "mirrored"

    class Mine(Ring):
        layout = Mirrored()

        @classmethod
        def layout_for(cls, options: Algorithm.Options) -> Layout:
            return cls.layout

    monkeypatch.setattr(registry, "_algorithms", {})
    registry.register("mine")(Mine)
    named, _ = choose(TINY, 4)
    assert named.algo == "mine"
    assert registry.layout_of("auto", {"layout": "mirrored"}) == Mirrored()
    with pytest.raises(ConfigError, match=r"did you mean 'mirrored'\?\): use one of .*, mirrored"):
        registry.layout_of("auto", {"layout": "mirored"})


def test_a_run_takes_the_fastest_of_those_measured(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no machine is named and there is a GPU."""
    words = LLAMA + "--seq-length 65536 --context-parallel-size 8 --context-parallel-algo auto"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    monkeypatch.setattr(auto, "check_arguments", lambda *_: None)  # the kernels need a GPU
    found = []
    for more in ("", " --cp-machine h200"):
        flags, rest = split_flags((words + more).split())
        args = parser.parse_args(rest)
        args.world_size = 8
        found.append(resolve_auto(flags, args, gpu))
    free, named = found
    assert len(named.contenders) == 1
    assert 4 <= len(free.contenders) <= 6
    assert next(iter(free.contenders.values())) == free.flags == replace(named.flags, machine=None)
    assert not any(flags.is_auto for flags in free.contenders.values())
    listed = tuple(free.contenders)
    last = free.contenders[listed[-1]]
    seconds = tuple(1.0 - number / 100 for number in range(len(listed)))

    topology = SimpleNamespace(destroy_further_groups=lambda: None)
    monkeypatch.setattr(auto, "ProcessGroupTopology", lambda group: topology)
    for times, expected in ((Measured(listed, seconds), last), (None, free.flags)):
        monkeypatch.setattr(auto, "measure", lambda *_, times=times: times)
        flags, said = auto.fastest(free, None, gpu)  # type: ignore[arg-type]
        assert flags == expected
        if times is None:  # a rank has measured nothing
            assert said is None
            continue
        assert said is not None
        pin = f"to pin the fastest one: --context-parallel-algo {last.algo}"
        options = " ".join(f"{name}={value}" for name, value in last.options)
        assert said.endswith(pin + (f" --cp-options {options}" if options else ""))
        again, rest = split_flags(said.rpartition(": ")[2].split())
        again.check()
        assert (again.algo, dict(again.options).keys()) == (last.algo, dict(last.options).keys())
    assert auto.fastest(named, None, gpu) == (named.flags, None)  # type: ignore[arg-type]


def test_what_was_measured_takes_the_place_of_what_was_chosen(
    parser: argparse.ArgumentParser,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from megatron_cp_plugin.integration.installer import LauncherInstaller

    flags, rest = split_flags((TINY + "--context-parallel-algo auto").split())
    chosen, other = (replace(flags, algo=algo, by_auto=True) for algo in ("zigzag", "distflash"))
    args = parser.parse_args([*rest, "--context-parallel-size", "2"])
    args.rank = 0
    installer = LauncherInstaller(chosen, CPU)
    installer._args = args
    resolved = auto.Resolved(chosen, [], {}, ())
    installer._resolved = resolved
    installer._runtime = before = Runtime(chosen.config(2))
    monkeypatch.setattr(auto, "check_same_choice", lambda flags: None)
    monkeypatch.setattr(auto, "fastest", lambda *_: (other, "measured"))
    groups = argparse.Namespace(cp=None)
    runtime = installer._runtime_of({"pg_collection": groups})
    assert runtime is not before
    assert runtime is installer._runtime_of({})  # once
    assert (runtime.config.algo, runtime.config.layout.name) == ("distflash", "contiguous")
    assert "measured" in capsys.readouterr().out
