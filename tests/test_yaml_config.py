"""YAML run files: what becomes which argument, and what is refused with which words."""

import argparse
from enum import Enum
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.args import add_arguments
from megatron_cp_plugin.integration.yaml_config import load_run_file, yaml_to_argv

CONFIGS = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


class Backend(Enum):
    """A choice like Megatron's attention backends."""

    flash = 1
    fused = 2


def parser() -> argparse.ArgumentParser:
    """A parser with every kind of flag that Megatron's has."""
    made = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    made.add_argument("--num-layers", type=int)
    made.add_argument("--lr", type=float)
    made.add_argument("--save", type=str)
    made.add_argument("--swiglu", action="store_true")
    made.add_argument("--no-bias-swiglu-fusion", action="store_false", dest="bias_swiglu_fusion")
    made.add_argument("--disable-bias-linear", action="store_false", dest="add_bias_linear")
    made.add_argument("--apply-layernorm-1p", action="store_true", dest="zero_centered_gamma")
    made.add_argument("--prefix-caching", action=argparse.BooleanOptionalAction, default=False)
    made.add_argument("--round", action="store_true", default=None)
    made.add_argument("--no-round", action="store_false", dest="round")
    made.add_argument("--parallel-save", action="store_true", dest="parallel_save_deprecated")
    made.add_argument("--no-parallel-save", action="store_false", dest="parallel_save")
    made.add_argument("--data-path", nargs="*")
    made.add_argument("--ranks", nargs="+", type=int)
    made.add_argument("--rampup", nargs=3, type=int)
    made.add_argument("--order", choices=["forward", "backward"], default="forward")
    made.add_argument("--backend", type=lambda name: Backend[name], choices=list(Backend))
    made.add_argument("--onnx-safe", type=bool)
    return made


def argv_of(text: str, tmp_path: Path) -> list[str]:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return yaml_to_argv(path, parser())


def parsed(text: str, tmp_path: Path, *more: str) -> argparse.Namespace:
    return parser().parse_args([*argv_of(text, tmp_path), *more])


@pytest.mark.parametrize(
    ("setting", "argv"),
    [
        ("num_layers: 2", ["--num-layers", "2"]),
        ("num-layers: 2", ["--num-layers", "2"]),
        ("num_layers: 1e2", ["--num-layers", "100"]),
        ("lr: 1e-4", ["--lr", "0.0001"]),
        ("lr: -0.5", ["--lr=-0.5"]),
        ("save: -odd", ["--save=-odd"]),
        ("save: null", []),
        ("swiglu: true", ["--swiglu"]),
        ("swiglu: false", []),
        ("bias_swiglu_fusion: false", ["--no-bias-swiglu-fusion"]),
        ("bias_swiglu_fusion: true", []),
        ("no_bias_swiglu_fusion: true", ["--no-bias-swiglu-fusion"]),
        ("no-bias-swiglu-fusion: false", []),
        ("disable_bias_linear: true", ["--disable-bias-linear"]),
        ("add_bias_linear: false", ["--disable-bias-linear"]),
        ("apply_layernorm_1p: true", ["--apply-layernorm-1p"]),
        ("zero_centered_gamma: true", ["--apply-layernorm-1p"]),
        ("prefix_caching: true", ["--prefix-caching"]),
        ("prefix_caching: false", ["--no-prefix-caching"]),
        ("no_prefix_caching: true", ["--no-prefix-caching"]),
        ("round: true", ["--round"]),
        ("round: false", ["--no-round"]),
        ("parallel_save: false", ["--no-parallel-save"]),
        ("parallel_save: true", []),
        ("data_path: [0.3, a, 0.7, b]", ["--data-path", "0.3", "a", "0.7", "b"]),
        ("data_path: a", ["--data-path", "a"]),
        ("data_path: []", ["--data-path"]),
        ("ranks: [0, -1]", ["--ranks", "0", "-1"]),
        ("rampup: [1, 2, 3]", ["--rampup", "1", "2", "3"]),
        ("order: backward", ["--order", "backward"]),
        ("backend: fused", ["--backend", "fused"]),
    ],
)
def test_setting_becomes_flag(setting: str, argv: list[str], tmp_path: Path) -> None:
    text = f"megatron:\n  {setting}\n"
    assert argv_of(text, tmp_path) == argv
    parsed(text, tmp_path)


def test_bool_typed_flag_keeps_false(tmp_path: Path) -> None:
    # argparse's type=bool takes the word "false" for true.
    assert parsed("megatron: {onnx_safe: false}", tmp_path).onnx_safe is False
    assert parsed("megatron: {onnx_safe: true}", tmp_path).onnx_safe is True


def test_command_line_overrides(tmp_path: Path) -> None:
    text = "megatron: {num_layers: 2, lr: 0.1}\ncontext_parallel: {algo: ring, backward: kv}"
    args = parsed(
        text, tmp_path, "--num-layers", "3", "--context-parallel-algo", "zigzag", "--lr", "1"
    )
    assert (args.num_layers, args.lr, args.context_parallel_algo) == (3, 1.0, "zigzag")


def test_references_between_values(tmp_path: Path) -> None:
    text = "megatron: {num_layers: 4, lr: 0.5, ranks: ['${megatron.num_layers}']}"
    assert parsed(text, tmp_path).ranks == [4]


def test_context_parallel_section(tmp_path: Path) -> None:
    text = "context_parallel: {algo: zigzag, kernel: auto, platform: cpu, backward: kv, "
    text += "recompute_attention: true, explain: false, chunked_loss: 512}"
    words = "--context-parallel-algo zigzag --cp-kernel auto --cp-platform cpu "
    words += "--cp-recompute-attention --cp-chunked-loss 512 --cp-options backward=kv"
    assert argv_of(text, tmp_path) == words.split()


def test_every_algorithm_takes_its_own_options(tmp_path: Path) -> None:
    for algo in registry.available():
        defaults = registry.read_options(algo, {})
        options = {name: getattr(defaults, name) for name in registry.option_names(algo)}
        lines = "".join(f"  {name}: {str(value).lower()}\n" for name, value in options.items())
        argv = argv_of(f"context_parallel:\n  algo: {algo}\n{lines}", tmp_path)
        assert argv[:2] == ["--context-parallel-algo", algo]
        given = dict(word.split("=", 1) for word in argv[3:])
        assert registry.read_options(algo, given) == defaults


def test_empty_sections(tmp_path: Path) -> None:
    assert argv_of("megatron:\ncontext_parallel:\n", tmp_path) == []


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "mapping with the sections"),
        ("megatron: {num_layers: [", "not valid YAML: line"),
        ("megatron: {lr: 1, lr: 2}", "duplicate key lr"),
        ("megatron:\n\t- b", "not valid YAML: line 2, column 1"),
        (
            "megatron: {num_layers: 1, ranks: ['${megatron.num_layer}']}",
            "Interpolation key 'megatron.num_layer' not found; full_key: megatron.ranks[0]",
        ),
        ("megatron: {lr: '${megatron.lr}'}", "Recursive interpolation"),
        ("megatron: 3", "megatron must be a mapping of names to values"),
        ("megatron: {num_layer: 2}", "megatron.num_layer: no such Megatron flag (did you mean"),
        (
            "megatron: {num_layers: two}",
            "megatron.num_layers: --num-layers takes a whole number, got 'two'",
        ),
        ("megatron: {num_layers: 1.5}", "takes a whole number, got '1.5'"),
        ("megatron: {num_layers: true}", "takes a whole number, got 'true'"),
        ("megatron: {num_layers: [1]}", "takes one value, got the list [1]"),
        ("megatron: {lr: {a: 1}}", "takes text or numbers"),
        ("megatron: {swiglu: 1}", "megatron.swiglu is a switch: true or false, got 1"),
        ("megatron: {zero_centered_gama: true}", "did you mean 'zero_centered_gamma'?"),
        ("megatron: {order: forwards}", "--order invalid choice: 'forwards' (choose from"),
        ("megatron: {backend: flush}", "megatron.backend does not accept 'flush'"),
        ("megatron: {rampup: [1, 2]}", "takes a list of 3 values, got [1, 2]"),
        ("megatron: {ranks: []}", "at least one value"),
        ("megatron: {data_path: [--oops]}", "cannot start with a dash"),
        ("megatron: {data_path: [[1]]}", "takes text or numbers"),
        ("megatron: {num-layers: 1, num_layers: 2}", "same flag as megatron.num-layers"),
        ("megatron: {round: true, no_round: true}", "same flag as megatron.round"),
        ("megatron: {context_parallel_algo: ring}", "write context_parallel.algo"),
        ("megatron: {help: true}", "give it on the command line"),
        ("context_parallel: {algo: [ring]}", "algo must be a name"),
        ("context_parallel: {algo: megatron, backward: kv}", "with algo megatron the keys are"),
        ("context_parallel: {backward: kv}", "without an algo the keys are algo, kernel"),
        ("context_parallel: {platform: gpu}", "--cp-platform invalid choice: 'gpu' (choose from"),
        ("context_parallel: {size: 4}", "write megatron.context_parallel_size"),
    ],
)
def test_refused_in_one_line(text: str, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        argv_of(text, tmp_path)
    message = str(caught.value)
    assert words in message
    assert message.startswith(f"{tmp_path / 'run.yaml'}")
    assert "\n" not in message


def test_value_that_no_flag_sets(tmp_path: Path) -> None:
    made = add_arguments(argparse.ArgumentParser())
    made.add_argument("--always", action="store_true", default=True)
    path = tmp_path / "run.yaml"
    path.write_text("megatron: {always: true}")
    assert yaml_to_argv(path, made) == []
    path.write_text("megatron: {always: false}")
    with pytest.raises(ConfigError, match=r"megatron\.always cannot be false"):
        yaml_to_argv(path, made)


REFERRING = """
megatron:
  num_layers: 2
  ranks: ["${megatron.num_layers}", "${megatron.rampup.1}"]
  save: ${megatron.data_path.0}/out
  rampup: [1, 2, 3]
"""


def test_flags_come_before_references(tmp_path: Path) -> None:
    """Also those of what the file does not have."""
    path = tmp_path / "run.yaml"
    path.write_text(REFERRING)
    words = "--num-layers 7 --rampup 4 5 6 --data-path one two".split()
    args = parser().parse_args([*yaml_to_argv(path, parser(), words), *words])
    assert (args.num_layers, args.ranks, args.rampup) == (7, [7, 5], [4, 5, 6])
    assert args.save == "one/out"


def test_a_longer_sequence_on_the_command_line(megatron_parser: argparse.ArgumentParser) -> None:
    words = ["--seq-length", "1024"]
    argv = yaml_to_argv(CONFIGS[-1], megatron_parser, words)
    assert megatron_parser.parse_args([*argv, *words]).max_position_embeddings == 1024


OPTIONS = "context_parallel: {algo: ring, backward: kv, kernel: reference, platform: cpu}"


@pytest.mark.parametrize(
    ("words", "algo", "options", "kernel"),
    [
        ("", "ring", [("backward", "kv")], "reference"),
        ("--context-parallel-algo ring", "ring", [("backward", "kv")], "reference"),
        (
            "--cp-options gradients=model",
            "ring",
            [("backward", "kv"), ("gradients", "model")],
            "reference",
        ),
        ("--context-parallel-algo zigzag", "zigzag", None, "reference"),
        ("--cp-layers ulysses*2,usp", None, None, "reference"),
        ("--cp-comm-type a2a", None, None, "reference"),
        ("--context-parallel-algo megatron", "megatron", None, "auto"),
    ],
)
def test_another_algorithm_takes_the_place_of_the_files_and_of_its_options(
    words: str,
    algo: str | None,
    options: list[tuple[str, str]] | None,
    kernel: str | None,
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(OPTIONS)
    found = parser().parse_known_args(
        [*yaml_to_argv(path, parser(), words.split()), *words.split()]
    )[0]
    assert (found.context_parallel_algo, found.cp_options, found.cp_kernel) == (
        algo,
        options,
        kernel,
    )
    assert found.cp_platform == "cpu"


def test_options_of_a_superseded_algorithm_are_looked_at(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("context_parallel: {algo: ring, backwards: kv}")
    with pytest.raises(ConfigError, match=r"backwards: unknown key \(did you mean 'backward'"):
        yaml_to_argv(path, parser(), ["--context-parallel-algo", "ulysses"])


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nope\.yaml: no such run file"):
        yaml_to_argv(tmp_path / "nope.yaml", parser())
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run_file(tmp_path)


@pytest.fixture(scope="module")
def megatron_parser() -> argparse.ArgumentParser:
    from megatron.training.arguments import add_megatron_arguments

    return add_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_taken_by_megatron(
    path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    args = megatron_parser.parse_args(yaml_to_argv(path, megatron_parser))
    for name, value in load_run_file(path).megatron.items():
        # A setting by the value's name arrives as it was written.
        if hasattr(args, name):
            got = getattr(args, name)
            if isinstance(got, tuple):
                got = ",".join(map(str, got))
            if isinstance(got, list) and not OmegaConf.is_list(value):
                (got,) = got  # a flag that takes several values was given one
            assert got == value, name
    assert args.context_parallel_algo in registry.available()


def test_megatron_switches_of_both_senses(
    tmp_path: Path, megatron_parser: argparse.ArgumentParser
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "megatron:\n"
        "  bias_swiglu_fusion: false\n"
        "  swiglu: true\n"
        "  apply_rope_fusion: false\n"
        "  ckpt_fully_parallel_save: false\n"
        "  attention_backend: flash\n"
        '  moe_layer_freq: "[0]*1+[1]*3"\n'
    )
    args = megatron_parser.parse_args(yaml_to_argv(path, megatron_parser))
    assert args.bias_swiglu_fusion is False
    assert args.swiglu is True
    assert args.apply_rope_fusion is False
    assert args.ckpt_fully_parallel_save is False
    assert args.attention_backend.name == "flash"
    assert args.moe_layer_freq == [0, 1, 1, 1]
