"""The comparison of every call among its ranks, before the call sends anything else.

Each rank sends every other one a number that depends on the kind of the call, on how many came
before, and on all values that the ranks share; a rank that refuses the call sends that instead. The
hosts exchange these 16 bytes, one host in its memory, and wait for no GPU. Where numbers differ the
ranks gather what they stand for, and all refuse the call in one line.

Ranks that disagree would compute a wrong result, or wait for messages of another size, which ends
the process over gloo and hangs over NCCL.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from textwrap import shorten
from types import MappingProxyType
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import others_lost
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_REFUSED = -1  # in place of a number


def gathered[T](mine: T, group: dist.ProcessGroup) -> list[T]:
    """Every rank's object, by rank; a collective operation.

    Raises: CommunicationError if another rank does not come.
    """
    of_ranks = [mine] * group.size()
    try:
        dist.all_gather_object(of_ranks, mine, group=group)
    except RuntimeError as error:
        raise others_lost(group.rank(), group.size(), "in a check", error) from error
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

    @property
    def words(self) -> str:
        """The value, shortened."""
        return shorten(repr(self._value), 80, placeholder=" ...")


class SameCall:
    """Within this context a rank reads a call; at its end the ranks compare their calls.

    A collective operation, whatever happens within: every `Exception` there reaches all ranks.

    Raises: ContextParallelError on all ranks, with the same words, if calls differ or a rank has
    raised an error in the context, which that rank raises itself. CommunicationError if another
    rank does not come.

    Attributes:
        topology: the ranks.
        function: what is called.
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
    if isinstance(value, Digest):
        return value.words
    return shorten(repr(value), 80, placeholder=" ...")


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


class LaterValues:
    """Values of a call that a GPU finds, and faults: the host asks for them when it need not wait.

    All ranks add the same names in the same order; see `names`.
    """

    def __init__(self) -> None:
        self._begun: list[tuple[str, Callable[[], Tensor], Callable[[Tensor], object]]] = []
        self.waits = False

    def add(self, name: str, x: Tensor, read: Callable[[Tensor], object]) -> None:
        """Begins to copy a tensor to the host; `read` makes a value of it, or raises
        ContextParallelError for a fault.
        """
        self._begun.append((name, _on_host(x), read))
        self.waits = self.waits or x.is_cuda

    @property
    def names(self) -> tuple[str, ...]:
        """What was added, to be compared before."""
        return tuple(name for name, *_ in self._begun)

    def take(self) -> dict[str, object]:
        """Waits for all values, and forgets them. Raises: ContextParallelError for a fault."""
        begun = self._begun
        self.clear()
        return {name: read(found()) for name, found, read in begun}

    def clear(self) -> None:
        """Forgets what was added."""
        self._begun, self.waits = [], False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Forgets what was added in a call that failed."""
        if kind is not None:
            self.clear()


def _on_host(x: Tensor) -> Callable[[], Tensor]:
    """Starts to copy a tensor to the host; the function that is returned waits for the copy."""
    if not x.is_cuda:
        return lambda: x
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    host.copy_(x, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def value() -> Tensor:
        copied.synchronize()
        return host

    return value


class Stages:
    """Lets the stages of a pipeline compare what they share of each micro-batch.

    A later stage runs after the first one, so that they cannot wait for each other: the first stage
    leaves its values in a store when a forward pass has ended, and the last of the others to read
    them deletes them.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, chunk: int, chunks: int, *, is_first: bool
    ) -> None:
        """All stages make them in the same order.

        Args:
            ranks: the pipeline's, in the job.
            rank: the index of this one.
            chunk, chunks: index and number of a rank's virtual stages, which are one model.
        """
        built = _store().add(f"megatron_cp_plugin/models/{ranks[rank]}", 1)
        self._key = f"megatron_cp_plugin/stages/{ranks[0]}/{built - chunk}"
        self._readers = len(ranks) * chunks - 1
        self._is_first, self._calls = is_first, 0

    def first(self) -> dict[str, list[str]]:
        """The first stage's values of this call, as text and in words; {}: this is the first one.

        Raises: CommunicationError if the first stage does not come.
        """
        if self._is_first:
            return {}
        store, key = _store(), f"{self._key}/{self._calls}"
        self._calls += 1
        try:
            found: dict[str, list[str]] = json.loads(store.get(key))
        except RuntimeError as error:
            raise CommunicationError(
                "a pipeline stage lost the first one in a comparison; has it died? "
                f"({str(error).splitlines()[0]})"
            ) from error
        if store.add(f"{key}/read", 1) == self._readers:
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        return found

    def tell(self, values: Mapping[str, object]) -> None:
        """Leaves the first stage's values of a call that has ended for the others."""
        if self._is_first:
            said = {name: [repr(value), words_of(value)] for name, value in values.items()}
            _store().set(f"{self._key}/{self._calls}", json.dumps(said))
            self._calls += 1


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()
