"""Rollouts that share prefixes, as batches of Megatron."""

from typing import Any

import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.inputs import serve_inputs
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.ranks import on_ranks
from tests.integration.test_spans_in_megatron import Model


def test_a_pack_is_a_batch() -> None:
    """Its tokens, labels and weights are split by the layout that follows its spans."""
    rollouts = [[1, 2, 3, 4, 5, answer, 6, 7] for answer in range(10, 13)]
    (pack,) = cp.pack_rollouts(rollouts, multiple=4)

    def rank(group: Any) -> None:
        config = ContextParallelConfig("zigzag", 2, options=(("layout", "documents"),))
        model, batches = Model(), Batches(Runtime(config))
        serve_inputs(model, batches, group)
        batch = batches.shard(pack.batch(), group)
        layout = config.layout.within(Slices.of(pack.spans, len(pack.tokens)))
        mine = positions(layout, group.rank(), 2, len(pack.tokens))
        for key, whole in (("tokens", pack.tokens), ("labels", pack.labels)):
            assert torch.equal(batch[key][0], whole[mine])
        assert torch.equal(batch["loss_mask"][0], pack.weights[mine].float())
        mask = model(batch["tokens"])
        assert list(mask.slices(len(pack.tokens))) == sorted(pack.spans)
        assert batches.runtime.mask.positions.tolist() == pack.positions.tolist()

    on_ranks(2, rank)
