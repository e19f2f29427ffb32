"""Short causal convolutions over a split sequence.

B batch, S local tokens, C channels, W width: an output reads its token and the W - 1 before it in
its document. Those of a run's first outputs may be on other ranks: they are sent, once.
"""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp_plugin.core.autograd.function import differentiable_once
from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.communication.record import PHASE, holding
from megatron_cp_plugin.core.linear.states import Route
from megatron_cp_plugin.core.ranges import Numbers, Ranges, Span, expanded


@dataclass(frozen=True)
class _Halo:
    """What a rank needs for the first outputs of its runs and documents.

    Attributes:
        received: (rank, how many tokens) that come, one rank's after another's.
        sent: (local tokens, rank) that go to others.
        rows: local tokens whose outputs are made again.
        taps: for each of them and each tap, from the oldest, which token of the local ones, of
            those that came, and of a zero, one after another [rows*W].
    """

    received: tuple[tuple[int, int], ...]
    sent: tuple[tuple[Tensor, int], ...]
    rows: Tensor
    taps: Tensor


@kept_on_device(maxsize=64)  # every layer has the same
def _halo(route: Route, rank: int, width: int, device: torch.device) -> _Halo:
    documents = np.array([0, *route.documents])
    pieces = [
        (start, owner, before)
        for owner, runs in enumerate(route.runs)
        for (start, stop), before in zip(
            runs, accumulate((stop - start for start, stop in runs), initial=0), strict=False
        )
        if start < stop
    ]
    starts, owners, befores = np.array(sorted(pieces), np.int64).reshape(-1, 3).T

    def begin(places: Numbers) -> Numbers:
        """Where their documents begin."""
        found: Numbers = documents[documents.searchsorted(places, side="right") - 1]
        return found

    def held(places: Numbers) -> tuple[Numbers, Numbers]:
        """The ranks that hold places, and the local tokens that they are there."""
        piece = starts.searchsorted(places, side="right") - 1
        return owners[piece], befores[piece] + places - starts[piece]

    def needed(one: int) -> Numbers:
        """Places before the runs of a rank that their first outputs read."""
        own = starts[owners == one]
        first = np.maximum(begin(own), own - width + 1)
        run, number = expanded(own - first)
        return np.unique(first[run] + number)

    def on_device(numbers: Numbers) -> Tensor:
        return uploaded(torch.from_numpy(numbers), device)

    others = [other for other in range(len(route.runs)) if other != rank]
    places = needed(rank)
    holders, _ = held(places)
    came = np.concatenate([places[holders == other] for other in others] or [places[:0]])
    received = [(other, int((holders == other).sum())) for other in others]
    sent = []
    for other in others:
        holder, local = held(needed(other))
        if (holder == rank).any():
            sent.append((on_device(local[holder == rank]), other))
    own = Ranges.of([Span(*run) for run in route.runs[rank]])
    place = own.elements
    document = begin(place)
    rows = np.flatnonzero(
        place - np.maximum(document, np.repeat(own.start, own.lengths)) < width - 1
    )
    taps = place[rows, None] + np.arange(1 - width, 1)
    holder, local = held(np.maximum(taps, 0))
    known = np.append(came, route.length)
    order = np.argsort(known)
    foreign = len(place) + order[known.searchsorted(taps, sorter=order)]
    found = np.where(holder == rank, local, foreign)
    found[taps < document[rows, None]] = len(place) + len(came)
    return _Halo(
        tuple(pair for pair in received if pair[1]),
        tuple(sent),
        on_device(rows),
        on_device(found.ravel()),
    )


class _Fetch(torch.autograd.Function):
    """The tokens that come from other ranks; gradients go back to them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, halo: _Halo, channel: Communicator) -> Tensor:
        ctx.halo, ctx.channel, ctx.tokens = halo, channel, x.shape[1]
        sends = [(x.index_select(1, local), rank) for local, rank in halo.sent]
        receives = [
            (x.new_empty(x.shape[0], count, x.shape[2]), rank) for rank, count in halo.received
        ]
        with holding(PHASE, "forward"):
            channel.exchange(sends, receives).wait()
        return torch.cat([x[:, :0], *(part for part, _ in receives)], 1)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dcame: Tensor) -> tuple[Tensor, None, None]:
        halo: _Halo = ctx.halo
        parts = dcame.split([count for _, count in halo.received], 1)
        gone = zip(parts, halo.received, strict=False)  # without any, there is an empty part
        sends = [(part.contiguous(), rank) for part, (rank, _) in gone]
        receives = [
            (dcame.new_empty(dcame.shape[0], len(local), dcame.shape[2]), rank)
            for local, rank in halo.sent
        ]
        with holding(PHASE, "backward"):
            ctx.channel.exchange(sends, receives).wait()
        dx = dcame.new_zeros(dcame.shape[0], ctx.tokens, dcame.shape[2])
        for (local, _), (part, _) in zip(halo.sent, receives, strict=True):
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

    Returns: [B,S,C] in x's dtype.
    """
    width = weight.shape[1]
    halo = _halo(route, rank, width, x.device)
    came = _Fetch.apply(x, halo, channel)
    out = functional.conv1d(
        x.transpose(1, 2), weight.unsqueeze(1), bias, padding=width - 1, groups=x.shape[2]
    )
    out = out[..., : x.shape[1]].transpose(1, 2)
    if not len(halo.rows):
        return out
    known = torch.cat((x, came, x.new_zeros(x.shape[0], 1, x.shape[2])), 1)
    read = known.index_select(1, halo.taps).unflatten(1, (-1, width))
    again = torch.einsum("brwc,cw->brc", read, weight.to(x.dtype))
    if bias is not None:
        again = again + bias.to(x.dtype)
    return out.index_copy(1, halo.rows.long(), again.to(out.dtype))
