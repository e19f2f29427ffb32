"""Checks that all ranks of a group make the same call before its messages are sent.

Ranks that disagree would compute something that nobody has asked for, or wait for messages of
other sizes than those that come, which ends the process over gloo and hangs over NCCL.
"""

from collections.abc import Mapping
from textwrap import shorten

import numpy as np
import torch
from torch import Tensor

from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError

_KEPT = 4096


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
            )
    return [given for _, _, given in of_ranks]


def check_same_call(
    topology: Topology,
    function: str,
    settings: Mapping[str, object],
    changing: Mapping[str, object],
) -> None:
    """Checks that all ranks make one call; a collective operation at the first one with `settings`.

    Args:
        function: its name. settings: by name, hashable, in one order at each call. changing: what
            may be another one at each call, and is compared where the settings are.

    Raises: ContextParallelError on all ranks, with the same words, if they disagree;
    CommunicationError if another rank does not come.
    """
    key = function, *settings.values()
    if topology.size == 1 or key in topology.same_calls:
        return
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        return  # the call before the capture was compared
    given = {"function": function, **changing, **settings}
    mine = {name: _written(value) for name, value in given.items()}
    new = ", ".join(f"{name} {mine[name]}" for name in settings)
    call = f"a new one of {function} with {new}"
    try:
        of_ranks = compared(topology, "settings", call, mine)
    except CommunicationError as error:
        raise CommunicationError(
            f"{error}; the ranks were comparing their calls, {call}"
        ) from error
    first = of_ranks[0]
    for name in first:
        for rank, theirs in enumerate(of_ranks):
            if theirs[name] != first[name]:
                one, other = (shorten(x[name], 80, placeholder=" ...") for x in (first, theirs))
                raise ContextParallelError(
                    f"all ranks need one {name}, got {one} on rank 0 and {other} on rank {rank}: "
                    "make the same call on all"
                )
    if len(topology.same_calls) >= _KEPT:
        topology.same_calls.clear()
    topology.same_calls.add(key)


def _written(value: object) -> str:
    return repr(value.tolist() if isinstance(value, Tensor | np.ndarray) else value)
