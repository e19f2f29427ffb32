"""Chooses a linear attention kernel for a problem."""

from collections.abc import Callable
from functools import cache

from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.kernels.choice import choose_kernel, loader

# In the order of preference of "auto", fastest first.
_KERNELS: dict[str, Callable[[], LinearKernel]] = {
    "fla": loader("fla_gated", "FlaLinear"),
    "chunked": loader("chunked", "Chunked"),
}


def linear_kernel_names() -> tuple[str, ...]:
    """Names that `kernel=` of linear attention takes beside "auto"."""
    return tuple(_KERNELS)


def linear_kernels() -> tuple[LinearKernel, ...]:
    """All kernels in the order of preference of "auto", whether they can run here or not."""
    return tuple(load() for load in _KERNELS.values())


@cache
def resolve_linear(name: str, problem: LinearProblem) -> LinearKernel:
    """The kernel of that name, or for "auto" the fastest one that serves the problem.

    Raises: KernelUnavailableError if the name is unknown, or the kernel cannot serve the problem.
    """
    return choose_kernel("linear-attention kernel", name, problem, _KERNELS)
