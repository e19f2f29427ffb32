"""Ring Self-Attention, a baseline of the papers: it keeps all scores of its rows.

Two rings: keys go round until a rank has the scores of its queries with all of them, then values.
Softmax comes between, so that every score must be there at once: that is what DISTFLASHATTN's
Table 3 and BurstAttention's Table 1 compare with. For comparisons only.

B batch, S local tokens, N tokens of the whole sequence, H query heads, G KV heads, D head dim, E
that of values, P ranks.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.context import Group, not_compiled, topology_for
from megatron_cp_plugin.core.agree import SameCall
from megatron_cp_plugin.core.autograd.function import check_shapes, differentiable_once
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import PHASE, holding
from megatron_cp_plugin.core.partial import accumulation_dtype


@not_compiled
def ring_self_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Group = None,
    causal: bool = True,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention over a sequence that is split into contiguous chunks of equal lengths.

    A collective operation. For the backward it keeps B * H * S * N probabilities in q's dtype, and
    computes with two to three times as many in float32 (float64 for float64). A rank sends P - 1
    times its K and V in the forward; in the backward these again, and as much of dK and dV.

    Source: Li et al., "Sequence Parallelism: Long Sequence Training from System Perspective".
    Differs: dK and dV are reduced to their owners, not to all ranks; grouped queries.

    Args:
        q: [B,S,H,D]; k: [B,S,G,D]; v: [B,S,G,E], G dividing H: this rank's shards.
        group, causal, scale: as in `attention`.

    Returns: out [B,S,H,E] in q's dtype; differentiable.
    Raises: ContextParallelError for shapes that do not fit, or that differ between ranks.
    """
    topology = topology_for(group)
    with SameCall(topology, "ring_self_attention") as made:
        check_shapes(q, k, v)
        shapes = tuple(tuple(x.shape) for x in (q, k, v))
        made.values = {
            "set of shapes": shapes,
            "dtype": q.dtype,
            "causal": causal,
            "scale": scale,
        }
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out: Tensor = _RingSelfAttention.apply(q, k, v, topology, causal, scale)
    return out


def _round(topology: Topology, name: str, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of all ranks, the own one first, and which columns of the scores each has."""
    rank, size = topology.rank, topology.size
    channel, block = topology.channel(name), x.contiguous()
    for step in range(size):
        owner = (rank - step) % size
        columns = slice(owner * x.shape[1], (owner + 1) * x.shape[1])
        if step == size - 1:
            yield columns, block
            continue
        coming = torch.empty_like(block)
        sent = channel.exchange([(block, (rank + 1) % size)], [(coming, (rank - 1) % size)])
        yield columns, block
        sent.wait()
        block = coming


class _RingSelfAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, topology: Topology, causal: bool, scale: float
    ) -> Tensor:
        wide, groups, tokens = accumulation_dtype(q.dtype), k.shape[2], q.shape[1]
        grouped = q.to(wide).unflatten(2, (groups, -1))
        shape = (q.shape[0], groups, q.shape[2] // groups, tokens, tokens * topology.size)
        p = q.new_empty(shape, dtype=wide)
        out = torch.zeros_like(grouped[..., :1]).expand(*grouped.shape[:-1], v.shape[3]).clone()
        with holding(PHASE, "forward"):
            for columns, keys in _round(topology, "keys", k):
                scores = torch.einsum("bsgnd,btgd->bgnst", grouped, keys.to(wide))
                p[..., columns] = scores * scale
            if causal:
                rows = torch.arange(tokens, device=q.device) + topology.rank * tokens
                p.masked_fill_(rows[:, None] < torch.arange(shape[-1], device=q.device), -torch.inf)
            p = p.softmax(-1)
            for columns, values in _round(topology, "values", v):
                out += torch.einsum("bgnst,btgd->bsgnd", p[..., columns], values.to(wide))
        ctx.save_for_backward(q, k, v, p.to(q.dtype))
        ctx.topology, ctx.scale = topology, scale
        return out.flatten(2, 3).to(q.dtype)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, p = ctx.saved_tensors
        topology, wide, groups = ctx.topology, accumulation_dtype(q.dtype), k.shape[2]
        grouped, dout = (x.to(wide).unflatten(2, (groups, -1)) for x in (q, dout))
        p = p.to(wide)
        ds, dq = torch.empty_like(p), torch.zeros_like(grouped)
        dk, dv = (x.new_empty((topology.size, *x.shape)) for x in (k, v))
        with holding(PHASE, "backward"):
            for columns, values in _round(topology, "values", v):
                ds[..., columns] = torch.einsum("bsgnd,btgd->bgnst", dout, values.to(wide))
                owner = columns.start // q.shape[1]
                dv[owner] = torch.einsum("bgnst,bsgnd->btgd", p[..., columns], dout)
            ds = p * (ds - (p * ds).sum(-1, keepdim=True)) * ctx.scale
            for columns, keys in _round(topology, "keys", k):
                part, owner = ds[..., columns], columns.start // q.shape[1]
                dq += torch.einsum("bgnst,btgd->bsgnd", part, keys.to(wide))
                dk[owner] = torch.einsum("bgnst,bsgnd->btgd", part, grouped)
            sums = [topology.channel("keys").reduce_scatter(x).wait() for x in (dk, dv)]
        return dq.flatten(2, 3).to(q.dtype), *sums, None, None, None
