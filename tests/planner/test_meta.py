"""Blocks joined on the meta device, where torch's own operations take seconds the first time."""

import pytest
import torch

from megatron_cp_plugin.planner import meta
from megatron_cp_plugin.planner.meta import OnMeta, run_on_meta


class Compared(OnMeta):
    """Does every operation both ways."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = run_on_meta(func, args, kwargs or {})
        expected = func(*args, **(kwargs or {}))
        assert [x.shape for x in (result, expected)] == [expected.shape] * 2
        assert (result.stride(), result.dtype) == (expected.stride(), expected.dtype)
        assert result.device == expected.device
        return result


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_joined_blocks_are_those_of_torch(device, dim):
    x = torch.zeros((2, 3, 4), dtype=torch.bfloat16, device=device)
    with Compared():
        torch.cat([x, x.narrow(dim, 0, 1)], dim)
        torch.stack([x, x, x], dim)
        torch.cat([x, x])


def test_tensors_with_values_are_computed_with():
    with Compared():
        assert torch.cat([torch.ones(2), torch.full((1,), 2.0)]).tolist() == [1.0, 1.0, 2.0]


def test_what_is_overwritten_is_not_read():
    x = torch.empty(4, device="meta")
    y = x.bfloat16()
    events, _ = meta._recorded(lambda: (x.copy_(y), x.add_(y), x.zero_()))
    assert [event.bytes for event in events] == [16 + 8, 16 + 8 + 16, 16]
