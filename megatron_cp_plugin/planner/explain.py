"""Describes a choice: one line for the log, and tables that explain it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from megatron_cp_plugin.planner.choose import (
    GIB,
    Choice,
    Combination,
    Kind,
    Row,
    Site,
    choose,
    peak_of_row,
)
from megatron_cp_plugin.planner.machine import Links
from megatron_cp_plugin.terminal import text_table

_OF_EACH = 3  # number of candidates of an algorithm that are shown
_ALIKE_PERCENT = 0.2  # slower by less than this counts as equal
_CLEARLY = 1.03  # times as fast: what differs by less would not change the choice


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
    """Tables of the candidates for each kind of layers, the fastest first; of refusals; of changes
    that would alter the choice.
    """
    lines = []
    for number, (kind, found, _) in enumerate(choice.tables):
        lines.append(f"{kind.name}, one of {kind.count}:" if kind.count > 1 else f"{kind.name}:")
        lines.append(_table_of_kind(choice, number, _shown(found, choice.best.rows[number])))
    legend = "MiB that a rank sends in its node and between nodes; * chosen"
    if not all(row.simulated for one in choice.tables for row in one.rows):
        legend += "; ~ estimated, the others simulated"
    lines.append(legend)
    lines += [f"not {name}: {reason}" for name, reason in choice.refused]
    lines += changes(choice)
    return "\n".join(lines)


def _shown(found: Sequence[Row], chosen: Row) -> list[Row]:
    """The best rows of each algorithm, and the chosen row."""
    shown: list[Row] = []
    for row in found:
        same = [one for one in shown if one.algo == row.algo]
        alike = any(_figures(one) == _figures(row) for one in same)
        if row.name == chosen.name or (len(same) < _OF_EACH and not alike):
            shown.append(row)
    return shown


def _figures(row: Row) -> tuple[object, ...]:
    return row.layout, row.forward, row.backward, row.inside, row.between


def _table_of_kind(choice: Choice, number: int, rows: Sequence[Row]) -> str:
    kind, chosen = choice.tables[number].kind, choice.best.rows[number].name
    known = {one.rows[number].name: one.rows[number].peak_bytes for one in choice.combinations}
    seen: set[str] = set()
    cells = []
    for row in rows:
        peak = known.get(row.name)
        if peak is None and row.algo not in seen:
            peak = peak_of_row(row, kind, choice.site)
        seen.add(row.algo)
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


def changes(choice: Choice) -> list[str]:
    """Changes that would make another algorithm the fastest, by estimates."""
    kinds = [table.kind for table in choice.tables]
    shown = (
        _shown(one.rows, row) for one, row in zip(choice.tables, choice.best.rows, strict=True)
    )
    among = frozenset(row.name for rows in shown for row in rows)
    lines: list[str] = []
    looked: list[str] = []
    for words, changed, site in _variations(kinds, choice.site):
        layouts = (choice.best.rows[0].layout,) if len(kinds) > 1 else None
        others = choose(changed, site, layouts=layouts, quick=True, among=among)
        same = [
            one for one in others.combinations if _names_of_rows(one) == _names_of_rows(choice.best)
        ]
        gain = same[0].seconds / others.best.seconds if same else None
        if others.best.algo != choice.best.algo and (gain is None or gain > _CLEARLY):
            than = f", {gain:.2f} times as fast as {choice.best.name}" if gain else ""
            lines.append(f"{words} it would be {others.best.name}{than}")
        looked.append(words)
    return lines or [f"the same choice {words}" for words in [", ".join(looked)] if looked]


def _names_of_rows(combination: Combination) -> tuple[str, ...]:
    return tuple(row.name for row in combination.rows)


def _variations(kinds: Sequence[Kind], site: Site) -> Iterator[tuple[str, list[Kind], Site]]:
    for factor, name in ((0.5, "half"), (2, "twice")):
        tokens = int(kinds[0].shape.seq_len * factor)
        if not any(kind.mask.documents for kind in kinds):
            changed = [replace(k, shape=replace(k.shape, seq_len=tokens)) for k in kinds]
            yield f"with {name} the tokens", changed, site
        if len(set(site.nodes)) > 1:
            machine = replace(
                site.machine,
                between=_scaled(site.machine.between, factor),
                between_total=site.machine.between_total and site.machine.between_total * factor,
            )
            yield (
                f"with {name} the bandwidth between nodes",
                list(kinds),
                replace(site, machine=machine),
            )


def _scaled(links: Links, factor: float) -> Links:
    return Links(
        replace(links.exchange, bytes_per_second=links.exchange.bytes_per_second * factor),
        {
            operation: {
                count: replace(rate, bytes_per_second=rate.bytes_per_second * factor)
                for count, rate in rates.items()
            }
            for operation, rates in links.collective.items()
        },
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"
