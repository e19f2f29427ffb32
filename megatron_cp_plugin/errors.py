"""Errors of this package. A message is one line: setting, value, allowed values, advice."""

from collections.abc import Iterable
from contextlib import suppress
from difflib import get_close_matches
from operator import index
from textwrap import shorten
from typing import SupportsIndex


class ContextParallelError(ValueError):
    """Base of every error that a wrong setting or an unsupported combination raises."""


class ConfigError(ContextParallelError):
    """A setting is unknown, malformed or contradicts another one."""


class KernelUnavailableError(ContextParallelError):
    """A named attention kernel is not installed or cannot serve the problem."""


class CommunicationError(RuntimeError):
    """Another rank cannot be reached any more."""


def whole_number(name: str, value: object) -> int:
    """Returns a setting as an int. Raises: ContextParallelError: It is no whole number."""
    if isinstance(value, SupportsIndex) and not isinstance(value, bool):
        with suppress(TypeError):  # a tensor of fractions, or of several numbers
            return index(value)
    raise ContextParallelError(f"{name} needs a whole number, got {brief(value)}: cast it first")


def brief(value: object) -> str:
    """Returns a value in one line, shortened if it is long."""
    text = repr(value)
    return shorten(text, 80, placeholder=" ...") if " " in text else text[:80]


def nearest(name: object, choices: Iterable[str]) -> str:
    """Returns " (did you mean 'x'?)" for the choice closest to `name`, or "" if none is close."""
    close = get_close_matches(str(name), list(choices), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def near_multiples(value: int, step: int) -> str:
    """The multiples of `step` next to `value`, as an error proposes them."""
    below = value - value % step
    return f"{below} or {below + step}" if below else str(step)
