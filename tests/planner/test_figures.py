"""Figures of plans: texts that fit, and files."""

import html
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from megatron_cp_plugin import cli
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.planner.drawing import picture
from megatron_cp_plugin.planner.figures import figure, save
from tests.planner.test_drawing import MASKS, PAPER, ROOT, SEQ_LEN, draw
from tests.span_masks import mask_of

# Under "nothing" no query sees a key.
SEEN = MASKS | {"nothing": mask_of([(0, 2, 0, 1, "bi_causal")], SEQ_LEN)}


def texts(path: Path) -> Counter[str]:
    return Counter(
        html.unescape(found) for found in re.findall(r"<text[^>]*>([^<]*)<", path.read_text())
    )


def written(made: Figure) -> list[Text]:
    FigureCanvasAgg(made).draw()
    texts = made.findobj(Text)
    return [text for text in dict.fromkeys(texts) if text.get_text() and text.get_visible()]


@pytest.mark.parametrize(
    ("algo", "size", "mask", "options"),
    [
        *((algo, 8, "documents", {}) for algo in ("attention2d", "distflash", "ulysses")),
        ("zigzag", 2, "documents", {}),
        ("lasp", 8, "causal", {}),
        ("zigzag", 16, "documents", {"layout": "documents"}),
        ("attention2d", 4, "causal", PAPER | {"gradients": "float32", "rows": 2, "cols": 2}),
        ("attention2d", 16, "window", PAPER | {"rows": 4}),
        ("usp", 8, "causal", {"ulysses": 4, "chunks": 2, "layout": "contiguous", "keep": "local"}),
        *((algo, 2, "nothing", {}) for algo in ("ring", "ulysses", "attention2d")),
    ],
)
def test_texts_fit(algo: str, size: int, mask: str, options: dict[str, object]) -> None:
    """No text over another, none outside of the picture; the title whole."""
    seen = SEEN[mask]
    seq_len = SEQ_LEN if seen.special else None
    drawn = picture(algo, size, seq_len=seq_len, mask=seen, options=options)
    made = figure(drawn)
    renderer = FigureCanvasAgg(made).get_renderer()
    boxes = [(text.get_text(), text.get_window_extent(renderer)) for text in written(made)]
    whole = made.get_tightbbox(renderer).padded(0.1).transformed(made.dpi_scale_trans)
    for text, box in boxes:
        assert min(box.x0 - whole.x0, box.y0 - whole.y0) >= 0, text
        assert max(box.x1 - whole.x1, box.y1 - whole.y1) <= 0, text
    corners = np.array([box.extents for _, box in boxes])
    low, high = corners[:, :2], corners[:, 2:]
    overlap = np.minimum(high[:, None], high) - np.maximum(low[:, None], low)
    over = np.argwhere(np.triu((overlap >= 0.5).all(-1), 1))
    assert not len(over), [(boxes[a][0], boxes[b][0]) for a, b in over]
    words = " ".join(text for text, _ in boxes).replace("\n", " ")
    assert f"{drawn.title} {drawn.subtitle}" in words
    cells = Counter(cell.text for step in drawn.steps for cell in step if cell)
    labels = cells + Counter(transfer.text for transfer in drawn.transfers)
    assert not labels - Counter(text for text, _ in boxes)


@pytest.mark.parametrize("algo", ["zigzag", "distflash", "attention2d"])
def test_pictures_of_the_pages(algo: str, tmp_path: Path) -> None:
    """Each picture is what the command printed below it makes."""
    page = (ROOT / "docs" / "algorithms.md").read_text()
    (command,) = re.findall(rf"^    megatron-cp (draw --algo {algo} .*)$", page, re.MULTILINE)
    *words, path = command.split()
    assert f"({path.removeprefix('docs/')})" in page
    assert cli.main([*words, str(tmp_path / "again.svg")]) == 0
    again = (tmp_path / "again.svg").read_text()
    assert again == (ROOT / path).read_text(), f"run: megatron-cp {command}"
    assert len(again) < 150_000


def test_the_legend_is_true() -> None:
    for algo, results in (
        ("distflash", ("partial outputs and lse", "partial gradients")),
        ("attention2d", ("partial outputs and lse", "partial gradients")),
        ("ulysses", ("outputs and lse", "gradients")),  # of some heads, complete
    ):
        for phase, text in zip(PHASES, results, strict=True):
            made = figure(picture(algo, 4, phase=phase))
            words = [found.get_text() for found in written(made)]
            assert text in words
            assert ("computes own queries" in words) == (algo == "distflash")
            assert ("computes own queries and those of others" in words) != (algo == "distflash")
            assert "waits" not in words


def test_a_file_has_the_plan(tmp_path: Path) -> None:
    drawn = picture("distflash", 5)
    save(drawn, tmp_path / "plan.svg")
    found = texts(tmp_path / "plan.svg")
    cells = Counter(cell.text for step in drawn.steps for cell in step if cell)
    assert not cells + Counter(transfer.text for transfer in drawn.transfers) - found
    assert found["q4 k0"] == 1
    assert {"distflash", "queries", "keys and values", "partial outputs and lse"} <= set(found)


def test_a_png_is_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.png"
    assert draw("--algo", "zigzag", "--size", "2", "--output", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
