"""Angles of a rank's tokens, of images too; those in documents: test_batch.py."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import (
    MultimodalRotaryEmbedding,
    RotaryEmbedding,
)
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.rope import LayoutRotaryEmbedding, use_layout
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


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> LayoutRotaryEmbedding:
    """Of rank 1 of 3, tokens 4 to 7 of 12."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    group: Any = Place(1, 3)
    embedding = RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=group)
    return LayoutRotaryEmbedding(embedding, Runtime(ContextParallelConfig("ring", 3)), group)


def test_angles_of_any_length_and_offset(cut: LayoutRotaryEmbedding) -> None:
    """More of them than are kept."""
    for seq_len, offset in [(12, 0), (12, 5), (6, 0), (9, 0), (18, 2), (12, 0)]:
        part = seq_len // 3
        whole = cut.embedding.get_emb(seq_len, offset)
        found = cut(seq_len, offset, cp_group=cut._group)
        assert torch.equal(found, whole[part : 2 * part])
        assert torch.equal(found, cut(seq_len, offset))
    assert not torch.equal(cut(12), cut(12, 5))


def test_frequencies_that_a_framework_sets(cut: LayoutRotaryEmbedding) -> None:
    before = cut(12)
    cut.inv_freq = cut.inv_freq / 2
    assert torch.equal(cut(12), before / 2)


def test_groups_of_another_kind_are_refused(cut: LayoutRotaryEmbedding) -> None:
    other: Any = Place(1, 3)
    for settings in ({"packed_seq": True}, {"cp_group": other}):
        with pytest.raises(ContextParallelError, match="packed sequences need a model that"):
            cut(12, **settings)


def test_positions_of_another_length_are_refused(cut: LayoutRotaryEmbedding) -> None:
    cut.packed = DocumentMask(seq_len=12, starts=(5,), positions=torch.arange(4))
    with pytest.raises(ContextParallelError, match=r"one for each of the 12 tokens .* got 4: pass"):
        cut(12)
    cut.packed = DocumentMask(seq_len=12, starts=(5,), positions=torch.arange(12).flip(0))
    assert torch.equal(cut(12), cut.embedding.get_emb(12)[4:8].flip(0))
