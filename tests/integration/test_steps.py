"""What is checked in the first step is checked in every step: for functions, models and batches of
real ranks; for the stages of a pipeline see test_packed_documents.py.
"""

import json
from pathlib import Path

import pytest

from tests.integration.megatron_job import run_warm
from tests.integration.steps_job import FUNCTIONAL, OF_BATCHES, OF_MODELS, STEPS, refused_together

JOB = Path(__file__).with_name("steps_job.py")
CASES = {"functional": tuple(FUNCTIONAL), "install": OF_MODELS, "launcher": OF_BATCHES}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, dict[str, str]]]]:
    """What each rank was told."""
    job = run_warm(tmp_path_factory.mktemp("steps"), ranks=2, script=JOB).succeeded()
    return [json.loads(p.stdout.split("FOUND")[-1].splitlines()[0]) for p in job.processes]


@pytest.mark.parametrize("step", [str(step) for step in STEPS])
@pytest.mark.parametrize("way", CASES)
def test_what_differs_in_any_step_is_refused_on_all_ranks(ranks, way: str, step: str) -> None:
    """And the job has found the next good steps to be right, and has come to its end."""
    first, second = (rank[way] for rank in ranks)
    assert first.keys() == second.keys() == set(CASES[way])
    for name in CASES[way]:
        said = first[name][step], second[name][step]
        assert refused_together(*said), (name, said)
