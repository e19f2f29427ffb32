"""Chooses a kernel: by name, or the fastest one that supports a problem."""

import logging
import os
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any, Protocol

from megatron_cp_plugin.core.kernel import Kernel
from megatron_cp_plugin.errors import KernelUnavailableError, nearest

log = logging.getLogger(__name__)


class AnyProblem(Protocol):
    """What all problems say, whatever they are.

    Attributes: deterministic: every run must give the same bits.
    """

    @property
    def deterministic(self) -> bool: ...


def loader(module: str, name: str) -> Callable[[], Any]:
    """Makes a kernel of this package on the first call; its packages are imported no earlier."""

    @cache
    def load() -> Any:
        return getattr(import_module(f"megatron_cp_plugin.kernels.{module}"), name)()

    return load


def choose[P: AnyProblem, K: Kernel](
    kind: str, name: str, problem: P, kernels: Mapping[str, Callable[[], K]]
) -> K:
    """The kernel of that name, or for "auto" the first one that serves the problem.

    Args:
        kind: for messages, such as "kernel". kernels: loaders by name, fastest first; one
            of them serves every problem.

    Raises: KernelUnavailableError if the name is unknown, or the kernel cannot serve the problem.
    """
    if name == "auto":
        for candidate, load in kernels.items():
            reason = _unsupported(load(), problem)
            if reason is None:
                if os.environ.get("RANK", "0") == "0":  # the others choose the same
                    log.info("%s: %s for %s", kind, candidate, problem)
                return load()
            log.debug("%s %s not taken: %s", kind, candidate, reason)
        raise AssertionError("one kernel serves every problem")
    kernel = named(kind, name, kernels)
    reason = _unsupported(kernel, problem)
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


def _unsupported[P: AnyProblem](kernel: Kernel[P], problem: P) -> str | None:
    if problem.deterministic and not kernel.deterministic:
        return "its results differ from run to run in the last bits, got deterministic mode"
    return kernel.unsupported(problem)
