"""Errors of this package. Each message is one line: what, got, allowed, what to do."""

from collections.abc import Iterable
from difflib import get_close_matches


class ContextParallelError(ValueError):
    """Base of every error that a wrong setting or an unsupported combination raises."""


class ConfigError(ContextParallelError):
    """A setting is unknown, malformed or contradicts another one."""


class KernelUnavailableError(ContextParallelError):
    """A named attention kernel is not installed or cannot serve the problem."""


class CommunicationError(RuntimeError):
    """Another rank cannot be reached any more."""


def nearest(name: str, choices: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the choice closest to `name`, or "" if none is close."""
    close = get_close_matches(name, list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def near_multiples(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, as an error proposes them."""
    below = value - value % step
    return f"{below} or {below + step}" if below else str(step)
