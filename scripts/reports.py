"""A benchmark's rows as a table on the terminal, as Markdown and as JSON."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def report(
    rows: Sequence[Any],
    header: Sequence[str],
    cells: Callable[[Any], Sequence[str]],
    title: str,
    output: Path,
    about: Mapping[str, object] | None = None,
) -> None:
    """Prints the table, and writes table.md and rows.json.

    Args:
        rows: Dataclasses.
        cells: Makes a line of the table of a row.
        output: An existing folder.
        about: What else rows.json has, by name.
    """
    lines = [[*cells(row)] for row in rows]
    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="left" if name == "algorithm" else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(width=180).print(table)
    words = ["| " + " | ".join(line) + " |" for line in (header, *lines)]
    words.insert(1, "|" + " --- |" * len(header))
    (output / "table.md").write_text("\n".join([f"**{title}**", "", *words]) + "\n")
    data = {"title": title, **(about or {}), "rows": [asdict(row) for row in rows]}
    (output / "rows.json").write_text(json.dumps(data, indent=1))
