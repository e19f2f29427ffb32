"""Teams of ranks that gather tensors by collective operations and return the results.

B batch, S local tokens, T tokens of a team, H query heads, G KV heads, D head dim, U ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import Assembly, Blocks, padded
from megatron_cp_plugin.core.blocks.packed_rows import packed
from megatron_cp_plugin.core.blocks.rows import Rows, between, common, narrowed, token_dim
from megatron_cp_plugin.core.comm import Communicator, Pending
from megatron_cp_plugin.core.partial import accumulation_dtype, merge_all_into, rows_at
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import OF_KEYS, OF_ROWS, TENSORS, TensorNames

Tensors = tuple[Tensor, ...]
Named = Mapping[str, Tensor]
Found = tuple[slice, Tensors]  # results for some rows of a team's queries, or keys
EVERYTHING = slice(None)


# Of a tensor [B,S,heads,D], or rows [B,heads,S], some heads; None: all.
Index = tuple[slice, ...] | None


class SomeHeads(NamedTuple):
    """Some heads of all tensors.

    Attributes: heads: which. slices: of each tensor, by its name.
    """

    heads: HeadGroup
    slices: Mapping[str, Index]

    @classmethod
    def of(cls, heads: HeadGroup, whole: HeadGroup) -> Self:
        """Args: whole: all heads of the tensors."""
        slices: dict[str, Index] = {}
        for name in TENSORS:
            some, of_all = (x.kv if name in OF_KEYS else x.q for x in (heads, whole))
            before = 1 if name in OF_ROWS else 2
            slices[name] = None if some == of_all else (*(EVERYTHING,) * before, some)
        return cls(heads, slices)

    def named(self, names: Iterable[str], tensors: Named) -> list[Tensor]:
        """These heads of some tensors, each itself if they are all of it."""
        slices = self.slices
        return [
            tensors[name] if (some := slices[name]) is None else tensors[name][some]
            for name in names
        ]


class Operation(NamedTuple):
    """What the ranks of a team send each other at a time.

    Attributes:
        messages: the tensors; those in one tuple travel as one. names: of all of them. part: heads
            of which they are. wide: results travel in float32, not in the model's dtype.
    """

    messages: tuple[TensorNames, ...]
    names: TensorNames
    part: SomeHeads
    wide: bool


class Team(ABC):
    """Ranks whose tensors come together. Attributes: order: of their tokens."""

    def __init__(self, inward: Communicator, outward: Communicator, order: Assembly) -> None:
        """Args: inward, outward: channels to where they are computed with, and back."""
        self.order = order
        self._inward, self._outward = inward, outward

    @abstractmethod
    def gather(self, message: TensorNames, given: Named, part: SomeHeads) -> Pending[Tensors]:
        """[B,S,heads,D] -> [B,T,heads,D], rows [B,H,S] -> [B,H,T]; of all that is given."""

    @abstractmethod
    def scatter(
        self, operation: Operation, results: Iterable[Found], targets: Named
    ) -> Pending[None]:
        """Brings results for a team's tokens to where these are, into some heads of targets."""


class Travelling(NamedTuple):
    """What travels of a rank's tokens, where that is not all.

    Attributes: member: which of the team it is. rows: that travel.
    """

    member: int
    rows: Rows

    def with_own(self, blocks: Blocks, own: Tensor) -> Sequence[Tensor]:
        """Blocks of all members, in which the own tokens are all there."""
        return (*blocks[: self.member], own, *blocks[self.member + 1 :])


class GatheringTeam(Team):
    """Every rank gets the tokens of all, and finds a part of the results for all.

    Where only some rows travel, `order` is that of the rank's own tokens and of those rows of the
    others.
    """

    def __init__(
        self,
        inward: Communicator,
        outward: Communicator,
        order: Assembly,
        travelling: Travelling | None = None,
    ) -> None:
        """See Team. Args: travelling: None: all tokens travel."""
        super().__init__(inward, outward, order)
        self._travelling = travelling

    def gather(self, message: TensorNames, given: Named, part: SomeHeads) -> Pending[Tensors]:
        """See Team.gather; tensors travel and are put in order as one."""
        order, travelling, own = self.order, self._travelling, part.named(message, given)
        of_rows = message[0] in OF_ROWS
        if of_rows:
            whole, dim = torch.stack(own), 3
        else:
            whole, dim = torch.cat(own, -1) if len(own) > 1 else own[0], 1
        widths = [x.shape[3] for x in own if x.dim() == 4]
        sent = whole if travelling is None else _packed(whole, dim, travelling)
        coming = self._inward.all_gather(padded(sent, dim, order.width))

        def finish() -> Tensors:
            blocks: Blocks = coming.wait()
            if travelling is not None:
                blocks = travelling.with_own(blocks, whole)
            joined = order.join(blocks, dim)
            return joined.unbind() if of_rows else _apart(joined, widths)

        return Pending(finish)

    def scatter(
        self, operation: Operation, results: Iterable[Found], targets: Named
    ) -> Pending[None]:
        """See Team.scatter: partial outputs are merged, gradients summed."""
        own = operation.part.named(operation.names, targets)
        blocks, lses = self._placed(own, results, wide=operation.wide)
        tokens = between(0, own[0].shape[1])
        pieces = common(tokens if self._travelling is None else self._travelling.rows, tokens)
        if lses is None:
            summed = _sum_scatter(self._outward, blocks)
            widths = [x.shape[3] for x in own]

            def add() -> None:
                for target, total in zip(own, _apart(summed.wait(), widths), strict=True):
                    for piece in pieces:
                        rows_at(target, piece.there).copy_(rows_at(total, piece.here))

            return Pending(add)
        out, lse = own
        partials, statistics = self._outward.all_to_all(blocks), self._outward.all_to_all(lses)

        def merge() -> None:
            outs, lses = partials.wait(), statistics.wait()
            for here, there in pieces:
                count = here.stop - here.start
                own_rows = rows_at(out, there), narrowed(lse, 2, there.start, count)
                of_rows = narrowed(outs, 2, here.start, count), narrowed(lses, 3, here.start, count)
                merge_all_into(*own_rows, *of_rows)

        return Pending(merge)

    def _placed(
        self, own: Sequence[Tensor], results: Iterable[Found], *, wide: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Results by member: tensors [n,B,S,heads,D] as one, and [n,B,heads,S] if there is lse.

        Args: own: where those for the own tokens belong, and are written if they do not travel.
        """
        widths = [x.shape[3] for x in own if x.dim() == 4]
        like, travelling, order = own[0], self._travelling, self.order
        members, width, (batch, _, heads, _) = order.members, order.width, like.shape
        dtype = accumulation_dtype(like.dtype) if wide else like.dtype
        blocks = like.new_empty((members, batch, width, heads, sum(widths)), dtype=dtype)
        rows_of = [x.new_empty((members, *x.shape[:2], width)) for x in own if x.dim() == 3]
        places = (*_apart(blocks, widths), *rows_of)
        dims = [1] * len(widths) + [2] * len(rows_of)
        written, mine = list[Blocks](places), list[Tensor]()
        if travelling is not None:  # some of the own tokens: all of them are here
            pairs = zip(own, places, strict=True)
            mine = [x.new_empty(x.shape, dtype=place.dtype) for x, place in pairs]
            written = [travelling.with_own(*pair) for pair in zip(places, mine, strict=True)]
        for rows, tensors in results:
            for of_all, dim, x in zip(written, dims, tensors, strict=True):
                order.place(of_all, dim, rows, x)
        if travelling is not None:
            for place, whole, target, dim in zip(places, mine, own, dims, strict=True):
                some = _packed(whole, dim, travelling)
                place[travelling.member].narrow(dim, 0, some.shape[dim]).copy_(some)
                target.copy_(whole)
        return blocks, (rows_of[0] if rows_of else None)


class ExchangingTeam(Team):
    """U ranks that split the heads: every rank gets the tokens of all, for its share of them."""

    def gather(self, message: TensorNames, given: Named, part: SomeHeads) -> Pending[Tensors]:
        """See Team.gather; the part is one of every share."""
        (name,) = message
        coming = self.come(given[name], part.slices[name])
        return Pending(lambda: (coming.wait(),))

    def scatter(
        self, operation: Operation, results: Iterable[Found], targets: Named
    ) -> Pending[None]:
        """See Team.scatter."""
        ((_, tensors),) = results
        return together(
            [
                self.leave(x.to(targets[name].dtype), targets[name], operation.part.slices[name])
                for name, x in zip(operation.names, tensors, strict=True)
            ]
        )

    def come(self, x: Tensor, part: Index = None) -> Pending[Tensor]:
        """[B,S,U*h,D] -> [B,T,those of this rank's h heads,D], contiguous; [B,U*h,S] likewise."""
        tokens = token_dim(x)
        blocks = _shares(x, self.order.members, part).movedim(3 - tokens, 0)
        coming = self._inward.all_to_all(padded(blocks, 1 + tokens, self.order.width))
        return Pending(lambda: self.order.join(coming.wait(), tokens).contiguous())

    def leave(self, x: Tensor, target: Tensor, part: Index = None) -> Pending[None]:
        """Sends [B,T,heads,D] or [B,heads,T] back to where the tokens are: to those heads of every
        rank's share in target [B,S,U*h,D] or [B,U*h,S].
        """
        tokens = token_dim(x)
        under_way = self._outward.all_to_all(self.order.split(x, tokens))
        place = _shares(target, self.order.members, part)

        def finish() -> None:
            own = narrowed(under_way.wait(), 1 + tokens, 0, target.shape[tokens])
            place.copy_(own.movedim(0, 3 - tokens))

        return Pending(finish)


def together(all_of: Sequence[Pending[None]]) -> Pending[None]:
    """Several operations as one."""

    def finish() -> None:
        for pending in all_of:
            pending.wait()

    return Pending(finish)


def _packed(x: Tensor, dim: int, travelling: Travelling) -> Tensor:
    """What travels of a tensor of the own tokens."""
    return packed(x, dim, travelling.rows, between(0, x.shape[dim]))


def _shares(x: Tensor, members: int, part: Index) -> Tensor:
    """[B,S,U*h,D] -> [B,S,U,heads,D], rows [B,U*h,S] -> [B,U,heads,S], as a view. Args: part: of
    each share.
    """
    shares = x.unflatten(2 if x.dim() == 4 else 1, (members, -1))
    return shares if part is None else shares[(EVERYTHING, *part)]


def _apart(x: Tensor, widths: Sequence[int]) -> Tensors:
    """Tensors that were put together along their last dimension."""
    return x.split(widths, -1) if len(widths) > 1 else (x,)


def _sum_scatter(comm: Communicator, blocks: Tensor) -> Pending[Tensor]:
    """The sum over ranks of this rank's block, [n, ...] -> [...], each addend rounded only once."""
    wide = accumulation_dtype(blocks.dtype)
    # A reduction adds up in the dtype that travels; with two ranks that is one rounding too.
    if blocks.dtype == wide or comm.size == 2:
        return comm.reduce_scatter(blocks)
    return comm.all_to_all(blocks).then(lambda received: received.sum(0, dtype=wide))
