"""Public models as Megatron's settings, for model cards.

The numbers of `public_models.yaml` are from the models' published configurations. Settings that say
neither how tokens meet nor how large a model is are left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_LISTS = {
    "sizes": "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups "
    "kv_channels vocab_size",
    "experts": "num_experts moe_router_topk moe_ffn_hidden_size "
    "moe_shared_expert_intermediate_size first_dense_layers",
    "latents": "q_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim",
}


@dataclass(frozen=True)
class PublicModel:
    """A model.

    Attributes:
        name: Of its card.
        settings: Megatron's.
    """

    name: str
    settings: Mapping[str, object]


def _models(content: Mapping[str, Any]) -> Iterator[PublicModel]:
    kinds = content["kinds"]
    for name, row in content["models"].items():
        found = dict(kinds["common"])
        for kind in row.pop("of", ()):
            found |= kinds[kind]
        for each in row.keys() & _LISTS:
            pairs = zip(_LISTS[each].split(), row.pop(each), strict=False)
            found |= {setting: value for setting, value in pairs if value != 0}
        found |= row
        lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
        yield PublicModel(name, found | lists)


MODELS = tuple(_models(yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())))
