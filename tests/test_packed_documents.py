"""The script that compares algorithms on packed documents by their plans."""

import json
from pathlib import Path

import pytest

from scripts import packed_documents


def test_layout_documents_is_balanced_and_sends_least_of_the_balanced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "points.json"
    words = f"--lengths lognormal:256:1.2 --tokens 512 --sizes 4,8 --packs 2 --output {output}"
    packed_documents.main(words.split())
    points = {(p["label"], p["size"]): p for p in json.loads(output.read_text())}
    labels = {line.label for line in packed_documents.LINES}
    assert {label for label, _ in points} == labels | {"dynamic sizes, zigzag"}
    for size in (4, 8):
        balanced, straight, plain, ulysses = (
            points[label, size]
            for label in (
                "zigzag, layout=documents, route=ring",
                "zigzag, layout=documents, route=straight",
                "zigzag, route=ring",
                "ulysses",
            )
        )
        # Pairs alone: keys of other ranks are work too, which counts in short blocks.
        assert balanced["work"] < 1.1 < plain["work"]
        assert ulysses["work"] == pytest.approx(1)
        assert straight["mean_mib"] < min(plain["mean_mib"], ulysses["mean_mib"])
    said = capsys.readouterr().out
    assert "P = 4" in said
    assert f"{points['zigzag, route=ring', 8]['work']:.2f}; " in said
