"""Caches of methods."""

from collections.abc import Callable
from functools import lru_cache
from typing import cast
from weakref import WeakMethod


def cached_method[**P, R](method: Callable[P, R], maxsize: int) -> Callable[P, R]:
    """A bound method that remembers its last results; positional, hashable arguments.

    Kept in the object that the method is of, it makes no circle of references: what the object
    holds, such as process groups, is let go of with the last reference to it, and not whenever the
    garbage collector comes.
    """
    weak = WeakMethod(method)

    @lru_cache(maxsize)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        bound = weak()
        assert bound is not None  # whoever calls has the object
        return bound(*args, **kwargs)

    return cast("Callable[P, R]", call)
