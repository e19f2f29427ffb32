"""Span masks of one batch as an example, for `auto`, which chooses before it sees any."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask, visible_pairs
from megatron_cp_plugin.errors import ConfigError, ContextParallelError

EXAMPLE_SPANS = "--cp-example-spans"


@dataclass(frozen=True)
class ExampleSpans:
    """What queries see in a batch that stands for all.

    Attributes:
        name: Of the file. spans: As `attention_spans`.
    """

    name: str
    spans: tuple[tuple[object, ...], ...]

    @classmethod
    def read(cls, path: str) -> ExampleSpans:
        """Reads a JSON list of slices.

        Raises:
            ConfigError: There is no such file, or it is no such list.
        """
        try:
            found = json.loads(Path(path).read_text())
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise ConfigError(
                f"{EXAMPLE_SPANS} {path} cannot be read, {reason}: name a JSON file with a list "
                "of slices"
            ) from None
        if not isinstance(found, list) or not all(isinstance(one, list) for one in found):
            raise ConfigError(
                f"{EXAMPLE_SPANS} {path} must have a list of slices such as [[0, 64, 0, 64, 1]]: "
                "write what a batch has as attention_spans"
            )
        return cls(Path(path).name, tuple(map(tuple, found)))

    def mask(self, seq_len: int, documents: tuple[int, ...], window: int | None) -> Mask:
        """The mask of a layer.

        Args:
            seq_len: Tokens of the whole sequence.
            documents: As of `document_starts`.
            window: As of `Mask`.

        Raises:
            ConfigError: The slices do not fit, or name a query and a key twice.
        """
        try:
            return Mask.of(Slices.of(self.spans, seq_len, documents), window)
        except ContextParallelError as error:
            raise ConfigError(f"{EXAMPLE_SPANS} {self.name}: {error}") from None


def words(path: str, mask: Mask, seq_len: int) -> str:
    """What a choice takes span masks for. Args: path: of the example, which gave the mask."""
    share = visible_pairs(seq_len, mask) / seq_len**2
    return f"; spans as in {Path(path).name}, with {share:.1%} of all pairs"
