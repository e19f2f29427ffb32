"""What several of Megatron's settings mean together."""

from argparse import Namespace
from typing import Any

import pytest
import torch

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.integration.settings import Settings


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"num_query_groups": 4}, Shape(1, 8, 4, 2, 16)),
        ({"num_query_groups": 1}, Shape(1, 8, 4, 1, 16)),
        (
            {
                "multi_latent_attention": True,
                "qk_head_dim": 24,
                "qk_pos_emb_head_dim": 8,
                "v_head_dim": 20,
            },
            Shape(1, 8, 4, 4, 32, value_dim=20),
        ),
    ],
    ids=["GQA", "MQA", "latent"],
)
def test_shape_of_the_attention_of_a_tensor_parallel_rank(
    settings: dict[str, Any], expected: Shape
) -> None:
    common = {"num_attention_heads": 8, "tensor_model_parallel_size": 2, "kv_channels": 16}
    common |= {"num_query_groups": 8, "params_dtype": torch.bfloat16}
    assert Settings(Namespace(**(common | settings))).shape(8) == expected
