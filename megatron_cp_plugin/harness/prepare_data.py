"""Turns text files into the indexed dataset that Megatron's GPTDataset reads."""

import hashlib
import json
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.packages import need
from megatron_cp_plugin.terminal import check_folder

END_OF_DOCUMENT = 256
VOCAB_SIZE = 257
# Between two lines that say how far it is.
_SAID_BYTES = 256 * 2**20
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


def fingerprint(files: Iterable[Path]) -> str:
    """Hashes names, sizes and times of change, so that a changed corpus is seen without reading."""
    digest = hashlib.sha256()
    for file in files:
        stat = file.stat()
        digest.update(f"{file.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def write_dataset(
    files: Sequence[Path], prefix: Path, document_bytes: int | None = None
) -> dict[str, object]:
    """Writes PREFIX.bin, PREFIX.idx and, last, PREFIX.json, which describes them.

    Args:
        files: in the order of their documents.
        document_bytes: of a document at most.

    Returns: the contents of PREFIX.json.
    """
    # Imported on use: it takes seconds, and none of its warnings concerns a dataset.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    manifest_path = _with_suffix(prefix, ".json")
    manifest_path.unlink(missing_ok=True)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    total_bytes, read_bytes, said_bytes = sum(f.stat().st_size for f in files), 0, 0
    # Written beside the target and renamed: an interrupted run leaves no half-written dataset.
    partial_bin, partial_idx = (_with_suffix(prefix, f"{s}.partial") for s in (".bin", ".idx"))
    builder = IndexedDatasetBuilder(str(partial_bin), dtype=np.uint16)
    documents = 0
    tokens = 0
    for file in files:
        text = np.frombuffer(file.read_bytes(), dtype=np.uint8)
        read_bytes += len(text)
        if read_bytes - said_bytes >= _SAID_BYTES:
            print(f"read {read_bytes / 2**20:.0f} of {total_bytes / 2**20:.0f} MiB", flush=True)
            said_bytes = read_bytes
        length = document_bytes or max(len(text), 1)
        for piece in (text[start : start + length] for start in range(0, len(text), length)):
            document = np.append(piece.astype(np.uint16), np.uint16(END_OF_DOCUMENT))
            builder.add_document(document, [len(document)])
            documents += 1
            tokens += len(document)
    builder.finalize(str(partial_idx))
    os.replace(partial_bin, _with_suffix(prefix, ".bin"))
    os.replace(partial_idx, _with_suffix(prefix, ".idx"))
    manifest: dict[str, object] = {
        "documents": documents,
        "tokens": tokens,
        "vocab_size": VOCAB_SIZE,
        "end_of_document": END_OF_DOCUMENT,
        "document_bytes": document_bytes,
        "fingerprint": fingerprint(files),
    }
    manifest_path.write_text(json.dumps(manifest, indent=2) + "\n")
    return manifest


def read_current(
    files: Sequence[Path], prefix: Path, document_bytes: int | None
) -> dict[str, object] | None:
    """Returns the manifest of the dataset at `prefix` if it was made from these very files."""
    if not all(_with_suffix(prefix, s).is_file() for s in (".bin", ".idx", ".json")):
        return None
    try:
        manifest = json.loads(_with_suffix(prefix, ".json").read_text())
    except ValueError:
        return None
    made_from = {"fingerprint": fingerprint(files), "document_bytes": document_bytes}
    if not isinstance(manifest, dict) or not made_from.items() <= manifest.items():
        return None
    return manifest


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code (0 written or up to date, 2 bad input)."""
    try:
        given = parser_of("prepare-data").parse_args(argv)
        need("megatron", "prepare-data", "megatron")
        if given.document_bytes is not None and given.document_bytes < 1:
            raise ConfigError(f"--document-bytes must be 1 or more, got {given.document_bytes}")
        check_folder("--output", given.output.parent)
        files = find_files(given.paths, given.suffix) if given.paths else stdlib_files()
        manifest = None if given.force else read_current(files, given.output, given.document_bytes)
        made = manifest is None
        if manifest is None:
            manifest = write_dataset(files, given.output, given.document_bytes)
    except (ConfigError, OSError) as error:
        print(f"megatron-cp: {error}", file=sys.stderr)
        return 2
    print(
        f"{given.output}: {manifest['documents']} documents, {manifest['tokens']:,} tokens "
        f"({'written' if made else 'up to date'})"
    )
    return 0


def _with_suffix(prefix: Path, suffix: str) -> Path:
    # Path.with_suffix would cut a prefix such as "corpus.v2".
    return prefix.with_name(prefix.name + suffix)
