"""The comparison of every call among its ranks, before the call sends anything else.

Each rank sends every other one a number that depends on the kind of the call, on how many came
before, and on all values that the ranks share; a rank that refuses the call sends that instead. The
hosts exchange these 16 bytes, one host in its memory, and wait for no GPU. Where numbers differ the
ranks gather what they stand for, and all refuse the call in one line.

Ranks that disagree would compute a wrong result, or wait for messages of another size, which ends
the process over gloo and hangs over NCCL.
"""

from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from textwrap import shorten
from types import MappingProxyType
from typing import Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import Topology, others_lost
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_REFUSED = -1  # in place of a number


def gathered[T](mine: T, group: dist.ProcessGroup, doing: str = "in a check") -> list[T]:
    """Every rank's object, by rank; a collective operation. Args: doing: for the error.

    Raises: CommunicationError if another rank does not come.
    """
    of_ranks = [mine] * group.size()
    try:
        dist.all_gather_object(of_ranks, mine, group=group)
    except RuntimeError as error:
        raise others_lost(group.rank(), group.size(), doing, error) from error
    return of_ranks


def check_same(need: str, of_ranks: Sequence[object], advice: str) -> None:
    """Refuses values that differ between ranks, with the same message on all ranks.

    Args: need: what all ranks need, in words.

    Raises: ContextParallelError.
    """
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise ContextParallelError(
                f"{need}, got {of_ranks[0]} on rank 0 and {other} on rank {rank}: {advice}"
            ) from None


class Digest:
    """Stands for a long value among the values of calls: its text is made once for many calls.

    Equal values of one type have equal digests; a tensor is copied to the host.
    """

    def __init__(self, value: object) -> None:
        if isinstance(value, Tensor):
            value = value.detach().cpu().numpy()
        self._value = value.tolist() if isinstance(value, np.ndarray) else value
        self._number = _number_of(repr(self._value))

    def __repr__(self) -> str:
        return str(self._number)


class SameCall:
    """Within this context a rank reads a call; at its end the ranks compare their calls.

    A collective operation, whatever happens within: every `Exception` there reaches all ranks.

    Raises: ContextParallelError on all ranks, with the same words, if calls differ or a rank has
    raised an error in the context, which that rank raises itself. CommunicationError if another
    rank does not come.

    Attributes:
        values: what all ranks share, by name, in plain types or `Digest`.
        content: a checksum of what ranks do not share; refused if it is the same on all, see
            `content_of`; 0: none.
        refusal: says that a value differs, from its name, its words by rank, and the first rank
            that differs from rank 0.
    """

    values: Mapping[str, object] = MappingProxyType({})
    content = 0

    def __init__(self, topology: Topology, function: str) -> None:
        self.topology, self.function = topology, function
        self.refusal: Callable[[str, Sequence[str], int], str] = _other_values

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if self.topology.size == 1 or isinstance(error, CommunicationError):
            return
        if error is None or isinstance(error, Exception):
            try:
                self._compare(error)
            except CommunicationError as lost:
                raise CommunicationError(
                    f"{lost}; ranks were to compare their call, {self._words()}"
                ) from lost

    def _compare(self, error: Exception | None) -> None:
        topology = self.topology
        topology.calls += 1  # also of those that are refused
        number = _REFUSED
        if error is None:
            number = _number_of(f"{self.function} {topology.calls} {self.values!r}")
        numbers, contents = zip(*topology.numbers((number, self.content)), strict=True)
        if error is not None or numbers.count(number) < len(numbers):
            self._refuse(error)
        elif self.content and len(set(contents)) == 1:
            tokens, size = int(repr(self.values["tokens"])), topology.size
            raise ContextParallelError(
                f"ranks need different tokens, got the same {tokens} on all {size}, as if they "
                f"were not split: shard with cp.shard, or pass seq_len={tokens * size} if they are"
            )

    def _refuse(self, error: Exception | None) -> None:
        """Raises: ContextParallelError on all ranks, in the same words. Returns on a rank with an
        `error` of another class, which goes on.
        """
        values = {**self.values, "number of calls before": self.topology.calls - 1}
        mine = {name: (repr(value), words_of(value)) for name, value in values.items()}
        fault = None if error is None else _line_of(error)
        notes = self.topology.gather((fault, repr(self.function), mine))
        faults, functions, of_ranks = zip(*notes, strict=True)
        for rank, said in enumerate(faults):
            if said is not None:
                if error is not None and not isinstance(error, ContextParallelError):
                    return
                where = "" if all(faults) else f" (rank {rank})"
                raise (type(error) if error else ContextParallelError)(said + where) from None
        check_same("all ranks need one function", functions, "make the same call on all")
        for name in dict.fromkeys(chain(*of_ranks)):
            texts, words = zip(
                *(each.get(name, ("None", "None")) for each in of_ranks), strict=True
            )
            for rank, text in enumerate(texts):
                if text != texts[0]:
                    raise ContextParallelError(self.refusal(name, words, rank)) from None

    def _words(self) -> str:
        settings = (f"{name} {words_of(value)}" for name, value in self.values.items())
        return f"{self.function} with {', '.join(settings)}"


def _other_values(name: str, words: Sequence[str], rank: int) -> str:
    """As of `SameCall.refusal`."""
    return (
        f"all ranks need one {name}, got {words[0]} on rank 0 and {words[rank]} on rank {rank}: "
        "make the same call on all"
    )


def _number_of(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=7).digest())


def words_of(value: object) -> str:
    """A value in one line, shortened."""
    text = repr(value._value if isinstance(value, Digest) else value)
    return shorten(text, 80, placeholder=" ...")


def _line_of(error: Exception) -> str:
    line = (str(error).splitlines() or [""])[0]
    return line if isinstance(error, ContextParallelError) else f"{type(error).__name__}: {line}"


def content_of(x: Tensor) -> int:
    """A checksum of some elements [B,S,H,D]; 0 if all tokens have the same elements, or while a
    CUDA graph is captured, which no host can see.
    """
    if not x.numel() or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return 0
    part = x.detach()[0, :, 0, :8].cpu().double()
    return _number_of(part.numpy().tobytes().hex()) if bool((part != part[0]).any()) else 0
