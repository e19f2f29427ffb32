"""The list of faults is up to date; whether they are found is for `check.py`."""

from pathlib import Path

import megatron_cp_plugin
from tests.mutations.check import FAULTS

SOURCES = Path(megatron_cp_plugin.__file__).parent
TESTS = Path(__file__).parents[1]


def test_every_fault_can_be_planted() -> None:
    """A change that moves one of these places takes its row of `faults.txt` along."""
    lost = [
        f"{fault.file} does not have once: {fault.before}"
        for fault in FAULTS
        if not fault.applies((SOURCES / fault.file).read_text())
    ]
    assert lost == []


def test_faults_differ() -> None:
    assert len({(fault.file, fault.before, fault.after) for fault in FAULTS}) == len(FAULTS) >= 60
    assert len({fault.what for fault in FAULTS}) == len(FAULTS)


def test_the_tests_that_are_tried_first_exist() -> None:
    for fault in FAULTS:
        file, _, name = fault.test.partition("::")
        assert f"def {name}(" in (TESTS / file).read_text(), fault.test
