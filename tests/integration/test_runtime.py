"""Process groups: made with a model, with Megatron's settings for them."""

import re
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from megatron.core import parallel_state

from megatron_cp_plugin.integration import runtime
from tests.integration.megatron_job import LAUNCH, TINY, run_warm

JOB = Path(__file__).with_name("new_group_job.py")
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
    """The first stage's channel takes the given group; the second stage's need another."""
    flags = "--cp-layers lasp2,zigzag --cp-linear-model transnormer"
    found = groups_after(tmp_path, flags)
    assert sorted(x.count("2 3 CONTEXT_PARALLEL_GROUP") for x in found) == [1, 1, 2, 2]


@pytest.mark.slow
def test_interleaved_stages_and_groups_of_some_ranks(tmp_path: Path) -> None:
    flags = "--num-layers 4 --num-layers-per-virtual-pipeline-stage 1 "
    found = groups_after(tmp_path, flags + "--cp-layers zigzag,attention2d,usp,allgather")
    assert [x.count("2 3 CONTEXT_PARALLEL_GROUP") for x in found] == [4, 4, 4, 4]


@pytest.mark.slow
def test_a_stage_without_attention(tmp_path: Path) -> None:
    flags = "--position-embedding-type rope --normalization RMSNorm --spec hybrid_job stack "
    flags += "--hybrid-layer-pattern *-|-- --untie-embeddings-and-output-weights "
    found = groups_after(tmp_path, flags + "--context-parallel-algo distflash")
    assert sorted(x.count("2 3 CONTEXT_PARALLEL_GROUP") for x in found) == [1, 1, 2, 2]


def test_settings_of_a_group_are_those_of_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run's timeout, and the options for context parallelism; each group has its own object."""
    file = tmp_path / "nccl.yaml"
    file.write_text("cp: {max_ctas: 8}\ntp: {max_ctas: 4}\n")
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(
        parallel_state, "create_group", lambda ranks, **given: made.append({"ranks": ranks} | given)
    )
    monkeypatch.setattr(
        parallel_state, "get_nccl_options", lambda name, options: dict(options.get(name, {}))
    )
    args = Namespace(
        nccl_communicator_config_path=str(file),
        high_priority_stream_groups=["cp"],
        distributed_timeout_minutes=7,
    )
    new_group = runtime._new_group(args)
    for ranks in ([0, 2], [1, 3]):
        new_group(ranks)
    assert [settings["ranks"] for settings in made] == [[0, 2], [1, 3]]
    for settings in made:
        assert settings["timeout"] == timedelta(minutes=7)
        assert settings["pg_options"] == {"max_ctas": 8, "is_high_priority_stream": True}
        assert settings["use_local_synchronization"]
    assert made[0]["pg_options"] is not made[1]["pg_options"]
