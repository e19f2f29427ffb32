"""The matrix of parity runs: a few of its cells, and that a cell which fails is seen."""

from dataclasses import replace
from pathlib import Path

import parity_matrix as matrix
import pytest

from megatron_cp_plugin.harness.parity import Comparison, Worst

ROOT = Path(__file__).parents[1]


# Ranks and samples without a token that counts; the same by tokens, of further tokens; padded
# documents, cut apart; experts over the ranks, with auxiliary losses and padding; and one refused.
CELLS = {
    "padded/zigzag": "equal",
    "mtp-per-token/zigzag": "equal",
    "thd-mla/distflash:layout=thd": "equal",
    "moe-ep-cp/distflash": "equal",
    "moe-drop/zigzag": "refused: --context-parallel-algo zigzag does not support dropping tokens",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_cells(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["--output", str(tmp_path), "--only", *CELLS]) == 0
    lines = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert lines.keys() == CELLS.keys()
    for name, verdict in CELLS.items():
        assert lines[name].startswith(verdict)


def cell(key: str, error: float = 1e-7, problem: str = "") -> object:
    combination = next(c for c in matrix.COMBINATIONS if c.key == key)
    variant = combination.variants[0]
    worst = [Worst(error)] * 4
    comparison = Comparison(*worst, problems=[problem] * bool(problem))
    outcome = matrix.Outcome(combination.run(variant), comparison=comparison)
    return matrix.Cell(combination, variant, outcome)


def test_table() -> None:
    passed = cell("rope-gqa")
    wrong = cell("tp", error=0.5, problem="gradient is off")
    refused = replace(
        cell("gpt2"), outcome=replace(passed.outcome, failure="exit code 2"), refused="no"
    )
    crashed = replace(cell("pp"), outcome=matrix.Outcome(passed.outcome.run, failure="1"))
    assert [c.good for c in (passed, wrong, refused, crashed)] == [True, False, True, False]
    text = matrix.table([passed, wrong, refused, crashed], 5)
    assert "4 of 5 cells run: 1 equal to the unsplit model, 1 refused, 2 failed." in text
    for row in (
        "| `rope-gqa` | RoPE, GQA 8:4, untied embeddings | 4 | 4 | 1e-07 / 1e-07 / 1e-07 |",
        "| `tp` | TP 2 | 2 | 4 | **5e-01 / 5e-01 / 5e-01** |",
        "| 4 | 4 | refused (1) |",
        "| 2 | 4 | **failed** |",
        "1. no",
    ):
        assert row in text


def test_keys_are_unique_and_samples_can_be_split() -> None:
    keys = [combination.key for combination in matrix.COMBINATIONS]
    assert len(set(keys)) == len(keys)
    assert all(matrix.SEQ_LENGTH % (2 * c.cp) == 0 for c in matrix.COMBINATIONS)
    lengths = {len(document) for document in matrix.padded_documents()}
    padded = [c for c in matrix.COMBINATIONS if c.data == "padded_documents"]
    assert len(padded) > 4
    assert all(length % (2 * c.cp) == 0 for c in padded for length in lengths)


def test_the_reference_shards_no_parameters() -> None:
    """It has Megatron's own data parallelism, whatever the runs have."""
    row = next(c for c in matrix.COMBINATIONS if c.key == "fsdp")
    assert "use_torch_fsdp2" not in row.config_of(row.reference).megatron
    assert row.config_of(row.run(row.variants[0])).megatron.use_torch_fsdp2


def test_rows_of_other_data_have_references_of_their_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`documents` and `thd` differ in nothing else, and were once held against one run."""
    trained: list[tuple[str, str]] = []

    def train(self: object, combination: object, run: object, reference: object) -> object:
        trained.append((combination.key, str(run)))  # type: ignore[attr-defined]
        return matrix.Outcome(run), ""

    monkeypatch.setattr(matrix.Matrix, "_train", train)
    monkeypatch.setattr(matrix, "write_data", lambda *_: None)
    rows = {row.key: row for row in matrix.COMBINATIONS}
    matrix_ = matrix.Matrix(tmp_path, 1.0, keep=True)
    for key in ("documents", "thd", "documents"):
        matrix_._reference(rows[key])
    assert [key for key, _ in trained] == ["documents", "thd"]
