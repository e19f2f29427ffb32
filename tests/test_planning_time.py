"""How long a rank plans a micro-batch: bounds with room for a busy machine."""

import pytest

from scripts.planning_time import main, planning_ms


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "most_ms"),
    [
        ("zigzag:layout=documents:route=straight", 20),
        ("distflash", 20),
        ("ring", 20),
        ("zigzag:layout=documents", 45),
        ("zigzag:layout=thd", 60),
        ("allgather:transport=group", 25),
        ("attention2d:transport=group", 15),
    ],
)
def test_a_rank_of_64_plans_500_documents_in_time(spec: str, most_ms: float) -> None:
    """Of 1M tokens; two to five times more when every rank planned for all, and with thd fifty
    times when each pair of ranks had tiles of its own.
    """
    assert planning_ms(spec, 64, 2**20, 500, packs=2) < most_ms


def test_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--size", "4", "--tokens", "4K", "--documents", "8", "--algos", "ring,ulysses"])
    out = capsys.readouterr().out
    assert "4 ranks, 4096 tokens, 8 documents" in out
    assert "ulysses" in out
