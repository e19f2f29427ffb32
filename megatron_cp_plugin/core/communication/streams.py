"""Runs work on a stream next to the current CUDA stream."""

from collections.abc import Callable
from functools import cache
from types import TracebackType

import torch
from torch import Tensor


class SideStream:
    """Within this context kernels are queued beside the current stream, as of its making.

    What was queued before `SideStream(device)` is visible inside; what is queued between that and
    `join` runs at the same time. Does nothing on devices without streams.
    """

    def __init__(self, device: torch.device) -> None:
        self._context: torch.cuda.StreamContext | None = None
        if device.type == "cuda":
            self._stream = _side_stream(device)
            self._stream.wait_stream(torch.cuda.current_stream(device))
            self._context = torch.cuda.stream(self._stream)

    def __enter__(self) -> None:
        if self._context is not None:
            self._context.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._context is not None:
            self._context.__exit__(kind, value, traceback)

    def join(self) -> None:
        """The current stream waits for what was queued inside."""
        if self._context is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


def capturing(x: Tensor) -> bool:
    """Whether what happens to a tensor now goes to a CUDA graph."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def capture[T](call: Callable[[], T], meet: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, T]:
    """Captures a call in a CUDA graph, after running it twice where nothing is left behind.

    Args: meet: lets all ranks, and their GPUs, come to the point where they capture.

    Returns: the graph, and what the call gave, which replays write to.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    meet()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = call()
    return graph, results


def copy_stream() -> torch.cuda.Stream:
    """The stream of the present GPU's copies to others."""
    return _copy_stream(torch.cuda.current_device())


@cache
def _copy_stream(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)
