"""Teams of ranks: they gather blocks before a round, and get results for them back after it.

Both are collective operations. While a rank computes with the blocks of one round, the blocks of
the next round arrive, and the results of the round before leave.

B batch, S local tokens, T tokens of a team, H query heads, G KV heads, D head dim, U ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import Assembly, assemble, narrowed, padded
from megatron_cp_plugin.core.call import Call, HeadGroup, together
from megatron_cp_plugin.core.comm import Communicator
from megatron_cp_plugin.core.communication.devices import contiguous_copy, copy_into, shares_memory
from megatron_cp_plugin.core.execution.program import (
    EVERYTHING,
    HeadExchange,
    Index,
    Operation,
    Program,
    Round,
    SomeHeads,
    Step,
    Task,
)
from megatron_cp_plugin.core.masks.tile_batches import parts
from megatron_cp_plugin.core.partial import accumulation_dtype, beside_each_other, merge_all_into
from megatron_cp_plugin.core.plans.plan import (
    KEYS,
    OF_KEYS,
    PER_HEAD,
    QUERIES,
    Plan,
    Side,
    TensorNames,
    during,
)
from megatron_cp_plugin.core.plans.team_heads import TeamHeads
from megatron_cp_plugin.core.tiles import NO_TILES

Tensors = tuple[Tensor, ...]
Named = Mapping[str, Tensor]
# Functions to be called once, which wait for results and place them.
Completions = list[Callable[[], None]]


class ResultScatter:
    """Results for the tokens of a base block, on their way to the ranks that own the tokens. This
    class writes them to this rank's own tokens.
    """

    def __init__(self, targets: Sequence[Tensor]) -> None:
        """Args: targets: memory of the results, [B,S,heads,D] or [B,heads,S]."""
        self._targets = targets

    def add(self, rows: slice, tensors: Tensors) -> None:
        """Takes the results for some rows."""
        for target, x in zip(self._targets, tensors, strict=True):
            dim = 1 if x.dim() == 4 else 2
            narrowed(target, dim, rows.start, x.shape[dim]).copy_(x)

    def post(self) -> Completions:
        """Sends the results; call it after all rows have been added."""
        return []


class GatheringTeam:
    """Every rank gets the tokens of all ranks, and computes a part of the results for all.

    Attributes:
        order: how the members' tokens are joined.
        lends: results that come are overwritten by those of the next round.
    """

    lends = False

    def __init__(self, inward: Communicator, outward: Communicator, order: Assembly) -> None:
        """Args: inward, outward: channels of inputs and of results."""
        self._inward, self._outward, self.order = inward, outward, order

    def gather(
        self, message: TensorNames, given: Named, part: SomeHeads
    ) -> Callable[[], Sequence[Tensor]]:
        """Gathers tensors, which travel, and are ordered, as one tensor.

        [B,S,heads,D] -> [B,T,heads,D], [B,H,S] -> [B,H,T].

        Returns: a function that waits for the tensors; to be called once.
        """
        order, own = self.order, part.named(message, given)
        of_rows = message[0] in PER_HEAD
        widths = [x.shape[3] for x in own if x.dim() == 4]
        if of_rows:
            whole, dim = torch.stack(own), 3
        else:
            whole, dim = beside_each_other(own), 1
        coming = self._inward.all_gather(padded(whole, dim, order.width))

        def finish() -> Sequence[Tensor]:
            joined = order.join(coming.wait(), dim)
            if of_rows:
                return joined.unbind()
            return joined.split(widths, -1) if len(widths) > 1 else (joined,)

        return finish

    def scatter(self, operation: Operation, targets: Named) -> ResultScatter:
        """Sends results, which come for some rows at a time, to the owners of the tokens.

        The owners merge partial outputs, or sum gradients, into their `targets`.
        """
        own = operation.part.named(operation.names, targets)
        return _TeamScatter(self._outward, self.order, own, wide=operation.wide)


class _TeamScatter(ResultScatter):
    """Results, by member of the team: [n,B,S,heads,D], joined, and [n,B,heads,S] for lse."""

    def __init__(
        self, outward: Communicator, order: Assembly, own: Sequence[Tensor], *, wide: bool
    ) -> None:
        """Args: own: memory of the results for the own tokens."""
        self._outward, self._order, self._own = outward, order, own
        self._widths = widths = [x.shape[3] for x in own if x.dim() == 4]
        like, members, width = own[0], order.members, order.width
        dtype = accumulation_dtype(like.dtype) if wide else like.dtype
        of_all = members, len(like), width, like.shape[2], sum(widths)
        self._blocks = like.new_empty(of_all, dtype=dtype)
        rows_of = [x.new_empty((members, *x.shape[:2], width)) for x in own if x.dim() == 3]
        self._lses = rows_of[0] if rows_of else None
        by_width = self._blocks.split(widths, -1) if len(widths) > 1 else (self._blocks,)
        self._places = (*by_width, *rows_of)
        self._dims = [1] * len(widths) + [2] * len(rows_of)

    def add(self, rows: slice, tensors: Tensors) -> None:
        for of_all, dim, x in zip(self._places, self._dims, tensors, strict=True):
            self._order.place(of_all, dim, rows, x)

    def post(self) -> Completions:
        own, widths, tokens = self._own, self._widths, self._own[0].shape[1]
        blocks, lses = self._blocks, self._lses
        # The results travel: this object must not hold their memory.
        del self._blocks, self._lses, self._places
        if lses is None:
            wide = accumulation_dtype(blocks.dtype)
            # A reduction adds up in the dtype that travels: with two ranks one rounding as well.
            if blocks.dtype == wide or self._outward.size == 2:
                summed = self._outward.reduce_scatter(blocks)
            else:
                came = self._outward.all_to_all(blocks)
                summed = came.then(lambda each: each[0].sum(0, dtype=wide))

            def add() -> None:
                whole = summed.wait()
                if whole.shape[1] > tokens:
                    whole = whole[:, :tokens]
                totals = whole.split(widths, -1) if len(widths) > 1 else (whole,)
                for target, total in zip(own, totals, strict=True):
                    target.copy_(total)

            return [add]
        out, lse = own
        under_way = self._outward.all_to_all(blocks, lses)

        def merge() -> None:
            outs, lses = under_way.wait()
            if outs.shape[2] > tokens:
                outs, lses = outs[:, :, :tokens], lses[..., :tokens]
            merge_all_into(out, lse, outs, lses)

        return [merge]


class TeamChannels(NamedTuple):
    """Where blocks come together.

    Attributes:
        owners: owners of the blocks, in the order of the ranks.
        own: owner of the block that this rank holds.
        inward, outward: channels to the ranks that compute with the blocks, and back.
    """

    owners: tuple[int, ...]
    own: int
    inward: Communicator
    outward: Communicator


def gathering_teams(
    steps: Plan, channels: Mapping[Side, TeamChannels], call: Call, rank: int
) -> tuple[dict[Side, GatheringTeam], Program]:
    """Teams that gather queries and keys, and the rank's program."""
    teams, spans = dict[Side, GatheringTeam](), steps.spans
    for side, (owners, own, inward, outward) in channels.items():
        width = max(spans.lengths) if len(owners) > 1 else spans.lengths[own]
        order = assemble([spans[owner] for owner in owners], width)
        teams[side] = GatheringTeam(inward, outward, order)
    return teams, _gathering_program(steps, rank, teams[QUERIES].order.tokens, call)


def _gathering_program(plan: Plan, rank: int, tokens: int, call: Call) -> Program:
    """What `rank` does with the tokens of its teams, which are gathered before each round.

    Args: tokens: queries of the team.
    """
    kernel = call.kernel
    computes = (compute for compute in plan.computes if compute.rank == rank)
    kinds = {"rectangular": kernel.rectangular_causal, "windows": kernel.windows}
    tiles = next((plan.tiles(one, **kinds) for one in computes), NO_TILES)
    found = parts(tiles, tokens, plan.groups[0].heads, call.packed, kernel.gaps)
    if plan.phase == "backward":
        # Parts that see more leading keys come first: the sum of key gradients can start as the
        # first part's gradient if that part sees all keys.
        found = tuple(sorted(found, key=lambda x: -int(x.tiles.kv.stop.max(initial=0))))
    block = (rank, QUERIES), (rank, KEYS)
    rounds = _rounds(plan, rank, plan.groups)
    steps = (
        # Not `last`: results of tasks leave as they are.
        Step(step, heads, tasks=tuple(Task(*block, x.tiles, heads, x.rows) for x in found))
        for step, heads in enumerate(plan.groups)
    )
    return Program(
        tuple(one._replace(steps=(step,)) for one, step in zip(rounds, steps, strict=True)),
        few=len(found) <= 2,
        own=(rank, rank),
        parted=True,
        wide=any(move.wide for move in plan.moves),
    )


def exchanging_program(steps: Program, exchange: TeamHeads, slots: int) -> Program:
    """What a rank does with the tokens of its team, for its share of the heads.

    Args:
        steps: what the rank does between teams, in one round.
        slots: see ExchangingTeam.
    """
    (inner,), exchanges, found, start = steps.rounds, exchange.placement.exchanges, [], 0
    each = len(inner.steps) // sum(count for _, count in exchanges)
    whole = together([heads for heads, _ in exchanges])
    come = _exchanges(exchange, whole, slots)
    for index, (heads, count) in enumerate(exchanges):
        of_group = inner.steps[start : start + count * each]
        sent = [*exchange.results(heads)]
        if heads.first and len(sent) > 1 and len(exchange.of_teams.spans) == 1:
            sent.append((sum([messages for messages, _ in sent], ()), heads))  # all at once
        results = [Operation.of(messages, some, whole) for messages, some in sent]
        inputs = tuple(chain(*[operations for operations, _ in come[index]]))
        local = tuple(_with_local_heads(step, heads, count) for step in of_group)
        by_names = {x.names: x for x in results}
        found.append(Round(SomeHeads.of(heads, whole), inputs, by_names, local, come[index]))
        start += count * each
    return replace(steps, rounds=tuple(found))


def _exchanges(exchange: TeamHeads, whole: HeadGroup, slots: int) -> list[list[HeadExchange]]:
    """What brings the base blocks of each round. Keys that several rounds need come before
    queries, because they stay, and may be sent on; but process groups bring all at once.
    """
    rounds = list[list[list[Operation]]]()
    for index, (group, _) in enumerate(exchange.placement.exchanges):
        each = [Operation.of(names, some, whole) for names, some in exchange.inputs(group, index)]
        keys = [one for one in each if one.names[0] in OF_KEYS]
        others = [one for one in each if one not in keys]
        rounds.append([keys, others] if keys and slots > 1 and not group.last else [each])
    stays = exchange.of_teams.phase == "backward" or not exchange.placement.keep
    before, found = [*accumulate(map(len, rounds), initial=0)], list[list[HeadExchange]]()
    for number, exchanges in enumerate(rounds):
        # Those of a round are posted before the round before it computes.
        until = before[min(number + 2, len(rounds))] - before[number] - slots
        numbered = enumerate(exchanges)
        found.append([HeadExchange(each, stays and place >= until) for place, each in numbered])
    return found


def _with_local_heads(step: Step, base: HeadGroup, count: int) -> Step:
    """The step with base blocks of the heads `base`, which have `count` groups."""
    if count == 1:
        return step._replace(local_heads=None)
    q, kv = (
        slice(part.start - whole.start, part.stop - whole.start)
        for part, whole in ((step.heads.q, base.q), (step.heads.kv, base.kv))
    )
    return step._replace(local_heads=replace(step.heads, q=q, kv=kv))


def _rounds(plan: Plan, rank: int, groups: tuple[HeadGroup, ...]) -> tuple[Round, ...]:
    """Rounds without steps, one for each group of heads: what a rank and its teams exchange."""
    whole = together(groups)
    found: dict[tuple[HeadGroup, bool], dict[tuple[object, ...], Operation]] = {}
    last: tuple[object, ...] | None = None
    for move in during(plan):
        kind = move.messages, move.heads, move.wide
        # Most moves differ from the move before only in the block.
        if kind == last or move.source != rank:
            continue
        last, group = kind, move.heads if move.heads in groups else groups[0]
        of_group = found.setdefault((group, move.result), {})
        of_group[kind] = Operation.of(*kind[:2], whole, move.wide)
    return tuple(
        Round(
            SomeHeads.of(group, whole),
            tuple(found.get((group, False), {}).values()),
            {operation.names: operation for operation in found.get((group, True), {}).values()},
            (),
        )
        for group in groups
    )


class ExchangingTeam:
    """U ranks that split the heads: each gets the tokens of all U ranks, for its own heads."""

    def __init__(
        self,
        inward: Callable[[], Communicator],
        outward: Callable[[], Communicator],
        order: Assembly,
        slots: tuple[int, int] = (0, 0),
    ) -> None:
        """See GatheringTeam; channels are asked for in each call, for `release` forgets them.

        Args: slots: receive buffers that inputs, and results, take in turn; 0: what comes has its
            own memory.
        """
        self._inward, self._outward, self.order, self.slots = inward, outward, order, slots
        self.lends = slots[0] > 0

    def come(
        self, given: Sequence[tuple[Tensor, Index]], *, lent: bool = False
    ) -> Callable[[], Sequence[Tensor]]:
        """Exchanges [B,S,U*h,D] -> [B,T,heads,D], contiguous; [B,U*h,S] likewise.

        Args:
            given: tensors, and heads of each share of theirs; None: all h.
            lent: tensors of four dimensions are used where they came.

        Returns: a function that waits for the tensors; to be called once.
        """
        order, channel = self.order, self._inward()
        channel.rotation = max(self.slots[0], 1)
        dims = [1 if x.dim() == 4 else 2 for x, _ in given]
        each = zip(dims, given, strict=True)
        blocks = [_shares(x, order.members, some).movedim(3 - dim, 0) for dim, (x, some) in each]
        both = zip(dims, blocks, strict=True)
        coming = channel.all_to_all(*[padded(x, 1 + dim, order.width) for dim, x in both])

        def finish() -> Sequence[Tensor]:
            found, came = list[Tensor](), [*coming.wait()]
            for dim in dims:
                x = came.pop(0)
                joined, stays = order.join(x, dim), not self.lends or (lent and dim == 1)
                kept = stays or not shares_memory(joined, x)
                found.append(joined.contiguous() if kept else contiguous_copy(joined))
            return found

        return finish

    def send_results(self, results: Sequence[tuple[Tensor, Tensor, Index]]) -> Callable[[], None]:
        """Sends results [B,T,heads,D] or [B,heads,T] back to the ranks that own the tokens.

        Args: results: each with its target, [B,S,U*h,D] or [B,U*h,S], and heads of each share
            there; None: all h.
        """
        order, channel = self.order, self._outward()
        channel.rotation = max(self.slots[1], 1)
        dims = [1 if x.dim() == 4 else 2 for x, *_ in results]
        both = zip(results, dims, strict=True)
        under_way = channel.all_to_all(*[order.split(x, dim) for (x, *_), dim in both])
        places = [_shares(x, order.members, some) for _, x, some in results]

        def finish() -> None:
            came = [*under_way.wait()]
            for place, dim in zip(places, dims, strict=True):
                own, tokens = came.pop(0), place.shape[2 * dim - 1]
                if own.shape[1 + dim] > tokens:
                    own = own.narrow(1 + dim, 0, tokens)
                copy_into(place, own.movedim(0, 3 - dim))

        return finish


Team = GatheringTeam | ExchangingTeam


def _shares(x: Tensor, members: int, part: Index) -> Tensor:
    """[B,S,U*h,D] -> [B,S,U,heads,D], rows [B,U*h,S] -> [B,U,heads,S], as a view."""
    shares = x.unflatten(2 if x.dim() == 4 else 1, (members, -1))
    return shares if part is None else shares[(EVERYTHING, *part)]
