"""What is kept on a device, and what goes there."""

import ast
from pathlib import Path
from weakref import ref

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.blocks import assembly
from megatron_cp_plugin.core.communication.devices import (
    capture,
    contiguous_copy,
    copy_into,
    uploaded,
)
from megatron_cp_plugin.errors import ContextParallelError
from tests.operators import Operators


def test_what_a_graph_was_captured_with_outlives_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay reads the indices of the mask that it was captured with, whatever came since."""
    captures = False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: captures)
    monkeypatch.setattr(assembly, "uploaded", lambda numbers, _: numbers.clone())

    def indices(mask: int) -> torch.Tensor:
        rows = ((0, mask), (mask + 1, mask + 2))
        return assembly.numbers_of(rows, rows, torch.device("cuda")).to

    eager, captured = ref(indices(1)), ref(indices(2))
    captures = True
    assert indices(2) is captured()
    captures = False
    for mask in range(3, 100):
        indices(mask)
    assert eager() is None
    assert captured() is not None
    captures = True
    assert indices(2) is captured()


@pytest.mark.gpu
def test_a_replay_after_many_other_masks() -> None:
    q, k, v = (torch.randn((1, 2048, 4, 64), device="cuda").bfloat16() for _ in "qkv")

    def attend(window: int) -> torch.Tensor:
        return cp.attention(q, k, v, algo="zigzag", window=window, kernel="torch_flash")

    want = attend(100)
    graph, out = capture(lambda: attend(100), torch.cuda.synchronize)
    for window in range(101, 701):
        attend(window)
    # Whatever was given up is other numbers now.
    taken = [torch.full((size,), 2**30, device="cuda", dtype=torch.int32) for size in range(4096)]
    out.zero_()
    graph.replay()
    assert torch.equal(out, want)
    del taken


def test_all_tensors_of_a_device_are_kept_for_graphs() -> None:
    """No function that takes a device has another cache, but for streams, which are no memory."""
    found = []
    for path in Path(cp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                caches = ("cache", "lru_cache")
                cached = any(ast.unparse(x).startswith(caches) for x in node.decorator_list)
                takes = [ast.unparse(arg.annotation or arg) for arg in node.args.args]
                makes = ast.unparse(node.returns) if node.returns else ""
                if cached and "torch.device" in takes and "Stream" not in makes:
                    found.append(node.name)
    assert not found


def test_indices_beyond_int32_are_refused() -> None:
    """Kernels take them as int32, in which they would be others."""
    last = 2**31 - 1
    assert uploaded(torch.tensor([0, last]), torch.device("cpu")).tolist() == [0, last]
    with pytest.raises(ContextParallelError, match="up to 2147483647, got 2147483648"):
        uploaded(torch.tensor([0, last + 1]), torch.device("cpu"))


def test_tensors_of_another_gpu_than_the_current_one_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kernels and messages would be queued on streams that know nothing of those tensors."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with FakeTensorMode():
        x = torch.empty((1, 8, 2, 8), device="cuda:1")
        calls = (
            lambda: cp.attention(x, x, x, algo="zigzag"),
            lambda: cp.linear_attention(x, x, x, decay=1.0),
            lambda: cp.chunked_cross_entropy(x[0, 0], x[0, 0], x[0, 0, :, 0].long()),
        )
        for call in calls:
            with pytest.raises(ContextParallelError, match=r"got cuda:1: call .*set_device\(1\)"):
                call()


def bits(dtype: torch.dtype, *shape: int, start: int = 0) -> torch.Tensor:
    """A tensor of any bits, NaNs among them, that begins at an element of its memory."""
    elements = start + torch.Size(shape).numel()
    line = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    return line.view(dtype)[start:].view(shape)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("dim", "start", "wide"), [(16, 0, True), (16, 8, True), (16, 1, False), (13, 0, False)]
)
def test_rows_are_copied_in_sixteens_of_bytes(
    dtype: torch.dtype, dim: int, start: int, wide: bool
) -> None:
    """[B,S,ranks*heads,D] to the heads of each rank, and back, to the bit."""
    x = bits(dtype, 2, 5, 6, dim, start=start)
    shares = x.unflatten(2, (3, 2))[:, :, :, :1].movedim(2, 0)
    back = torch.zeros_like(x)
    dtypes: list[torch.dtype] = []  # of the elements that are copied

    def see(name: str, args: list[torch.Tensor], _results: object) -> None:
        if name == "copy_":
            dtypes.append(args[0].dtype)

    with Operators(see):
        found = contiguous_copy(shares)
        copy_into(back.unflatten(2, (3, 2))[:, :, :, :1], found.movedim(0, 2))
    assert found.is_contiguous()
    assert torch.equal(found.view(torch.uint8), shares.clone().contiguous().view(torch.uint8))
    want = x.view(torch.uint8).clone()
    want[:, :, 1::2] = 0
    assert torch.equal(back.view(torch.uint8), want)
    assert (dtypes[0] == torch.complex128) == wide


def test_other_copies_are_made_as_they_are() -> None:
    """Of another dtype, and of elements that are no rows."""
    x = torch.randn(4, 6, 16)
    out, other = torch.empty(4, 6, 16, dtype=torch.bfloat16), torch.empty(16, 6, 4)
    copy_into(out, x)
    copy_into(other, x.movedim(0, 2).movedim(0, 1))
    assert torch.equal(out, x.bfloat16())
    assert torch.equal(other, x.permute(2, 1, 0))
