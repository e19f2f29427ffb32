"""Process groups: made by all ranks of the job together, as Megatron makes its own."""

import re
from pathlib import Path

import pytest

import megatron_cp_plugin
from tests.integration.megatron_job import TINY, run_warm

pytestmark = pytest.mark.slow

JOB = Path(__file__).with_name("new_group_job.py")
LAUNCH = Path(megatron_cp_plugin.__file__).with_name("launch.py")
# Torch's own timeout is 30 minutes.
SHORT = ("--distributed-timeout-minutes", "3", "--train-iters", "1")


def groups_after(folder: Path, flags: str) -> list[list[str]]:
    """The groups of each of four ranks, if all agree about what there is and make one more."""
    stages = "--pipeline-model-parallel-size 2 --context-parallel-size 2".split()
    words = (str(JOB), *TINY, *flags.split(), *stages, *SHORT)
    text = run_warm(folder, *words, ranks=4, script=LAUNCH).succeeded().text
    found = dict(re.findall(r"rank (\d+) summed 4, groups: (.*)\.", text))
    assert sorted(found) == ["0", "1", "2", "3"]
    return [groups.split(", ") for groups in found.values()]


def test_stages_of_different_algorithms(tmp_path: Path) -> None:
    """The first stage's one flow takes the given group; the second stage's two need another one."""
    flags = "--cp-layers lasp2,zigzag --cp-linear-model transnormer"
    groups = groups_after(tmp_path, flags)
    for of_rank in groups:
        # What was given has the flow of lasp2, and zigzag two others.
        assert of_rank.count("2 3 CONTEXT_PARALLEL_GROUP") == 3


def test_interleaved_stages_and_groups_of_some_ranks(tmp_path: Path) -> None:
    flags = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
    groups = groups_after(tmp_path, flags + "--cp-layers zigzag,attention2d,usp,allgather")
    assert len({of_rank.count("2 3 CONTEXT_PARALLEL_GROUP") for of_rank in groups}) == 1


def test_a_stage_without_attention(tmp_path: Path) -> None:
    flags = "--position-embedding-type rope --normalization RMSNorm --spec hybrid_job stack "
    flags += "--hybrid-layer-pattern *-|-- --untie-embeddings-and-output-weights "
    groups = groups_after(tmp_path, flags + "--context-parallel-algo distflash")
    for of_rank in groups:
        assert of_rank.count("2 3 CONTEXT_PARALLEL_GROUP") == 2
