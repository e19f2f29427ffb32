"""Weights whose rows are for different things."""

from types import SimpleNamespace

import torch

from megatron_cp_plugin.harness import recorder, weight_parts
from megatron_cp_plugin.harness.weight_parts import Rows


def test_a_fused_projection_is_split_by_group() -> None:
    # Two groups of two query heads of size 2: rows q q q q k k v v, twice.
    weight = torch.arange(16.0)[:, None].expand(16, 3)
    parts = Rows(2, {"query": 4, "key": 2, "value": 2}).split("qkv", weight)
    assert {name: part[:, 0].tolist() for name, part in parts.items()} == {
        "qkv[query]": [0, 1, 2, 3, 8, 9, 10, 11],
        "qkv[key]": [4, 5, 12, 13],
        "qkv[value]": [6, 7, 14, 15],
    }


def test_what_has_something_else_in_it_stays_whole() -> None:
    weight = torch.zeros(16, 3)
    assert Rows(1, {"query": 4, "key": 2, "value": 2}).split("qkv", weight).keys() == {"qkv"}


def test_main_weights_have_the_values_of_the_model() -> None:
    """In float32, of a model in bfloat16: they are recorded as equal, and others are not."""
    weight = torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers = [
        recorder._digest(recorder._whole_values(torch.nn.Parameter(each)))
        for each in (weight, weight.float(), weight.float() * (1 + 2**-12))
    ]
    assert numbers[0] == numbers[1] != numbers[2]


def test_mamba() -> None:
    """Rows of z, x, B, C and dt, one after another: of three heads of two, and two groups."""
    mixer = SimpleNamespace(d_inner_local_tp=6, ngroups_local_tp=2, d_state=2, nheads_local_tp=3)
    (rows,) = weight_parts._of_mamba(mixer).values()
    parts = rows.split("in_proj", torch.arange(23.0)[:, None])
    assert list(parts) == [f"in_proj[{name}]" for name in ("z", "x", "B", "C", "dt")]
    assert [int(part[0]) for part in parts.values()] == [0, 6, 12, 16, 20]
