"""What kernels take within a call, as `workspace` says, against what torch's allocator saw."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import KernelCall, Packing, Problem, Statistics
from megatron_cp_plugin.kernels.choice import kernel_called
from tests.kernel_calls import backward_of, forward_of


def taken_and_predicted(
    name: str, kv_heads: int, given: str, tokens: tuple[int, int], packing: Packing | None, **causal
) -> tuple[int, float]:
    """Bytes of a call, its results among them, of queries and keys of `tokens` tokens."""
    kernel, dtype = kernel_called(name), torch.bfloat16
    reason = kernel.unsupported(Problem(torch.device("cuda"), dtype, 16, kv_heads, 128))
    if reason:
        pytest.skip(reason)
    rows, cols = tokens
    q, dout = (torch.randn(1, rows, 16, 128, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(1, cols, kv_heads, 128, device="cuda", dtype=dtype) for _ in range(2))
    settings = {"scale": 128**-0.5, "packing": packing, **causal}
    out, lse = forward_of(kernel, q, k, v, **settings)
    statistics = {
        "forward": None,
        "out": Statistics(lse, out=out),
        "delta": Statistics(lse, delta=torch.zeros_like(lse)),
    }[given]

    def call():
        if statistics is None:
            return forward_of(kernel, q, k, v, **settings)
        return backward_of(kernel, dout, q, k, v, statistics, **settings)

    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = sum(x.untyped_storage().nbytes() for x in call())
    taken = torch.cuda.max_memory_allocated() - before
    return taken, made + kernel.workspace(KernelCall(q, k, v, **settings), statistics)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["forward", "out", "delta"])
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ["flash4", "cudnn", "torch_flash", "flash2"])
def test_workspace(name: str, causal: bool, kv_heads: int, given: str) -> None:
    """Within 3% of all that a call takes."""
    taken, predicted = taken_and_predicted(name, kv_heads, given, (8192, 8192), None, causal=causal)
    assert predicted == pytest.approx(taken, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize("given", ["forward", "out", "delta"])
@pytest.mark.parametrize("kv_heads", [16, 4])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("name", ["flash4", "torch_flash", "flash2"])
def test_workspace_of_many_sequences(name: str, causal: bool, kv_heads: int, given: str) -> None:
    """Each is padded by itself: 256 of 1 to 96 queries, some with as many keys again."""
    lengths = torch.arange(256) % 96 + 1
    rows = (0, *lengths.cumsum(0).tolist())
    cols = rows if causal else (0, *(2 * lengths).cumsum(0).tolist())
    of_sequences = (rows[-1], cols[-1]), Packing.adjacent(rows, cols)
    taken, predicted = taken_and_predicted(name, kv_heads, given, *of_sequences, causal=causal)
    assert predicted == pytest.approx(taken, rel=0.03)


def test_workspace_of_flash_attn_4() -> None:
    """Counted in its source: rows are padded to 64 (80 without a mask), widths to 32."""
    kernel = kernel_called("flash4")
    q = torch.empty(2, 100, 8, 96, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 130, 2, 96, device="meta", dtype=torch.bfloat16)
    lse, out = torch.empty(2, 8, 100, device="meta"), torch.empty_like(q)
    assert kernel.workspace(KernelCall(q, k, k, 1.0, True), None) == 0
    queries, keys = 2 * 8 * 128 * (96 + 2) * 4, 2 * 2 * 256 * (96 + 96) * 4
    found = kernel.workspace(KernelCall(q, k, k, 1.0, False), Statistics(lse, out=out))
    assert found == queries + keys
    # dK and dV are not summed over heads; out is one row of zeros, and lse is copied.
    wide = torch.empty(2, 130, 8, 96, device="meta", dtype=torch.bfloat16)
    strided = torch.empty(2, 100, 8, device="meta").transpose(1, 2)
    call = KernelCall(q, wide, wide, 1.0, causal=True)
    found = kernel.workspace(call, Statistics(strided, delta=lse))
    assert found == queries + 2 * 8 * 100 * 4 * 2


def test_workspace_of_flash_attn_4_for_many_sequences() -> None:
    """Each is padded by itself, and there is room for one more."""
    kernel = kernel_called("flash4")
    q = torch.empty(2, 100, 8, 128, device="meta", dtype=torch.bfloat16)
    k = torch.empty(2, 130, 2, 128, device="meta", dtype=torch.bfloat16)
    statistics = Statistics(torch.empty(2, 8, 100, device="meta"), out=torch.empty_like(q))
    rows, cols = 200 + 7 * 64 - 1, 260 + 7 * 128 - 1
    queries, keys = 8 * (rows // 64 * 64) * (128 + 2), 2 * (cols // 128 * 128) * (128 + 128)
    packing = Packing.adjacent((0, 1, 2, 100), (0, 1, 2, 130))
    found = kernel.workspace(KernelCall(q, k, k, 1.0, True, packing), statistics)
    assert found == 4 * (queries + keys)
