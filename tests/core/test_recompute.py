"""Attention under activation checkpointing: run once, the same bits, nothing mixed up or left."""

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.autograd import recompute
from megatron_cp_plugin.core.autograd.function import attend
from megatron_cp_plugin.core.autograd.host_memory import HostMemory
from megatron_cp_plugin.core.autograd.recompute import Checkpointed, computed_once
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.linear.function import attend_linearly
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.linear import resolve_linear
from megatron_cp_plugin.registry import create, create_linear
from tests.peer_world import run_virtual

HEADS, KV_HEADS, HEAD_DIM, TOKENS, BATCH = 4, 2, 8, 12, 2
WIDTH = HEADS * HEAD_DIM

Run = Callable[[Callable[..., Any], Tensor], Tensor]
checkpointed = partial(Checkpointed, memory=HostMemory())


def no_checkpoint(function: Callable[..., Any], x: Tensor) -> Tensor:
    return function(x)


def reentrant(function: Callable[..., Any], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=True)


def plain(function: Callable[..., Any], x: Tensor) -> Tensor:
    return checkpoint(function, x, use_reentrant=False)


def megatron(function: Callable[..., Any], x: Tensor) -> Tensor:
    from megatron.core import tensor_parallel

    return tensor_parallel.checkpoint(function, False, x)


CHECKPOINTS = {"torch reentrant": reentrant, "torch": plain, "megatron": megatron}


@pytest.fixture(autouse=True)
def _no_cuda_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron's checkpoint saves the CUDA generator's state; nothing here is random."""
    from megatron.core.tensor_parallel import random

    monkeypatch.setattr(random, "_get_all_rng_states", lambda: (None,))
    monkeypatch.setattr(random, "_set_all_rng_states", lambda *states: None)


class Layer(nn.Module):
    """A residual layer of attention, with sinks or without; counts how often attention runs."""

    def __init__(
        self, algorithm: Algorithm, seq_len: int = TOKENS, seed: int = 0, *, sinks: bool = False
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def weight(rows: int, cols: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, cols, generator=generator) / cols**0.5)

        self.qkv = weight((HEADS + 2 * KV_HEADS) * HEAD_DIM, WIDTH)
        self.out = weight(WIDTH, WIDTH)
        self.sink = nn.Parameter(torch.linspace(-3, 6, HEADS)) if sinks else None
        self.seq_len = seq_len
        self.runs = 0
        self._algorithm = [algorithm]

    def forward(self, x: Tensor) -> Tensor:
        mixed = nn.functional.linear(x, self.qkv).unflatten(-1, (-1, HEAD_DIM))
        q, k, v = mixed.split([HEADS, KV_HEADS, KV_HEADS], 2)
        with self._counted():
            out = attend(
                q,
                k,
                v,
                algorithm=self._algorithm[0],
                seq_len=self.seq_len,
                kernel_for=partial(resolve, "auto"),
                sink=self.sink,
                recompute_key=self,
            )
        return x + torch.tanh(nn.functional.linear(out.flatten(2), self.out))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        algorithm = self._algorithm[0]
        compiled = algorithm.compiled

        def counted(*args: Any) -> Any:
            found = compiled(*args)

            def attend(*tensors: Tensor) -> Any:
                self.runs += 1
                return found.forward.attend(*tensors)

            forward = SimpleNamespace(attend=attend)
            return SimpleNamespace(forward=forward, backward=found.backward, backwards={})

        algorithm.compiled = counted  # type: ignore[assignment]
        try:
            yield
        finally:
            algorithm.compiled = compiled  # type: ignore[assignment]


def alone(algo: str = "ring") -> Algorithm:
    return create(algo, VirtualWorld(1).topology(0), {})


def batch(seed: int) -> Tensor:
    x = torch.randn(BATCH, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed))
    return x.requires_grad_()


def gradients(layers: list[Layer], x: Tensor) -> list[Tensor]:
    """Takes the gradients out of x and the layers."""
    tensors = [x, *(p for layer in layers for p in layer.parameters())]
    found = [t.grad.clone() for t in tensors if t.grad is not None]
    assert len(found) == len(tensors)
    for tensor in tensors:
        tensor.grad = None
    return found


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("peer_access", [True, False], ids=["peer", "group"])
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_one_round_of_forward_communication(algo: str, peer_access: bool) -> None:
    size = 4

    def body(topology: Topology, run: Run) -> tuple[list[Tensor], int]:
        algorithm = create(algo, topology, {})
        layer = Layer(algorithm, seq_len=size * TOKENS, sinks=True)
        x = batch(topology.rank)
        run(checkpointed(layer.forward), x).square().sum().backward()
        return gradients([layer], x), layer.runs

    with cp.record_communication() as once:
        want = run_virtual(
            size, lambda topology: body(topology, no_checkpoint), peer_access=peer_access
        )
    with cp.record_communication() as log:
        got = run_virtual(size, lambda topology: body(topology, reentrant), peer_access=peer_access)
    assert [runs for _, runs in got] == [1] * size
    assert all(same(g, w) for (g, _), (w, _) in zip(got, want, strict=True))
    assert once.bytes(phase="forward") > 0
    assert log.bytes(phase="forward") == once.bytes(phase="forward")
    assert log.messages(phase="backward") == once.messages(phase="backward")


@pytest.mark.parametrize("algo", ["ring", "zigzag", "distflash"])
def test_what_is_kept_is_out_and_lse(algo: str) -> None:
    function = checkpointed(Layer(alone(algo)).forward)
    y = reentrant(function, batch(0))
    ((kept,),) = function._kept.values()
    storages = {
        x.untyped_storage().data_ptr(): x.numel() * x.element_size()
        for x in kept.results
        if isinstance(x, Tensor)
    }
    assert sum(storages.values()) == 4 * BATCH * TOKENS * HEADS * (HEAD_DIM + 1)
    y.sum().backward()
    assert not any(function._kept.values())


SCHEDULES = {
    "accumulation": "F0 B0 F1 B1 F2 B2 F3 B3",
    "1F1B": "F0 F1 F2 B0 F3 B1 B2 B3",
    "all forward, then all backward": "F0 F1 F2 F3 B0 B1 B2 B3",
    "last in, first out": "F0 F1 F2 F3 B3 B2 B1 B0",
    "with evaluation between": "F0 E F1 E B1 E F2 B0 F3 E B3 B2",
}


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_micro_batches_in_any_order(schedule: str, run: Run) -> None:
    """Two layers in one checkpoint, one of them twice, as a pipeline stage would run them."""
    layers = [Layer(alone(), seed=1), Layer(alone("distflash"), seed=2)]
    stack = [layers[0], layers[1], layers[0]]

    def forward(x: Tensor) -> Tensor:
        for layer in stack:
            x = layer(x)
        return x

    want = {seed: expected_of(forward, layers, seed) for seed in range(4)}
    under_way: dict[int, tuple[Tensor, Tensor]] = {}
    for action in schedule.split():
        if action == "E":
            before = [layer.runs for layer in layers]
            with torch.no_grad():
                forward(batch(99))
                run(checkpointed(forward), batch(98))
            for layer, runs in zip(layers, before, strict=True):
                layer.runs = runs
            continue
        seed = int(action[1])
        if action[0] == "F":
            x = batch(seed)
            under_way[seed] = x, run(checkpointed(forward), x)
            continue
        x, y = under_way.pop(seed)
        y.square().sum().backward()
        assert same(gradients(layers, x), want[seed])
    assert [layer.runs for layer in layers] == [8, 4]


def expected_of(
    forward: Callable[[Tensor], Tensor], layers: list[Layer], seed: int
) -> list[Tensor]:
    x = batch(seed)
    forward(x).square().sum().backward()
    for layer in layers:
        layer.runs = 0
    return gradients(layers, x)


@pytest.mark.parametrize("run", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_an_exception_in_either_run_leaves_nothing_behind(run: Run) -> None:
    layer = Layer(alone())
    want = expected_of(layer, [layer], 1)
    fails_in = 1
    runs = 0

    def forward(x: Tensor) -> Tensor:
        nonlocal runs
        runs += 1
        if runs == fails_in == 2:
            raise RuntimeError("out of memory")
        y = layer(x)
        if runs == fails_in == 1:
            raise RuntimeError("out of memory")
        return y

    with pytest.raises(RuntimeError, match="out of memory"):
        run(checkpointed(forward), batch(1))
    assert recompute._running.get() == ()
    fails_in, runs = 2, 0
    with pytest.raises(RuntimeError, match="out of memory"):
        run(checkpointed(forward), batch(1)).sum().backward()
    assert recompute._running.get() == ()
    fails_in, runs = 0, 0
    layer.runs = 0
    layer.zero_grad()
    x = batch(1)
    run(checkpointed(forward), x).square().sum().backward()
    assert layer.runs == 1
    assert same(gradients([layer], x), want)


def test_the_checkpoint_of_a_checkpoint() -> None:
    layer = Layer(alone())
    want = expected_of(layer, [layer], 1)
    x = batch(1)

    def outer(x: Tensor) -> Tensor:
        return reentrant(checkpointed(layer.forward), x)

    reentrant(checkpointed(outer), x).square().sum().backward()
    assert layer.runs == 1
    assert same(gradients([layer], x), want)


@pytest.mark.parametrize("run", [reentrant, megatron])
def test_a_second_backward_of_one_graph_computes_again(run: Run) -> None:
    layer = Layer(alone())
    want = expected_of(layer, [layer], 1)
    x = batch(1)
    loss = run(checkpointed(layer.forward), x).square().sum()
    loss.backward(retain_graph=True)
    assert same(gradients([layer], x), want)
    loss.backward()
    assert same(gradients([layer], x), want)
    assert layer.runs == 2


def test_nothing_is_left_after_many_steps() -> None:
    """Without help of the garbage collector: all is freed with the graph."""
    layer = Layer(alone())
    functions: weakref.WeakSet[Checkpointed] = weakref.WeakSet()
    outs: list[weakref.ref[Tensor]] = []
    gc.collect()
    gc.disable()
    try:
        for step in range(300):
            function = checkpointed(layer.forward)
            functions.add(function)
            y = megatron(function, batch(step))
            ((kept,),) = function._kept.values()
            outs += [weakref.ref(x) for x in kept.results if isinstance(x, Tensor)]
            del kept, function
            if step % 3:
                y.sum().backward()
            del y
            assert len(functions) == 0
            assert not any(out() is not None for out in outs)
    finally:
        gc.enable()


def test_without_a_checkpoint_or_a_site_everything_runs() -> None:
    calls = []

    def compute() -> tuple[Tensor, ...]:
        calls.append(1)
        return (torch.ones(1),)

    for recompute_key in (None, "here"):
        computed_once(recompute_key, (), compute)
    assert len(calls) == 2
    function = checkpointed(lambda: computed_once(None, (), compute))
    function(), function()
    assert len(calls) == 4


def test_other_shapes_in_the_second_run_are_refused() -> None:
    sizes = iter((3, 4))

    def forward() -> None:
        x = torch.ones(next(sizes))
        computed_once("here", (x,), lambda: (x + 1,))

    function = checkpointed(forward)
    function()
    with pytest.raises(ContextParallelError, match="set recompute_attention to true"):
        function()


@pytest.mark.parametrize("algo", cp.available("linear"))
def test_linear_attention_runs_once(algo: str) -> None:
    def body(topology: Topology, run: Run) -> list[Tensor]:
        algorithm = create_linear(algo, topology, {})
        decay = Decay.of(0.9, HEADS)

        def forward(x: Tensor) -> Tensor:
            q, k, v = x.unflatten(-1, (HEADS, HEAD_DIM)).sin(), x.cos(), x.tanh()
            k, v = (y.unflatten(-1, (HEADS, HEAD_DIM)) for y in (k, v))
            out, _ = attend_linearly(
                q,
                k,
                v,
                algorithm=algorithm,
                seq_len=2 * TOKENS,
                decay=decay,
                kernel_for=partial(resolve_linear, "auto"),
                recompute_key="layer",
            )
            return out.tanh()

        x = batch(topology.rank)
        run(checkpointed(forward), x).square().sum().backward()
        return gradients([], x)

    with cp.record_communication() as once:
        want = run_virtual(2, lambda topology: body(topology, no_checkpoint))
    with cp.record_communication() as log:
        got = run_virtual(2, lambda topology: body(topology, reentrant), peer_access=True)
    assert all(same(g, w) for g, w in zip(got, want, strict=True))
    assert log.bytes(phase="forward") == once.bytes(phase="forward") > 0
    assert log.bytes(phase="backward") == once.bytes(phase="backward")
