"""Distributions of document lengths, as the command line names them; documents drawn from them."""

import csv
import json
from argparse import ArgumentTypeError
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise, takewhile
from math import ceil, exp, log
from pathlib import Path
from random import Random

from megatron_cp_plugin.terminal import tokens_of

_TAKEN = "takes a mean such as 16K, lognormal:MEAN:SIGMA or a histogram, FILE.csv or FILE.json"


@dataclass(frozen=True)
class Exponential:
    """Attributes: mean: in tokens."""

    mean: float

    @property
    def label(self) -> str:
        """As titles have it."""
        return f"exponential, mean {self.mean:g}"

    def draw(self, source: Random) -> float:
        """A length in tokens, more than 0."""
        return source.expovariate(1 / self.mean)


@dataclass(frozen=True)
class LogNormal:
    """Attributes:
    mean: of the lengths, in tokens.
    sigma: of their logarithms.
    """

    mean: float
    sigma: float

    @property
    def label(self) -> str:
        """As titles have it."""
        return f"log-normal, mean {self.mean:g}, sigma {self.sigma:g}"

    def draw(self, source: Random) -> float:
        """A length in tokens, more than 0."""
        return source.lognormvariate(log(self.mean) - self.sigma**2 / 2, self.sigma)


@dataclass(frozen=True)
class Histogram:
    """Shares of documents by length; inside a class the logarithm of a length is uniform.

    Attributes:
        label: as titles have it.
        edges: upper ones of the classes, in tokens; the first begins with 1.
        shares: of any sum.
    """

    label: str
    edges: tuple[float, ...]
    shares: tuple[float, ...]

    def draw(self, source: Random) -> float:
        """A length in tokens, more than 0."""
        (index,) = source.choices(range(len(self.edges)), self.shares)
        lower = self.edges[index - 1] if index else 1
        return exp(source.uniform(log(lower), log(self.edges[index])))


type Lengths = Exponential | LogNormal | Histogram


def lengths_of(text: str) -> Lengths:
    """16K: exponential with this mean; lognormal:MEAN:SIGMA; a file that `read_histogram` takes.

    Raises: ArgumentTypeError if it is none of these.
    """
    if text.endswith((".csv", ".json")):
        return read_histogram(Path(text))
    kind, *numbers = text.split(":")
    try:
        if kind == "lognormal":
            mean, sigma = numbers
            found = LogNormal(tokens_of(mean), float(sigma))
            if found.sigma >= 0:
                return found
        return Exponential(tokens_of(text))
    except (ArgumentTypeError, ValueError):
        raise ArgumentTypeError(f"{_TAKEN}, got {text!r}") from None


def random_documents(
    seq_len: int, lengths: Lengths | int, *, multiple: int = 1, seed: int = 0
) -> tuple[int, ...]:
    """`document_starts` of random lengths, the same ones for the same seed; seq_len cuts the last.

    Args:
        lengths: their distribution; a number: exponential with this mean.
        multiple: to which lengths are rounded up.
    """
    if isinstance(lengths, int):
        lengths = Exponential(lengths)
    source = Random(seed)
    drawn = (ceil(lengths.draw(source) / multiple) * multiple for _ in range(seq_len))
    return tuple(takewhile(lambda start: start < seq_len, accumulate(drawn)))


def read_histogram(path: Path) -> Histogram:
    """Reads rows of an upper edge, in tokens, and the share of documents up to there.

    A CSV file may have a first line of names, and lines that begin with #; a JSON file holds a
    list of pairs.

    Raises: ArgumentTypeError if it cannot be read, or holds something else.
    """
    try:
        text = path.read_text()
        rows = json.loads(text) if path.suffix == ".json" else _csv_rows(text)
        pairs = [(float(edge), float(share)) for edge, share in rows]
    except (OSError, TypeError, ValueError) as error:
        raise ArgumentTypeError(
            f"needs rows of an upper edge and a share in {str(path)!r}, got "
            f"{type(error).__name__}: {error}"
        ) from error
    edges, shares = ([pair[column] for pair in pairs] for column in (0, 1))
    ascending = all(a < b for a, b in pairwise([1, *edges]))
    if not ascending or min(shares, default=0) < 0 or not sum(shares) > 0:
        raise ArgumentTypeError(
            f"needs ascending edges of more than 1 token, and shares of 0 or more that are not all "
            f"0, in {str(path)!r}, got edges {edges} and shares {shares}"
        )
    return Histogram(f"as in {path.name}", tuple(edges), tuple(shares))


def _csv_rows(text: str) -> Sequence[Sequence[str]]:
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    rows = list(csv.reader(lines))
    with suppress(ValueError, IndexError):  # a line of names, or no line
        float(rows[0][0])
        return rows
    return rows[1:]
