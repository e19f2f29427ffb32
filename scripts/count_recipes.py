#!/usr/bin/env python
"""Checks public recipes with context parallelism, and writes docs/data/recipes.md.

    python scripts/count_recipes.py Megatron-Bridge=FOLDER verl=FOLDER slime=FOLDER ms-swift=FOLDER

A folder is a checkout of the program. Recipes that build another model than Megatron's, or run on
other devices than GPUs, are listed but not counted.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.check_recipe import REFUSED, SERVED, findings_of
from megatron_cp_plugin.harness.recipes import read_recipe

PAGE = Path(__file__).parents[1] / "docs" / "data" / "recipes.md"
_WORDS = ("served", "refused", "not understood")


@dataclass(frozen=True)
class Found:
    """Of a recipe.

    Attributes:
        counted: Whether Megatron builds its model, on GPUs.
        ranks: Context-parallel ones.
    """

    name: str
    code: int
    counted: bool
    ranks: int
    algorithm: str
    why: str


def of_bridge(folder: Path) -> Iterator[str]:
    """Public functions that return a recipe."""
    for path in sorted((folder / "src/megatron/bridge/recipes").rglob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and re.fullmatch(r"[a-z]\w*_config", node.name):
                yield f"{path}:{node.name}"


def scripts(*folders: str) -> Callable[[Path], Iterator[str]]:
    """Shell scripts that name context parallelism, in folders of a checkout."""

    def found(folder: Path) -> Iterator[str]:
        for each in folders:
            for path in sorted((folder / each).rglob("*.sh")):
                text = path.read_text()
                if "context_parallel_size" in text or "context-parallel-size" in text:
                    yield str(path)

    return found


# Where each program keeps its recipes.
PROGRAMS: dict[str, Callable[[Path], Iterator[str]]] = {
    "Megatron-Bridge": of_bridge,
    "verl": scripts("examples", "verl/experimental"),
    "slime": scripts("scripts"),
    "ms-swift": scripts("examples/megatron"),
}


def check(name: str, folder: Path) -> Found | None:
    """Returns what is said of a recipe; None: it does not split sequences, or is none."""
    try:
        recipe = read_recipe([name])
    except ConfigError:
        return None
    if recipe.size == 1:
        return None
    finding = findings_of(recipe)
    lines = dict(finding.lines)
    short = name.removeprefix(f"{folder}/").removeprefix("src/megatron/bridge/recipes/")
    why = "; ".join([*finding.refused, *finding.unknown])
    beyond = recipe.beyond or (recipe.model.beyond if recipe.model else "")
    algorithm = lines.get("algorithm", "").partition(",")[0]
    memory = lines.get("memory", "").partition(":")[0]
    said = ", ".join(filter(None, (lines.get("layout", ""), algorithm, memory)))
    return Found(short, finding.code, not beyond, recipe.size, said, why)


def table(program: str, version: str, every: list[Found]) -> list[str]:
    """The lines of a program."""
    counted = [each for each in every if each.counted]
    served = sum(each.code == SERVED for each in counted)
    lines = [f"## {program}", "", f"At {version}: {served} of {len(counted)} served."]
    lines += [
        "",
        "| recipe | CP | | layout, algorithm that `plan` would take, memory; or why not |",
    ]
    lines += ["| --- | --- | --- | --- |"]
    for each in every:
        word = _WORDS[each.code] if each.counted else "not counted"
        text = each.algorithm if each.code == SERVED else each.why.replace("|", "or")
        lines.append(f"| {each.name} | {each.ranks} | {word} | {text} |")
    return [*lines, ""]


def main() -> int:
    """Writes the page; returns 1 if a recipe that is counted is not understood."""
    parser = argparse.ArgumentParser(description="Writes docs/data/recipes.md.")
    parser.add_argument("folders", nargs="+", metavar="PROGRAM=FOLDER", help=", ".join(PROGRAMS))
    parser.add_argument(
        "--versions", default="", help="PROGRAM=TEXT,..., where folders have no git"
    )
    arguments = parser.parse_args()
    versions = dict(pair.split("=", 1) for pair in arguments.versions.split(",") if pair)
    lines = ["# Public recipes with context parallelism", ""]
    lines += ["Written by `scripts/count_recipes.py`, by `megatron-cp check`, for h100_400g.", ""]
    worst = SERVED
    for pair in arguments.folders:
        program, _, place = pair.partition("=")
        folder = Path(place)
        version = (
            versions.get(program)
            or subprocess.run(
                ["git", "-C", place, "log", "-1", "--format=%h of %cs"],
                check=True,
                capture_output=True,
                text=True,
            ).stdout.strip()
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            every = [each for name in PROGRAMS[program](folder) if (each := check(name, folder))]
        lines += table(program, version, every)
        worst = max([worst, *(each.code for each in every if each.counted)])
    PAGE.write_text("\n".join(lines).rstrip() + "\n")
    return int(worst > REFUSED)


if __name__ == "__main__":
    sys.exit(main())
