"""Comparisons among ranks of what they must have in common, at once or later.

Now (`compared`, `SameCall`, `agreed_length`, `CallChecks.compare`) objects are gathered before
anything else is sent. Later (`same_on_all_ranks`) numbers are reduced while other work goes on, and
whoever asks for the answer waits. What differs is refused in one line on all ranks.

Ranks that disagree would compute a wrong result, or wait for messages of another size, which ends
the process over gloo and hangs over NCCL.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from textwrap import shorten
from types import MappingProxyType
from typing import Any, Self
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.comm import others_lost
from megatron_cp_plugin.core.layout import Layout, unfit
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

COMPARED_TOGETHER = 16
_FACTOR, _MODULUS = 1_000_003, 2**61 - 1  # primes, so that no number is lost from their sum
_KEPT = 4096
_FAULTY = -1  # in place of a checksum
_ARRAYS = Tensor, np.ndarray


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


def check_same(
    need: str, of_ranks: Sequence[object], advice: str, words: Sequence[object] = ()
) -> None:
    """Refuses values that differ between ranks, with the same message on all ranks.

    Args:
        need: what all ranks need, in words.
        words: description of each rank's value, by rank; (): `of_ranks`.

    Raises: ContextParallelError.
    """
    words = words or of_ranks
    for rank, other in enumerate(of_ranks):
        if other != of_ranks[0]:
            raise ContextParallelError(
                f"{need}, got {words[0]} on rank 0 and {words[rank]} on rank {rank}: {advice}"
            ) from None


def compared[T](topology: Topology, what: str, call: str, mine: T) -> list[T]:
    """Every rank's value for a comparison, by rank; a collective operation.

    Args:
        what: name of the value.
        call: the call that it belongs to, in words for errors.

    Raises: ContextParallelError on all ranks, with the same words, if other ranks make another
    call; CommunicationError if another rank does not come.
    """
    whats, calls, of_ranks = zip(*topology.gather((what, call, mine)), strict=True)
    check_same("all ranks need one call", whats, "make the same call on all", calls)
    return list(of_ranks)


def _check_faults(faults: Sequence[str | None]) -> None:
    """Raises: ContextParallelError on all ranks for what one of them has found to be wrong."""
    for rank, fault in enumerate(faults):
        if fault:
            where = "" if all(faults) else f" (rank {rank})"
            raise ContextParallelError(f"{fault}{where}") from None


def same_on_all_ranks(numbers: Tensor, group: dist.ProcessGroup) -> Callable[[], bool]:
    """Begins to compare int64 numbers [n] over a group, in one collective operation.

    On a GPU neither the current stream nor the host waits for the comparison. Call the returned
    function once: the host then waits for the comparison, but not for work queued since. The
    function says whether all ranks gave the same numbers, and raises CommunicationError if a rank
    does not come.
    """
    extremes = torch.cat((numbers, -numbers))
    work = dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group, async_op=True)
    assert work is not None  # it is asynchronous
    found: Callable[[], Tensor] | None = None
    if extremes.is_cuda:
        with torch.cuda.stream(_stream(extremes.device)):
            work.wait()
            found = on_host(_all_equal(extremes))

    def value() -> bool:
        try:
            if found is not None:
                return bool(found())
            work.wait()
        except RuntimeError as error:
            raise others_lost(group.rank(), group.size(), "in a comparison", error) from error
        return bool(_all_equal(extremes))  # whose memory is held until here

    return value


def on_host(x: Tensor) -> Callable[[], Tensor]:
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


def _all_equal(extremes: Tensor) -> Tensor:
    """Whether all are equal, bool [], from the maxima of the numbers and of their negatives."""
    largest, smallest = extremes.chunk(2)
    return (largest == -smallest).all()


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class SameCall:
    """Within this context a rank reads its arguments; at its end the ranks compare their calls.

    A collective operation: one small message at each call if the topology `compares_each_call`.
    Otherwise ranks compare the first call with such settings and `changing`, and later calls
    `COMPARED_TOGETHER` at a time.

    Raises: ContextParallelError on all ranks, with the same words, if they disagree, or if one of
    them has raised it in the context; over NCCL, in a later call, on that rank alone.
    CommunicationError if another rank does not come.

    Attributes:
        function: its name.
        settings: settings by name, hashable, in the same order at each call.
        changing: values that may differ from call to call, in plain types.
        lengths: what `agreed_length` goes by, likewise the same on all ranks.
    """

    settings: Mapping[str, object] = MappingProxyType({})
    changing: Mapping[str, object] = MappingProxyType({})
    lengths: object = None

    def __init__(self, topology: Topology, function: str) -> None:
        self._topology, self.function = topology, function

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        fault = error if isinstance(error, ContextParallelError) else None
        if fault is not error or self._topology.size == 1:
            return
        # The call before a capture was compared.
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            return
        try:
            self._compare(fault)
        except CommunicationError as lost:
            raise CommunicationError(
                f"{lost}; ranks were to compare their call, {self._words()}"
            ) from lost

    def _compare(self, fault: ContextParallelError | None) -> None:
        topology, known = self._topology, self._topology.agreed
        key = self.function, *self.settings.values()
        changing = _written(self.changing)
        if topology.compares_each_call:
            held = repr((self.function, changing, _written(self.settings), self.lengths))
            if topology.comparison(_FAULTY if fault else crc32(held.encode()))():
                return
        elif fault is not None:
            return
        elif key in known.calls:
            # Not the hash of the settings, which another process has not for words.
            held = repr((known.calls[key], changing, self.lengths))
            known.sum = (known.sum * _FACTOR + crc32(held.encode())) % _MODULUS
            known.count += 1
            if known.count % COMPARED_TOGETHER:
                return
            # Begins to compare the sum, and looks at what the comparison before has found, so that
            # the host hardly ever waits, and all ranks have one answer.
            same, known.begun = known.begun, topology.comparison(known.sum)
            if same is not None and not same():
                raise ContextParallelError(
                    "all ranks need the same calls of attention, linear_attention and unshard, got "
                    f"others on some rank among the last {2 * COMPARED_TOGETHER}: make the same "
                    "calls, with the same settings, on all"
                )
            return
        mine = {"function": repr(self.function), **changing, **_written(self.settings)}
        note = str(fault) if fault else None, mine
        faults, calls = zip(
            *compared(topology, "settings", f"a new one of {self._words()}", note), strict=True
        )
        if all(faults):
            return  # each rank raises its own
        _check_faults(faults)
        for name in mine:
            values = [call.get(name) for call in calls]
            words = [shorten(str(value), 80, placeholder=" ...") for value in values]
            check_same(f"all ranks need one {name}", values, "make the same call on all", words)
        known.lengths.clear()  # it may be these that differ: they are compared next
        if len(known.calls) >= _KEPT:
            known.calls.clear()
        known.calls[key] = crc32(repr(mine).encode())

    def _words(self) -> str:
        settings = (f"{name} {value}" for name, value in _written(self.settings).items())
        return f"{self.function} with {', '.join(settings)}"


def _written(settings: Mapping[str, object]) -> dict[str, str]:
    return {
        name: repr(value.tolist() if isinstance(value, _ARRAYS) else value)
        for name, value in settings.items()
    }


def agreed_length(
    topology: Topology,
    layout: Layout,
    tokens: int,
    seq_len: int | None,
    unknown: Tensor | None = None,
) -> int:
    """The global sequence length, after all ranks have found that it fits the tokens they hold.

    A collective operation at the first call with a seq_len, or, without seq_len, with a number of
    tokens; later calls send nothing. Once shards of unequal lengths exist, every call without
    seq_len compares.

    Args:
        layout: within the documents, where it follows them.
        tokens: number of tokens that this rank holds.
        seq_len: global, the same on all ranks; None: all ranks hold equally many tokens.
        unknown: [B,S,H,D], a tensor of which it is not known whether it was split; refused if all
            ranks hold the same elements.

    Raises: ContextParallelError on all ranks, with the same words, if they disagree;
    CommunicationError if another rank does not come.
    """
    size, known = topology.size, topology.agreed
    if size == 1:
        return tokens if seq_len is None else seq_len
    # With seq_len all ranks come here together, whatever they hold.
    key = tokens if seq_len is None else (layout if seq_len % size else layout.name, seq_len)
    total = tokens * size if seq_len is None else seq_len
    if key in known.lengths and not (seq_len is None and known.unequal):
        return total
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            f"a CUDA graph cannot compare the ranks' numbers of tokens, got {tokens} for the first "
            "time while it was captured: make the same call, with seq_len=, once before"
        )
    expected = layout.length(topology.rank, size, total)
    mine = tokens, expected, seq_len, None if seq_len is not None else _content(unknown)
    try:
        held = compared(topology, "numbers of tokens", "one that was made before", mine)
    except CommunicationError as error:
        raise CommunicationError(
            f"{error}; the ranks were comparing their numbers of tokens, {tokens} here: pass "
            "seq_len= if they are unequal"
        ) from error
    known.unequal |= len({tokens for tokens, *_ in held}) > 1
    _check_lengths(held, layout)
    if len(known.lengths) >= _KEPT:
        known.lengths.clear()
    known.lengths.add(key)
    return total


def _content(x: Tensor | None) -> int | None:
    """A checksum of some elements [B,S,H,D]; None if all tokens have the same elements."""
    if x is None or not x.numel():
        return None
    part = x.detach()[0, :, 0, :8].cpu().double()
    return crc32(part.numpy().tobytes()) if bool((part != part[0]).any()) else None


def _check_lengths(held: list[tuple[int, int, int | None, int | None]], layout: Layout) -> None:
    """Raises: ContextParallelError unless the numbers of tokens that ranks hold and expect, and the
    seq_len they were given, fit.
    """
    tokens, expected, seq_lens, contents = zip(*held, strict=True)
    check_same("all ranks need one seq_len", seq_lens, "pass the global length on all")
    size, first, seq_len = len(held), tokens[0], seq_lens[0]
    if contents[0] is not None and len(set(contents)) == 1:
        raise ContextParallelError(
            f"ranks need different tokens, got the same {first} on all {size}, as if they were not "
            f"split: shard with cp.shard, or pass seq_len={first * size} if they are"
        )
    if seq_len is None:
        total = sum(tokens)
        fits = all(layout.length(rank, size, total) == tokens[rank] for rank in range(size))
        advice = f"pass seq_len={total}" if fits else "shard with cp.shard, and pass seq_len="
        check_same("ranks hold unequally many tokens", tokens, advice)
        return
    for rank in range(size):
        if tokens[rank] != expected[rank]:
            raise unfit(layout, rank, size, seq_len, expected[rank], tokens[rank])


class CallChecks:
    """Checks of the calls of a model, each over the ranks of a group.

    The first call of training and the first call of evaluation in a group are compared at once.
    Later calls are compared while the model runs; `finish` collects the answers.
    """

    def __init__(self) -> None:
        self._compared: set[tuple[dist.ProcessGroup, bool]] = set()
        self._begun: list[Callable[[], str | None]] = []

    def is_first(self, group: dist.ProcessGroup) -> bool:
        """Whether a group has not yet compared a call with, or without, gradients."""
        return (group, torch.is_grad_enabled()) not in self._compared

    def compare(
        self,
        fault: str | None,
        group: dist.ProcessGroup,
        held: object = None,
        difference: Callable[[int, Any, Any], str] = lambda rank, theirs, first: "",
    ) -> bool:
        """Refuses a fault: in a first call on all ranks, in later calls on this rank.

        Args:
            fault: what is wrong on this rank; None: nothing.
            held: value that should be equal on all ranks, in plain types.
            difference: says what is wrong if a rank's value differs from the first rank's.

        Returns: whether the ranks compared: in a first call, if there are several ranks.

        Raises: ContextParallelError, CommunicationError.
        """
        compares = group.size() > 1 and self.is_first(group)
        if compares:
            faults, holding = zip(*gathered((fault, held), group), strict=True)
            _check_faults(faults)
            for rank, theirs in enumerate(holding):
                if theirs != holding[0]:
                    raise ContextParallelError(difference(rank, theirs, holding[0]))
            self._compared.add((group, torch.is_grad_enabled()))
        if fault:
            raise ContextParallelError(fault)
        return compares

    def compare_later(self, numbers: Tensor, group: dist.ProcessGroup, fault: str) -> None:
        """Begins to compare int64 numbers [n]. Args: fault: what is wrong if they differ."""
        same = same_on_all_ranks(numbers, group)
        self.add(lambda: None if same() else fault)

    def add(self, answer: Callable[[], str | None]) -> None:
        """Takes a check that has begun: a function that waits and returns the fault, if any."""
        self._begun.append(answer)

    def clear(self) -> None:
        """Forgets the checks that have begun, as after a call that failed."""
        self._begun.clear()

    def finish(self) -> None:
        """Asks for all answers. Raises: as `compare`."""
        while self._begun:
            if fault := self._begun.pop(0)():
                raise ContextParallelError(fault)
