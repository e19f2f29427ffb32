"""Short causal convolutions over a split sequence.

B batch, S local tokens, C channels, W width: an output reads its token and the W - 1 before it in
its document. Those of a run's first outputs may be on other ranks: they are sent, once.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp_plugin.core.autograd.function import differentiable_once
from megatron_cp_plugin.core.comm import CommunicatingIn, Communicator
from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.route import Route


@dataclass(frozen=True, eq=False)
class _Halo:
    """What a rank needs for the first outputs of its runs and documents.

    Attributes:
        received: (rank, how many tokens) that come, one rank's after another's.
        sent: (rank, local tokens) that go to others.
        rows: local tokens whose outputs are made again.
        taps: for each of them and each tap, from the oldest, which token of the local ones, of
            those that came, and of a zero, one after another [rows,W].
    """

    received: tuple[tuple[int, int], ...]
    sent: tuple[tuple[int, tuple[int, ...]], ...]
    rows: tuple[int, ...]
    taps: tuple[tuple[int, ...], ...]

    @staticmethod
    @lru_cache(maxsize=64)  # every layer has the same
    def of(route: Route, rank: int, width: int) -> "_Halo":
        """Of a rank."""
        size = len(route.runs)
        needed = [_needed(route, one, width) for one in range(size)]
        owned = _owners(route, {place for one in needed for place in one})
        others = [one for one in range(size) if one != rank]
        received: list[tuple[int, int]] = []
        came: dict[int, int] = {}
        for owner in others:
            places = [place for place in needed[rank] if owned[place][0] == owner]
            for place in places:
                came[place] = len(came)
            if places:
                received.append((owner, len(places)))
        sent = []
        for target in others:
            mine = tuple(owned[p][1] for p in needed[target] if owned[p][0] == rank)
            if mine:
                sent.append((target, mine))
        tokens = sum(stop - start for start, stop in route.runs[rank])
        rows, taps, before = [], [], 0
        for start, stop in route.runs[rank]:
            for first, last, document in _outputs(route, start, stop, width):
                for place in range(first, last):
                    rows.append(before + place - start)
                    taps.append(
                        tuple(
                            tokens + len(came)
                            if p < document
                            else before + p - start
                            if p >= start
                            else tokens + came[p]
                            if p in came
                            else owned[p][1]
                            for p in range(place - width + 1, place + 1)
                        )
                    )
            before += stop - start
        return _Halo(tuple(received), tuple(sent), tuple(rows), tuple(taps))


def _outputs(route: Route, start: int, stop: int, width: int) -> list[tuple[int, int, int]]:
    """Outputs of a run that need other tokens than the local ones before them.

    Returns: first, last + 1, and where their document begins.
    """
    first, end = bisect_right(route.documents, start), bisect_left(route.documents, stop)
    inside = route.documents[first:end]
    begins = [(start, route.documents[first - 1] if first else 0), *((at, at) for at in inside)]
    ends = [*inside, stop]
    return [
        (at, min(at + width - 1, end), document)
        for (at, document), end in zip(begins, ends, strict=True)
    ]


def _needed(route: Route, rank: int, width: int) -> list[int]:
    """Positions before the runs of a rank that their first outputs read, each once."""
    found: dict[int, None] = {}
    for start, stop in route.runs[rank]:
        if start < stop:
            (_, _, document), *_ = _outputs(route, start, stop, width)
            found |= dict.fromkeys(range(max(document, start - width + 1), start))
    return list(found)


def _owners(route: Route, places: Iterable[int]) -> dict[int, tuple[int, int]]:
    """The rank that holds each position, and its local token there."""
    pieces = []
    for rank, runs in enumerate(route.runs):
        before = 0
        for start, stop in runs:
            if start < stop:
                pieces.append((start, rank, before))
            before += stop - start
    pieces.sort()
    starts = [start for start, *_ in pieces]
    found = {}
    for place in places:
        start, rank, before = pieces[bisect_right(starts, place) - 1]
        found[place] = rank, before + place - start
    return found


@kept_on_device(maxsize=64)
def _indices(halo: _Halo, device: torch.device) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """rows, taps and what is sent, on a device."""
    rows, taps = (torch.tensor(x, dtype=torch.long, device="cpu") for x in (halo.rows, halo.taps))
    sent = (torch.tensor(local, dtype=torch.long, device="cpu") for _, local in halo.sent)
    return uploaded(rows, device), uploaded(taps, device), tuple(uploaded(x, device) for x in sent)


class _Fetch(torch.autograd.Function):
    """The tokens that come from other ranks; gradients go back to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, channel: Communicator) -> Tensor:
        *_, sent = _indices(halo, x.device)
        ctx.halo, ctx.channel, ctx.tokens = halo, channel, x.shape[1]
        sends = [
            (x.index_select(1, local), rank)
            for local, (rank, _) in zip(sent, halo.sent, strict=True)
        ]
        parts = [x.new_empty(x.shape[0], count, x.shape[2]) for _, count in halo.received]
        ranks = [rank for rank, _ in halo.received]
        with CommunicatingIn("forward"):
            channel.exchange(sends, list(zip(parts, ranks, strict=True))).wait()
        return torch.cat([x[:, :0], *parts], 1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dcame: Tensor) -> tuple[Tensor, None, None]:
        halo = ctx.halo
        *_, sent = _indices(halo, dcame.device)
        counts = [count for _, count in halo.received]
        gone = zip(dcame.split(counts, 1), (rank for rank, _ in halo.received), strict=True)
        sends = [(part.contiguous(), rank) for part, rank in gone if counts]
        parts = [dcame.new_empty(dcame.shape[0], len(x), dcame.shape[2]) for x in sent]
        ranks = [rank for rank, _ in halo.sent]
        with CommunicatingIn("backward"):
            ctx.channel.exchange(sends, list(zip(parts, ranks, strict=True))).wait()
        dx = dcame.new_zeros(dcame.shape[0], ctx.tokens, dcame.shape[2])
        for local, part in zip(sent, parts, strict=True):
            dx.index_add_(1, local, part)
        return dx, None, None


def short_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    route: Route,
    rank: int,
    channel: Communicator,
) -> Tensor:
    """A convolution of each channel with the W - 1 tokens before; differentiable.

    A collective operation of the ranks of `channel`: one message of up to W - 1 tokens for each run
    to the rank that holds it, B*C numbers a token, and its gradients back.

    Args:
        x: [B,S,C]: this rank's tokens.
        weight: [C,W], the last column for a token itself.
        bias: [C], or None.
        route: the runs of all ranks.
        rank: this one.
        channel: its messages.

    Returns: [B,S,C] in x's dtype.
    """
    width = weight.shape[1]
    halo = _Halo.of(route, rank, width)
    came = _Fetch.apply(x, halo, channel)
    out = _convolution(x, weight, bias)
    if not halo.rows:
        return out
    rows, taps, _ = _indices(halo, x.device)
    known = torch.cat((x, came, x.new_zeros(x.shape[0], 1, x.shape[2])), 1)
    read = known.index_select(1, taps.flatten()).unflatten(1, (-1, width))
    again = torch.einsum("brwc,cw->brc", read, weight.to(x.dtype))
    if bias is not None:
        again = again + bias.to(x.dtype)
    return out.index_copy(1, rows.long(), again.to(out.dtype))


def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    tokens, width = x.shape[1], weight.shape[1]
    out = functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[2]
    )
    return out[..., :tokens].transpose(1, 2)
