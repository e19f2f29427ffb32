"""Packs rows of blocks, and joins blocks of several ranks into one in ascending order of positions.

n ranks' blocks come out of a collective operation as [n, ..., S, ...], each padded to S tokens.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp_plugin.core.comm import Pieces
from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.partial import RowIndex, fused_for, taken
from megatron_cp_plugin.core.ranges import (
    Numbers,
    Ranges,
    Rows,
    Span,
    common,
    expanded,
    joined,
    offsets,
    offsets_of_each,
    row_count,
    runs,
    united,
)

# Up to this number, pieces of rows are taken, or added, one by one; more pieces go through one
# kernel, by row numbers.
FEW = 2
# Up to this number copy engines send them one by one.
_COPIES = 8
# Up to this number of segments a member, copies are as fast as a gather of rows by indices.
_FEW = 8
# [n, ..., S, ...] as one tensor; or a tensor of each rank, some of them longer than S.
Blocks = Tensor | Sequence[Tensor]


def narrowed(x: Tensor, dim: int, start: int, length: int) -> Tensor:
    """As `x.narrow`; x itself if nothing is cut off."""
    return x if x.shape[dim] == length else x.narrow(dim, start, length)


def token_dim(x: Tensor) -> int:
    """Dimension of tokens in [B,S,heads,D] or [B,heads,S]."""
    return 1 if x.dim() == 4 else 2


def packed(x: Tensor, dim: int, rows: Rows, held: Rows) -> Tensor:
    """Packs some rows of a packed block, contiguous; x itself if these are all its rows.

    Args: x: the rows `held` of the block, along a dimension.
    """
    if rows == held:
        return x.contiguous()
    parts = [there for _, there in common(rows, held)]
    if len(parts) > FEW:
        return taken(x, dim, numbers_of(rows, held, x.device).to)
    pieces = [x.narrow(dim, part.start, part.stop - part.start) for part in parts]
    if len(pieces) == 1:
        return pieces[0].contiguous()
    return torch.cat(pieces, dim) if pieces else x.narrow(dim, 0, 0).contiguous()


def strided(x: Tensor, dim: int, rows: Rows, held: Rows) -> Tensor | Pieces:
    """As `packed`, for a channel that is `direct`: rows that stay in place are views."""
    if x.stride(-1) != 1 or not stay_in_place(len(x), dim, rows, held):
        return packed(x, dim, rows, held)
    if rows == held:
        return x
    each = [(part.start, part.stop - part.start) for _, part in common(rows, held)]
    pieces = tuple([x.narrow(dim, *part) for part in each])
    return pieces[0] if len(pieces) == 1 else Pieces(pieces)


def stay_in_place(batch: int, dim: int, rows: Rows, held: Rows) -> bool:
    """Whether a channel that is `direct` sends rows from where they are: without gaps, or in a few
    pieces. Args: dim: of tokens.
    """
    if rows == held:
        return True
    count = len(common(rows, held))
    return count == 1 or batch == dim == 1 < count <= _COPIES


@kept_on_device(maxsize=64)  # of some micro-batches: they take memory of the device
def numbers_of(here: Rows, there: Rows, device: torch.device) -> RowIndex:
    """Rows that two packed blocks have in common: their numbers in the second and the first."""
    pieces = common(here, there)
    to, of = (
        torch.cat([torch.arange(part.start, part.stop, device="cpu") for part in parts])
        for parts in ([there for _, there in pieces], [here for here, _ in pieces])
    )
    if len(of) == row_count(here):
        return RowIndex(uploaded(to, device))
    to, of = uploaded(torch.stack((to, of)), device)
    return RowIndex(to, of)


def padded(x: Tensor, dim: int, width: int) -> Tensor:
    """x with zeros behind it, up to `width` along `dim`; x itself if it is as long as that."""
    missing = width - x.shape[dim]
    return x if not missing else pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, missing])


class Assembly:
    """The order of the tokens of some ranks, whose spans have no gaps: sorted by position.

    Dimensions are those of one rank's tensor, where `dim` is the one of tokens.

    Attributes:
        spans: positions of the assembled block, ascending.
        members: number of ranks.
        width: S, to which every rank's block is padded.
    """

    def __init__(self, spans: Ranges, owner: Numbers, members: int, width: int) -> None:
        """Args: spans: of one rank's block after another. owner: [n], whose they are."""
        self.members, self.width, self.spans = members, width, spans.united
        local = offsets_of_each(owner, spans.lengths)  # where each span is in its rank's block
        order = np.argsort(spans.start, kind="stable")
        owner, lengths = owner[order], spans.lengths[order]
        # A rank's spans that follow each other are one segment.
        first, last = runs(owner[1:] != owner[:-1], len(owner))
        start, length = local[order][first], np.cumsum(lengths)[last] - offsets(lengths)[first]
        self._member, self._places = owner[first], Ranges.between(start, start + length)
        self.tokens = self._places.total
        # One gather in place of a copy for each segment: a pack of documents that are cut each by
        # itself has some segments a document.
        self._many = many = len(first) > _FEW * members
        columns = self._member, start, length, offsets(length)
        # Of each segment its rank, where it starts there, its length, and its assembled row.
        self._segments = () if many else tuple(zip(*(x.tolist() for x in columns), strict=True))
        # Padding may follow the last rank's block: it is cut off at the end.
        self._in_order = not many and all(
            (member, start) == (index, 0) and (length == width or index == len(self._segments) - 1)
            for index, (member, start, length, _) in enumerate(self._segments)
        )

    @cached_property
    def successive(self) -> bool:
        """Whether it is the members' blocks, all of each, one after another."""
        return self._member.tolist() == [*range(self.members)]

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor]:
        """For each assembled row, ascending: the member that has it, and the row's place there."""
        segment, within = expanded(self._places.lengths)
        local = self._places.start[segment] + within
        return torch.from_numpy(self._member[segment]), torch.from_numpy(local)

    def rows_of(self, member: int) -> Rows:
        """The assembled rows that a member has, ascending."""
        edges = np.stack((before := offsets(self._places.lengths), before + self._places.lengths))
        own = edges[:, self._member == member]
        return united(own, 0) if own.size else ()

    def join(self, gathered: Blocks, dim: int) -> Tensor:
        """[n, ..., S, ...] -> [..., tokens, ...] in ascending order; a view where it can be."""
        if self._in_order and isinstance(gathered, Tensor):
            whole = gathered.movedim(0, dim).flatten(dim, dim + 1)
            return narrowed(whole, dim, 0, self.tokens)
        if self._many:
            widths = (self.width,) * self.members
            if isinstance(gathered, Tensor):
                line = gathered.movedim(0, dim).flatten(dim, dim + 1)
            else:
                widths = tuple(block.shape[dim] for block in gathered)
                line = torch.cat(tuple(gathered), dim)
            return taken(line, dim, _joined_rows(self, widths, line.device))
        blocks = gathered.unbind() if isinstance(gathered, Tensor) else gathered
        parts = [narrowed(blocks[member], dim, *part) for member, *part, _ in self._segments]
        return torch.cat(parts, dim) if parts else blocks[0].narrow(dim, 0, 0)

    def place(self, blocks: Tensor, dim: int, rows: slice, values: Tensor) -> None:
        """Writes some rows of an assembled block to their places in [n, ..., S, ...]."""
        if blocks.dim() == 5:
            fused = fused_for(values)
            if fused is not None:  # one pass, whatever the number of segments
                apart = blocks.stride(0) // blocks.stride(2)
                numbers = _numbers(self, rows.start, rows.stop, apart, values.device)
                fused.write_rows(blocks[0], numbers, values)
                return
        if self._many:
            member, local = _members_of(self, rows.start, rows.stop, values.device)
            # Values may be sums in float32.
            found = values.movedim(dim, 0).to(blocks.dtype)
            blocks.movedim(dim + 1, 1)[member, local] = found
            return
        for member, start, length, row in self._segments:
            low = max(rows.start, row)
            count = min(rows.stop, row + length) - low
            if count > 0:
                target, part = blocks[member], values  # in every layer: without further calls
                if target.shape[dim] != count:
                    target = target.narrow(dim, start + low - row, count)
                if part.shape[dim] != count:
                    part = part.narrow(dim, low - rows.start, count)
                target.copy_(part)

    def split(self, whole: Tensor, dim: int) -> Tensor:
        """The inverse of `join`: [..., tokens, ...] -> [n, ..., S, ...]. Padding is undefined."""
        if self._many:
            rows = taken(whole, dim, _split(self, whole.device))
            return rows.unflatten(dim, (self.members, self.width)).movedim(dim, 0)
        # One copy does where blocks are consecutive in memory too; of rows of statistics,
        # which are small, a second one is cheaper than one for each segment.
        joined = self._in_order or whole.shape[:dim].numel() == 1 or whole.dim() == 3
        if not (joined and self._segments) or self.tokens < self.members * self.width:
            shape = (self.members, *whole.shape[:dim], self.width, *whole.shape[dim + 1 :])
            blocks = whole.new_empty(shape)
            self.place(blocks, dim, slice(0, self.tokens), whole)
            return blocks
        if not self._in_order:
            segments = sorted(self._segments)  # by ranks
            whole = torch.cat([whole.narrow(dim, row, n) for _, _, n, row in segments], dim)
        return whole.unflatten(dim, (self.members, self.width)).movedim(dim, 0)


@kept_on_device(maxsize=32)  # those of some micro-batches: they take memory of the device
def _joined_rows(order: Assembly, widths: tuple[int, ...], device: torch.device) -> Tensor:
    """For each assembled row, its index in the members' padded blocks, in succession."""
    member, local = order.rows
    before = torch.tensor([0, *widths[:-1]], device="cpu").cumsum(0)
    return uploaded(before[member] + local, device)


@kept_on_device(maxsize=32)
def _split(order: Assembly, device: torch.device) -> Tensor:
    """For each row of all members, its assembled row; arbitrary for padding."""
    member, local = order.rows
    rows = torch.zeros(order.members * order.width, dtype=torch.int64, device="cpu")
    rows[member * order.width + local] = torch.arange(order.tokens, device="cpu")
    return uploaded(rows, device)


@kept_on_device(maxsize=32)
def _numbers(order: Assembly, start: int, stop: int, apart: int, device: torch.device) -> Tensor:
    """Where some assembled rows are, of blocks of which each begins `apart` rows after the last."""
    member, local = (x[start:stop] for x in order.rows)
    return uploaded(member * apart + local, device)


@kept_on_device(maxsize=32)
def _members_of(
    order: Assembly, start: int, stop: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Of some assembled rows the member, and the row's place there."""
    member, local = uploaded(torch.stack([x[start:stop] for x in order.rows]), device).long()
    return member, local


def assemble(members: Sequence[Sequence[Span]], width: int) -> Assembly:
    """The order of the tokens of some ranks.

    Args:
        members: spans of each rank's block. They are without gaps, or all ranks together hold
            positions at equal distances.
        width: to which blocks are padded.

    Raises: ValueError if the spans are neither.
    """
    return _assemble(tuple(map(Ranges.of, members)), width)


@lru_cache(maxsize=64)  # of a pack on 64 ranks one is 0.6 MiB
def _assemble(members: tuple[Ranges, ...], width: int) -> Assembly:
    spans, count = joined(members), len(members)
    owner = np.repeat(np.arange(count), list(map(len, members)))
    if spans.plain:
        return Assembly(spans, owner, count, width)
    positions = spans.elements  # one after the other: each as a span of its own
    single, line = Ranges.between(positions, positions + 1), np.sort(positions)
    apart = int(line[1] - line[0]) if len(line) > 1 else 1
    if (np.diff(line) != apart).any():
        raise ValueError(f"spans must be evenly interleaved, got {list(map(list, members))}")
    order = Assembly(single, np.repeat(owner, spans.lengths), count, width)
    order.spans = Ranges.of([Span(int(line[0]), int(line[-1]) + 1, apart)])
    return order
