"""Imports all algorithms of this package, which registers them."""

from megatron_cp_plugin.algorithms import (  # noqa: F401
    allgather,
    attention2d,
    distflash,
    lasp,
    lasp2,
    linear_ulysses,
    published,
    ring,
    ulysses,
    usp,
)
