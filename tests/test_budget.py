"""How large each room of the house may be: what was reached, so that nobody takes it back unseen.

Lower a number when a change takes something away; raise one only with its reason in the commit.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_cp_plugin"
# Lines of Python; of scripts of all files.
LINES = {
    "package root": 4_187,
    "core": 12_662,
    "algorithms": 1_755,
    "kernels": 3_325,
    "integration": 8_001,
    "planner": 5_626,
    "harness": 2_111,
    "scripts": 7_067,
    "tests": 37_907,
}
# Words of Markdown: of the README; of all pages, it among them.
WORDS = {"README": 1_100, "pages": 42_484}


def files(room: str) -> Iterator[Path]:
    """Those that a room has."""
    if room == "README":
        yield ROOT / "README.md"
    elif room == "pages":
        for folder in (ROOT, ROOT / "patches"):
            yield from folder.glob("*.md")
        yield from (ROOT / "docs").rglob("*.md")
    elif room == "scripts":
        yield from (path for path in (ROOT / "scripts").iterdir() if path.is_file())
    elif room == "tests":
        yield from (ROOT / "tests").rglob("*.py")
    elif room == "package root":
        yield from (ROOT / PACKAGE).glob("*.py")
    else:
        yield from (ROOT / PACKAGE / room).rglob("*.py")


@pytest.mark.parametrize("room", LINES)
def test_lines(room: str) -> None:
    lines = sum(path.read_text().count("\n") for path in files(room))
    assert 0 < lines <= LINES[room]


@pytest.mark.parametrize("room", WORDS)
def test_words(room: str) -> None:
    words = sum(len(path.read_text().split()) for path in files(room))
    assert 0 < words <= WORDS[room]


def test_no_file_of_the_package_is_outside_of_a_room() -> None:
    rooms = LINES.keys() - {"scripts", "tests"}
    found = sorted(path for room in rooms for path in files(room))
    assert found == sorted((ROOT / PACKAGE).rglob("*.py"))
