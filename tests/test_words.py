"""Phrases that break the house rules of words in CONTRIBUTING.md."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
ROOMS = "docs", "patches", "configs", "examples", "megatron_cp_plugin", "scripts", "tests"
KINDS = {".md", ".py", ".sh", ".toml", ".yaml"}
FILES = (
    *ROOT.glob("*.md"),
    *(file for room in ROOMS for file in (ROOT / room).rglob("*") if file.suffix in KINDS),
)
PHRASES = re.compile(
    r"\b(so\s+many|how\s+many-th|one\s+behind\s+the\s+other|which\s+(\w+\s+){0,3}want)\b", re.I
)


def of_rules(text: str) -> str:
    """Without the phrases that the rules quote as what not to write."""
    return re.sub(r"not \*[^*]+\*", "", text)


def phrases_of(file: Path) -> list[str]:
    text = file.read_text().partition("\n## 0.3.0")[0]  # what was released stays as it was
    if file.suffix != ".md":  # comments of several lines
        text = re.sub(r"\n\s*#\s*", " ", text)
    return [found[0] for found in PHRASES.finditer(of_rules(text))]


def test_phrases() -> None:
    found = {str(file): phrases_of(file) for file in FILES if file != Path(__file__)}
    assert len(found) > 400
    assert {file: phrases for file, phrases in found.items() if phrases} == {}


def test_the_phrases_are_found() -> None:
    for text in (
        "of so\nmany tokens",
        "its how many-th",
        "One behind the other",
        "which they want",
    ):
        assert PHRASES.search(text)
    assert not PHRASES.search(of_rules("chunks of N, not *chunks of so many*"))
