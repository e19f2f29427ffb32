"""Writes figures of matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.extras import need

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_picture(path: Path) -> None:
    """Refuses to draw to a file.

    Args: path: ends in .png or .svg.

    Raises: ConfigError for another ending, and if matplotlib is not installed.
    """
    if path.suffix not in (".png", ".svg"):
        raise ConfigError(f"a picture is a .png or .svg file, got {path.name!r}: change its ending")
    need("report", repr(path.name), "matplotlib")


def write_picture(figure: Figure, path: Path, *, tight: bool = False) -> None:
    """Writes a figure of matplotlib.

    Args:
        path: as `check_picture` takes it.
        tight: cut to the drawing, with parts of it beyond the edges.
    """
    import matplotlib

    # Text stays text in an SVG, and two runs write the same bytes.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "plan"}):
        metadata = {"Date": None, "Creator": None} if path.suffix == ".svg" else None
        bbox = "tight" if tight else None
        figure.savefig(path, dpi=120, metadata=metadata, bbox_inches=bbox)
