"""The table of what the plugin takes for granted of Megatron, and a Megatron that differs."""

import argparse
import ast
import dataclasses
import enum
import inspect
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megatron.core
import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.training import training
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.cli import main
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import compat, contract
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.contract import NAMES, SETTINGS, USED, VERSIONS, Name
from megatron_cp_plugin.integration.installer import LauncherInstaller
from megatron_cp_plugin.integration.settings import SHORT, Settings

ROOT = Path(__file__).parents[2]
PARTS = ("algorithm", "training", "cpu", "record", "script")
VERSION, _ = compat.running_version()
# Without the commit of the checkout that the environment is in.
RELEASE = megatron.core.__version__.partition("+")[0]
TABLES = (*NAMES, *USED)
ROWS = [row for row in TABLES if row.is_in(VERSION)]
WITHOUT_TE = "TEDotProductAttention"  # no class where Transformer Engine is not installed


def refusal(body: Callable[[], Any]) -> str:
    with pytest.raises(ContextParallelError) as error:
        body()
    message = str(error.value)
    assert "\n" not in message
    return message


def check(*parts: contract.Part) -> None:
    compat.check_megatron(*parts, allow_untested=False)


def all_differences(part: contract.Part) -> list[str]:
    return compat.problems(part, tables=TABLES)


def test_megatron_is_as_the_table_says(request: pytest.FixtureRequest) -> None:
    """Of the version that is installed, or of the one that --megatron-core names."""
    folder = request.config.getoption("--megatron-core")
    if folder is None:
        assert compat.report() == (RELEASE, [])
        return
    path = os.pathsep.join((str(Path(folder).resolve()), str(ROOT)))
    command = [sys.executable, "-m", "megatron_cp_plugin.cli", "hooks", "--check"]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["hooks"]) == 0
    printed = capsys.readouterr().out
    assert printed == (ROOT / "megatron_cp_plugin" / "integration" / "contract.md").read_text()
    assert sum(line.startswith("| `") for line in printed.splitlines()) == len(TABLES)
    assert all(f"`{setting.name}`" in printed for setting in SETTINGS)
    page = (ROOT / "patches" / "README.md").read_text()
    assert f"{', '.join(VERSIONS[:-1])} and {VERSIONS[-1]} were tested" in page


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("| `a.b.C.d` | says no | first `self`, `x`; takes `y` | all |", ("a.b", "C.d")),
        ("| `a.b._C.d` | only `x`; has `p`, `q` | 0.17 to before 0.18 |", ("a.b", "_C.d")),
        ("| `a.b.HAVE_C` |  | before 0.17 |", ("a.b", "HAVE_C")),
        ("| `a.b.c` | returns `x`, `...`, `z` | from 0.19 |", ("a.b", "c")),
    ],
)
def test_a_row_is_read(row: str, found: tuple[str, str]) -> None:
    (name,) = contract._names(f"On the CPU platform:\n\n{row}")
    assert (name.module, name.name, name.part) == (*found, "cpu")
    assert name.first == (("self", "x") if "first" in row else ())
    assert name.parameters == (("y",) if "takes" in row else ("x",) if "only" in row else ())
    assert (name.closed, name.attributes) == ("only" in row, ("p", "q") if "has" in row else ())
    assert name.returned == (("x", "", "z") if "returns" in row else ())
    since = (0, 17) if "0.17 to" in row else (0, 19) if "from" in row else (0, 0)
    assert name.since == since
    assert name.before == ((0, 18) if since == (0, 17) else (0, 17) if "before" in row else None)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.part}-{row.name}")
def test_a_name_that_is_gone_is_named(row: Name, monkeypatch: pytest.MonkeyPatch) -> None:
    if row.name.startswith(WITHOUT_TE):
        pytest.skip("needs Transformer Engine")
    owner, name = compat.owner_of(row)
    if isinstance(owner, enum.EnumMeta):
        left = enum.Enum(owner.__name__, [m for m in owner.__members__ if m != name])
        monkeypatch.setattr(sys.modules[row.module], owner.__name__, left)
    else:
        holders = owner.__mro__ if isinstance(owner, type) else (owner,)
        holder = next(holder for holder in holders if name in vars(holder))
        monkeypatch.delattr(holder, name)
        if hasattr(owner, name):
            # That of a base class, which fits or is said not to.
            has = inspect.signature(getattr(owner, name)).parameters
            assert all_differences(row.part) or {*row.first, *row.parameters} <= set(has)
            return
    assert f"{row.path} is missing" in all_differences(row.part)
    if row not in NAMES:
        return  # a run does not look at it
    said = refusal(lambda: check(row.part))
    assert said.startswith(f"Megatron {RELEASE} differs from what the plugin relies on")


@pytest.mark.parametrize(
    ("row", "parameter"),
    [(row, name) for row in ROWS for name in (*row.first, *row.parameters)],
    ids=lambda value: getattr(value, "name", value),
)
def test_a_parameter_that_is_gone_is_named(
    row: Name, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if row.name.startswith(WITHOUT_TE):
        pytest.skip("needs Transformer Engine")
    owner, name = compat.owner_of(row)
    signature = inspect.signature(getattr(owner, name))
    left = [p for p in signature.parameters.values() if p.name != parameter]
    monkeypatch.setattr(owner, name, stand_in(signature.replace(parameters=left)))
    # Of this row alone: that all rows are looked at is what the test above shows.
    assert any(parameter in line for line in compat.differences(row) if row.path in line)


def stand_in(signature: inspect.Signature) -> Callable[..., None]:
    def function(*args: Any, **kwargs: Any) -> None: ...

    function.__signature__ = signature  # type: ignore[attr-defined]
    return staticmethod(function)


def test_a_parameter_that_the_plugin_does_not_take_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    real = DotProductAttention.forward

    def forward(self: Any, *args: Any, sparsity: Any = None) -> None: ...

    signature = inspect.signature(real)
    more = inspect.signature(forward).parameters["sparsity"]
    forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), more]
    )
    monkeypatch.setattr(DotProductAttention, "forward", forward)
    (line,) = all_differences("algorithm")
    assert line.endswith("DotProductAttention.forward has another parameter sparsity")


@pytest.mark.parametrize(
    "row", [r for r in USED if r.attributes and r.is_in(VERSION)], ids=lambda row: row.name
)
def test_an_attribute_that_is_gone_is_named(row: Name) -> None:
    renamed = dataclasses.replace(row, attributes=("renamed_since",))
    (line,) = compat.differences(renamed)
    assert line.endswith(f"{row.name.partition('.')[0]} has no attribute renamed_since")


def test_a_gradient_norm_that_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_step(forward_backward_func: Any, model: Any) -> Any:
        loss_reduced, skipped_iter, exit_code, norm_of_weights, grad_norm = {}, 0, 0, 1.0, 2.0
        return loss_reduced, skipped_iter, False, False, exit_code, norm_of_weights, grad_norm

    monkeypatch.setattr(training, "train_step", train_step)
    (line,) = all_differences("record")
    assert "train_step does not return (loss_reduced, skipped_iter, ..., ..., ..., grad_n" in line


def test_models_that_are_not_returned_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def set_up() -> Any:
        model = optimizer = None
        return optimizer, model

    monkeypatch.setattr(training, "setup_model_and_optimizer", set_up)
    (line,) = all_differences("training")
    assert line.endswith("setup_model_and_optimizer does not return (model, ...)")


@pytest.fixture(scope="module")
def parsed() -> argparse.Namespace:
    words = "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
    words += "--attention-dropout 0 --position-embedding-type rope"
    parser = add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(words.split())
    args.rank, args.world_size = 1, 1
    return args


READ = [s.name for s in SETTINGS if s.is_in(VERSION, "args")]


@pytest.mark.parametrize("name", READ)
def test_a_flag_that_is_gone_is_named(name: str, parsed: argparse.Namespace) -> None:
    flags, _ = split_flags(["--context-parallel-algo", "ring"])
    args = argparse.Namespace(**{k: v for k, v in vars(parsed).items() if k != name})
    hooks = LauncherInstaller(flags, torch.device("cpu"))
    said = refusal(lambda: hooks.validate_args(lambda args, defaults: args, args))
    assert f": {name} is missing in its command-line arguments: use 0.16.1" in said


def test_a_validated_flag_that_is_gone_is_named(parsed: argparse.Namespace) -> None:
    flags, _ = split_flags(["--context-parallel-algo", "ring"])
    args = argparse.Namespace(**vars(parsed), data_parallel_size=1, params_dtype=torch.float32)
    hooks = LauncherInstaller(flags, torch.device("cpu"))
    said = refusal(lambda: hooks.validate_args(lambda args, defaults: args, args))
    assert "virtual_pipeline_model_parallel_size is missing in its validated arguments" in said


def test_what_is_captured_is_printed(
    parsed: argparse.Namespace,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of the arguments as Megatron has validated them: it may have moved what it was given."""
    monkeypatch.setattr(
        "megatron_cp_plugin.integration.checks._check_kernel", lambda *_: "of some kind"
    )
    flags, _ = split_flags(["--context-parallel-algo", "ring"])
    validated = argparse.Namespace(
        **vars(parsed),
        data_parallel_size=1,
        params_dtype=torch.float32,
        virtual_pipeline_model_parallel_size=None,
    )
    validated.rank, validated.cuda_graph_impl = 0, "full_iteration"
    args = argparse.Namespace(**vars(parsed))
    args.cuda_graph_impl = "local"
    LauncherInstaller(flags, torch.device("cuda")).validate_args(
        lambda args, defaults: validated, args
    )
    line = "CUDA graphs by Megatron (full_iteration, whole iterations after 3): attention captured"
    assert capsys.readouterr().out == f"megatron_cp_plugin: {line}\n"


def test_a_field_of_the_configuration_that_is_gone_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left = dict(TransformerConfig.__dataclass_fields__)
    del left["fp8_dot_product_attention"]
    monkeypatch.setattr(TransformerConfig, "__dataclass_fields__", left)
    said = refusal(lambda: check("algorithm"))
    assert "fp8_dot_product_attention is missing in its TransformerConfig" in said


def test_settings_that_are_not_in_the_table_cannot_be_read() -> None:
    settings = Settings(argparse.Namespace(no_such_setting=True))
    assert settings.qk_clip is None
    with pytest.raises(KeyError, match="no_such_setting is not in"):
        settings.no_such_setting  # noqa: B018


def test_the_command_lists_all_differences(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hooks", "--check"]) == 0
    monkeypatch.delattr(megatron.core.utils, "get_batch_on_this_cp_rank")
    monkeypatch.delattr(training, "train_step")
    capsys.readouterr()
    assert main(["hooks", "--check"]) == 2
    assert capsys.readouterr().out.splitlines() == [
        "megatron.core.utils.get_batch_on_this_cp_rank is missing",
        "megatron.training.training.train_step is missing",
        f"Megatron {RELEASE}: 2 difference(s) from what the plugin expects",
    ]


# The table is whole: everything that the code imports of Megatron or reads of its arguments.


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("integration", "harness"):
        for path in sorted((ROOT / "megatron_cp_plugin" / folder).glob("*.py")):
            yield path, ast.parse(path.read_text())


def test_every_import_of_megatron_is_in_the_table() -> None:
    modules = {row.module for row in TABLES}
    known = {row.path for row in TABLES} | {
        f"{row.module}.{row.name.partition('.')[0]}" for row in TABLES
    }
    # The same by another name of Megatron's.
    aliases = {
        "megatron.core.models.gpt.GPTModel": "megatron.core.models.gpt.gpt_model.GPTModel",
        "megatron.core.mpu": "megatron.core.parallel_state",
    }
    known.add("megatron.core.__version__")
    known.add("megatron.core.distributed.fsdp.mcore_fsdp_adapter.MegatronFSDP")  # with einops only
    for path, tree in sources():
        found: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "megatron":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    found[alias.asname or alias.name] = aliases.get(name, name)
        for local, name in found.items():
            if name not in modules:
                assert name in known, (path.name, name)
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and ast.unparse(node.value) == local:
                    assert f"{name}.{node.attr}" in known, (path.name, name, node.attr)


def test_every_argument_that_is_read_is_in_the_table() -> None:
    known = {setting.name for setting in SETTINGS}
    own = {"device", *SHORT} | {name for name in vars(Settings) if name[0] != "_"}
    places = {"args", "validated", "settings", "s", "Settings(args)", "get_args()"}
    read = {
        (path.name, node.attr)
        for path, tree in sources()
        if path.name not in ("args.py", "yaml_config.py")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in places
    }
    assert {name for _, name in read} >= {"seq_length", "mmap_bin_files", "moe_layer_freq"}
    assert {(path, name) for path, name in read if name not in known | own} == set()


def test_every_setting_of_the_configuration_that_is_read_is_in_the_table() -> None:
    known = {s.name for s in SETTINGS if {"config", "latent config"} & set(s.places)}
    megatrons = ("attention", "linear_models", "loss", "spec", "weight_parts")
    read = {
        (path.name, node.attr)
        for path, tree in sources()
        if path.stem in megatrons
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config")
    }
    assert {name for _, name in read} >= {"qk_clip", "kv_lora_rank", "params_dtype"}
    assert {(path, name) for path, name in read if name not in known} == set()
