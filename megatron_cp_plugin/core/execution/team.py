"""Teams of ranks that gather tensors by collective operations and return the results.

B batch, S local tokens, T tokens of a team, H query heads, G KV heads, D head dim, U ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import Assembly, Blocks, padded
from megatron_cp_plugin.core.blocks.packed_rows import packed
from megatron_cp_plugin.core.blocks.rows import Rows, between, common, narrowed, token_dim
from megatron_cp_plugin.core.comm import Communicator, Pending
from megatron_cp_plugin.core.execution.partial import accumulation_dtype, merge_all_into, rows_at
from megatron_cp_plugin.core.pipeline import HeadGroup
from megatron_cp_plugin.core.plans.plan import OF_KEYS, OF_ROWS, TensorNames

Tensors = tuple[Tensor, ...]
Named = Mapping[str, Tensor]
Found = tuple[slice, Tensors]  # results for some rows of a team's queries, or keys
EVERYTHING = slice(None)


@dataclass(frozen=True)
class Operation:
    """What the ranks of a team send each other at a time.

    Attributes: messages: the tensors; those in one tuple travel as one. heads: of which they are.
        wide: results travel in float32, not in the model's dtype.
    """

    messages: tuple[TensorNames, ...]
    heads: HeadGroup
    wide: bool

    @cached_property
    def names(self) -> TensorNames:
        """Of all tensors."""
        return tuple(name for message in self.messages for name in message)


class Team(ABC):
    """Ranks whose tensors come together. Attributes: order: of their tokens."""

    def __init__(self, inward: Communicator, outward: Communicator, order: Assembly) -> None:
        """Args: inward, outward: channels to where they are computed with, and back."""
        self.order = order
        self._inward, self._outward = inward, outward

    @abstractmethod
    def gather(self, message: TensorNames, given: Named, heads: HeadGroup) -> Pending[Tensors]:
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

    def gather(self, message: TensorNames, given: Named, heads: HeadGroup) -> Pending[Tensors]:
        """See Team.gather; tensors travel and are put in order as one."""
        own = [heads_of(name, given[name], heads) for name in message]
        if message[0] in OF_ROWS:
            return self._gather(torch.stack(own), 3).then(Tensor.unbind)
        widths = [x.shape[3] for x in own]
        whole = torch.cat(own, -1) if len(own) > 1 else own[0]
        return self._gather(whole, 1).then(lambda x: _apart(x, widths))

    def _gather(self, own: Tensor, dim: int) -> Pending[Tensor]:
        coming = self._inward.all_gather(padded(self._packed(own, dim), dim, self.order.width))
        return coming.then(lambda gathered: self.order.join(self._with(gathered, own), dim))

    def _packed(self, own: Tensor, dim: int) -> Tensor:
        """What travels of a tensor of the own tokens."""
        if self._travelling is None:
            return own
        return packed(own, dim, self._travelling.rows, between(0, own.shape[dim]))

    def _with(self, blocks: Tensor, own: Tensor) -> Blocks:
        """Blocks of all members, in which the own tokens are all there."""
        if self._travelling is None:
            return blocks
        member = self._travelling.member
        return (*blocks[:member], own, *blocks[member + 1 :])

    def scatter(
        self, operation: Operation, results: Iterable[Found], targets: Named
    ) -> Pending[None]:
        """See Team.scatter: partial outputs are merged, gradients summed."""
        own = [heads_of(name, targets[name], operation.heads) for name in operation.names]
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
        partials, statistics = (self._outward.all_to_all(x) for x in (blocks, lses))

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
        like = own[0]
        dtype = accumulation_dtype(like.dtype) if wide else like.dtype
        blocks = self._blocks((*like.shape[:3], sum(widths)), 1, like, dtype)
        rows_of = [self._blocks(x.shape, 2, x, x.dtype) for x in own if x.dim() == 3]
        places = (*_apart(blocks, widths), *rows_of)
        dims, written, mine = [token_dim(x) for x in own], list[Blocks](places), list[Tensor]()
        if self._travelling is not None:  # some of the own tokens: all of them are here
            pairs = zip(own, places, strict=True)
            mine = [x.new_empty(x.shape, dtype=place.dtype) for x, place in pairs]
            written = [self._with(*pair) for pair in zip(places, mine, strict=True)]
        for rows, tensors in results:
            for of_all, dim, x in zip(written, dims, tensors, strict=True):
                self.order.place(of_all, dim, rows, x)
        if self._travelling is not None:
            for place, whole, target, dim in zip(places, mine, own, dims, strict=True):
                travelling = self._packed(whole, dim)
                place[self._travelling.member].narrow(dim, 0, travelling.shape[dim]).copy_(
                    travelling
                )
                target.copy_(whole)
        return blocks, (rows_of[0] if rows_of else None)

    def _blocks(self, shape: Sequence[int], dim: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        """An empty tensor of one block for each member, with tokens along `dim` of a block."""
        block = (*shape[:dim], self.order.width, *shape[dim + 1 :])
        return like.new_empty((self.order.members, *block), dtype=dtype)


class ExchangingTeam(Team):
    """U ranks that split the heads: every rank gets the tokens of all, for its share of them."""

    def gather(self, message: TensorNames, given: Named, heads: HeadGroup) -> Pending[Tensors]:
        """See Team.gather; the group is one of every share."""
        (name,) = message
        coming = self.come(given[name], _part(name, heads))
        return Pending(lambda: (coming.wait(),))

    def scatter(
        self, operation: Operation, results: Iterable[Found], targets: Named
    ) -> Pending[None]:
        """See Team.scatter."""
        ((_, tensors),) = results
        return together(
            [
                self.leave(x.to(targets[name].dtype), targets[name], _part(name, operation.heads))
                for name, x in zip(operation.names, tensors, strict=True)
            ]
        )

    def come(self, x: Tensor, heads: slice = EVERYTHING) -> Pending[Tensor]:
        """[B,S,U*h,D] -> [B,T,those of this rank's h heads,D], contiguous; [B,U*h,S] likewise."""
        tokens = token_dim(x)
        blocks = _shares(x, self.order.members, heads).movedim(3 - tokens, 0)
        coming = self._inward.all_to_all(padded(blocks, 1 + tokens, self.order.width))
        return Pending(lambda: self.order.join(coming.wait(), tokens).contiguous())

    def leave(self, x: Tensor, target: Tensor, heads: slice = EVERYTHING) -> Pending[None]:
        """Sends [B,T,heads,D] or [B,heads,T] back to where the tokens are: to those heads of every
        rank's share in target [B,S,U*h,D] or [B,U*h,S].
        """
        tokens = token_dim(x)
        under_way = self._outward.all_to_all(self.order.split(x, tokens))
        place = _shares(target, self.order.members, heads)

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


def heads_of(name: str, x: Tensor, heads: HeadGroup) -> Tensor:
    """Those of a tensor: [B,S,heads,D], rows [B,heads,S]; itself if they are all."""
    part, dim = heads.kv if name in OF_KEYS else heads.q, x.dim() - 2
    if part.stop - part.start == x.shape[dim]:
        return x
    return x[:, part] if dim == 1 else x[:, :, part]


def _part(name: str, heads: HeadGroup) -> slice:
    return heads.kv if name in OF_KEYS else heads.q


def _shares(x: Tensor, members: int, heads: slice) -> Tensor:
    """[B,S,U*h,D] -> [B,S,U,heads,D], rows [B,U*h,S] -> [B,U,heads,S], as a view."""
    dim = 2 if x.dim() == 4 else 1
    shares = x.unflatten(dim, (members, -1))
    if heads in (EVERYTHING, slice(0, shares.shape[dim + 1])):
        return shares
    return shares[:, :, :, heads] if dim == 2 else shares[:, :, heads]


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
