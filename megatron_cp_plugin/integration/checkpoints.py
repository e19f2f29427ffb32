"""Says which file of a checkpoint is damaged, where Megatron fails to load it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from traceback import extract_tb
from zipfile import is_zipfile

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from megatron_cp_plugin.errors import ContextParallelError


@contextmanager
def damage_in_one_line(load: str | None) -> Iterator[None]:
    """Turns what Megatron raises over a damaged file into an error of one line on all ranks: an
    exception, or an exit with the code of a run that ended well.
    """
    try:
        yield
    except ContextParallelError:
        raise
    except (Exception, CheckpointException, SystemExit) as error:
        loads = "load_checkpoint" in [each.name for each in extract_tb(error.__traceback__)]
        file = damaged(Path(load)) if loads and load is not None else None
        if file is None:
            raise
        raise ContextParallelError(
            f"--load needs whole files, got {file}, which is missing or cut off: copy it again, or "
            "load an earlier iteration with --ckpt-step"
        ) from error


def damaged(load: Path) -> Path | None:
    """The first file that ends before its last part, from the last iteration on; None: none."""
    last = load / "latest_checkpointed_iteration.txt"
    if last.exists() and not (text := last.read_text().strip()).isdecimal() and text != "release":
        return last
    for folder in sorted(load.glob("*/"), reverse=True):
        cut = [file for file in folder.rglob("*.pt") if not is_zipfile(file)]
        index = folder / ".metadata"
        if cut or not index.exists():
            return cut[0] if cut else None
        try:
            reading = folder / "metadata.json"
            json.loads(reading.read_text())
            reading = index
            parts = FileSystemReader(folder).read_metadata().storage_data.values()
        except (ValueError, EOFError, OSError, UnpicklingError):
            return reading
        for part in parts:
            reading = folder / part.relative_path
            if not reading.exists() or reading.stat().st_size < part.offset + part.length:
                return reading
    return None
