"""Executes a plan with collective operations: one loop, forward and backward.

Tensors of the ranks of a team come together, for one group of heads at a time. While one group is
computed, the next one comes and results of the last one leave.

B batch, S local tokens, T tokens of a team, H query heads, G KV heads, D head dim.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Call, Gradients, attend_block, differentiate_block
from megatron_cp_plugin.core.blocks.rows import narrowed, token_dim
from megatron_cp_plugin.core.comm import Pending
from megatron_cp_plugin.core.execution.team import (
    Found,
    Named,
    Operation,
    SomeHeads,
    Team,
    together,
)
from megatron_cp_plugin.core.kernel import Statistics
from megatron_cp_plugin.core.masks.tile_batches import Part
from megatron_cp_plugin.core.partial import (
    Accumulator,
    GradientSum,
    accumulation_dtype,
    delta_of,
    rows_at,
)
from megatron_cp_plugin.core.pipeline import HeadGroup, pipeline
from megatron_cp_plugin.core.pipeline import together as of_all
from megatron_cp_plugin.core.plans.plan import OF_KEYS, OF_ROWS, Move, TensorNames

Compute = Callable[[HeadGroup, Named, Sequence[GradientSum]], Iterator[Found]]
Kind = tuple[tuple[TensorNames, ...], HeadGroup, bool]
_NOTHING = Pending[None](lambda: None)


class Round(NamedTuple):
    """A group of heads. Attributes: inputs, results: what comes before and leaves after it; results
    by the names of their tensors.
    """

    part: SomeHeads
    inputs: tuple[Operation, ...]
    results: Mapping[TensorNames, Operation]


def rounds(moves: Iterable[Move], groups: Sequence[HeadGroup]) -> tuple[Round, ...]:
    """Args: moves: from or to one rank. groups: of heads that are exchanged at a time; what is
    of all heads comes before the first.
    """
    whole = of_all(groups)
    found: dict[tuple[HeadGroup, bool], dict[Kind, Operation]] = {}
    last: Kind | None = None
    for move in moves:
        kind = move.messages, move.heads, move.wide
        if kind == last:  # as most are: of one block after another
            continue
        last, group = kind, move.heads if move.heads in groups else groups[0]
        names = tuple(name for message in move.messages for name in message)
        operation = Operation(move.messages, names, SomeHeads.of(move.heads, whole), move.wide)
        found.setdefault((group, move.result), {})[kind] = operation
    return tuple(
        Round(
            SomeHeads.of(group, whole),
            tuple(found.get((group, False), {}).values()),
            {operation.names: operation for operation in found.get((group, True), {}).values()},
        )
        for group in groups
    )


def follow(
    plan: Sequence[Round],
    teams: Mapping[bool, Team],
    given: Named,
    targets: Named,
    compute: Compute,
    kept: Sequence[Named] = (),
) -> None:
    """Does this rank's part of a plan.

    Args:
        teams: of queries (false), of keys (true). given: tensors of the own tokens, which come
            together if the plan says so. targets: where results belong; others do not travel.
        compute: yields results for queries, and adds those for keys to the sums that it is given.
        kept: what came together before, by group of heads.
    """
    run = _Run(plan, teams, given, targets, compute, kept)
    pipeline(range(len(plan)), run.arrive, run.work)


@dataclass
class _Run:
    """One rank on its way through a plan.

    Attributes: as in `follow`. shared: what came and is not used up. sums: for keys of the group.
    """

    plan: Sequence[Round]
    teams: Mapping[bool, Team]
    given: Named
    targets: Named
    compute: Compute
    kept: Sequence[Named]
    shared: dict[str, Tensor] = field(default_factory=dict)
    sums: list[GradientSum] = field(default_factory=list)

    def arrive(self, index: int) -> Pending[Named]:
        """Posts what a group of heads needs."""
        coming = [
            (
                message,
                self.teams[message[0] in OF_KEYS].gather(message, self.given, operation.part),
            )
            for operation in self.plan[index].inputs
            for message in operation.messages
        ]

        def finish() -> Named:
            for message, tensors in coming:
                self.shared.update(zip(message, tensors.wait(), strict=True))
            coming.clear()
            return self._held(index)

        return Pending(finish)

    def _held(self, index: int) -> Named:
        """Tensors of a group of heads, of all tokens of the team if they came together."""
        heads, of_part = self.plan[index].part
        held = {**self.kept[index]} if self.kept else {}
        for name, x in self.given.items():
            some = of_part[name]
            if name not in self.shared:
                held[name] = x if some is None else x[some]
            elif name in OF_ROWS:  # of all heads
                rows = self.shared[name]
                held[name] = (rows if some is None else rows[some]).contiguous()
            elif heads.last or name not in OF_KEYS:
                held[name] = self.shared.pop(name)
            else:
                held[name] = self.shared[name]
        return held

    def work(self, index: int, held: Named) -> Pending[None]:
        """Computes with a group of heads, and posts what leaves then."""
        heads, leaving = self.plan[index].part.heads, []
        if heads.first:
            self.sums[:] = GradientSum(held["k"]), GradientSum(held["v"])
        results = self.compute(heads, held, self.sums)
        of_queries = ("out", "lse") if "out" in self.targets else ("dq",)
        if of_queries[0] in self.targets:
            leaving.append(self._leave(index, of_queries, results))
        for _ in results:
            pass  # nobody wants them, but those for keys are made with them
        if heads.last and "dk" in self.targets:
            leaving.append(self._leave(index, ("dk", "dv"), self._of_keys()))
        if heads.last:
            self.sums.clear()
        return together(leaving)

    def _leave(self, index: int, names: TensorNames, results: Iterator[Found]) -> Pending[None]:
        """Brings results to where they belong: here, if the plan has nothing else for them."""
        part, _, leaving = self.plan[index]
        if names in leaving:
            return self.teams[names[0] in OF_KEYS].scatter(leaving[names], results, self.targets)
        targets = part.named(names, self.targets)
        for rows, tensors in results:
            for own, x in zip(targets, tensors, strict=True):
                dim = token_dim(x)
                narrowed(own, dim, rows.start, x.shape[dim]).copy_(x)
        return _NOTHING

    def _of_keys(self) -> Iterator[Found]:
        dk, dv = [total.held for total in self.sums]
        self.sums.clear()
        yield slice(0, dk.shape[1]), (dk, dv)


def forward(
    plan: Sequence[Round],
    teams: Mapping[bool, Team],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    compute: Compute,
) -> tuple[Tensor, Tensor]:
    """Out [B,S,H,E] and lse [B,H,S] of the own queries."""
    batch, tokens, heads, _ = q.shape
    out = q.new_empty((batch, tokens, heads, v.shape[3]))
    lse = q.new_empty((batch, heads, tokens), dtype=accumulation_dtype(q.dtype))
    follow(plan, teams, {"q": q, "k": k, "v": v}, {"out": out, "lse": lse}, compute)
    return out, lse


def backward(
    plan: Sequence[Round],
    teams: Mapping[bool, Team],
    dout: Tensor,
    given: Named,
    gradients: tuple[Tensor, Tensor, Tensor],
    call: Call,
    compute: Compute,
    kept: Sequence[Named] = (),
) -> None:
    """Gradients of the own q, k and v, as far as the call wants them.

    Args: given: q, k, v, out and lse, as far as they are not kept. gradients: where they belong.
    """
    wanted = {"dq": call.dq, "dk": call.dkv, "dv": call.dkv}
    targets = {name: x for name, x in zip(wanted, gradients, strict=True) if wanted[name]}
    names = {name for one in plan for operation in one.inputs for name in operation.names}
    given = {**given, "dout": dout}
    if "delta" in names:  # it travels in place of out
        given["delta"] = delta_of(dout, given.pop("out"))
    follow(plan, teams, given, targets, compute, kept)


def attend(parts: Sequence[Part], call: Call, dtype: torch.dtype) -> Compute:
    """Attention of a team's queries. Args: parts: of them. dtype: of partial outputs."""

    def compute(_: HeadGroup, x: Named, sums: Sequence[GradientSum]) -> Iterator[Found]:
        for part in parts:
            rows = rows_at(x["q"], part.rows)
            total = Accumulator(rows, x["v"].shape[3])
            attend_block(total, rows, x["k"], x["v"], part.work, call)
            yield part.rows, total.result(dtype)

    return compute


def differentiate(parts: tuple[Part, ...], call: Call) -> Compute:
    """Gradients of `attend`; of dout, lse and either delta or out."""
    ordered = _furthest_first(parts)

    def compute(_: HeadGroup, x: Named, sums: Sequence[GradientSum]) -> Iterator[Found]:
        statistics = Statistics(x["lse"], out=x.get("out"), delta=x.get("delta"))
        for part in ordered:
            q, dout = rows_at(x["q"], part.rows), rows_at(x["dout"], part.rows)
            dq = GradientSum(q)
            rows = statistics.rows(part.rows)
            gradients = Gradients(dq, *sums)
            differentiate_block(gradients, dout, q, x["k"], x["v"], rows, part.work, call)
            yield part.rows, (dq.held,)

    return compute


@lru_cache(maxsize=256)  # of the same parts in every layer
def _furthest_first(parts: tuple[Part, ...]) -> list[Part]:
    """The first part that is added to a sum is the whole sum if it sees all keys."""
    return sorted(parts, key=_reach, reverse=True)


def _reach(part: Part) -> int:
    """Number of leading keys that a part's queries see."""
    return int(part.work.tiles.kv[1].max(initial=0))
