"""Span masks of one batch as an example, for `auto`, which chooses before it sees any."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, ContextParallelError

EXAMPLE_SPANS = "--cp-example-spans"


def read(path: str) -> list[list[object]]:
    """Returns what a JSON file has in the place of a batch's attention_spans.

    Raises: ConfigError: There is no such file, or it has no list of slices.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(
            f"{EXAMPLE_SPANS} {path} cannot be read, {reason}: name a JSON file with a list of "
            "slices"
        ) from None
    if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
        raise ConfigError(
            f"{EXAMPLE_SPANS} {path} must have a list of slices such as [[0, 64, 0, 64, 1]]: "
            "write what a batch has as attention_spans"
        )
    return found


def mask_of(path: str, seq_len: int, documents: tuple[int, ...]) -> Mask:
    """The mask of a layer without a window.

    Raises: ConfigError: As `read`; or the slices do not fit, or name a query and a key twice.
    """
    try:
        return Mask.of(Slices.of(read(path), seq_len, documents))
    except ContextParallelError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{EXAMPLE_SPANS} {Path(path).name}: {error}") from None


def words(path: str, mask: Mask, seq_len: int) -> str:
    """What a choice takes span masks for. Args: path: of the example, which gave the mask."""
    share = mask.bands.area(seq_len) / seq_len**2
    return f"; spans as in {Path(path).name}, with {share:.1%} of all pairs"
