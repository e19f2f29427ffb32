"""The page of predictions: what it counts, and that the simulator still predicts as well."""

import statistics
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import predictions as page

from megatron_cp_plugin.planner.machine import Machine


def test_at_most_a_quarter_is_fitted_to():
    numbers = {"fit": 0, "held": 0, "left out": 0}
    for row in page.measured():
        numbers[row.use] += (row.forward_ms is not None) + (row.step_ms is not None)
    assert 0 < numbers["fit"] < (numbers["fit"] + numbers["held"]) / 4
    assert numbers["held"] > 400


def test_held_out_rows_over_nvlink():
    rows = [r for r in page.measured() if r.table == "NVLink, 4 GPUs" and r.use == "held"]
    found = page.predictions(row for row in rows if row.kv_heads == 8)
    assert len(found) > 40
    sizes = [abs(one.error) for one in found]
    assert statistics.median(sizes) < 0.1
    assert sum(size < 0.2 for size in sizes) >= 0.9 * len(sizes)
    right, pairs = page.share_of_order(found)
    assert pairs > 40
    assert right >= 0.9 * pairs


def test_the_page_says_how_far_off_it_is():
    text, rows = page.PAGE.read_text(), page.ROWS.read_text()
    held = sum(
        (row.forward_ms is not None) + (row.step_ms is not None)
        for row in page.measured()
        if row.use == "held"
    )
    assert f"| **ours, held out** | {held} |" in text
    for row in page.measured():
        if row.use != "left out":
            assert f"### {row.table}\n" in rows


def test_the_fit_finds_a_number_again(monkeypatch):
    """Rows made with another rate give that rate back."""
    rows = [r for r in page.measured() if r.table == "sockets, 4 GPUs" and r.tokens == 16384][:1]
    machine = page.machine_of(rows[0].machine)
    values = machine.values()
    values["between_total"] = None
    values["between"]["collective"] = {}
    values["between"]["exchange"]["bytes_per_second"] = 2e9
    start, wanted = Machine.of(values), dict(values)
    wanted["between"] = {"exchange": {"seconds": 1e-4, "bytes_per_second": 1.5e9}}
    forward, both = page.predict(rows[0], Machine.of(wanted))
    row = page.replace(rows[0], forward_ms=forward, step_ms=both)
    monkeypatch.setattr(page, "machine_of", lambda name: start)
    found = page.fit("any", [row], ["between/exchange/bytes_per_second"], 4)
    assert found.between.exchange.bytes_per_second == pytest.approx(1.5e9, rel=0.02)


@pytest.mark.slow
def test_held_out_ranks_alone():
    """The host decides in half of them; times of equal code differ by up to 1.4 there."""
    every = page.of_ranks()
    sizes = [abs(error) for row, _, errors in every if row.use == "held" for error in errors]
    assert len(sizes) > 50
    assert statistics.median(sizes) < 0.06
    assert sum(size < 0.15 for size in sizes) >= 0.85 * len(sizes)
    causal = [
        abs(error)
        for row, _, errors in every
        for error in errors
        if row.case.words == "causal" and row.case.tokens > 2048
    ]
    assert max(causal) < 0.1
