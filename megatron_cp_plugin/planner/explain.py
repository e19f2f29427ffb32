"""Describes a choice: one line for the log, and tables that explain it."""

from __future__ import annotations

from collections import Counter

from megatron_cp_plugin.planner.choose import GIB, Choice, peak_at
from megatron_cp_plugin.terminal import text_table

_OF_EACH = 3  # number of candidates of an algorithm that are shown
_ALIKE_PERCENT = 0.2  # slower by less than this counts as equal


def sentence(choice: Choice) -> str:
    """The choice and its reason, in one line."""
    best = choice.best
    exposed = sum(
        table.kind.count * row.exposed for table, row in zip(choice.tables, best.rows, strict=True)
    )
    layers = sum(table.kind.count for table in choice.tables)
    time = f"{best.seconds * 1e3:.2f} ms for {layers} layers" if layers > 1 else _ms(best.seconds)
    words = [
        f"auto chose {described(choice)}: {time} forward and backward, {_ms(exposed)} of it "
        "waiting for messages"
    ]
    others = [one for one in choice.combinations[1:] if one.algo != best.algo]
    if others:
        percent = 100 * (others[0].seconds / best.seconds - 1)
        slower = f"{percent:.1f}% slower" if percent >= _ALIKE_PERCENT else "as fast"
        words.append(f"next best {others[0].name}, {slower}")
    rows = [row for table in choice.tables for row in table.rows]
    simulated = sum(row.simulated for row in rows)
    rest = "" if simulated == len(rows) else ", the others estimated"
    words.append(
        f"of {len(rows)} candidates on {choice.site.machine.name}, {simulated} simulated{rest}"
    )
    return "; ".join(words)


def described(choice: Choice) -> str:
    """Algorithms, by kind of layers where there are several, and layout."""
    best, tables = choice.best, choice.tables
    layout = f"({best.rows[0].layout} layout)"
    if len({row.name for row in best.rows}) == 1:
        return f"{best.rows[0].name} {layout}"
    parts = (f"{row.name} for {t.kind.name}" for t, row in zip(tables, best.rows, strict=True))
    return f"{', '.join(parts)} {layout}"


def table(choice: Choice) -> str:
    """Tables of the candidates for each kind of layers, the fastest first; and of refusals."""
    lines = []
    for number, (kind, *_) in enumerate(choice.tables):
        lines.append(f"{kind.name}, one of {kind.count}:" if kind.count > 1 else f"{kind.name}:")
        lines.append(_table_of_kind(choice, number))
    legend = "MiB that a rank sends in its node and between nodes; * chosen"
    if not all(row.simulated for one in choice.tables for row in one.rows):
        legend += "; ~ estimated, the others simulated"
    lines.append(legend)
    lines += [f"not {name}: {reason}" for name, reason in choice.refused]
    return "\n".join(lines)


def _table_of_kind(choice: Choice, number: int) -> str:
    """The best rows of each algorithm, and the chosen row."""
    (kind, rows, _), chosen = choice.tables[number], choice.best.rows[number].name
    known = {one.rows[number].name: one.rows[number].peak_bytes for one in choice.combinations}
    shown: Counter[str] = Counter()  # rows of each algorithm
    cells = []
    for row in rows:
        if row.name != chosen and shown[row.algo] >= _OF_EACH:
            continue
        peak = known.get(row.name)
        if peak is None and not shown[row.algo]:
            peak = peak_at(row.algo, row.options, kind, choice.site)
        shown[row.algo] += 1
        cells.append(
            (
                row.layout,
                f"{'' if row.simulated else '~'}{row.seconds * 1e3:.2f}",
                f"{row.exposed * 1e3:.2f}",
                f"{row.inside / 2**20:.1f}",
                f"{row.between / 2**20:.1f}",
                "-" if peak is None else f"{peak / GIB:.2f}",
                f"{row.name} *" if row.name == chosen else row.name,
            )
        )
    headers = ("layout", "ms", "exposed", "in node", "between", "peak GiB", "algorithm")
    return text_table(headers, cells, right=range(1, len(headers) - 1))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
