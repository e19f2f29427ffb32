"""What recipes of five programs say, by setting and by place."""

from pathlib import Path

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.recipes import Recipe, read_recipe
from tests.test_check_recipe import (
    BRIDGE,
    MEGATRON,
    PYTHON,
    SLIME,
    SWIFT,
    SWIFT_YAML,
    VERL,
    VERL_YAML,
)


def read(folder: Path, name: str, text: str, *words: str) -> Recipe:
    file = name.partition(":")[0]
    (folder / file).write_text(text.replace("EXTRA", "pass" if file.endswith(".py") else ""))
    return read_recipe([str(folder / name), *words])


@pytest.mark.parametrize(
    ("name", "text", "said", "place"),
    [
        ("a.sh", MEGATRON, ("Megatron", 2, 8, 16384, None), "a.sh:4"),
        ("a.sh", SLIME, ("slime", 2, 16, 2 * 4096, None), "a.sh:4"),
        ("a.sh", SWIFT, ("ms-swift", 2, 8, 2 * 8192, "qwen3-30b-a3b"), "a.sh:4"),
        ("a.yaml", SWIFT_YAML, ("ms-swift", 2, None, 32768, "qwen3-8b"), "a.yaml"),
        ("a.sh", VERL, ("verl", 2, 8, 2 * 8192, "qwen3-8b"), "a.sh:5"),
        ("a.yaml", VERL_YAML, ("verl", 2, None, 2 * 8192, "qwen3-8b"), "a.yaml"),
        ("a.yaml", BRIDGE, ("Megatron-Bridge", 2, None, 32768, "llama-3-8b"), "a.yaml"),
        ("a.py:long_config", PYTHON, ("Megatron-Bridge", 2, None, 16384, "llama-3-8b"), "a.py:12"),
    ],
)
def test_what_is_read(
    tmp_path: Path, name: str, text: str, said: tuple[object, ...], place: str
) -> None:
    """Program, context-parallel ranks, GPUs, tokens of a micro-batch, the model and the place."""
    found = read(tmp_path, name, text)
    model = found.model and found.model.name
    assert (found.program, found.size, found.gpus, found.tokens, model) == said
    assert found.places["context_parallel_size"] == place
    assert (found.flags is not None) == (found.program == "Megatron")


def test_the_command_that_splits_a_model_is_taken(tmp_path: Path) -> None:
    """Of several in a file; words on the command line override it."""
    first = "python download.py --tensor-model-parallel-size 8\n"
    last = "\nsrun check_nodes --wait\n"
    found = read(tmp_path, "a.sh", first + MEGATRON + last, "--context-parallel-size", "4")
    assert found.settings["tensor_model_parallel_size"] == 2
    assert found.size == 4
    assert found.places["context_parallel_size"] == "command line"
    assert found.unknown == []


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.sh", "echo hello\n", "a.sh has no command that says how a model is split: give its"),
        ("a.py", PYTHON, "a.py may have many recipes: name one as .*a.py:FUNCTION"),
        ("a.py:other", PYTHON, "other"),
    ],
)
def test_no_recipe(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        read(tmp_path, name, text)
    assert "\n" not in str(error.value)
    with pytest.raises(ConfigError, match=r"there is no recipe at .*none\.sh: name a file, or"):
        read_recipe([str(tmp_path / "none.sh")])
