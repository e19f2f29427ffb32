"""Attention of layers that a program builds after the model, and what layers are given."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import follow, use_attention
from tests.integration.cut_batches_job import make_config
from tests.integration.ranks import ALONE


def rebuilt(kind: type[nn.Module] = SelfAttention, **settings: Any) -> Any:
    """A model whose decoder has one layer, as Bridge rebuilds it from the spec before ours."""
    attention: Any = kind.__new__(kind)
    nn.Module.__init__(attention)
    attention.config = make_config(1, **settings)
    attention.layer_number, attention.attention_type = 2, "self"
    attention.attn_mask_type = AttnMaskType.causal
    attention.pg_collection = SimpleNamespace(cp=ALONE, tp=ALONE)
    attention.core_attention = core = DotProductAttention.__new__(DotProductAttention)
    nn.Module.__init__(core)
    return nn.ModuleDict({"decoder": nn.ModuleDict({"attention": attention})})


def test_attention_of_rebuilt_layers_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "algorithm", lambda self, group: None)
    model, runtime = rebuilt(softmax_scale=0.25), Runtime(ContextParallelConfig("zigzag", 1))
    for _ in range(2):
        use_attention(SimpleNamespace(decoder=model["decoder"]), runtime)
        core = model["decoder"]["attention"].core_attention
        assert type(core) is ContextParallelAttention
        assert (core.layer_number, core._scale, core.runtime) == (2, 0.25, runtime)


@pytest.mark.parametrize("settings", [{"kind": nn.Linear}, {"softmax_type": "learnable"}])
def test_rebuilt_layers_of_other_kinds_are_refused(settings: dict[str, Any]) -> None:
    model = SimpleNamespace(decoder=rebuilt(**settings)["decoder"])
    with pytest.raises(ContextParallelError, match=r"let GPTModel\.__init__ build the layers"):
        use_attention(model, Runtime(ContextParallelConfig("zigzag", 1)))


class DSALayer(nn.Module):
    """Attention that splits documents by itself; others get what the plugin's attention needs."""

    def forward(self, packed_seq_params: Any) -> str:
        return str(packed_seq_params.qkv_format)


class OtherLayer(DSALayer):
    pass


def test_layers_that_split_documents_are_given_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_cp_plugin.integration.spec.use_layout", lambda *args: None)
    model = nn.ModuleList([DSALayer(), OtherLayer()])
    follow(model, Runtime(ContextParallelConfig("zigzag", 1)))
    bounds = torch.tensor([0, 3, 8])
    mask = DocumentMask(seq_len=8, starts=(3,), cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    assert [layer(packed_seq_params=mask) for layer in model] == ["thd", "bshd"]
