"""Phrases that break the house rules of words in CONTRIBUTING.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = "integration", "kernels", "harness"
PAGES = (
    *ROOT.glob("*.md"),
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / "patches").glob("*.md"),
    *(ROOT / "megatron_cp_plugin").rglob("*.toml"),
    *(ROOT / "megatron_cp_plugin").glob("*.py"),
    *(file for room in ROOMS for file in (ROOT / "megatron_cp_plugin" / room).rglob("*.py")),
)
PHRASES = re.compile(
    r"\b(so\s+many|how\s+many-th|one\s+behind\s+the\s+other|which\s+(\w+\s+){0,3}want)\b", re.I
)


def of_rules(text: str) -> str:
    """Without the phrases that the rules quote as what not to write."""
    return re.sub(r"not \*[^*]+\*", "", text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_phrases(page: Path) -> None:
    text = page.read_text().partition("\n## 0.3.0")[0]  # what was released stays as it was
    assert [found[0] for found in PHRASES.finditer(of_rules(text))] == []


def test_the_phrases_are_found() -> None:
    for text in (
        "of so\nmany tokens",
        "its how many-th",
        "One behind the other",
        "which they want",
    ):
        assert PHRASES.search(text)
    assert not PHRASES.search(of_rules("chunks of N, not *chunks of so many*"))
