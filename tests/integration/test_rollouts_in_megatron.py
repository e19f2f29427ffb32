"""Rollouts that share prefixes, as batches of Megatron; a policy that is trained with rewards."""

from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.inputs import SplitInputs
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.megatron_job import run_warm
from tests.integration.ranks import on_ranks
from tests.integration.test_inputs import Model

JOB = Path(__file__).with_name("grpo_job.py")
UPDATES = 2
BOUND = 1e-9


def test_a_pack_is_a_batch() -> None:
    """Its tokens, labels and weights are split by the layout that follows its spans."""
    rollouts = [[1, 2, 3, 4, 5, answer, 6, 7] for answer in range(10, 13)]
    (pack,) = cp.pack_rollouts(rollouts, multiple=4)

    def rank(group: Any) -> None:
        config = ContextParallelConfig("zigzag", 2, options=(("layout", "documents"),))
        model, batches = Model(), Batches(Runtime(config))
        SplitInputs(model, batches, group)
        batch = batches.shard(pack.batch(), group)
        layout = config.layout.for_documents(Slices.of(pack.spans, len(pack.tokens)))
        mine = positions(layout, group.rank(), 2, len(pack.tokens))
        for key, whole in (("tokens", pack.tokens), ("labels", pack.labels)):
            assert torch.equal(batch[key][0], whole[mine])
        assert torch.equal(batch["loss_mask"][0], pack.weights[mine].float())
        mask = model(batch["tokens"])
        assert list(mask.slices(len(pack.tokens))) == sorted(pack.spans)
        assert batches.runtime.mask.positions.tolist() == pack.positions.tolist()

    on_ranks(2, rank)


def trained(folder: Path, way: str, size: int) -> dict[str, Any]:
    """Rewards, losses and weights."""
    file = folder / f"{way}{size}.pt"
    words = (way, str(size), str(UPDATES), str(file))
    run_warm(folder / f"{way}{size}", *words, ranks=size, script=JOB).succeeded()
    found: dict[str, Any] = torch.load(file)
    assert len(found["losses"]) == UPDATES
    return found


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["rewards"] == expected["rewards"]
    losses = torch.tensor([found["losses"], expected["losses"]], dtype=torch.float64)
    assert float(losses.diff(dim=0).abs().max()) < BOUND
    assert found["weights"].keys() == expected["weights"].keys()
    for name, weight in expected["weights"].items():
        off = float((found["weights"][name] - weight).abs().max())
        assert off < BOUND, f"{name} is off by {off:.1e}"


@pytest.mark.slow
def test_a_policy_is_trained_with_rewards_as_on_one_rank(tmp_path: Path) -> None:
    """Rewards, losses and weights are equal, however the rollouts are given to the model. Those of
    packs are sampled from rows.
    """
    expected = trained(tmp_path, "whole", 1)
    compare(trained(tmp_path, "packs", 4), expected)
    compare(trained(tmp_path, "rows", 2), expected)
