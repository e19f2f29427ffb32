"""Peak memory as predicted, against what ranks that exchange real tensors need.

Every rank is a thread with a counter of its own. What only the test needs is not counted: messages
on their way, and the arithmetic of the kernel, of merges and of sums, which on a GPU is one pass.
"""

import sys
import weakref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import megatron_cp_plugin as cp
from megatron_cp_plugin.core import partial
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.blocks import assembly
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.comm import Pending
from megatron_cp_plugin.core.communication import virtual
from megatron_cp_plugin.core.execution.executor import Executor
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.masks.tile_batches import Batch
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.planner import call_memory
from megatron_cp_plugin.planner.call_memory import Peak, peak_bytes, peak_of
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.planner.layer import Layer
from megatron_cp_plugin.registry import create
from tests.peer_world import VirtualPeerCommunicator, run_virtual

SHAPE = Shape(1, 100, 12, 4, 16, element_bytes=4)

RUNS = [(2, "causal"), (3, "causal"), (4, "causal"), (3, "window"), (4, "documents")]
VARIANTS = [
    ("zigzag", {"backward": "query", "chunks": 2}),
    ("ring", {"route": "straight", "gradients": "model"}),
    ("distflash", {"last_step": "owner", "chunks": 2}),
    ("allgather", {"chunks": 4}),
    ("attention2d", {"variant": "no", "chunks": 2}),
    ("attention2d", {"variant": "overlap"}),
    ("ulysses", {"chunks": 4, "layout": "zigzag"}),
    ("usp", {"ulysses": 1, "keep": "local"}),
]
CASES = [
    *(
        (algo, {}, *run)
        for turn, algo in enumerate(cp.available("softmax"))
        for number, run in enumerate(RUNS)
        if (turn + number) % 2
    ),
    *((algo, options, 4, "causal") for algo, options in VARIANTS),
    ("zigzag", {"layout": "documents"}, 3, "documents"),
    # 12 heads that are filled up to 15.
    ("ulysses", {}, 5, "causal"),
    ("ulysses", {"keep": "local"}, 5, "causal"),
]
MASKS = {"causal": Mask(), "window": Mask(window=20), "documents": Mask(documents=(30, 41, 70))}


class Counter(TorchDispatchMode):
    """Attributes: most: bytes, at a time, of storages that were made while the mode was on."""

    def __init__(self) -> None:
        super().__init__()
        self._living: weakref.WeakValueDictionary[int, torch.UntypedStorage]
        self._living = weakref.WeakValueDictionary()
        self.most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                storage = x.untyped_storage()
                self._living[storage._cdata] = storage
        self.most = max(self.most, self.now)
        return result

    @property
    def now(self) -> int:
        return sum(storage.nbytes() for storage in tuple(self._living.values()))

    def excluding(self, known: list[Tensor]) -> int:
        """Bytes of those among the living that are older than the mode: views of them were made."""
        return sum(x.untyped_storage().nbytes() for x in known if self.has(x))

    def has(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._living


class WithWorkspace(Reference):
    """The reference, with a workspace."""

    def workspace(self, call, statistics) -> int:
        each = 3 * call.q.numel() + call.k.numel() * (2 if call.causal else 1)
        sequences = 1 if call.packing is None else len(call.packing)
        return 0 if statistics is None else each + 100 * (sequences - 1)

    def forward(self, call):
        with _disable_current_modes():
            results = Reference().forward(call)
        return results if call.into is not None else tuple(counted(x) for x in results)

    def backward(self, call, dout, statistics):
        with _disable_current_modes():
            gradients = Reference().backward(call, dout, statistics)
        if call.into is None:
            gradients = tuple(counted(x) for x in gradients)
        torch.empty(self.workspace(call, statistics), dtype=torch.uint8)
        return gradients


def counted(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype).copy_(x)


def uncounted(function):
    def call(*args, **kwargs):
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return function(*args, **kwargs)
        with _disable_current_modes():
            result = function(*args, **kwargs)
        return counted(result) if isinstance(result, Tensor) else result

    return call


def without_modes(function):
    def call(*args):
        with _disable_current_modes():
            return function(*args)

    return call


@pytest.fixture
def ranks_as_on_gpus(monkeypatch) -> None:
    """Operations take memory when they are posted, and hold what they send until they are done."""
    channel = virtual._VirtualCommunicator
    post = channel._exchange

    def exchange(self, sends, receives):
        held = [sends]
        return post(self, sends, receives).then(lambda _: held.clear())

    def one_to_all(self, x, out):
        sends, receives = ([(t[rank], rank) for rank in range(self.size)] for t in (x, out))
        return self._exchange(sends, receives).then(lambda _: out)

    def all_to_all(self, tensors):
        each = [one_to_all(self, x, torch.empty_like(x)) for x in tensors]
        return Pending(lambda: [one.wait() for one in each])

    def all_gather(self, x):
        return one_to_all(self, x.expand(self.size, *x.shape), x.new_empty((self.size, *x.shape)))

    def reduce_scatter(self, x):
        out, held, ranks = torch.empty_like(x[0]), [x], range(self.size)
        with _disable_current_modes():
            parts = torch.empty_like(x)
            sends, receives = ([(t[rank], rank) for rank in ranks] for t in (x, parts))
            under_way = post(self, sends, receives)

        def finish():
            with _disable_current_modes():
                under_way.wait()
                torch.sum(parts, 0, out=out)
            held.clear()
            return out

        return Pending(finish)

    for function in (exchange, all_to_all, all_gather, reduce_scatter):
        monkeypatch.setattr(channel, f"_{function.__name__}", function)
    monkeypatch.setattr(virtual.VirtualWorld, "post", uncounted(virtual.VirtualWorld.post))
    peer = VirtualPeerCommunicator
    monkeypatch.setattr(peer, "_post", uncounted(peer._post))
    # Indices of rows, which all layers share.
    monkeypatch.setattr(Batch, "sides", without_modes(Batch.sides))
    for name in ("_joined_rows", "_split", "_numbers", "_members_of"):
        monkeypatch.setattr(assembly, name, without_modes(getattr(assembly, name)))
    for name in ("merge_into", "_sum_rows", "_merge_rows", "_add_rows", "delta_of"):
        real = getattr(partial, name)
        for module in tuple(sys.modules.values()):
            if getattr(module, name, None) is real:
                monkeypatch.setattr(module, name, uncounted(real))


@pytest.mark.parametrize(("algo", "options", "size", "mask"), CASES, ids=str)
@pytest.mark.usefixtures("ranks_as_on_gpus")
def test_prediction_is_what_ranks_need(algo: str, options: dict, size: int, mask: str) -> None:
    seen, kernel = MASKS[mask], WithWorkspace()
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, SHAPE.seq_len, heads, 16, generator=generator) for heads in (12, 4, 4, 12)
    ]
    peer_access = size != 3

    def measured(topology) -> Peak:
        algorithm = create(algo, topology, options)
        layout = algorithm.layout.for_documents(seen.documents)
        q, k, v, dout = (shard(x, 1, layout, topology.rank, size) for x in whole)
        compiled = Compiled(algorithm, Call(SHAPE, seen, 0.25, kernel))
        with Counter() as counter:
            for _ in range(2):
                counter.most = 0
                out, lse, saved = compiled.forward.attend(q, k, v)
                del lse
                forward, between, counter.most = counter.most, counter.now, 0
                gradients = compiled.backward().differentiate(dout, saved)
                own = counter.excluding([q, k, v, dout])
                del out, saved, gradients
        peer = topology.peer_bytes
        return Peak(forward - own, counter.most - own, between - own - peer, peer)

    found = run_virtual(size, measured, peer_access=peer_access)
    for rank, peak in enumerate(found):
        predicted = peak_of(
            create(algo, DryRunGroup(rank, (0,) * size, peer_access=peer_access), options),
            SHAPE,
            seen,
            kernel,
        )
        assert tuple(predicted) == pytest.approx(tuple(peak), rel=0.001), rank


def test_gradients_for_own_tokens_take_no_memory_beside_the_first_kernel() -> None:
    class Large(WithWorkspace):
        def workspace(self, call, statistics) -> int:
            return 0 if statistics is None else 10**9

    ulysses = create("ulysses", DryRunGroup(0, (0,) * 4, peer_access=False), {"chunks": 1})
    peak = peak_of(ulysses, SHAPE, Mask(), Large())
    tokens, heads, kv_heads, dim = 25, 12, 4, 16
    q, kv, row = (4 * tokens * x for x in (heads * dim, kv_heads * dim, heads))
    # q, k, v and lse of three heads of all tokens, and the own out.
    assert peak.saved == 2 * q + 2 * kv + row
    # dout and delta, which came, delta as it was sent, and the kernel's dq, dk and dv.
    assert peak.backward == 10**9 + peak.saved + q + 2 * row + q + 2 * kv


def test_gradients_of_keys_take_memory_after_the_last_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, real = [], Executor._gradients

    class Noted(WithWorkspace):
        def workspace(self, call, statistics) -> int:
            events.extend([] if statistics is None else ["kernel"])
            return 0

    noted = lambda self, *given: events.append(given[-1].name) or real(self, *given)  # noqa: E731
    monkeypatch.setattr(Executor, "_gradients", noted)
    ulysses = create("ulysses", DryRunGroup(0, (0,) * 4, peer_access=False), {"chunks": 3})
    peak_of(ulysses, SHAPE, Mask(), Noted())
    assert events == 2 * ["kernel", "QUERIES", "kernel", "kernel", "KEYS"]


# ---- many ranks, and linear attention

GIB = 2**30


@pytest.mark.parametrize(
    ("algo", "options", "kv_heads"),
    [
        ("zigzag", {}, 8),
        ("zigzag", {"route": "double"}, 8),
        ("zigzag", {"backward": "query"}, 32),
        ("distflash", {}, 8),
        ("allgather", {}, 1),
        ("attention2d", {}, 8),
        pytest.param("attention2d", {"variant": "overlap", "rows": 4}, 8, marks=pytest.mark.slow),
        ("usp", {"ulysses": 8}, 8),
        ("ulysses", {}, 8),
    ],
)
def test_many_ranks_have_what_few_say(
    algo: str, options: dict[str, object], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the plan of all 64, followed by the last of them; 32 count as many here."""
    monkeypatch.setattr(call_memory, "_ALL", 32)
    size = 64
    nodes = tuple(rank // 4 for rank in range(size))
    shape = Shape(1, size * 1024, 32, kv_heads, 64)
    layer = Layer(algo, tuple(options.items()), shape, Mask(), nodes, peer_access=False)
    of_all, _ = layer.pinned()
    exact = peak_of(of_all.on(size - 1), shape, Mask(), kernel_called("flash4"))
    found = peak_bytes(layer, "flash4")
    assert found == pytest.approx(max(exact.forward, exact.backward), rel=0.02)


@pytest.mark.slow
def test_a_thousand_ranks_have_a_peak() -> None:
    nodes = tuple(rank // 8 for rank in range(1024))
    shape = Shape(1, 2**20, 32, 8, 128)
    documents = Mask(documents=random_documents(2**20, 65536))
    for algo, mask in (("zigzag", Mask(window=4096)), ("zigzag", documents), ("distflash", Mask())):
        found = peak_bytes(Layer(algo, (), shape, mask, nodes, peer_access=False), "flash4")
        # Out in bfloat16 and its sum in float32 at least; less than ten times that.
        least = 1024 * 32 * 128 * 6
        assert least < found < 10 * least


@pytest.mark.parametrize(
    ("tokens", "algo", "options", "measured"),
    [
        (2**19, "lasp", {}, 3.57),
        (2**19, "lasp2", {}, 3.57),
        (2**21, "lasp2", {}, 14.07),
        (2**21, "lasp2", {"layout": "zigzag"}, 14.07),
    ],
)
def test_linear_attention_has_what_was_measured(
    tokens: int, algo: str, options: dict[str, object], measured: float
) -> None:
    """On 4 H200 with 16 heads of 128 (docs/benchmarks.md), without decay."""
    shape = LinearShape(1, tokens, 16, 128, 128)
    layer = Layer(algo, tuple(options.items()), shape, Mask(), (0,) * 4, peer_access=False)
    found = peak_bytes(layer, "flash4")
    assert found / GIB == pytest.approx(measured, rel=0.01)


def test_gathered_states_grow_with_ranks_and_passed_ones_do_not() -> None:
    def gib(algo: str, size: int) -> float:
        shape, nodes = LinearShape(1, size * 4096, 16, 128, 128), (0,) * size
        layer = Layer(algo, (), shape, Mask(), nodes, peer_access=False)
        return peak_bytes(layer, "fla") / GIB

    assert gib("lasp", 512) == gib("lasp", 8)
    assert gib("lasp2", 1024) == gib("lasp2", 512) + 512 * 2**20 / GIB  # of 1 MiB each


@pytest.mark.parametrize("algo", ["allgather", "attention2d"])
def test_long_documents_take_little_more_memory_than_one_sequence(algo: str) -> None:
    """What came is one kernel call, which takes workspace for all heads that it has."""
    shape, size = Shape(1, 131_072, 32, 8, 128), 4
    peaks = [
        peak_bytes(Layer(algo, (), shape, Mask(documents=cuts), (0,) * size, True), "flash4")
        for cuts in ((), (8_192, 110_592))
    ]
    assert peaks[1] < 1.1 * peaks[0]
