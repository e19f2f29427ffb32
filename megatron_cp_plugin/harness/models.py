"""Public models as Megatron's settings, for `check` and model cards.

The numbers of `models.yaml` are from the models' published configurations. Settings that say
neither how tokens meet nor how large a model is are left out.
"""

from __future__ import annotations

import re
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
        known_as: A substring of its names, in lower case, of letters and digits only.
        settings: Megatron's.
        beyond: Why no GPTModel or HybridModel is built of it; empty: one is.
    """

    name: str
    known_as: tuple[str, ...]
    settings: Mapping[str, object]
    beyond: str = ""


def _models(content: Mapping[str, Any]) -> Iterator[PublicModel]:
    kinds = content["kinds"]
    for name, row in content["models"].items():
        known_as, beyond = row.pop("known_as"), row.pop("beyond", "")
        found = {} if beyond else dict(kinds["common"])
        for kind in row.pop("of", ()):
            found |= kinds[kind]
        for each in row.keys() & _LISTS:
            pairs = zip(_LISTS[each].split(), row.pop(each), strict=False)
            found |= {setting: value for setting, value in pairs if value != 0}
        found |= row
        lists = {key: tuple(value) for key, value in found.items() if isinstance(value, list)}
        yield PublicModel(name, tuple(known_as), found | lists, beyond)


MODELS = tuple(_models(yaml.safe_load(Path(__file__).with_name("models.yaml").read_text())))


def model_named(text: str) -> PublicModel | None:
    """Returns the model that a name, path or recipe means; None: it is not known.

    Args:
        text: Such as "Qwen/Qwen3-30B-A3B" or "llama3_8b_pretrain_config".
    """
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    found = [(len(key), model) for model in MODELS for key in model.known_as if key in plain]
    return max(found, key=lambda pair: pair[0])[1] if found else None
