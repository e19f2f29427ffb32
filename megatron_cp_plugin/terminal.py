"""Words of a command line, files that they name, and tables that a command prints."""

import argparse
import logging
import re
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from textwrap import wrap

from megatron_cp_plugin.errors import ConfigError

_UNITS = {"": 1, "k": 2**10, "m": 2**20}
_NARROWEST, _WIDEST = 16, 100  # columns


def count_of(text: str) -> int:
    """A number above 0. Raises: ArgumentTypeError if it is none."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"takes a whole number above 0, got {text!r}")
    return int(text)


def tokens_of(text: str) -> int:
    """128K -> 131072, 1M -> 1048576. Raises: ArgumentTypeError if it is no such number."""
    found = re.fullmatch(r"(\d+)([kKmM]?)", text.strip().replace("_", ""))
    if found is None or not int(found[1]):
        raise argparse.ArgumentTypeError(
            f"takes a number of tokens, such as 131072 or 128K, got {text!r}"
        )
    return int(found[1]) * _UNITS[found[2].lower()]


def heads_of(text: str) -> tuple[int, int]:
    """32:8 -> (32, 8), 32 -> (32, 32). Raises: ArgumentTypeError if no attention has them."""
    heads, _, kv_heads = text.partition(":")
    with suppress(argparse.ArgumentTypeError):
        found = count_of(heads), count_of(kv_heads or heads)
        if found[0] % found[1] == 0:
            return found
    raise argparse.ArgumentTypeError(
        "takes query heads, or query heads:KV heads, which divide them, such as 32 or 32:8, got "
        f"{text!r}"
    )


def option_of(text: str) -> tuple[str, str]:
    """KEY=VALUE -> (KEY, VALUE). Raises: ArgumentTypeError if it is none."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"takes KEY=VALUE, got {text!r}: write for example a=1")
    return key, value


def flag_of(name: str) -> str:
    """The command-line flag of a setting: --seq-length of seq_length."""
    return "--" + name.replace("_", "-")


def say_nothing_of_cuda() -> None:
    """Keeps torch from warning, where there is no GPU, that no CUDA runtime is found."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def check_folder(flag: str, path: str | Path) -> None:
    """Refuses a folder to which nothing can be written, be it there or yet to be made.

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

    Raises: as `check_folder`.
    """
    folder = Path(path).parent
    if Path(path).is_dir():
        raise ConfigError(f"{flag} got {path}, which is a folder: name a file")
    if not folder.is_dir():
        raise ConfigError(
            f"{flag} got {path}, and there is no folder {str(folder)!r}: make it first"
        )
    check_folder(flag, folder)


def text_table(
    headers: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()
) -> str:
    """Returns a table; its last column is folded to the terminal's width, at most 100, the others
    never.

    Args: right: the columns whose cells stand at the right.
    """
    before = [max(map(len, column)) for column in list(zip(headers, *rows, strict=True))[:-1]]
    room = min(shutil.get_terminal_size().columns, _WIDEST) - sum(before) - 3 * len(headers) - 1
    width = max(room, _NARROWEST)
    folded = [[*([cell] for cell in row[:-1]), wrap(row[-1], width) or [""]] for row in rows]
    last = max(len(line) for line in (headers[-1], *(line for row in folded for line in row[-1])))
    widths = [*before, last]
    lines = [_rule("┌┬┐", widths), _line(headers, widths, ()), _rule("├┼┤", widths)]
    for row in folded:
        for number in range(max(map(len, row))):
            cells = [cell[number] if number < len(cell) else "" for cell in row]
            lines.append(_line(cells, widths, right))
    return "\n".join([*lines, _rule("└┴┘", widths)])


def _rule(corners: str, widths: Sequence[int]) -> str:
    return corners[0] + corners[1].join("─" * (width + 2) for width in widths) + corners[2]


def _line(cells: Sequence[str], widths: Sequence[int], right: Collection[int]) -> str:
    texts = (
        cell.rjust(width) if column in right else cell.ljust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return "│ " + " │ ".join(texts) + " │"
