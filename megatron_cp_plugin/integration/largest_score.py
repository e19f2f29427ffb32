"""The largest attention score of each head, for QK clipping and `--log-max-attention-logit`.

Megatron takes it from Transformer Engine's kernels. Those here keep it to themselves, and a
logarithm of a sum bounds it only to within the logarithm of the number of keys. So it is computed
by itself, of the pairs that attention computes: the keys of all ranks are gathered, and scores are
made and reduced some rows at a time, in half of the multiplications of attention's forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.layout import Layout, unshard
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.core.tiles import Mask, Tile, plan_tiles

# Scores that there are at a time: 128 MiB in float32.
_SCORES = 1 << 25


@torch.no_grad()
def largest_scores(
    q: Tensor, k: Tensor, *, scale: float, mask: Mask, layout: Layout, group: dist.ProcessGroup
) -> Tensor:
    """Returns the largest score of this rank's queries with the keys of all ranks that they see.

    A collective operation of the group's ranks; the host waits for nothing.

    Args:
        q: [B,S,H,D].
        k: [B,S,G,D].
        scale: above 0.

    Returns: [H] in float32, or float64 where q is; -inf where no query sees a key.
    """
    whole, size = k, group.size()
    if size > 1:
        parts = [torch.empty_like(k, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, k.contiguous(), group=group)
        whole = unshard(parts, 1, layout)
    seq_len, kv_heads = whole.size(1), k.size(2)
    # By KV heads: [B,G,S,H/G,D] and [B,G,D,N].
    rows, columns = q.unflatten(2, (kv_heads, -1)).transpose(1, 2), whole.permute(0, 2, 3, 1)
    found = torch.full(q.shape[2:3], -torch.inf, dtype=accumulation_dtype(q.dtype), device=q.device)
    own = layout.spans(group.rank(), size, seq_len)
    for tile in plan_tiles(own, (Span(0, seq_len),), mask, rectangular=True):
        of_q, of_k = rows[:, :, tile.q], columns[..., tile.kv]
        if tile.reverse:
            of_q, of_k = of_q.flip(2), of_k.flip(3)
        for scores in _scores(of_q, of_k, tile):
            found = torch.maximum(found, scores.amax((0, 2, 4)).flatten())
    return found * scale


def _scores(q: Tensor, k: Tensor, tile: Tile) -> Iterator[Tensor]:
    """Scores [B,G,R,H/G,C] without scale of q [B,G,S,H/G,D] and k [B,G,D,N], some rows at a time.

    A triangle is hidden where rows see ever more columns.
    """
    dtype = accumulation_dtype(q.dtype)
    step = max(1, _SCORES // (q[:, :, 0, :, 0].numel() * tile.cols))
    for start in range(0, tile.rows, step):
        stop = min(start + step, tile.rows)
        seen = stop + tile.cols - tile.rows if tile.causal else tile.cols
        rows, columns = q[:, :, start:stop], k[..., :seen].flatten(0, 1)
        left = rows.flatten(2, 3).flatten(0, 1)
        if q.is_cuda and q.dtype != dtype:
            products = torch.bmm(left, columns, out_dtype=dtype)
        else:
            products = torch.bmm(left.to(dtype), columns.to(dtype))
        scores = products.view(*rows.shape[:4], seen)
        if tile.causal:
            n = stop - start
            later = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
            scores[..., seen - n :].masked_fill_(later[:, None], -torch.inf)
        yield scores
