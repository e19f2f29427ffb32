"""The pages of the papers: their tables, what writes them, and commands that are to run."""

import re

import papers_predicted as page
import pytest

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.costs import cost
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.step import step

# Blocks that take little to make.
QUICK = (
    "lasp_table1",
    "lasp_memory",
    "distflash_waiting",
    "ring_self_attention",
    "pipeline_stages",
    "rematerialization",
    "burst_table1",
)
SUMMARY = page.ROOT / "docs" / "papers.md"
COMMANDS = page.ROOT / "docs" / "papers" / "commands.md"
TEXTS = [path.read_text() for path in (SUMMARY, *page.PAGES)]


def test_every_table_is_there_as_it_was_written():
    found = [(name, *block) for text in TEXTS for name, block in page.blocks(text).items()]
    assert sorted(name for name, *_ in found) == sorted(page.BLOCKS)
    for name, digest, body in found:
        assert page.digest(body) == digest, f"{name} was changed by hand"
        assert body.count("\n| ") >= 3, name
        error = page.nearest(name)
        assert " ".join(error).strip() in body.replace("\n", " "), f"{name} has another error"


@pytest.mark.parametrize("name", QUICK)
def test_a_quick_table_is_made_again(name: str):
    text = page.page_of(name).read_text()
    assert page.written(text, name, page.lines_of(name)) == text


def test_the_summary_is_short_and_its_tables_are_those_of_the_pages():
    text = SUMMARY.read_text()
    assert len(text.split()) <= 2500
    details = "\n".join(path.read_text() for path in page.PAGES)
    names = set()
    for line in re.findall(r"^\| .*\d.*\|$", text, re.M):
        cells = [cell.strip() for cell in line.split("|")[2:-1]]
        for cell in (cell for cell in cells if re.match(r"[\d.]+", cell)):
            names.add(cell)
            assert re.search(rf"(?<![\d.]){re.escape(cell.removesuffix(' (longest)'))}", details), (
                f"{cell} of the summary is on no page"
            )
    assert len(names) > 60


def test_what_is_to_run_has_a_command():
    """Each cell names commands by their letters, which the page of commands has."""
    letters = set(re.findall(r"^\| ([A-Z]) \|", COMMANDS.read_text(), re.M))
    count = 0
    for text in TEXTS:
        for found in re.finditer(r"\*\*to\s+run\*\*\s+\(([^)]*)\)", text):
            named = set(re.findall(r"\b[A-Z]\b", found[1]))
            assert named, found[0]
            assert named <= letters, found[0]
            count += 1
    assert count > 10


def test_commands_name_what_there_is():
    """Scripts, shapes, run files and algorithms."""
    import benchmark_train

    text = COMMANDS.read_text()
    for script in re.findall(r"scripts/(\w+)\.py", text):
        assert (page.ROOT / "scripts" / f"{script}.py").is_file(), script
    for shape in re.findall(r"--shape ([\w.-]+)", text):
        assert shape in benchmark_train.SHAPES, shape
    for words in re.findall(r"--algos ([\w:=,.-]+)", text):
        for spec in words.split(","):
            name, *options = spec.split(":")
            given = dict(option.split("=") for option in options)
            given.pop("kernel", None)
            registry.read_options(name, given)


def test_a_block_is_written_again():
    text = (
        "a\n<!-- generated: few 0 -->\nold\n<!-- end -->\nb\n"
        "<!-- generated: more 0 -->\n<!-- end -->\n"
    )
    got = page.written(text, "few", ["| x |"])
    digest = page.digest("| x |")
    assert got == text.replace("few 0 -->\nold\n", f"few {digest} -->\n\n| x |\n\n")
    assert page.blocks(got)["few"] == (digest, "\n| x |\n\n")
    with pytest.raises(ValueError, match="one block none, has 0"):
        page.written(text, "none", [])


def test_the_ring_that_others_are_compared_with_is_transformer_engines():
    """Six units a hop: K and V, then K, V, dK and dV in the model's dtype."""
    tokens, size = 8192, 4
    shape = Shape(1, tokens, 32, 32, 128)
    name, options = page.RING
    found = cost(name, size, shape, Mask(causal=False), options)
    hop = tokens // size * shape.query_width * 2
    assert (found.forward_bytes, found.backward_bytes) == (2 * 3 * hop, 4 * 3 * hop)


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
    once = step(
        model, Split(tensor=8, recompute="full"), tokens, on, attention=attention.seconds
    ).seconds
    again = page.tensor(model, 8, tokens, on, "full")
    assert again == pytest.approx(once + model.layers * attention.forward.seconds)
