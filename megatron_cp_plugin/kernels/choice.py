"""Chooses a kernel: by name, or the fastest one that supports a problem."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib import import_module
from typing import Any

from megatron_cp_plugin.core.kernel import Kernel, Problem, SoftmaxKernel
from megatron_cp_plugin.errors import ConfigError, KernelUnavailableError, nearest
from megatron_cp_plugin.packages import load_installed

log = logging.getLogger(__name__)


def loader(module: str, name: str) -> Callable[[], Any]:
    """Makes a kernel of this package on the first call; its packages are imported no earlier."""

    @cache
    def load() -> Any:
        return getattr(import_module(f"megatron_cp_plugin.kernels.{module}"), name)()

    return load


def choose_kernel[K: Kernel](
    kind: str, name: str, problem: Any, kernels: Mapping[str, Callable[[], K]]
) -> K:
    """The kernel of that name, or for "auto" the first one that serves the problem.

    Args: kernels: loaders by name, fastest first; one serves every problem.

    Raises: KernelUnavailableError if the name is unknown, or the kernel cannot serve the problem.
    """
    if name == "auto":
        for candidate, load in kernels.items():
            reason = why_not(load(), problem)
            if reason is None:
                if os.environ.get("RANK", "0") == "0":  # the others choose the same
                    log.info("%s: %s for %s", kind, candidate, problem)
                return load()
            log.debug("%s %s not taken: %s", kind, candidate, reason)
        raise AssertionError("one kernel serves every problem")
    kernel = named(kind, name, kernels)
    reason = why_not(kernel, problem)
    if reason is not None:
        raise KernelUnavailableError(f"{kind} {name}: {reason}; use kernel auto")
    return kernel


def named[K: Kernel](kind: str, name: str, kernels: Mapping[str, Callable[[], K]]) -> K:
    """The kernel of that name. Raises: KernelUnavailableError if there is none."""
    if name not in kernels:
        raise KernelUnavailableError(
            f"unknown {kind} {name!r}{nearest(name, kernels)}: use auto or one of "
            f"{', '.join(kernels)}"
        )
    return kernels[name]()


def why_not(kernel: Kernel, problem: Any) -> str | None:
    """Why a kernel cannot serve a problem; None if it can."""
    if problem.deterministic and not kernel.deterministic:
        return "its results differ from run to run in the last bits, got deterministic mode"
    return kernel.unsupported(problem)


# In the order of preference of "auto", fastest first (docs/benchmarks.md has the measurements). The
# reference supports everything, so kernels registered after it are only used when named.
_KERNELS: dict[str, Callable[[], SoftmaxKernel]] = {
    "flash4": loader("flash4", "Flash4"),
    "cudnn": loader("torch_flash", "CudnnAttention"),
    "flash2": loader("flash2", "Flash2"),
    "torch_flash": loader("torch_flash", "CudaFlashAttention"),
    "torch_cpu": loader("torch_flash", "CpuFlashAttention"),
    "reference": loader("reference", "Reference"),
}


def register_kernel[K: type[SoftmaxKernel]](cls: K) -> K:
    """Class decorator: makes a kernel available under its `name`; "auto" never selects it.

    Raises: ConfigError if the name is taken, or the class lacks a name or a method.
    """
    name = getattr(cls, "name", "")
    if not name or name in (*_KERNELS, "auto"):
        raise ConfigError(f"kernel {cls.__name__} has the name {name!r}: set another one")
    for method in sorted(cls.__abstractmethods__):
        raise ConfigError(f"kernel {name!r} has no method {method}: define it in {cls.__name__}")
    _KERNELS[name] = cache(cls)
    return cls


def kernel_names() -> tuple[str, ...]:
    """Names that `kernel=` accepts besides "auto", including those of other installed packages."""
    load_installed()
    return tuple(_KERNELS)


def kernels() -> tuple[SoftmaxKernel, ...]:
    """All kernels in the order of preference of "auto", whether they can run here or not."""
    load_installed()
    return tuple(load() for load in _KERNELS.values())


def kernel_called(name: str) -> SoftmaxKernel:
    """The kernel of a name, whether it can run here or not.

    Raises: KernelUnavailableError if no kernel has it.
    """
    if name not in _KERNELS:
        load_installed()
    return named("kernel", name, _KERNELS)


@cache
def resolve(name: str, problem: Problem) -> SoftmaxKernel:
    """The kernel of that name, or for "auto" the fastest one that supports the problem.

    Raises: KernelUnavailableError if the name is unknown, or the kernel does not support it.
    """
    if name not in (*_KERNELS, "auto"):
        load_installed()
    return choose_kernel("kernel", name, problem, _KERNELS)


@cache  # one object for a name: calls are known by it
def resolver(name: str) -> Callable[[Problem], SoftmaxKernel]:
    """`resolve` for a name."""
    return partial(resolve, name)
