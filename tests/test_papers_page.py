"""docs/papers.md: its predicted tables, what writes them, and commands that are to run."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
import papers_predicted as page

from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.step import step


def test_every_predicted_table_is_there():
    text = page.PAGE.read_text()
    found = re.findall(r"<!-- predicted: (\w+) -->\n(.*?)<!-- end -->", text, re.S)
    assert sorted(name for name, _ in found) == sorted(page.BLOCKS)
    for name, block in found:
        assert block.count("\n| ") >= 3, name


def test_what_is_to_run_has_a_command():
    """Each cell names commands by their letters, which the page has."""
    text, commands = page.PAGE.read_text().split("## Commands")
    letters = set(re.findall(r"^\| ([A-Z]) \|", commands, re.M))
    for found in re.finditer(r"\*\*to run\*\*\s+\(([^)]*)\)", text):
        named = set(re.findall(r"\b[A-Z]\b", found[1]))
        assert named, found[0]
        assert named <= letters, found[0]


def test_a_block_is_written_again():
    text = (
        "a\n<!-- predicted: few -->\nold\n<!-- end -->\nb\n<!-- predicted: more -->\n<!-- end -->\n"
    )
    got = page.written(text, "few", ["| x |"])
    assert got == text.replace("old\n", "\n| x |\n\n")
    with pytest.raises(ValueError, match="one block none, has 0"):
        page.written(text, "none", [])


def test_a_first_token_is_a_step_without_its_backward():
    """Matrix products are a third of a step's, messages of tensor parallelism half."""
    on, tokens = page.machine("h200_nvlink"), 16384
    model = MODELS["llama2-7b"]
    split = Split(tensor=2)
    whole = page.whole(model, split, tokens, on)
    attention = page.layer("zigzag", {}, model.shape(tokens, 2), on, (0,))
    rest = page.prefill(model, split, tokens, on) - model.layers * attention.forward.seconds
    parts = whole.parts
    logits = 2 * 3 * tokens / 2 * model.hidden * model.vocabulary / on.matmul_flops
    expected = (parts["matrix products"] - logits) / 3 + parts["tensor-parallel messages"] / 2
    assert rest > expected
    assert rest - expected < parts["other kernels"] / 2


def test_heads_are_filled_up_for_tensor_parallelism():
    assert page.filled(page.LLAMA_33, 16).heads == 48
    assert page.filled(page.GQA, 16).kv_heads == 8
    shape = page.filled(page.LLAMA_33, 8).shape(64, 8)
    assert isinstance(shape, Shape)
    assert shape.heads == shape.kv_heads == 5


def test_attention_is_computed_again_by_tensor_parallelism():
    on, tokens, model = page.machine("a100_8x100g"), 16384, page.LLAMA
    attention = page.layer("zigzag", {}, model.shape(tokens, 8), on, (0,))
    once = step(model, Split(tensor=8, recompute="full"), tokens, on, attention=attention).seconds
    again = page.tensor(model, 8, tokens, on, "full")
    assert again == pytest.approx(once + model.layers * attention.forward.seconds)
