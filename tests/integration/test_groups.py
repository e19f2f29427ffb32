"""Process groups: made by all ranks of the job together, as Megatron makes its own."""

import re
from pathlib import Path

import pytest

from tests.integration.megatron_job import TINY, run_warm

JOB = Path(__file__).with_name("new_group_job.py")


def groups_after(folder: Path, flags: str, ranks: int) -> list[list[str]]:
    """The groups that each rank has, if all still agree about what there is and make one more."""
    words = (*TINY, *flags.split(), "--distributed-timeout-minutes", "3", "--train-iters", "1")
    text = run_warm(folder, *words, ranks=ranks, script=JOB).succeeded().text
    found = dict(re.findall(rf"rank (\d+) summed {ranks}, groups: (.*)\.", text))
    assert sorted(found) == [str(rank) for rank in range(ranks)]
    return [groups.split(", ") for groups in found.values()]


@pytest.mark.slow
def test_stages_of_different_algorithms(tmp_path: Path) -> None:
    """The first stage's one flow takes the given group; the second stage's two need another one."""
    flags = "--pipeline-model-parallel-size 2 --context-parallel-size 2 --cp-layers lasp2,zigzag "
    groups = groups_after(tmp_path, flags + "--cp-linear-model transnormer", ranks=4)
    for of_rank in groups:
        # What was given has the flow of lasp2, and zigzag two others.
        assert of_rank.count("2 3 CONTEXT_PARALLEL_GROUP") == 3
