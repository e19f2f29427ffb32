"""Many tiles in one call, against attention with a mask of all pairs, in float64.

On a GPU: pytest -m gpu tests/kernels
"""

from collections.abc import Sequence
from itertools import product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.execution.passes import Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.kernel import Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.masks.tile_batches import Batch, packed_calls
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, delta_of
from megatron_cp_plugin.core.tiles import Mask, Tile, TileTable
from megatron_cp_plugin.errors import ContextParallelError
from tests.kernel_calls import backward_of, forward_of
from tests.kernels.test_kernels import resolved
from tests.oracle import relative_error
from tests.plan_check import table_of

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
ON_CPU = pytest.param("reference", CPU, id="reference")
GPU_KERNELS = "flash4", "torch_flash", "flash2"
ON_GPUS = [pytest.param(name, GPU, marks=pytest.mark.gpu, id=name) for name in GPU_KERNELS]
DIMS = (64, 64), (128, 128), (192, 128)


def by_dims(names: Sequence[str], *dims: tuple[int, int]) -> list[Any]:
    """Kernels with head dims of queries and values; the reference takes all of them alike."""
    cpu = [("reference", CPU, each) for each in ((8, 8), (12, 8))]
    gpu = [(name, GPU, each) for name in names for each in dims]
    return [
        pytest.param(*one, id=f"{one[0]}-{one[2]}", marks=pytest.mark.gpu if one in gpu else ())
        for one in (*cpu, *gpu)
    ]


def kernel_for(
    name: str, device: torch.device, kv_heads: int, head_dim: int, value_dim: int
) -> tuple[SoftmaxKernel, torch.dtype, float]:
    """A kernel, the dtype that it is given, and the error that is right."""
    dtype, bound = (torch.float64, 1e-12) if device == CPU else (torch.bfloat16, 1e-2)
    shape = device, dtype, 4, kv_heads, head_dim
    kernel = resolved(name, Problem(*shape, documents=True, value_dim=value_dim))
    return kernel, dtype, bound


def tensors(
    rows: int, cols: int, kv_heads: int, dims: tuple[int, int], dtype: torch.dtype, batch: int
) -> list[Tensor]:
    """q, k, v and dout."""
    generator = torch.Generator().manual_seed(0)
    head_dim, value_dim = dims
    shapes = (rows, 4, head_dim), (cols, kv_heads, head_dim), (cols, kv_heads, value_dim)
    return [
        torch.randn(batch, *shape, generator=generator, dtype=torch.float64).to(dtype)
        for shape in (*shapes, (rows, 4, value_dim))
    ]


def expected(seen: Tensor, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    """out, lse [B,H,S], dq, dk and dv by the definition, where q is; every query sees a key.

    Head by head, so that several tests have room on a GPU.

    Args: seen: [S,T]. For the lengths that a GPU gets, one core would take half a minute.
    """
    seen = seen.to(q.device)
    shared, scale = q.shape[2] // k.shape[2], q.shape[3] ** -0.5
    wide = [x.double() for x in (q, k, v)]
    (dq, dk, dv), lse = map(torch.zeros_like, wide), wide[0].new_empty(q.shape[:3]).mT
    out = torch.zeros(dout.shape, dtype=torch.float64, device=q.device)
    for entry, head in product(range(q.shape[0]), range(q.shape[2])):
        own, of_keys = (entry, slice(None), head), (entry, slice(None), head // shared)
        places = own, of_keys, of_keys
        inputs = [x[at].requires_grad_() for x, at in zip(wide, places, strict=True)]
        scores = (inputs[0] @ inputs[1].t() * scale).masked_fill(~seen, -torch.inf)
        made = scores.softmax(-1) @ inputs[2]
        gradients = torch.autograd.grad(made, inputs, dout[own].double())
        out[own], lse[entry, head] = made.detach(), scores.detach().logsumexp(-1)
        for total, at, x in zip((dq, dk, dv), places, gradients, strict=True):
            total[at] += x
    return [out, lse, dq, dk, dv]


def assert_close(found, wanted, bound: float) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    errors = {
        name: relative_error(got, want)
        for name, got, want in zip(names, found, wanted, strict=True)
    }
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize(("name", "device", "dims"), by_dims(GPU_KERNELS, *DIMS, (40, 40)))
def test_sequences_of_different_lengths(
    name: str,
    device: torch.device,
    dims: tuple[int, int],
    kv_heads: int,
    causal: bool,
    batch: int,
) -> None:
    """60 of 1 to 300 queries and as many keys and more; single ones among them."""
    kernel, dtype, bound = kernel_for(name, device, kv_heads, *dims)
    random, longest = Random(0), 300 if device == GPU else 12
    lengths = [(1, 1), (1, longest), (longest, longest)]
    for _ in range(57):
        first, second = (random.randint(1, longest) for _ in "ab")
        lengths.append((min(first, second), max(first, second)) if causal else (first, second))
    if causal and not kernel.rectangular_causal:
        lengths = [(rows, rows) for rows, _ in lengths]
    random.shuffle(lengths)
    rows, cols = ([0, *torch.tensor(x).cumsum(0).tolist()] for x in zip(*lengths, strict=True))
    seen = torch.zeros(rows[-1], cols[-1], dtype=torch.bool)
    for index, (n, m) in enumerate(lengths):
        part = torch.ones(n, m, dtype=torch.bool)
        a, b = rows[index], cols[index]
        seen[a : a + n, b : b + m] = part.tril(m - n) if causal else part
    q, k, v, dout = tensors(rows[-1], cols[-1], kv_heads, dims, dtype, batch)
    q, k, v, dout = (x.to(device) for x in (q, k, v, dout))
    wanted = expected(seen, q, k, v, dout)
    packing, settings = Packing.adjacent(rows, cols), {"causal": causal}
    settings["scale"] = dims[0] ** -0.5
    out, lse = forward_of(kernel, q, k, v, packing=packing, **settings)
    for statistics in (Statistics(lse, out=out), Statistics(lse, delta=delta_of(dout, out))):
        gradients = backward_of(kernel, dout, q, k, v, statistics, packing=packing, **settings)
        assert_close((out, lse, *gradients), wanted, bound)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.parametrize(("name", "device", "dims"), by_dims(GPU_KERNELS[:1], *DIMS))
def test_sequences_with_gaps(
    name: str, device: torch.device, given: str, dims: tuple[int, int], kv_heads: int, causal: bool
) -> None:
    """50 with queries, or keys, or both, or none left out after them; two entries of a batch."""
    kernel, dtype, bound = kernel_for(name, device, kv_heads, *dims)
    random, longest = Random(2), 300 if device == GPU else 9
    sides: tuple[list[slice], list[slice]] = ([], [])
    starts = [0, 0]
    for _ in range(50):
        lengths = sorted(random.randint(1, longest) for _ in "ab")
        for side, length in enumerate(lengths):
            sides[side].append(slice(starts[side], starts[side] + length))
            starts[side] += length + random.choice([0, random.randint(1, longest)])
    packing = Packing.of(*sides)
    rows, cols = sides[0][-1].stop, sides[1][-1].stop
    seen = torch.zeros(rows, cols, dtype=torch.bool)
    for mine, theirs in zip(*sides, strict=True):
        n, m = mine.stop - mine.start, theirs.stop - theirs.start
        part = torch.ones(n, m, dtype=torch.bool)
        seen[mine, theirs] = part.tril(m - n) if causal else part
    used, used_keys = seen.any(1), seen.any(0)
    assert not used.all()
    assert not used_keys.all()
    q, k, v, dout = (x.to(device) for x in tensors(rows, cols, kv_heads, dims, dtype, 2))
    used, used_keys = used.to(device), used_keys.to(device)
    out, lse, dq, dk, dv = expected(seen.to(device)[used], q[:, used], k, v, dout[:, used])
    wanted = out, lse, dq, dk[:, used_keys], dv[:, used_keys]
    settings = {"scale": dims[0] ** -0.5, "causal": causal}
    out, lse = forward_of(kernel, q, k, v, packing=packing, **settings)
    # As merged: what is left out is not read.
    out = out.masked_fill(~used[:, None, None], 0.0)
    lse = lse.masked_fill(~used, 0.0)
    statistics = Statistics(lse, out=out)
    if given == "delta":
        statistics = Statistics(lse, delta=delta_of(dout, out))
    dq, dk, dv = backward_of(kernel, dout, q, k, v, statistics, packing=packing, **settings)
    found = out[:, used], lse[:, :, used], dq[:, used], dk[:, used_keys], dv[:, used_keys]
    assert_close(found, wanted, bound)


def random_tiles(random: Random, size: int, blocks: int, *, rectangular: bool) -> list[Tile]:
    """Of a block of blocks * size queries and as many keys, no pair in two of them."""
    found = []

    def tile(q: slice, kv: slice, *, causal: bool, reverse: bool = False) -> None:
        found.append(Tile(q, kv, q.stop - q.start, kv.stop - kv.start, causal, reverse))

    for row in range(blocks):
        start = row * size
        q = slice(start + random.randint(0, 2), start + size - random.randint(0, 2))
        length = q.stop - q.start
        # Some keys before, which other tiles see as well; all of the own block or a part of them.
        for col in range(row):
            if random.random() < 0.4:
                first = col * size + random.randint(0, 3)
                tile(q, slice(first, col * size + size), causal=False)
        kind = random.choice(["square", "rectangle", "both"])
        if kind == "rectangle" and rectangular:
            tile(q, slice(start, q.stop), causal=True)
        else:
            tile(q, slice(q.start, q.stop), causal=True)
        if kind == "both" and row + 1 < blocks:
            # The lower edge of a window: the first query sees all of them, the last one key.
            tile(q, slice(start + size, start + size + length), causal=True, reverse=True)
    random.shuffle(found)
    return found


@pytest.mark.parametrize("gaps", [False, True], ids=["copied", "gaps"])
@pytest.mark.parametrize("given", ["out", "delta"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(("name", "device"), [ON_CPU, *ON_GPUS])
def test_tiles_of_all_kinds(
    name: str,
    device: torch.device,
    kv_heads: int,
    batch: int,
    given: str,
    gaps: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows and columns that are copied together, taken twice, reversed, or lie between others:
    merged and summed.
    """
    kernel, dtype, bound = kernel_for(name, device, kv_heads, 64, 64)
    if gaps and not kernel.gaps:
        pytest.skip(f"{name} takes no sequences with gaps")
    monkeypatch.setattr(type(kernel), "gaps", gaps)
    size, blocks = (100, 16) if device == GPU else (7, 12)
    rows = size * blocks
    tiles = random_tiles(Random(1), size, blocks, rectangular=kernel.rectangular_causal)
    seen = torch.zeros(rows, rows, dtype=torch.int64)
    for tile in tiles:
        pairs = torch.ones(tile.rows, tile.cols, dtype=torch.int64)
        pairs = pairs.tril(tile.cols - tile.rows) if tile.causal else pairs
        seen[tile.q, tile.kv] += pairs.flip(0, 1) if tile.reverse else pairs
    assert seen.max() == 1
    table = table_of(tiles)
    calls = packed_calls(table, 4, gaps)
    assert gaps == any(isinstance(call, Batch) and call.apart for call in calls)
    assert len(calls) < len(tiles) / 4
    packed = [call for call in calls if isinstance(call, Batch)]
    assert sum(len(call.rows) for call in packed) > 2 * len(packed)
    assert any(len(call.sides(CPU)[1].given) > 1 for call in packed)
    mine, theirs = seen.any(1), seen.any(0)
    assert not mine.all()
    mine, theirs = mine.to(device), theirs.to(device)
    inputs = tensors(rows, rows, kv_heads, (64, 64), dtype, batch)
    q, k, v, dout = (x.to(device) for x in inputs)
    wanted = expected(seen.to(device)[mine].bool(), q[:, mine], k, v, dout[:, mine])
    call = Call(Shape.of(q, k, v, rows), Mask(window=5), 64**-0.5, kernel)
    assert call.packed
    total = Accumulator(q, 64)
    attend_block(total, q, k, v, packed_calls(table, 4, kernel.gaps, forward=True), call)
    out, lse = total.result()
    assert (out[:, ~mine] == 0).all()
    assert (lse[:, :, ~mine] == -torch.inf).all()
    # What no query sees: the lse of real calls is finite.
    statistics = Statistics(lse.masked_fill(lse == -torch.inf, 0.0), out=out)
    if given == "delta":
        statistics = Statistics(statistics.lse, delta=delta_of(dout, out))
    sums = Gradients(GradientSum(q), GradientSum(k, v))
    differentiate_block(sums, dout, q, k, v, statistics, packed_calls(table, 4, kernel.gaps), call)
    (dq,), (dk, dv) = sums.dq.result(), sums.dkv.result()
    assert (dq[:, ~mine] == 0).all()
    assert (dk[:, ~theirs] == 0).all()
    assert_close((out[:, mine], lse[:, :, mine], dq[:, mine], dk, dv), wanted, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["flash4", "torch_flash", "flash2"])
def test_a_new_mask_does_not_make_the_host_wait_and_a_graph_wants_one_that_ran(name: str) -> None:
    kernel, dtype, _ = kernel_for(name, GPU, 2, 64, 64)
    tiles = random_tiles(Random(3), 100, 8, rectangular=kernel.rectangular_causal)
    inputs = (x.to(GPU) for x in tensors(800, 800, 2, (64, 64), dtype, 1))
    q, k, v, _ = inputs
    call = Call(Shape.of(q, k, v, 800), Mask(window=5), 64**-0.5, kernel)

    def attend(table: TileTable) -> tuple[Tensor, Tensor]:
        total = Accumulator(q, 64)
        calls = packed_calls(table, 4, kernel.gaps, forward=True)
        attend_block(total, q, k, v, calls, call)
        return total.result()

    want = attend(table_of(tiles))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = attend(table_of(tiles))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    graph, table = torch.cuda.CUDAGraph(), table_of(tiles)
    with (
        pytest.raises(ContextParallelError, match="run the same call once before it"),
        torch.cuda.graph(graph, capture_error_mode="thread_local"),
    ):
        attend(table)
    graph, captured = capture(lambda: attend(table), torch.cuda.synchronize)
    for x in captured:
        x.zero_()
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(captured, want, strict=True))
