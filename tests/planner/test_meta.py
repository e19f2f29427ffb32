"""Operations on torch's meta device that run once make what they make there every time."""

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from megatron_cp_plugin.planner.meta import OnMeta, run_counted


class Compared(OnMeta):
    """Does every operation both ways. Attributes: seen: names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result, size = run_counted(func, args, kwargs)
        expected = func(*args, **kwargs)
        assert tree_map(layout, result) == tree_map(layout, expected)
        if args and expected is args[0]:
            assert result is args[0]
        elif isinstance(expected, torch.Tensor) and not func.is_view:
            assert result.untyped_storage().nbytes() == expected.untyped_storage().nbytes()
        leaves = tree_leaves((args, kwargs, expected))
        tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
        assert size == sum(x.numel() * x.element_size() for x in tensors)
        self.seen.append(func.overloadpacket.__name__)
        return result


def layout(x):
    if not isinstance(x, torch.Tensor):
        return x
    return x.shape, x.stride(), x.dtype, x.device, x.storage_offset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_operations_make_and_how_many_bytes(dtype):
    with Compared() as compared:
        for _ in range(2):  # the second time nothing runs
            x = torch.empty((2, 3, 4), dtype=dtype, device="meta")
            y = torch.empty((2, 4, 3), dtype=torch.float32, device="meta").transpose(1, 2)
            total = x * 1 + y
            total.addcmul_(x.to(total.dtype), y).copy_(y[:, :, :1])
            torch.where(y == -torch.inf, 0.0, torch.exp(y - y[0])).contiguous()
            torch.logsumexp(torch.stack([y, y]), 0)
            torch.cat([x, x[:, :1]], 1).narrow(1, 1, 2).sum(0, dtype=torch.float32)
            torch.empty_like(y).zero_().unflatten(2, (2, 2)).movedim(1, 0).clone()
            x.index_select(1, torch.zeros(2, dtype=torch.int64, device="meta"))
            x.index_copy_(1, torch.zeros(2, dtype=torch.int64, device="meta"), x[:, :2])
            x.unbind(), x.split([1, 2], 1)
    assert {"mul", "cat", "copy_", "unbind", "index_copy_", "clone"} <= set(compared.seen)


def test_numbers_of_other_types_are_other_arguments():
    whole = torch.empty(3, dtype=torch.int64, device="meta")
    with Compared():
        assert (whole * 1).dtype == torch.int64
        assert (whole * 1.0).dtype == torch.float32


def test_tensors_with_values_are_computed_with():
    values = []
    with Compared():
        for value in (1.0, 2.0):
            total = torch.full((2,), value, device="cpu") + 1
            values.append(total)
    assert [x.tolist() for x in values] == [[2.0, 2.0], [3.0, 3.0]]


def test_what_is_refused_is_refused_again():
    x = torch.empty(3, device="meta")
    with Compared():
        for _ in range(2):
            with pytest.raises(RuntimeError):
                torch.cat([x, x[:, None]])
