"""Writes timelines as pictures, or as files for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.pictures import check_picture, write_picture
from megatron_cp_plugin.planner.event_simulation import Interval, Timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLORS = {"attention": "#4292c6", "other": "#9ecae1", "messages": "#fdae6b"}
_HEIGHT = 0.22  # inches of a lane


def save(found: Timeline, title: str, path: Path) -> None:
    """Writes a timeline.

    Args: title: above the picture. path: .json for a trace, .svg or .png for a picture.

    Raises: ConfigError if the name ends otherwise, or matplotlib is not installed.
    """
    if path.suffix == ".json":
        path.write_text(json.dumps(found.chrome_trace()) + "\n")
        return
    if path.suffix not in (".svg", ".png"):
        raise ConfigError(f"a timeline is written as .json, .svg or .png, got {path.name}")
    check_picture(path)
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = sorted({(one.rank, one.lane != "computation") for one in found.intervals})
    figure = Figure(figsize=(9, 1.3 + _HEIGHT * len(lanes)), layout="constrained")
    axes = figure.subplots()
    for place, (rank, messages) in enumerate(lanes):
        of_lane = (
            one
            for one in found.intervals
            if one.rank == rank and messages == (one.lane != "computation")
        )
        for one in of_lane:
            _draw(axes, place, one)
    names = [f"rank {rank}" + (" sends" if messages else "") for rank, messages in lanes]
    axes.set_yticks(range(len(lanes)), names, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(found.forward.seconds * 1e3, color="#1a1a1a", linewidth=0.8)
    axes.set_xlim(0, found.seconds * 1e3)
    axes.set_xlabel("ms; the line is the end of the forward", fontsize=8)
    axes.set_title(title, fontsize=9)
    keys = [Patch(color=color, label=name) for name, color in _COLORS.items()]
    axes.legend(handles=keys, fontsize=7, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.12))
    write_picture(figure, path)


def _draw(axes: Axes, place: int, one: Interval) -> None:
    kind = "messages" if one.lane != "computation" else "other"
    if "attention" in one.name:
        kind = "attention"
    width = (one.stop - one.start) * 1e3
    axes.broken_barh([(one.start * 1e3, width)], (place - 0.4, 0.8), color=_COLORS[kind])
