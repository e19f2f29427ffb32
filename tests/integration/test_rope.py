"""Angles of images, by position ids; other embeddings: test_batch.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import MultimodalRotaryEmbedding
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.rope import use_layout
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.ranks import Place

SECTIONS = [2, 1, 1]


@pytest.fixture
def embedding(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Megatron's, which would cut angles by zigzag: of rank 1 of 3."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    group: Any = Place(1, 3)
    return MultimodalRotaryEmbedding(8, 1.0, cp_group=group)


def model_with(embedding: nn.Module) -> Any:
    model: Any = nn.Module()
    model.rotary_pos_emb = embedding
    model.pg_collection = SimpleNamespace(cp=Place(1, 3))
    use_layout(model, Runtime(ContextParallelConfig("ring", 3)))
    return model


def test_angles_are_those_of_the_positions_of_a_rank(embedding: Any) -> None:
    whole = torch.randint(0, 50, (3, 2, 12), generator=torch.Generator().manual_seed(0))
    alone: Any = Place(0, 1)
    want = embedding(whole, SECTIONS, cp_group=alone)
    mine = slice(4, 8)
    model = model_with(embedding)
    use_layout(model, Runtime(ContextParallelConfig("ring", 3)))
    assert model.rotary_pos_emb is embedding  # whatever else programs set on it
    assert len(embedding._forward_hooks) == 1
    assert torch.equal(embedding(whole[..., mine], SECTIONS, cp_group=None), want[mine])


def test_an_embedding_that_cuts_by_itself_is_refused() -> None:
    class Cutting(nn.Module):
        cp_group = None

        def forward(self, position_ids: Tensor) -> Tensor:
            return position_ids[0, 0, ::2]

    model = model_with(Cutting())
    with pytest.raises(ContextParallelError, match="angles of the 4 position_ids of a rank, got"):
        model.rotary_pos_emb(torch.zeros(3, 1, 4))
