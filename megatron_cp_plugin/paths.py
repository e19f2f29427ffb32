"""Checks that a folder or file can be written before anything is computed for it."""

import tempfile
from pathlib import Path

from megatron_cp_plugin.errors import ConfigError


def check_folder(flag: str, path: str | Path) -> None:
    """Refuses a folder to which nothing can be written, be it there or yet to be made.

    Args: flag: The flag that names it, for the error.

    Raises: ConfigError if it is no folder, or nothing can be written in it.
    """
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    try:
        if not folder.is_dir():
            raise NotADirectoryError(0, "Not a directory")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        where = "" if folder == Path(path).absolute() else f" in {folder}"
        raise ConfigError(
            f"{flag} got {path}, where nothing can be written ({error.strerror}{where}): "
            "name a folder that can be"
        ) from None


def check_file(flag: str, path: str | Path) -> None:
    """Refuses a file that cannot be written, or whose folder is yet to be made.

    Args, raises: as `check_folder`.
    """
    folder = Path(path).parent
    if Path(path).is_dir():
        raise ConfigError(f"{flag} got {path}, which is a folder: name a file")
    if not folder.is_dir():
        raise ConfigError(
            f"{flag} got {path}, and there is no folder {str(folder)!r}: make it first"
        )
    check_folder(flag, folder)
