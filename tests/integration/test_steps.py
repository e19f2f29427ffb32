"""What is checked in the first step is checked in every step: for functions, models and batches of
real ranks, and for the stages of a pipeline.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import inputs
from megatron_cp_plugin.integration.inputs import CutInputs
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.megatron import attention_spans
from tests.integration.megatron_job import run_warm
from tests.integration.ranks import Place, on_ranks
from tests.integration.steps_job import CASES, STEPS, refused_together

JOB = Path(__file__).with_name("steps_job.py")


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


STAGES, SIZE = 3, 2
BOUNDS = (0, 8, 16, 32)
# What a stage is given otherwise, and what it says.
OF_STAGES = {
    "documents": "need one packed_seq_params, got (32, (8, 16), ()) on the first stage",
    "no documents": "packed_seq_params, got (32, (8, 16), ()) on the first stage and None on",
    "padding": "need one packed_seq_params, got (32, (8, 16), ()) on the first stage",
    "spans": "need one attention_spans, got None on the first stage and ((0, 32, 0, 32, 'full'",
    "positions": "need one attention_spans, got None on the first stage and ((0, 32, 0, 32, 'full'",
    "tokens": "need one number of tokens, got 16 on the first stage and 8 on this one",
    "batch": "need one batch size, got 1 on the first stage and 2 on this one",
    "training": "need one training, got True on the first stage and False on this one",
}


class Stage(nn.Module):
    """Takes what models of Megatron do, as one stage of them."""

    def __init__(self, number: int, pipeline: int) -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_impl="none", sequence_parallel=False)
        self.pre_process = number == 0
        ranks: Any = Place(number, STAGES)
        ranks.of_world = [pipeline * STAGES + stage for stage in range(STAGES)]
        self.pg_collection = SimpleNamespace(pp=ranks)
        self.decoder = SimpleNamespace(input_tensor=None)

    def forward(self, input_ids: Any = None, packed_seq_params: Any = None) -> Any:
        """The documents that attention would see."""
        return packed_seq_params


def packed(difference: str = "") -> Any:
    """packed_seq_params of a stage."""
    bounds = {"documents": (0, 4, 16, 32), "padding": (0, 7, 15, 31)}.get(difference, BOUNDS)
    given, whole = (torch.tensor(each, dtype=torch.int32) for each in (bounds, BOUNDS))
    padded = whole if difference == "padding" else given
    found = PackedSeqParams("thd", given, given, padded, padded)
    if difference in ("spans", "positions"):
        positions = range(31, -1, -1) if difference == "positions" else None
        return attention_spans([(0, 32, 0, 32, "full")], positions, found)
    return None if difference == "no documents" else found


def give(stage: Stage, difference: str, *, documents: bool) -> Any:
    """One forward pass."""
    tokens, batch = 8 if difference == "tokens" else 16, 2 if difference == "batch" else 1
    stage.decoder.input_tensor = torch.zeros(tokens, batch, 4)
    ids = torch.zeros(1, 16) if stage.pre_process else None
    with torch.set_grad_enabled(difference != "training"):
        return stage(ids, packed_seq_params=packed(difference) if documents else None)


@pytest.mark.parametrize("alone", [False, True], ids=["a stage", "a rank of it"])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", OF_STAGES)
def test_what_stages_have_otherwise_is_refused_in_any_step(
    monkeypatch: pytest.MonkeyPatch, name: str, step: int, alone: bool
) -> None:
    """By all ranks of that stage. Then its next step is right, and the store is empty."""
    store = dist.HashStore()
    monkeypatch.setattr(inputs, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: group.of_world)
    config = ContextParallelConfig("ring", SIZE, options=(("layout", "thd"),))

    def rank_of(number: int, group: Any) -> str:
        stage, said = Stage(number, group.rank()), ""
        CutInputs(stage, Runtime(config, callers=True), group)
        documents = name != "tokens"  # by which they would be refused, too
        for at in range(1, step + 3):
            wrong = at == step and number == 1 and (group.rank() == 1 or not alone)
            try:
                found = give(stage, name if wrong else "", documents=documents)
            except ContextParallelError as error:
                assert at == step
                said = str(error)
                continue
            assert not documents or (found.starts, found.spans) == ((8, 16), None)
        return said

    with ThreadPoolExecutor(STAGES) as threads:
        of_stages = list(threads.map(lambda s: on_ranks(SIZE, partial(rank_of, s)), range(STAGES)))
    assert of_stages[0] == of_stages[2] == [""] * SIZE
    first, second = of_stages[1]
    assert first == second
    assert OF_STAGES[name] in first or "need one " in first
    assert not [key for key in store.list_keys() if "stages" in key]
