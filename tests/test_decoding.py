"""Decoding with a cache that is split among ranks, against attention over all tokens at once."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import unshard
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import layout_of
from tests.oracle import naive_attention, relative_error

PROMPT, DECODED, DIM, VALUE_DIM = 43, 40, 8, 12
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (3, 1)}


def inputs(heads: str, batch: int = 2, tokens: int = PROMPT + DECODED) -> list[Tensor]:
    """q, k, v of a whole sequence."""
    n_heads, kv_heads = HEADS[heads]
    generator = torch.Generator().manual_seed(0)
    sizes = ((n_heads, DIM), (kv_heads, DIM), (kv_heads, VALUE_DIM))
    shapes = ((batch, tokens, *size) for size in sizes)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("algo", "heads", "window"),
    [
        ("zigzag", "GQA", None),
        ("ring", "MQA", 9),
        ("zigzag", "MHA", 60),
        ("attention2d-no", "GQA", 25),
    ],
)
def test_a_prompt_and_40_tokens(algo: str, heads: str, window: int | None, size: int) -> None:
    """The shards of the prompt's keys and values are the cache; ranks take turns to add a token."""
    q, k, v = inputs(heads)
    expected = naive_attention(q, k, v, causal=True, scale=DIM**-0.5, window=window)

    def body(topology: Topology) -> tuple[Tensor, Tensor, int]:
        context = cp.Context(algo=algo, group=topology, seq_len=PROMPT)
        mine = [context.shard(x[:, :PROMPT]) for x in (q, k, v)]
        prompt = context.attention(*mine, window=window)
        length = mine[1].shape[1]
        room = length + -(-DECODED // size)
        caches = [x.new_full((2, room, *x.shape[2:]), torch.nan) for x in mine[1:]]
        positions = torch.full((room,), -1)
        positions[:length] = context.positions()
        for cache, x in zip(caches, mine[1:], strict=True):
            cache[:, :length] = x
        outs = []
        for step, at in enumerate(range(PROMPT, PROMPT + DECODED)):
            if step % size == topology.rank:
                for cache, x in zip(caches, (k, v), strict=True):
                    cache[:, length] = x[:, at]
                positions[length] = at
                length += 1
            near: dict[str, Any] = {"position": at, "positions": positions} if window else {}
            new = q[:, at : at + 1]
            outs.append(
                cp.decode_attention(new, *caches, length, group=topology, window=window, **near)
            )
        return prompt, torch.cat(outs, 1), length

    results = run_virtual(size, body)
    layout = layout_of(algo, {})
    prompt = unshard([found[0] for found in results], 1, layout)
    assert relative_error(prompt, expected[:, :PROMPT]) < 1e-10
    for _, decoded, _ in results:
        assert relative_error(decoded, expected[:, PROMPT:]) < 1e-10
    assert sum(length for *_, length in results) == PROMPT + DECODED


@pytest.mark.parametrize("window", [None, 5])
def test_sequences_of_unequal_lengths(window: int | None) -> None:
    """Each has its own length on each rank, none on some."""
    q, k, v = inputs("GQA", batch=3, tokens=20)
    ends = (20, 7, 1)
    size = 3

    def body(topology: Topology) -> Tensor:
        owned = [list(range(end))[topology.rank :: size] for end in ends]
        room = max(map(len, owned))
        caches = [torch.full((3, room, *x.shape[2:]), torch.nan, dtype=x.dtype) for x in (k, v)]
        for row, tokens in enumerate(owned):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[row, : len(tokens)] = x[row, tokens]
        positions = torch.zeros(3, room, dtype=torch.int64)
        for row, tokens in enumerate(owned):
            positions[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
        new = torch.stack([q[row, end - 1 : end] for row, end in enumerate(ends)])
        near: dict[str, Any] = {}
        if window:
            near = {"position": [end - 1 for end in ends], "positions": positions}
        lengths = torch.tensor([len(tokens) for tokens in owned])
        return cp.decode_attention(new, *caches, lengths, group=topology, window=window, **near)

    for out in run_virtual(size, body):
        for row, end in enumerate(ends):
            whole = [x[row : row + 1, :end] for x in (q, k, v)]
            expected = naive_attention(*whole, causal=True, scale=DIM**-0.5, window=window)
            assert relative_error(out[row : row + 1], expected[:, -1:]) < 1e-10


def test_what_is_sent_does_not_grow_with_the_cache() -> None:
    q, k, v = (x.float() for x in inputs("GQA", tokens=32))

    def body(topology: Topology) -> Tensor:
        return cp.decode_attention(q[:, :1], k, v, 32, group=topology)

    with cp.record_communication() as log:
        outs = run_virtual(4, body)
    assert log.bytes(rank=1) == 3 * 2 * 4 * (VALUE_DIM + 1) * 4
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert outs[0].dtype == torch.float32


def test_bfloat16_is_merged_in_float32() -> None:
    q, k, v = (x.bfloat16() for x in inputs("GQA", tokens=40))
    expected = naive_attention(*(x.double() for x in (q, k, v)), causal=True, scale=DIM**-0.5)

    def body(topology: Topology) -> Tensor:
        mine = slice(10 * topology.rank, 10 * topology.rank + 10)
        return cp.decode_attention(q[:, -1:], k[:, mine], v[:, mine], 10, group=topology)

    for out in run_virtual(4, body):
        assert out.dtype == torch.bfloat16
        assert relative_error(out, expected[:, -1:]) < 5e-3


def test_an_empty_cache_gives_zeros() -> None:
    q, k, v = inputs("GQA", tokens=4)
    outs = run_virtual(2, lambda topology: cp.decode_attention(q[:, :1], k, v, 0, group=topology))
    assert all(torch.equal(out, torch.zeros(2, 1, 4, VALUE_DIM).double()) for out in outs)


NEAR = {"window": 2, "position": 9, "positions": [0, 1, 2, 3]}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"lengths": 5}, "lengths needs 0 to 4, the room of the cache, got [5, 5]"),
        ({"lengths": [1]}, "lengths needs one number, or 2, got [1]"),
        ({"tokens": 2}, "takes one new token [B,1,H,D] and caches [B,C,G,D], got q [2, 2, 4, 8]"),
        ({"heads": 3}, "a number of KV heads that divides its heads, got q [2, 1, 3, 8]"),
        ({"dtype": torch.float32}, "one dtype on one device, got torch.float32 on cpu"),
        *(
            ({"scale": scale}, f"attention needs a scale above 0, got {scale}")
            for scale in (0.0, -1.0, float("nan"))
        ),
        ({"window": 3}, "pass position= and positions="),
        (NEAR | {"positions": [0, 1]}, "positions needs those of all 4 entries, got [2]"),
        (NEAR | {"position": 2}, "position needs to be 3 or more, that of the last entry"),
        (NEAR | {"positions": [3, 2, 1, 0]}, "positions to ascend, got 9 after [3, 2, 1, 0]"),
        (NEAR | {"positions": ["a"] * 4}, "positions needs whole numbers, got ['a', 'a', 'a', 'a"),
    ],
    ids=str,
)
def test_what_is_refused(change: dict[str, Any], words: str) -> None:
    q, k, v = inputs("GQA", tokens=4)
    given = dict(change)
    q = q[:, : given.pop("tokens", 1), : given.pop("heads", 4)].to(given.pop("dtype", q.dtype))
    lengths = given.pop("lengths", 4)
    with pytest.raises(ContextParallelError, match=re.escape(words)):
        cp.decode_attention(q, k, v, lengths, **given)


def test_ranks_with_other_calls_are_refused() -> None:
    q, k, v = inputs("GQA", tokens=4)

    def body(topology: Topology) -> str:
        new = q[:, :1] if topology.rank else q[:1, :1]
        with pytest.raises(ContextParallelError) as caught:
            cp.decode_attention(new, k[: len(new)], v[: len(new)], 4, group=topology)
        return str(caught.value)

    first, second = run_virtual(2, body)
    assert first == second
    assert "all ranks need one shape of q, got (1, 1, 4, 8) on rank 0" in first


@pytest.mark.gpu
@pytest.mark.parametrize("heads", HEADS)
def test_one_query_row_by_the_kernels_of_a_gpu(heads: str) -> None:
    """Head dims that they serve; entries of unequal lengths, and a part of the cache."""
    n_heads, kv_heads = HEADS[heads]
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(2, 1000, n, 128, device="cuda", generator=generator).bfloat16()
        for n in (n_heads, kv_heads, kv_heads)
    )
    wide = [x.double() for x in (q, k, v)]
    expected = naive_attention(*wide, causal=True, scale=128**-0.5)
    ends = (1000, 333)
    new = torch.stack([q[row, end - 1 : end] for row, end in enumerate(ends)])
    out = cp.decode_attention(new, k, v, ends)
    for row, end in enumerate(ends):
        assert relative_error(out[row : row + 1], expected[row : row + 1, end - 1 : end]) < 5e-3
