"""Checks the files that a run reads and writes, before it starts."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.features import Settings, packs_documents
from megatron_cp_plugin.paths import check_folder

# An index begins with a magic word, a version, the type of tokens, and two numbers of documents;
# the lengths of the documents follow.
_HEAD, _MAGIC = struct.Struct("<9sQBQQ"), b"MMIDIDX"
_PARTS = ("training", "validation", "testing")
_SPLIT = "969,30,1"  # Megatron's own
_WRITTEN = ("save", "tensorboard_dir", "data_cache_path")
_READ = ("data_path", "train_data_path", "valid_data_path", "test_data_path")


def check_files(args: Any) -> None:
    """Checks that data are there and that folders can be written to.

    Megatron finds out in hundreds of lines on every rank, for a checkpoint after hours.

    Args:
        args: Megatron's namespace.

    Raises:
        ConfigError: A file is missing, or a folder cannot be written to.
    """
    settings = Settings(args)
    for name in _WRITTEN:
        path = getattr(settings, name)
        if path is not None and not _is_remote(path):
            check_folder("--" + name.replace("_", "-"), path)
    if settings.mock_data:
        if settings.sft:
            raise ConfigError(
                "--sft trains on conversations, which Megatron makes no mock data of, got "
                "--mock-data: use --data-path FILE.jsonl, or leave --sft out"
            )
        return
    if settings.sft and find_spec("datasets") is None:
        raise ConfigError("--sft needs the package datasets, got none: pip install datasets")
    for name in _READ:
        flag = "--" + name.replace("_", "-")
        for prefix in _prefixes(getattr(settings, name) or ()):
            _check_data(flag, prefix, settings)


def _check_data(flag: str, prefix: str, settings: Settings) -> None:
    if settings.sft:
        if not Path(prefix).exists():
            raise ConfigError(
                f"{flag} got {prefix}, and there is no such file: name one of JSON lines that have "
                "messages"
            )
        if flag == "--data-path":
            _check_split_of_conversations(settings)
        return
    missing = [
        f"{prefix}{suffix}" for suffix in (".bin", ".idx") if not Path(f"{prefix}{suffix}").exists()
    ]
    if missing:
        pieces = " --document-bytes 200" if packs_documents(settings) else ""
        raise ConfigError(
            f"{flag} got {prefix}, and there is no {' and no '.join(missing)}: write the run "
            f"files' data with megatron-cp prepare-data --output {prefix}{pieces}, or add "
            "--mock-data"
        )
    if flag == "--data-path":
        _check_split(prefix, settings)


def _check_split(prefix: str, settings: Settings) -> None:
    """Refuses a part without documents, whose epochs Megatron counts without an end.

    And, where no evaluation asks for samples, one that has not enough tokens for a single one.
    """
    split, needed = settings.split or _SPLIT, (settings.seq_length or 0) + 1
    with Path(f"{prefix}.idx").open("rb") as index:
        head = index.read(_HEAD.size)
    if len(head) < _HEAD.size or not head.startswith(_MAGIC):
        raise ConfigError(
            f"--data-path got {prefix}, and {prefix}.idx is no index that Megatron can read: write "
            "the data again"
        )
    count = _HEAD.unpack(head)[3]
    shares = _shares(split)
    bounds = [round(sum(shares[:n]) / (sum(shares) or 1) * count) for n in range(len(shares) + 1)]
    for name, share, (start, stop) in zip(_PARTS, shares, pairwise(bounds), strict=False):
        if share and start == stop:
            raise ConfigError(
                f"--split {split} leaves none of the {count} document(s) of {prefix} for "
                f"{name}: add documents, or use --split 100,0,0"
            )
        if not share or name == "training" or settings.eval_iters or stop - start >= needed:
            continue
        with Path(f"{prefix}.idx").open("rb") as index:
            index.seek(_HEAD.size + 4 * start)
            tokens = sum(struct.unpack(f"<{stop - start}i", index.read(4 * (stop - start))))
        if tokens < needed:
            raise ConfigError(
                f"--split {split} leaves {tokens} tokens of {prefix} for {name}, and a sample has "
                f"{needed}: add documents, or use --split 100,0,0"
            )


def _check_split_of_conversations(settings: Settings) -> None:
    """Refuses conversations for an evaluation of no samples, of which Megatron makes an error."""
    split = settings.split or _SPLIT
    if not settings.eval_iters and any(_shares(split)[1:]):
        raise ConfigError(
            f"--sft with --eval-iters 0 needs all conversations for training, got --split {split}: "
            "use --split 100,0,0, or --eval-iters 1"
        )


def _shares(split: str) -> list[float]:
    return [float(word) for word in re.findall(r"[.0-9]+", split)]


def _prefixes(words: Iterable[str]) -> Iterator[str]:
    """The paths of a blend, which may have a weight before each; those of this machine."""
    for word in map(str, words):
        with suppress(ValueError):
            float(word)
            continue
        if not _is_remote(word):
            yield word


def _is_remote(path: str) -> bool:
    return "://" in str(path)
