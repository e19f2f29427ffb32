"""The autograd Function of softmax attention: dtypes, gradients that are wanted, saved tensors."""

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.virtual import run_virtual

RANKS = 4


@pytest.mark.parametrize("backward_inside", [False, True], ids=["outside", "inside"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("algo", ["zigzag", "allgather", "lasp2"])
def test_autocast_is_casting_by_hand(algo, dtype, backward_inside):
    """As torch's own attention: inputs in autocast's dtype, everything within as it is written."""

    def whole():
        generator = torch.Generator().manual_seed(0)
        return [torch.randn(1, 64, 2, 8, generator=generator) for _ in range(3)]

    def call(topology, inputs):
        parts = [cp.shard(x, 1, algo=algo, group=topology) for x in inputs]
        if algo == "lasp2":
            return cp.linear_attention(*parts, algo=algo, group=topology, decay=0.9)
        return cp.attention(*parts, algo=algo, group=topology, kernel="reference")

    def body(topology, autocast):
        inputs = [x.requires_grad_() for x in whole()]
        with torch.autocast("cpu", dtype, enabled=autocast):
            out = call(topology, inputs if autocast else [x.to(dtype) for x in inputs])
            if backward_inside:
                out.float().square().sum().backward()
        if not backward_inside:
            out.float().square().sum().backward()
        return (out.detach(), *(x.grad for x in inputs))

    by_hand = run_virtual(2, lambda topology: body(topology, False))
    got = run_virtual(2, lambda topology: body(topology, True))
    for results, expected in zip(got, by_hand, strict=True):
        for x, y in zip(results, expected, strict=True):
            assert x.dtype == y.dtype
            assert torch.equal(x, y)


def test_autocast_leaves_float64():
    x = torch.randn(1, 8, 2, 8, dtype=torch.float64)
    expected = cp.attention(x, x, x, algo="zigzag", kernel="reference")
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cp.attention(x, x, x, algo="zigzag", kernel="reference"), expected)


WANTED = {"q": (True, False, False), "k": (False, True, False), "kv": (False, True, True)}


# Which algorithms send less then; where keys and values travel, gradients of queries do not.
SAVING = {
    "q": {"allgather", "attention2d", "distflash", "ring", "ulysses", "usp", "zigzag"},
    "k": {"attention2d", "distflash", "ulysses", "usp"},
    "kv": {"attention2d", "distflash", "ulysses", "usp"},
}


def sent_in_backward(algo, wanted, **options):
    """Gradients that are wanted, and the bytes that rank 1 sends in the backward for them."""
    generator = torch.Generator().manual_seed(0)
    whole = [
        torch.randn(1, 64, heads, 8, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2, 4)
    ]

    def body(topology):
        *inputs, dout = (cp.shard(x, 1, algo=algo, group=topology) for x in whole)
        for x, want in zip(inputs, wanted, strict=True):
            x.requires_grad_(want)
        cp.attention(*inputs, algo=algo, group=topology, **options).backward(dout)
        return [x.grad for x in inputs]

    with cp.record_communication() as log:
        results = run_virtual(RANKS, body)
    return results, log.bytes(rank=1, phase="backward")


@pytest.mark.parametrize("only", WANTED)
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_gradients_of_some_inputs(algo, only):
    wanted = WANTED[only]
    everything, all_bytes = sent_in_backward(algo, (True, True, True))
    results, sent = sent_in_backward(algo, wanted)
    for got, expected in zip(results, everything, strict=True):
        for x, y, want in zip(got, expected, wanted, strict=True):
            assert (x is not None) == want
            if want:
                torch.testing.assert_close(x, y, rtol=0, atol=1e-12)
    assert sent <= all_bytes
    if algo in SAVING["q"]:  # all of this package
        assert (sent < all_bytes) == (algo in SAVING[only])


TOKENS, HEADS, KV_HEADS, DIM, WIDE = 16, 4, 2, 8, 8


QUERY, KV = TOKENS * HEADS * DIM * WIDE, 2 * TOKENS * KV_HEADS * DIM * WIDE


ROWS = 2 * TOKENS * HEADS * WIDE  # lse and delta


@pytest.mark.parametrize(
    ("options", "only", "hop"),
    [
        ({"backward": "kv"}, "q", KV),
        ({"backward": "kv"}, "kv", 2 * KV),
        ({"backward": "query"}, "q", 3 * QUERY + ROWS),
        ({"backward": "query"}, "kv", 2 * QUERY + ROWS),
        # The fewest bytes: queries only where the gradients of keys and values make up for it.
        ({"backward": "auto"}, "q", KV),
        ({"backward": "auto"}, "kv", 2 * KV),
        ({"backward": "auto", "chunks": 2}, "q", KV),
    ],
    ids=str,
)
def test_gradients_that_nobody_wants_do_not_go_round_the_ring(options, only, hop):
    _, sent = sent_in_backward("zigzag", WANTED[only], **options)
    assert sent == (RANKS - 1) * hop


def test_only_sinks_are_trained():
    x = torch.randn(1, 64, 2, 8, dtype=torch.float64)

    def body(topology, wanted):
        own = cp.shard(x, 1, algo="zigzag", group=topology).requires_grad_(wanted)
        sink = torch.zeros(2, dtype=torch.float64, requires_grad=True)
        cp.attention(own, own, own, algo="zigzag", group=topology, sink=sink).sum().backward()
        return sink.grad

    expected = run_virtual(2, lambda topology: body(topology, True))
    with cp.record_communication() as log:
        got = run_virtual(2, lambda topology: body(topology, False))
    assert all(torch.equal(x, y) for x, y in zip(got, expected, strict=True))
    assert not log.bytes(phase="backward")


def test_a_sink_of_minus_infinity_is_none():
    """Also for queries that see no key, whose softmax has nothing then."""
    q, k, v, dout = torch.randn(4, 2, 24, 4, 8, dtype=torch.float64)
    sink = torch.full((4,), -torch.inf, dtype=torch.float64)
    results = []
    for given in (None, sink.requires_grad_()):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        spans = [(0, 6, 0, 6, "causal")]
        out = cp.attention(*leaves, algo="zigzag", spans=spans, sink=given)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout, retain_graph=True)))
    assert all(map(torch.equal, *results))
    (dsink,) = torch.autograd.grad(out, sink, dout)
    assert torch.equal(dsink, torch.zeros_like(sink))


@pytest.mark.parametrize("algo", cp.available())
def test_saved_tensors_with_other_strides(algo):
    """What a hook gives back has the same elements, and may have them elsewhere."""
    x = torch.randn(2, 12, 6, 4, dtype=torch.float64)

    def reversed_in_memory(y):
        order = range(y.dim())[::-1]
        return y.permute(*order).contiguous().permute(*order)

    def body(topology, unpack):
        own = cp.shard(x, 1, algo=algo, group=topology).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, unpack):
            if algo in cp.available("linear"):
                out = cp.linear_attention(own, own, own, algo=algo, group=topology, decay=0.9)
            else:
                out = cp.attention(own, own, own, algo=algo, group=topology)
        return torch.autograd.grad(out.square().sum(), own)[0]

    want = run_virtual(3, lambda topology: body(topology, torch.clone))
    got = run_virtual(3, lambda topology: body(topology, reversed_in_memory))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)
