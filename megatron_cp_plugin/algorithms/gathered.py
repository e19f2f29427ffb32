"""Attention on a grid with collective operations: gather, compute, merge and scatter.

B batch, S local tokens, H query heads, G KV heads, D head dim, R rows, C columns.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_plugin.algorithms.grid import Flows, GatheredPlacement, GridSchedule, GridSettings
from megatron_cp_plugin.core.algorithm import (
    Call,
    Gradients,
    Saved,
    attend_block,
    differentiate_block,
)
from megatron_cp_plugin.core.assembly import Assembly, assemble, padded
from megatron_cp_plugin.core.caching import cached_method
from megatron_cp_plugin.core.comm import Communicator, Pending, Phase
from megatron_cp_plugin.core.grid import Grid
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    accumulation_dtype,
    delta_of,
    merge_all_into,
)
from megatron_cp_plugin.core.pipeline import HeadGroup, group_count, head_groups, pipeline
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask, Part, parts, plan_tiles
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError

Block = tuple[Tensor, ...]


@dataclass(frozen=True)
class _Plan:
    """All that is known before a tensor moves.

    Attributes:
        queries, keys: order of the gathered tokens. parts: what is computed with them.
        groups: heads that are gathered and computed together.
    """

    flows: Flows
    queries: Assembly
    keys: Assembly
    parts: tuple[Part, ...]
    groups: tuple[HeadGroup, ...]


class GatherSchedule(GridSchedule):
    """Q gathered in the row, K and V in the column, then (out, lse) merged and scattered.

    The reduce-scatter of (out, lse) is an all-to-all of partials and one merge at the receiver.
    While one group of heads is computed, the next one is gathered and the last one's partials
    travel; each of the four directions is a flow of its own. The backward gathers delta instead
    of the output.

    Source: Attention2D, Algorithms 1, 2 and 3. Differs: groups of heads overlap; with a zigzag
    layout there is no transpose.
    """

    def __init__(self, topology: Topology, settings: GridSettings) -> None:
        super().__init__(topology, settings)
        # Planned once: at short lengths a step of training is bound by the host.
        self._plan = cached_method(self._make_plan, 256)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Saved]:
        """See Algorithm.forward."""
        plan = self._plan(
            Shape.of(q, k, v, call.seq_len), call.mask, call.kernel.rectangular_causal
        )
        flows, tokens = plan.flows, q.shape[1]
        k, v = self.transpose(flows, (k, v), call.seq_len)
        out = q.new_empty((*q.shape[:3], v.shape[3]))
        lse = q.new_empty((q.shape[0], q.shape[2], tokens), dtype=accumulation_dtype(q.dtype))
        wire = self.wire_dtype(self.settings.partials, q.dtype)
        keys_of = self._key_gathering(plan, k, v)

        def arrive(group: HeadGroup) -> Pending[Block]:
            keys = keys_of(group)
            queries = _gather(flows.queries, plan.queries, (q[:, :, group.q],))
            return Pending(lambda: (*queries.wait(), *keys.wait()))

        def work(group: HeadGroup, block: Block) -> Pending[None]:
            queries, keys, values = block
            own_out, own_lse = out[:, :, group.q], lse[:, group.q]
            alone = plan.queries.members == 1
            outs = own_out.unsqueeze(0) if alone else _blocks(plan.queries, own_out, 1, wire)
            lses = own_lse.unsqueeze(0) if alone else _blocks(plan.queries, own_lse, 2)
            for part in plan.parts:
                rows = queries[:, part.rows]
                total = Accumulator(rows, values.shape[3])
                attend_block(total, rows, keys, values, part.tiles, call)
                part_out, part_lse = total.result(outs.dtype)
                plan.queries.place(outs, 1, part.rows, part_out)
                plan.queries.place(lses, 2, part.rows, part_lse)
            if alone:
                return Pending(lambda: None)
            partials = flows.outputs.all_to_all(outs)
            statistics = flows.outputs.all_to_all(lses)

            def merge() -> None:
                merge_all_into(
                    own_out,
                    own_lse,
                    partials.wait()[:, :, :tokens],
                    statistics.wait()[..., :tokens],
                )

            return Pending(merge)

        pipeline(plan.groups, arrive, work)
        return out, lse, (q, k, v, out, lse)

    def backward(self, dout: Tensor, saved: Saved, call: Call) -> tuple[Tensor, Tensor, Tensor]:
        """See Algorithm.backward."""
        q, k, v, out, lse = saved
        plan = self._plan(
            Shape.of(q, k, v, call.seq_len), call.mask, call.kernel.rectangular_causal
        )
        flows, wire = plan.flows, self.wire_dtype(self.settings.gradients, q.dtype)
        dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
        statistics_of = self._statistics_gathering(plan, dout, out, lse)
        keys_of = self._key_gathering(plan, k, v)
        by_keys = sorted(plan.parts, key=_reach, reverse=True)
        key_sums: list[GradientSum] = []

        def arrive(group: HeadGroup) -> Pending[Block]:
            keys = keys_of(group)
            own = q[:, :, group.q], dout[:, :, group.q]
            queries = _gather(flows.queries, plan.queries, own)
            return Pending(lambda: (*queries.wait(), *keys.wait()))

        def work(group: HeadGroup, block: Block) -> Pending[None]:
            queries, douts, keys, values = block
            statistics = statistics_of(group)
            own = dq[:, :, group.q]
            alone = plan.queries.members == 1
            blocks = own.unsqueeze(0) if alone else _blocks(plan.queries, own, 1, wire)
            if group.first:
                key_sums[:] = GradientSum(keys), GradientSum(values)
            for part in by_keys:
                rows = queries[:, part.rows]
                sums = Gradients(GradientSum(rows), *key_sums)
                differentiate_block(
                    sums,
                    douts[:, part.rows],
                    rows,
                    keys,
                    values,
                    statistics.rows(part.rows),
                    part.tiles,
                    call,
                )
                plan.queries.place(blocks, 1, part.rows, sums.dq.held)
            travels = call.dq and not alone
            queries_done = _sum_scatter(flows.outputs, blocks) if travels else None
            keys_done = scatter_keys(group) if group.last and call.dkv else None

            def finish() -> None:
                if queries_done is not None:
                    own.copy_(queries_done.wait()[:, : own.shape[1]])
                if keys_done is not None:
                    keys_done.wait()

            return Pending(finish)

        def scatter_keys(group: HeadGroup) -> Pending[None]:
            own = dk[:, :, group.kv], dv[:, :, group.kv]
            everything = slice(0, plan.keys.tokens)
            if plan.keys.members == 1:
                for target, total in zip(own, key_sums, strict=True):
                    plan.keys.place(target.unsqueeze(0), 1, everything, total.held)
                key_sums.clear()
                return Pending(lambda: None)
            widths = k.shape[3], v.shape[3]
            shape = (plan.keys.members, k.shape[0], plan.keys.width, group.kv_heads, sum(widths))
            blocks = k.new_empty(shape, dtype=wire)
            for block, total in zip(blocks.split(widths, -1), key_sums, strict=True):
                plan.keys.place(block, 1, everything, total.held)
            key_sums.clear()
            scattered = _sum_scatter(flows.key_gradients, blocks)

            def finish() -> None:
                for target, total in zip(own, scattered.wait().split(widths, -1), strict=True):
                    target.copy_(total[:, : target.shape[1]])

            return Pending(finish)

        pipeline(plan.groups, arrive, work)
        return (dq, *self.transpose(flows, (dk, dv), call.seq_len, back=True))

    def placement(self, grid: Grid, shape: Shape, phase: Phase) -> GatheredPlacement:
        """See GridSchedule.placement."""
        return GatheredPlacement(
            self.settings.layout,
            self.topology.size,
            self._groups(grid.cols, shape),
            wide_partials=self.settings.partials == "float32",
            wide_gradients=self.settings.gradients == "float32",
            grid=grid,
        )

    def _make_plan(self, shape: Shape, mask: Mask, rectangular: bool) -> _Plan:
        flows = self.flows(shape)
        queries = self._assembly(flows.row, shape.seq_len)
        keys = self._assembly(flows.column_owners, shape.seq_len)
        tiles = plan_tiles(queries.spans, keys.spans, mask, rectangular=rectangular)
        groups = self._groups(flows.grid.cols, shape)
        return _Plan(flows, queries, keys, parts(tiles, queries.tokens), groups)

    def _assembly(self, owners: tuple[int, ...], seq_len: int) -> Assembly:
        layout, size = self.settings.layout, self.topology.size
        return assemble([layout.spans(rank, size, seq_len) for rank in owners], self.width(seq_len))

    def _groups(self, cols: int, shape: Shape) -> tuple[HeadGroup, ...]:
        """Groups of heads; as many as the bound on gathered K and V needs.

        Raises: ContextParallelError if it cannot be kept.
        """
        size = self.topology.size
        chunks = group_count(self.settings.chunks, shape.flop(size)) if size > 1 else 1
        # Where only K and V travel, groups that share them would have nothing to wait for.
        share_kv = cols > 1
        groups = head_groups(shape.heads, shape.kv_heads, chunks, share_kv=share_kv)
        bound = self.settings.gathered_bytes
        if bound is None or cols == size:
            return groups
        tokens = self.width(shape.seq_len) * (size // cols)
        width = shape.head_dim + shape.value_dim
        head = shape.batch * tokens * width * shape.element_bytes

        def held(groups: tuple[HeadGroup, ...]) -> int:
            # One group is computed with while the next one arrives, or is put in order.
            return 2 * groups[0].kv_heads * head

        while held(groups) > bound:
            chunks += 1
            if chunks > shape.kv_heads:
                least = held(head_groups(shape.heads, shape.kv_heads, shape.kv_heads))
                raise ContextParallelError(
                    f"gathered K and V take {least / 2**20:.0f} MiB even by single heads, got a "
                    f"bound of {bound / 2**20:.0f} MiB: raise it, or shorten the sequence"
                )
            groups = head_groups(shape.heads, shape.kv_heads, chunks, share_kv=share_kv)
        return groups

    def _key_gathering(
        self, plan: _Plan, k: Tensor, v: Tensor
    ) -> Callable[[HeadGroup], Pending[Block]]:
        """Posts the gathering of a group's K and V, once for all groups that share them."""
        held: Block = ()

        def gather(group: HeadGroup) -> Pending[Block]:
            own = k[:, :, group.kv], v[:, :, group.kv]
            arriving = _gather(plan.flows.keys, plan.keys, own) if group.first else None

            def finish() -> Block:
                nonlocal held
                if arriving is not None:
                    held = arriving.wait()
                result = held
                if group.last:
                    held = ()
                return result

            return Pending(finish)

        return gather

    def _statistics_gathering(
        self, plan: _Plan, dout: Tensor, out: Tensor, lse: Tensor
    ) -> Callable[[HeadGroup], Statistics]:
        """Posts the gathering of lse and delta of all heads, to be had group by group."""
        if plan.queries.members == 1:
            return lambda group: Statistics(lse[:, group.q], out=out[:, :, group.q])
        own = padded(torch.stack((lse, delta_of(dout, out))), 3, plan.queries.width)
        arriving = plan.flows.queries.all_gather(own)
        gathered: list[Tensor] = []

        def statistics_of(group: HeadGroup) -> Statistics:
            if not gathered:
                gathered.extend(plan.queries.join(arriving.wait(), 3))
            all_lse, all_delta = gathered
            return Statistics(all_lse[:, group.q], delta=all_delta[:, group.q])

        return statistics_of


def _blocks(order: Assembly, like: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """An empty tensor of one block for each member, like one's own with tokens along `dim`."""
    shape = (order.members, *like.shape[:dim], order.width, *like.shape[dim + 1 :])
    return like.new_empty(shape, dtype=dtype)


def _gather(comm: Communicator, order: Assembly, own: Block) -> Pending[Block]:
    """Gathers and assembles tensors [B,S,heads,...], in one message to each rank.

    They travel and are put in order as one tensor, of which the results are views.
    """
    if order.members == 1:
        return Pending(lambda: own)
    widths = [x.shape[3] for x in own]
    arriving = comm.all_gather(padded(torch.cat(own, -1), 1, order.width))
    return arriving.then(lambda gathered: order.join(gathered, 1).split(widths, -1))


def _sum_scatter(comm: Communicator, blocks: Tensor) -> Pending[Tensor]:
    """The sum over ranks of this rank's block, [n, ...] -> [...], each addend rounded only once."""
    wide = accumulation_dtype(blocks.dtype)
    # A reduction adds up in the dtype that travels; with two ranks that is one rounding too.
    if blocks.dtype == wide or comm.size == 2:
        return comm.reduce_scatter(blocks)
    return comm.all_to_all(blocks).then(lambda received: received.sum(0, dtype=wide))


def _reach(part: Part) -> int:
    """Number of leading keys that a part's queries see."""
    return max((tile.kv.stop for tile in part.tiles), default=0)
