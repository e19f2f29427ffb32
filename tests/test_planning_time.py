"""The table of how long a rank plans a micro-batch."""

import pytest

from scripts.planning_time import main


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "4", "--tokens", "4K", "--documents", "8", "--algos", "ring,ulysses"])
    out = capsys.readouterr().out
    assert "4 ranks, 4096 tokens, 8 documents" in out
    assert "ulysses" in out
