"""Checks that all ranks of a group make the same call before its messages are sent.

Ranks that disagree would compute something that nobody has asked for, or wait for messages of
other sizes than those that come, which ends the process over gloo and hangs over NCCL.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from textwrap import shorten
from types import MappingProxyType
from typing import Self
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.same_numbers import COMPARED_TOGETHER
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_KEPT = 4096
_FAULTY = -1  # in place of a checksum
_ARRAYS = Tensor, np.ndarray


def compared[T](topology: Topology, what: str, call: str, mine: T) -> list[T]:
    """What each rank gives for a comparison, by rank; a collective operation.

    Args: what: is compared. call: that it is for, in words for errors.

    Raises: ContextParallelError on all ranks, with the same words, if other ranks compare something
    else, and so make another call; CommunicationError if another rank does not come.
    """
    of_ranks = topology.gather((what, call, mine))
    first_what, first_call, _ = of_ranks[0]
    for rank, (other_what, other_call, _) in enumerate(of_ranks):
        if other_what != first_what:
            raise ContextParallelError(
                f"all ranks need one call, got {first_call} on rank 0 and {other_call} on rank "
                f"{rank}: make the same call on all"
            ) from None
    return [given for _, _, given in of_ranks]


class SameCall:
    """Within this context a rank reads its arguments; at its end the ranks compare their calls.

    A collective operation: at each call where the topology `compares_each_call`, by one small
    message; else at the first one with such settings, `changing` with them, and later ones as
    `LaterNumbers` says.

    Raises: ContextParallelError on all ranks, with the same words, if they disagree, or if one of
    them has raised it in the context; over NCCL, in a later call, on that rank alone.
    CommunicationError if another rank does not come.

    Attributes:
        function: its name.
        settings: by name, hashable, in one order at each call.
        changing: what may be another one at each call, in plain types.
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
        if not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()):
            _compare(self._topology, self, fault)


def _compare(topology: Topology, made: SameCall, fault: ContextParallelError | None) -> None:
    function = made.function
    key = function, *made.settings.values()
    if topology.compares_each_call:
        held = repr((function, _written(made.changing), _written(made.settings), made.lengths))
        number = _FAULTY if fault else crc32(held.encode())
        with _missed(made):
            if topology.comparison(number)():
                return
    elif fault is not None:
        return
    elif key in topology.same_calls:
        # Not the hash of the settings, which another process has not for words.
        held = repr((topology.same_calls[key], _written(made.changing), made.lengths))
        if not topology.later_calls.add(crc32(held.encode()), topology.comparison):
            raise ContextParallelError(
                "all ranks need the same calls of attention, linear_attention and unshard, got "
                f"others on some rank among the last {2 * COMPARED_TOGETHER}: make the same calls, "
                "with the same settings, on all"
            )
        return
    mine = {"function": repr(function), **_written(made.changing), **_written(made.settings)}
    with _missed(made):
        what = f"a new one of {_words(made)}"
        of_ranks = compared(topology, "settings", what, (str(fault) if fault else None, mine))
    _check(of_ranks)
    topology.lengths.agreed.clear()  # it may be these that differ: they are compared next
    if len(topology.same_calls) >= _KEPT:
        topology.same_calls.clear()
    topology.same_calls[key] = crc32(repr(mine).encode())


def _check(of_ranks: list[tuple[str | None, dict[str, str]]]) -> None:
    """Raises: ContextParallelError unless all ranks make one call; not if all have a fault."""
    faults = [fault for fault, _ in of_ranks]
    if all(faults):
        return
    for rank, fault in enumerate(faults):
        if fault:
            raise ContextParallelError(f"{fault} (rank {rank})") from None
    first = of_ranks[0][1]
    for name in first:
        for rank, (_, theirs) in enumerate(of_ranks):
            if theirs.get(name) != first[name]:
                texts = (str(x.get(name)) for x in (first, theirs))
                one, other = (shorten(text, 80, placeholder=" ...") for text in texts)
                raise ContextParallelError(
                    f"all ranks need one {name}, got {one} on rank 0 and {other} on rank {rank}: "
                    "make the same call on all"
                ) from None


@contextmanager
def _missed(made: SameCall) -> Iterator[None]:
    """Says for what a rank waited in vain."""
    try:
        yield
    except CommunicationError as error:
        raise CommunicationError(
            f"{error}; ranks were to compare their call, {_words(made)}"
        ) from error


def _words(made: SameCall) -> str:
    """A call in words."""
    settings = _written(made.settings)
    return f"{made.function} with {', '.join(f'{name} {settings[name]}' for name in settings)}"


def _written(settings: Mapping[str, object]) -> dict[str, str]:
    return {
        name: repr(value.tolist() if isinstance(value, _ARRAYS) else value)
        for name, value in settings.items()
    }
