"""Decoding with a cache of keys and values that is split among ranks.

The prompt phase is `attention`: its K and V shards are the ranks' parts of the cache. Each new
token is added to the cache of any one rank; all ranks attend with it, each to its own part.

B batch, H query heads, G KV heads, D head dim of queries and keys, E head dim of values, P ranks,
C tokens for which a rank's cache has room.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_cp_plugin.arguments import check_tensors, fixed_number, word
from megatron_cp_plugin.context import Group, not_compiled, topology_for
from megatron_cp_plugin.core.agree import SameCall
from megatron_cp_plugin.core.kernel import KernelCall, Problem, SoftmaxKernel, check_scale
from megatron_cp_plugin.core.partial import accumulation_dtype, merge_all_into
from megatron_cp_plugin.errors import ContextParallelError, brief, whole_number
from megatron_cp_plugin.kernels import resolver

Numbers = Sequence[int] | Tensor


@not_compiled
@torch.no_grad()
def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    lengths: int | Numbers,
    *,
    group: Group = None,
    scale: float | None = None,
    kernel: str = "auto",
    window: int | None = None,
    position: int | Numbers | None = None,
    positions: Numbers | None = None,
) -> Tensor:
    """Softmax attention of one new token of each sequence over a cache that is split among ranks.

    A collective operation: each rank attends to its own entries, and all ranks merge all results by
    their denominators. A rank sends (P - 1) * B * H * (E + 1) floats of 4 bytes (8 for float64),
    however long the cache is. All ranks give the same q; whose entries come from which tokens makes
    no difference without a window. Not differentiable.

    Args:
        q: [B,1,H,D]: the new token's, whose key and value some rank has in its cache already.
        k_cache, v_cache: [B,C,G,D] and [B,C,G,E] in q's dtype, G dividing H: this rank's; C may
            differ between ranks.
        lengths: how many entries of this rank's cache are filled, from the first one on: one
            number, or B of them. A tensor on a GPU is copied to the host.
        group, scale, kernel: as in `attention`.
        window: the token sees the last `window` positions up to its own; needs the next two.
        position: the new token's in the whole sequence: one number, or B of them.
        positions: of this rank's entries, ascending, [C] or [B,C]; best a tensor on the host. Each
            call reads some of them, the first and the last, and does not look at their order.

    Returns: out [B,1,H,E] in q's dtype, the same on all ranks; 0 where no rank has an entry.
    Raises: ContextParallelError for shapes or numbers that do not fit, KernelUnavailableError if
    the kernel cannot serve them, CommunicationError if another rank cannot be reached any more.
    """
    topology = topology_for(group)
    with SameCall(topology, "decode_attention") as made:
        check_tensors("decode_attention", q=q, k_cache=k_cache, v_cache=v_cache)
        _check_shapes(q, k_cache, v_cache)
        scale = fixed_number("scale", scale)
        check_scale(1.0 if scale is None else scale)
        window = None if window is None else whole_number("window", window)
        batch, _, heads, head_dim = q.shape
        stops = _one_each("lengths", lengths, batch)
        if not 0 <= min(stops) <= max(stops) <= k_cache.shape[1]:
            raise ContextParallelError(
                f"lengths needs 0 to {k_cache.shape[1]}, the room of the cache, got {brief(stops)}"
            )
        starts = [0] * batch if window is None else _starts(window, position, positions, stops)
        made.values = {
            "dtype": q.dtype,
            "shape of q": tuple(q.shape),
            "heads and dims of caches": (*k_cache.shape[2:], *v_cache.shape[2:]),
            "scale": scale,
            "window": window,
            "kernel": word("kernel", kernel),
        }
        of_call = q.device, q.dtype, heads, k_cache.shape[2], head_dim
        found = resolver(kernel)(Problem(*of_call, value_dim=v_cache.shape[3]))
    scale = head_dim**-0.5 if scale is None else scale
    out, lse = _own_part(q, k_cache, v_cache, list(zip(starts, stops, strict=True)), found, scale)
    if topology.size == 1:
        return out
    mine = torch.cat((out.to(lse.dtype), lse.transpose(1, 2).unsqueeze(-1)), -1)
    parts = topology.channel("decode").all_gather(mine).wait()
    merge_all_into(out, lse, parts[..., :-1], parts[..., -1].transpose(2, 3))
    return out


def _own_part(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Sequence[tuple[int, int]],
    kernel: SoftmaxKernel,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention to some of this rank's entries. Args: seen: from which to which, of each sequence.

    Returns: out [B,1,H,E] in q's dtype, lse [B,H,1] in the wide one.
    """
    batch, _, heads, _ = q.shape
    if len(set(seen)) > 1:
        rows = [slice(row, row + 1) for row in range(batch)]
        each = (
            _own_part(q[row], k[row], v[row], [one], kernel, scale)
            for row, one in zip(rows, seen, strict=True)
        )
        outs, lses = zip(*each, strict=True)
        return torch.cat(outs), torch.cat(lses)
    start, stop = seen[0]
    if start >= stop:
        lse = q.new_full((batch, heads, 1), -torch.inf, dtype=accumulation_dtype(q.dtype))
        return q.new_zeros((batch, 1, heads, v.shape[3])), lse
    return kernel.forward(KernelCall(q, k[:, start:stop], v[:, start:stop], scale, causal=False))


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    shapes = f"q {list(q.shape)}, k_cache {list(k.shape)}, v_cache {list(v.shape)}"
    if not q.dim() == k.dim() == v.dim() == 4 or q.shape[1] != 1:
        raise ContextParallelError(
            f"decode_attention takes one new token [B,1,H,D] and caches [B,C,G,D], got {shapes}: "
            "call it once for each token"
        )
    alike = k.shape[:3] == v.shape[:3] and q.shape[0] == k.shape[0] and q.shape[3] == k.shape[3]
    if not alike or not k.shape[2] or q.shape[2] % k.shape[2] or not q.shape[0]:
        raise ContextParallelError(
            "decode_attention needs caches of q's batch and head dim, and a number of KV heads "
            f"that divides its heads, got {shapes}"
        )
    if not (q.dtype == k.dtype == v.dtype and q.device == k.device == v.device):
        raise ContextParallelError(
            "decode_attention needs q and caches of one dtype on one device, got "
            f"{q.dtype} on {q.device}, {k.dtype} on {k.device}, {v.dtype} on {v.device}"
        )


def _one_each(name: str, given: int | Numbers | None, batch: int) -> list[int]:
    """One number for each sequence."""
    if isinstance(given, Tensor):
        given = given.tolist()
    if not isinstance(given, Sequence):
        return [whole_number(name, given)] * batch
    if len(given) != batch:
        raise ContextParallelError(f"{name} needs one number, or {batch}, got {brief(given)}")
    return [whole_number(name, one) for one in given]


def _starts(
    window: int, position: int | Numbers | None, positions: Numbers | None, stops: Sequence[int]
) -> list[int]:
    """The first entry that each sequence's token sees."""
    if window < 1 or position is None or positions is None:
        raise ContextParallelError(
            "a window needs to be 1 or more, and the positions of the token and of the cache's "
            f"entries, got window {window}: pass position= and positions="
        )
    try:
        rows = torch.as_tensor(positions)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ContextParallelError(
            f"positions needs whole numbers, got {brief(positions)}"
        ) from None
    if rows.dim() not in (1, 2) or rows.shape[-1] < max(stops):
        raise ContextParallelError(
            f"positions needs those of all {max(stops)} entries, got {list(rows.shape)}"
        )
    places = _one_each("position", position, len(stops))
    each = list(zip(rows.expand(len(stops), -1), stops, places, strict=True))
    for row, stop, place in each:
        if stop and not row[0] <= row[stop - 1] <= place:
            raise ContextParallelError(
                f"position needs to be {int(row[:stop].max())} or more, that of the last entry, "
                f"and positions to ascend, got {place} after {brief(row[:stop].tolist())}"
            )
    firsts = [max(0, place - window + 1) for place in places]
    return [
        int(torch.searchsorted(row[:stop], first))
        for (row, stop, _), first in zip(each, firsts, strict=True)
    ]
