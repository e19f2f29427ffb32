"""What checkpoints keep in host memory: the same bits, few buffers, nothing left."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from megatron_cp_plugin.core.autograd import host_memory
from megatron_cp_plugin.core.autograd.host_memory import HostMemory, Moved, host_has_room
from megatron_cp_plugin.core.autograd.recompute import computed_once
from megatron_cp_plugin.integration.installer import checkpoint

LAYERS, TOKENS, WIDTH = 4, 32, 16


class Short(HostMemory):
    """Of a GPU that has no room for a hidden state; on a CPU too."""

    def _is_short(self, x: Tensor) -> bool:
        return x.numel() >= TOKENS * WIDTH


class Layer(nn.Module):
    """Something in place of attention, computed once, between two weights."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH)
        self.runs = 0

    def forward(self, x: Tensor, angles: Tensor) -> Tensor:
        return x + torch.tanh(Product.apply(x @ self.weight, angles, self))


class Product(torch.autograd.Function):
    """sin(x) * angles; what its backward needs of the forward is computed once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, angles: Tensor, layer: Layer) -> Tensor:
        def compute() -> tuple[Tensor, Tensor]:
            layer.runs += 1
            out = x.sin() * angles
            return out, out

        out, kept = computed_once(layer, (x, angles), compute)
        assert out is kept
        ctx.save_for_backward(x, angles)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor, None, None]:
        x, angles = ctx.saved_tensors
        return dout * x.cos() * angles, None, None


def reentrant(function: Callable[..., Any], *args: Any) -> Any:
    return torch_checkpoint(function, *args, use_reentrant=True, preserve_rng_state=False)


def step(
    layers: list[Layer], memory: HostMemory | None, device: str = "cpu", tokens: int = TOKENS
) -> tuple[list[Tensor], int]:
    """Gradients, and the bytes that the forward leaves allocated on a GPU."""
    before = torch.cuda.memory_allocated() if device == "cuda" else 0
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, WIDTH, generator=generator).to(device).requires_grad_()
    angles = torch.randn(tokens, WIDTH, generator=generator).to(device)
    y = x * 2
    for layer in layers:
        y = layer(y, angles) if memory is None else checkpoint(memory, reentrant, layer, y, angles)
    if device == "cuda":
        torch.cuda.synchronize()
    held = torch.cuda.memory_allocated() - before if device == "cuda" else 0
    y.square().sum().backward()
    parameters = [x, *(layer.weight for layer in layers)]
    found = [p.grad for p in parameters if p.grad is not None]
    assert len(found) == len(parameters)
    for layer in layers:
        layer.weight.grad = None
    return found, held


def test_the_same_bits_and_the_same_buffers_at_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_PIECE_BYTES", 1000)  # a hidden state is two and a bit
    layers = [Layer(seed) for seed in range(LAYERS)]
    want, _ = step(layers, None)
    memory = Short()
    for layer in layers:
        layer.runs = 0
    for number in range(1, 4):
        got, _ = step(layers, memory)
        assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))
        assert [layer.runs for layer in layers] == [number] * LAYERS
        assert len({piece.data_ptr() for piece in memory._pieces}) == len(memory._pieces)
        # Of each layer its input and its result, at once; angles stay where they are.
        assert len(memory._pieces) == 3 * 2 * LAYERS


def test_what_was_kept_last_comes_back_ahead() -> None:
    memory = Short()
    kept = [memory.keep(torch.full((TOKENS, WIDTH), float(number))) for number in range(5)]
    moved = [x for x in kept if isinstance(x, Moved)]
    assert len(moved) == 5
    assert [x._back is not None for x in moved] == [False] * 5
    assert bool((moved[4].tensor() == 4).all())
    assert [x._back is not None for x in moved] == [False, False, True, True, False]
    assert bool((moved[3].tensor() == 3).all())
    assert [x._back is not None for x in moved] == [False, True, True, False, False]
    assert bool((moved[3].tensor() == 3).all())  # once more, for a second backward


def test_a_second_backward_has_the_inputs_again() -> None:
    layer, memory = Layer(0), Short()
    x = torch.randn(TOKENS, WIDTH).requires_grad_()
    loss = checkpoint(memory, reentrant, layer, x * 2, torch.ones(TOKENS, WIDTH)).square().sum()
    found = []
    for _ in range(2):
        loss.backward(retain_graph=True)
        assert x.grad is not None
        found.append(x.grad.clone())
        x.grad.zero_()
    assert torch.equal(*found)


def test_a_host_without_room_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Short()
    x = torch.ones(TOKENS, WIDTH)
    monkeypatch.setattr(host_memory, "host_has_room", lambda size: False)
    assert memory.keep(x) is x
    monkeypatch.setattr(host_memory, "host_has_room", lambda size: True)
    moved = memory.keep(x)
    assert isinstance(moved, Moved)
    del moved
    monkeypatch.setattr(host_memory, "host_has_room", lambda size: False)
    assert isinstance(memory.keep(x), Moved)  # into the same buffer


def test_tensors_of_a_cpu_stay() -> None:
    x = torch.ones(host_memory.LEAST_BYTES)
    assert HostMemory().keep(x) is x


def test_a_quarter_of_the_host_stays_free(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/meminfo": "MemTotal: 100 kB\nMemAvailable:  60 kB\n"}
    monkeypatch.setattr(Path, "exists", lambda path: str(path) in texts)
    monkeypatch.setattr(Path, "read_text", lambda path: texts[str(path)])
    pages = {"SC_PHYS_PAGES": 100, "SC_PAGE_SIZE": 1024}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert host_has_room(35 << 10)
    assert not host_has_room(36 << 10)
    texts["/sys/fs/cgroup/memory.max"] = "max\n"
    assert host_has_room(35 << 10)
    texts |= {"/sys/fs/cgroup/memory.max": str(40 << 10)}
    texts |= {"/sys/fs/cgroup/memory.current": str(20 << 10)}
    assert host_has_room(10 << 10)
    assert not host_has_room(11 << 10)


@pytest.mark.gpu
def test_a_gpu_that_is_short_of_memory_holds_less(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = host_memory.LEAST_BYTES // (4 * WIDTH)
    layers = [Layer(seed).cuda() for seed in range(LAYERS)]
    for _ in range(2):  # cuBLAS allocates in the first
        want, without = step(layers, HostMemory(), "cuda", tokens)
    _, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(host_memory, "ROOM", 2 * total // host_memory.LEAST_BYTES)
    memory = HostMemory()
    for _ in range(3):
        got, held = step(layers, memory, "cuda", tokens)
        assert all(torch.equal(mine, other) for mine, other in zip(got, want, strict=True))
        assert without - held == 2 * LAYERS * host_memory.LEAST_BYTES
    assert len(memory._pieces) == 2 * LAYERS


@pytest.mark.gpu
def test_copies_overlap_with_what_comes_after(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copy of a block that is used again at once reads what was there before."""
    memory = HostMemory()
    _, total = torch.cuda.mem_get_info()
    monkeypatch.setattr(host_memory, "ROOM", 2 * total // host_memory.LEAST_BYTES)
    keep = partial(torch.full, (host_memory.LEAST_BYTES,), dtype=torch.uint8, device="cuda")
    moved = [memory.keep(keep(number)) for number in range(20)]
    for number, x in reversed(list(enumerate(moved))):
        assert isinstance(x, Moved)
        assert bool((x.tensor() == number).all())
