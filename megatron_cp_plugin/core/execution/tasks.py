"""Computes a pair of blocks by kernel calls, and adds what they find to running results.

B batch, H query heads, G KV heads, D head dim, E that of values.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from megatron_cp_plugin.core.call import Call
from megatron_cp_plugin.core.kernel import KernelCall, Statistics, run_backward, run_forward
from megatron_cp_plugin.core.masks.tile_batches import Batch
from megatron_cp_plugin.core.partial import Accumulator, GradientSum, rows_at
from megatron_cp_plugin.core.tiles import Tile


def attend_block(
    total: Accumulator, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[Tile | Batch], call: Call
) -> None:
    """Adds attention of queries over keys to `total`.

    Args:
        q: [B,rows,H,D].
        k: [B,cols,G,D].
        v: [B,cols,G,E].
        calls: kernel calls of the block, as `Batches.calls` gives them.
    """
    kernel, scale = call.kernel, call.scale
    for each in calls:
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            (rows,) = queries.given
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            packed = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            total.add(rows, *run_forward(kernel, packed))
            continue
        tile_q, tile_k, tile_v = q, k, v
        if each.rows < q.shape[1]:
            tile_q = q[:, each.q]
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        if each.reverse:
            flipped = tile_q.flip(1), tile_k.flip(1), tile_v.flip(1)
            out, lse = kernel.forward(KernelCall(*flipped, scale, each.causal))
            total.add(each.q, out.flip(1), lse.flip(2))
            continue
        place = None
        if total.empty and call.places_outputs:
            place = total.place_of_first(each.rows)
        tile = KernelCall(tile_q, tile_k, tile_v, scale, each.causal, None, place, each.window)
        found = kernel.forward(tile)
        total.add(each.q, *found)
        del found, tile


class Gradients(NamedTuple):
    """Running sums of dq of one block of queries, and of dk and dv of one block of keys."""

    dq: GradientSum
    dkv: GradientSum

    def places(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where the kernel writes the gradients of a tile's q, k and v: a block's first gradients
        to the memory of its sum, later ones to new memory. None: no gradient is a block's first.
        """
        of_q, side = self.dq.place_of_first(q.shape[1]), self.dkv.place_of_first(k.shape[1])
        if of_q is None and side is None:
            return None
        (dq,) = of_q or (q.new_empty(q.shape),)
        dk, dv = side or (k.new_empty(k.shape), v.new_empty(v.shape))
        return dq, dk, dv


def differentiate_block(
    sums: Gradients,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    calls: Sequence[Tile | Batch],
    call: Call,
) -> None:
    """Adds the gradients of a block's q, k and v to `sums`; see `attend_block` for the shapes.

    Args: statistics: lse, with delta or out, of all rows of q.
    """
    kernel, scale = call.kernel, call.scale
    for each in calls:
        if isinstance(each, Batch):
            queries, keys = each.sides(q.device)
            taken = rows_at(q, queries.taken), rows_at(k, keys.taken), rows_at(v, keys.taken)
            packed = KernelCall(*taken, scale, each.causal, each.packing, window=each.window)
            of_rows = rows_at(dout, queries.taken), statistics.rows(queries.taken)
            dq, dk, dv = run_backward(kernel, packed, *of_rows)
            del taken, packed, of_rows
            for rows in queries.given:
                sums.dq.add(rows, dq)
            for cols in keys.given:
                sums.dkv.add(cols, dk, dv)
            continue
        tile_dout, tile_q, tile_k, tile_v, of_tile = dout, q, k, v, statistics
        if each.rows < q.shape[1]:
            tile_dout, tile_q, of_tile = dout[:, each.q], q[:, each.q], statistics.rows(each.q)
        if each.cols < k.shape[1]:
            tile_k, tile_v = k[:, each.kv], v[:, each.kv]
        if each.reverse:
            flipped = tile_q.flip(1), tile_k.flip(1), tile_v.flip(1)
            tile = KernelCall(*flipped, scale, each.causal)
            found = kernel.backward(tile, tile_dout.flip(1), of_tile.flipped())
            dq, dk, dv = [x.flip(1) for x in found]
        else:
            places = None
            if call.places_gradients and (sums.dq.placing or sums.dkv.placing):
                places = sums.places(tile_q, tile_k, tile_v)
            tile = KernelCall(tile_q, tile_k, tile_v, scale, each.causal, None, places, each.window)
            dq, dk, dv = kernel.backward(tile, tile_dout, of_tile)
        sums.dq.add(each.q, dq)
        sums.dkv.add(each.kv, dk, dv)
