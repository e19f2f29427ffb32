"""Activation checkpointing that does not run attention again.

A checkpoint runs a function twice: once for its result, and in the backward once more for what
autograd needs. A flash kernel's backward needs its inputs, out and lse, nothing that only a second
run of its forward could give. So the first run's (out, lse) are kept and the second run uses them:
one attention forward and one round of communication fewer, and the same bits.

Results belong to one call of a checkpoint: `Checkpointed` wraps the function that the checkpoint
holds, stores the results itself, and is freed with the checkpoint. So no order of micro-batches,
pipeline stages, evaluation or errors can mix results up, and nothing has to be cleaned away.

Source: DISTFLASHATTN, section 3.3.
"""

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import cast

from torch import Tensor

from megatron_cp_plugin.core.autograd.host_memory import HostMemory, Moved
from megatron_cp_plugin.errors import ContextParallelError

_running: "ContextVar[tuple[Checkpointed, ...]]" = ContextVar("checkpointed", default=())


@dataclass(frozen=True)
class _Kept:
    """Results of one computation; a number in place of a result stands for the input of that
    number.

    Inputs are not kept, because the second run computes them again.
    """

    results: tuple[Tensor | Moved | int | None, ...]
    shapes: tuple[object, ...]

    @classmethod
    def of(
        cls, inputs: Sequence[Tensor], results: Sequence[Tensor | None], memory: HostMemory
    ) -> "_Kept":
        places: dict[int, Tensor | Moved | int] = {id(x): n for n, x in enumerate(inputs)}
        for x in results:
            if x is not None and id(x) not in places:
                places[id(x)] = memory.keep(x.detach())
        return cls(tuple(places.get(id(x)) for x in results), _shapes(inputs))

    def with_inputs(self, inputs: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        if _shapes(inputs) != self.shapes:
            raise ContextParallelError(
                f"a checkpointed function called attention with {_shapes(inputs)} when it was "
                f"recomputed, got {self.shapes} at first: set recompute_attention to true"
            )
        back = {x: x.tensor() for x in dict.fromkeys(self.results) if isinstance(x, Moved)}
        found = (back[x] if isinstance(x, Moved) else x for x in self.results)
        return tuple(inputs[x] if isinstance(x, int) else x for x in found)


def _shapes(inputs: Sequence[Tensor]) -> tuple[object, ...]:
    return tuple((tuple(x.shape), x.dtype) for x in inputs)


class Checkpointed:
    """A function for a checkpoint that will call it twice; one object for each checkpoint.

    Works with every checkpoint that calls the object itself that it was given: Megatron's,
    Transformer Engine's, and both kinds of torch.utils.checkpoint. A third run computes everything.
    """

    def __init__(self, function: Callable[..., object], memory: HostMemory) -> None:
        """Args: memory: where results are kept when the GPU is short of memory."""
        self._function, self._memory = function, memory
        self._keeping = True
        self._kept: dict[Hashable, deque[_Kept]] = {}

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Runs the function: the first run keeps what `computed_once` gives, the second uses it."""
        token = _running.set((*_running.get(), self))
        try:
            return self._function(*args, **kwargs)
        finally:
            _running.reset(token)
            self._keeping = False

    def _take(self, recompute_key: Hashable) -> _Kept | None:
        waiting = None if self._keeping else self._kept.get(recompute_key)
        return waiting.popleft() if waiting else None


def computed_once[T: Tensor | None](
    recompute_key: Hashable | None, inputs: Sequence[Tensor], compute: Callable[[], tuple[T, ...]]
) -> tuple[T, ...]:
    """The results of `compute`, which does not run again when a checkpoint runs its function again.

    Args:
        recompute_key: identifies the computation inside the function, such as the layer's module;
            those of one key run in the same order both times. None: `compute` always runs.
        inputs: all tensors that the results depend on; results that are inputs are not kept.

    Raises: ContextParallelError if the second run has inputs of other shapes or dtypes.
    """
    running = _running.get()
    if recompute_key is None or not running:
        return compute()
    # Checkpoints may be nested: the outer ones' second run is an inner one's first run.
    found = [
        kept for checkpoint in running if (kept := checkpoint._take(recompute_key)) is not None
    ]
    # Kept results have the types of computed ones.
    results = cast(tuple[T, ...], found[0].with_inputs(inputs)) if found else compute()
    keeping = [checkpoint for checkpoint in running if checkpoint._keeping]
    if keeping:
        kept = _Kept.of(inputs, results, keeping[0]._memory)
        for checkpoint in keeping:
            checkpoint._kept.setdefault(recompute_key, deque()).append(kept)
    return results
