"""Latents on the wire, against K and V made of all latents by hand."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.autograd.latents import Wire, attend_latents
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import CommunicationLog
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import Layout, shard, unshard
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels import resolver
from megatron_cp_plugin.registry import create, layout_of
from tests.oracle import naive_attention, relative_error
from tests.plan_check import traffic_of

BATCH, HEADS, LATENT, ROTARY, PLAIN, VALUE = 2, 4, 10, 3, 5, 4
WIRE = Wire(HEADS, LATENT, ROTARY, PLAIN + ROTARY, VALUE)
NAMES = ("out", "dq", "dlatent", "dweight")
ALGOS: dict[str, Mapping[str, object]] = {
    "zigzag": {"chunks": 1, "backward": "kv"},
    "ring": {"chunks": 1, "backward": "query"},
    "distflash": {},
    "allgather": {"chunks": 1},
    "attention2d": {"chunks": 1},
}


@dataclass(frozen=True)
class Problem:
    """Inputs [B,N,...], and what is expected of them."""

    q: Tensor
    latent: Tensor
    weight: Tensor
    dout: Tensor
    expected: tuple[Tensor, ...]


def problem(tokens: int, **mask: Any) -> Problem:
    draw = torch.Generator().manual_seed(tokens)
    sizes = ((BATCH, tokens, HEADS, PLAIN + ROTARY), (BATCH, tokens, LATENT + ROTARY))
    sizes += ((HEADS * (PLAIN + VALUE), LATENT),)
    q, latent, weight = (
        torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes
    )
    dout = torch.randn(BATCH, tokens, HEADS, VALUE, generator=draw, dtype=torch.float64)
    made = torch.einsum("btl,hml->bthm", latent[..., :LATENT], weight.view(HEADS, -1, LATENT))
    rotary = torch.stack([latent[..., LATENT:]] * HEADS, dim=2)
    k, v = torch.cat((made[..., :PLAIN], rotary), -1), made[..., PLAIN:]
    out = naive_attention(q, k, v, scale=0.3, **({"causal": True} | mask))
    expected = (out.detach(), *torch.autograd.grad(out, (q, latent, weight), dout))
    return Problem(q.detach(), latent.detach(), weight.detach(), dout, expected)


def run(
    size: int, algo: str, options: Mapping[str, object], given: Problem, **mask: Any
) -> tuple[list[tuple[Tensor, ...]], CommunicationLog]:
    """(out, dq, dlatent, dweight) of every rank, and what they sent."""
    layout = layout_of(algo, dict(options))
    tokens = given.q.shape[1]

    def body(topology: Topology) -> tuple[Tensor, ...]:
        q, latent, dout = (
            shard(x, 1, layout, topology.rank, size) for x in (given.q, given.latent, given.dout)
        )
        weight = given.weight.clone()
        wanted = [x.requires_grad_() for x in (q, latent, weight)]
        out = attend_latents(
            *wanted,
            algorithm=create(algo, topology, dict(options)),
            value_dim=VALUE,
            seq_len=tokens,
            kernel_for=resolver("reference"),
            mask=Mask(**mask),
            scale=0.3,
        )
        return (out.detach(), *torch.autograd.grad(out, wanted, dout))

    with cp.record_communication() as log:
        found = run_virtual(size, body)
    return found, log


def assert_matches(found: list[tuple[Tensor, ...]], given: Problem, layout: Layout) -> None:
    for index, (name, want) in enumerate(zip(NAMES, given.expected, strict=True)):
        parts = [each[index] for each in found]
        got = sum(parts) if name == "dweight" else unshard(parts, 1, layout)
        error = relative_error(got, want)
        assert error <= 1e-10, f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("algo", ALGOS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
def test_equals_unsplit_attention_and_sends_latents_only(size: int, algo: str) -> None:
    options, given = ALGOS[algo], problem(6 * size)
    found, log = run(size, algo, options, given)
    assert_matches(found, given, layout_of(algo, dict(options)))
    # As many bytes as K and V of the heads that hold a latent.
    assert (WIRE.kv_heads, LATENT + ROTARY) == (2, 13)
    q = given.q
    k, v = WIRE.packed(given.latent)
    shape = Shape.of(q, k, v, q.shape[1])
    assert shape.kv_width == 2 * (PLAIN + ROTARY + VALUE)

    def planned(topology: Topology) -> tuple[int, int]:
        of_rank = traffic_of(create(algo, topology, dict(options)), shape, Mask(), topology.rank)
        return of_rank.forward_bytes, of_rank.backward_bytes

    for rank, (forward, backward) in enumerate(run_virtual(size, planned)):
        assert log.bytes(rank=rank, phase="forward") == forward
        assert log.bytes(rank=rank, phase="backward") == backward
    if algo == "zigzag":  # once around, with the rest of the ring in the backward
        hop = BATCH * 6 * shape.kv_width * 8
        assert log.bytes(phase="forward") == size * (size - 1) * hop


@pytest.mark.parametrize(
    "mask",
    [{"documents": (3, 4, 11)}, {"window": 4}, {"documents": (5,), "causal": False}],
    ids=str,
)
@pytest.mark.parametrize("algo", ["zigzag", "distflash", "allgather"])
def test_masks(algo: str, mask: dict[str, Any]) -> None:
    written = {"window": mask.get("window"), "causal": mask.get("causal", True)}
    if "documents" in mask:
        written["cu_seqlens"] = (0, *mask["documents"], 18)
    given = problem(18, **written)
    found, _ = run(3, algo, ALGOS[algo], given, **mask)
    assert_matches(found, given, layout_of(algo, dict(ALGOS[algo])))


def test_only_some_gradients_are_wanted() -> None:
    """A frozen projection, and latents that need none."""
    given = problem(8)

    def body(topology: Topology) -> list[tuple[Tensor | None, ...]]:
        found = []
        for wanted in ((True, False, False), (False, True, False), (False, False, True)):
            inputs = [given.q, given.latent, given.weight]
            inputs = [
                x.clone().requires_grad_(want) for x, want in zip(inputs, wanted, strict=True)
            ]
            algorithm = create("ring", topology, {"chunks": 1})
            settings: dict[str, Any] = {"algorithm": algorithm, "value_dim": VALUE, "seq_len": 8}
            settings |= {"mask": Mask(), "scale": 0.3, "kernel_for": resolver("reference")}
            out = attend_latents(*inputs, **settings)
            out.backward(given.dout)
            found.append(tuple(x.grad for x in inputs))
        return found

    (found,) = run_virtual(1, body)
    for index, gradients in enumerate(found):
        for number, got in enumerate(gradients):
            if number == index:
                assert relative_error(got, given.expected[1 + index]) <= 1e-10
            else:
                assert got is None


def test_heads_that_hold_a_latent() -> None:
    """DeepSeek-V3's: 640 numbers in place of 40,960."""
    wire = Wire(128, 512, 64, 192, 128)
    assert wire.kv_heads * (192 + 128) == 640
    assert Wire(3, 8, 1, 2, 2).kv_heads == 3
    assert Wire(6, 15, 1, 2, 2).kv_heads == 6  # four would hold one, and do not divide six
    with pytest.raises(ConfigError, match=r"latents of 8 \+ 5 numbers need fewer than K and V"):
        _ = Wire(3, 8, 5, 2, 2).kv_heads


@pytest.mark.parametrize(
    ("algo", "options", "message"),
    [
        ("ulysses", {}, "ulysses exchanges heads, of which latents have none: use ring, zigzag"),
        ("usp", {}, "usp exchanges heads"),
        ("allgather", {}, "got allgather with chunks=0: use chunks=1, or send K and V"),
        ("zigzag", {}, "got zigzag with chunks=0"),
    ],
)
def test_algorithms_that_cannot_are_refused(
    algo: str, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(2, algo, options, problem(8))
