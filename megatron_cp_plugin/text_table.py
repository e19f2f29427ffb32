"""Tables of text for a terminal."""

import shutil
from collections.abc import Collection, Sequence
from textwrap import wrap

_NARROWEST, _WIDEST = 16, 100


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
