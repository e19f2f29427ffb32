"""Turns text files into the indexed dataset that Megatron's GPTDataset reads."""

import os
import sys
import sysconfig
import warnings
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.terminal import check_folder

END_OF_DOCUMENT = 256
# Left out of the default corpus: not every distribution of Python ships them.
_OUTSIDE_STDLIB = {
    "__pycache__",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "turtledemo",
}


def find_files(paths: Sequence[Path], suffixes: Sequence[str]) -> list[Path]:
    """Lists files, and files in folders with one of the suffixes, in the order of their names.

    Raises: ConfigError if a path does not exist, or no file was found.
    """
    files: list[Path] = []
    for path in paths:
        if path.is_file():
            files.append(path)
        elif path.is_dir():
            files += sorted(f for f in path.rglob("*") if f.is_file() and f.suffix in suffixes)
        else:
            raise ConfigError(f"no such file or folder: {path}")
    files = list(dict.fromkeys(files))
    if not files:
        wanted, where = " ".join(suffixes), ", ".join(map(str, paths))
        raise ConfigError(f"no text file ({wanted}) in {where}: name others by --suffix")
    return files


def stdlib_files() -> list[Path]:
    """Lists the standard library sources of the running Python without its tests, by name."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(
        file
        for file in root.rglob("*.py")
        if not _OUTSIDE_STDLIB.intersection(file.relative_to(root).parts[:-1])
    )


def write_dataset(
    files: Sequence[Path], prefix: Path, document_bytes: int | None = None
) -> tuple[int, int]:
    """Writes PREFIX.bin and PREFIX.idx.

    Args:
        files: in the order of their documents.
        document_bytes: of a document at most.

    Returns: the numbers of documents and of tokens.
    """
    # Imported on use: it takes seconds, and none of its warnings concerns a dataset.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    # Written beside the target and renamed: an interrupted run leaves no half-written dataset.
    partial_bin, partial_idx = f"{prefix}.bin.partial", f"{prefix}.idx.partial"
    builder = IndexedDatasetBuilder(partial_bin, dtype=np.uint16)
    documents = 0
    tokens = 0
    for file in files:
        text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        length = document_bytes or max(len(text), 1)
        for piece in (text[start : start + length] for start in range(0, len(text), length)):
            document = np.append(piece.astype(np.uint16), np.uint16(END_OF_DOCUMENT))
            builder.add_document(document, [len(document)])
            documents += 1
            tokens += len(document)
    builder.finalize(partial_idx)
    os.replace(partial_bin, f"{prefix}.bin")
    os.replace(partial_idx, f"{prefix}.idx")
    return documents, tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (0 written, 2 bad input)."""
    try:
        given = parser_of("prepare-data").parse_args(argv)
        check_folder("--output", given.output.parent)
        files = find_files(given.paths, given.suffix) if given.paths else stdlib_files()
        documents, tokens = write_dataset(files, given.output, given.document_bytes)
    except (ConfigError, OSError) as error:
        print(f"megatron-cp: {error}", file=sys.stderr)
        return 2
    print(f"{given.output}: {documents} documents, {tokens:,} tokens")
    return 0
