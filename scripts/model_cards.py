#!/usr/bin/env python
"""Compares small models with all kinds of layers of public ones with CP 1, and writes docs/models.

Each model of tests/integration/public_models.yaml is built with few numbers
(tests/integration/model_cards_job.py) on 2 and on 4 CPU processes, and on twice as many with
another parallelism. Models that become the same have one card.

    python scripts/model_cards.py                      # all
    python scripts/model_cards.py glm-5 gpt-oss-20b    # these, and the table of all cards
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from forks import ForkedJob

ROOT = Path(__file__).parents[1]
JOB = ROOT / "tests" / "integration" / "model_cards_job.py"
CARDS = ROOT / "docs" / "models"
SIZES = (2, 4)
# Largest errors that count as equal: relative, but for log-probabilities.
BOUNDS = {"loss": 1e-5, "log-probs": 1e-4, "gradients": 1e-4, "weights": 0.0}
TIMEOUT_S = 1200
_TITLES = {
    "samples": "samples",
    "packed documents": "packs",
    "packed documents with padding": "padded packs",
    "multi-token prediction": "MTP",
    "checkpoint": "checkpoint",
    "tensor parallelism": "TP 2, EP 2",
    "pipeline parallelism": "PP 2",
}
# Beside context parallelism, and how many processes that takes.
BESIDE = {"nothing": 1, "tensor": 2, "pipeline": 2}


def alike() -> dict[str, list[str]]:
    """Models by what is built of them: the first one's name, and those of all."""
    sys.path.insert(0, str(ROOT))
    from tests.integration.model_cards_job import small
    from tests.integration.public_models import MODELS

    groups: dict[str, list[str]] = {}
    for model in MODELS:
        built = json.dumps(small(dict(model.settings)), sort_keys=True)
        groups.setdefault(built, []).append(model.name)
    return {names[0]: names for names in groups.values()}


def run(names: list[str], beside: str, size: int, folder: Path) -> dict[str, Any]:
    """What rank 0 found, by model. Args: beside: one of `BESIDE`; size: of context parallelism."""
    ranks, place = size * BESIDE[beside], f"{beside}{size}"
    logs = [
        (folder / f"{place}.{rank}.out", folder / f"{place}.{rank}.err") for rank in range(ranks)
    ]
    words = [str(folder / place), beside, str(size), *names]
    codes = ForkedJob(JOB, words, logs).finish(TIMEOUT_S)
    found: dict[str, Any] = {}
    for line in logs[0][0].read_text().splitlines():
        if line.startswith("FOUND"):
            found |= json.loads(line.removeprefix("FOUND"))
    if any(codes):
        print(f"{beside}, {size}: {codes}: {logs[0][1].read_text()[-2000:]}")
    return found


def card(names: list[str], found: dict[tuple[str, int], dict[str, Any]]) -> dict[str, Any]:
    """Returns a card of what every run found.

    Raises:
        ValueError: A path failed otherwise than by a refusal, or is off by more than `BOUNDS`.
    """
    equal: dict[str, dict[str, dict[str, str]]] = {}
    refused: dict[str, str] = {}
    for (beside, size), each in found.items():
        if "failed" in each:
            raise ValueError(f"CP {size}, {beside}: {each['failed']}")
        for path, errors in each["off"].items():
            for name, error in errors.items():
                if not error <= BOUNDS[name]:
                    raise ValueError(f"CP {size}, {path}: {name} is off by {error:.1e}")
            equal.setdefault(path, {})[f"CP {size}"] = {k: f"{v:.0e}" for k, v in errors.items()}
        refused |= each["refused"]
    packages = ("megatron-core", "torch", "megatron-cp-plugin")
    return {
        "models": names,
        "written": str(datetime.date.today()),
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
        "algorithm": "zigzag, layout thd of install, CPU, float32",
        "built": found["nothing", min(SIZES)]["built"],
        "equal": equal,
        "refused": refused,
    }


def table(cards: dict[str, dict[str, Any]]) -> str:
    """Returns docs/models/README.md."""
    versions = sorted({" ".join(map(str, each["versions"].values())) for each in cards.values()})
    lines = [
        "# Models",
        "",
        "Written by `scripts/model_cards.py`. A card is a small model with all kinds of layers of",
        "a public one, built of Megatron's local modules and split over 2 and 4 CPU processes by",
        '`install("zigzag", layout="thd")`, in float32. It is equal to the same model on one',
        f"process if losses are within {BOUNDS['loss']:.0e}, log-probabilities within",
        f"{BOUNDS['log-probs']:.0e} and the gradients of all parameters within",
        f"{BOUNDS['gradients']:.0e}:",
        "",
        "- **samples**: three steps of gradient descent, as in pretraining;",
        "- **packs**, **padded packs**: documents of odd lengths, shorter than 2P and single ones,",
        "  each compared with the document alone, as in SFT and in RL (`thd`);",
        "- **MTP**: padded packs with one more token predicted;",
        "- **checkpoint**: weights saved by split ranks and read by one, and the other way round;",
        "- **TP 2, EP 2**: padded packs on twice as many processes, with sequence parallelism and,",
        "  where there are experts, half of them on each of two; equal to CP 1 split so;",
        "- **PP 2**: all packs as micro-batches of one step of two stages; -: not built.",
        "",
        "Megatron's own loop, with more parallelisms, is in [parity.md](../parity.md), by kind of",
        "layer. Where positions are of three kinds, every fifth embedding of a pack is an image's;",
        "vision towers are not built. Stand-ins compute for flash-linear-attention and mamba-ssm.",
        "Biases of experts, the Hadamard transform and the ReLU of DSA's indexer, norms around 1",
        "and MiniMax-M3's choice of blocks are left out; nothing ran on GPUs. Kimi K3 has no card:",
        "[refused.md](refused.md) says why.",
        "",
        f"Python, Megatron, torch and plugin: {'; '.join(versions)}.",
        "",
        f"| card | models | {' | '.join(_TITLES.values())} |",
        f"| --- | --- | {' | '.join('---' for _ in _TITLES)} |",
    ]
    reasons: list[str] = []
    for name, each in cards.items():
        cells = []
        for path in _TITLES:
            why = each["refused"].get(path) or each["refused"].get("all")
            if why is not None and why not in reasons:
                reasons.append(why)
            sizes = " ".join(size.removeprefix("CP ") for size in each["equal"].get(path, {}))
            equal = f"equal: CP {sizes}" if sizes else "-"
            cells.append(f"refused ({reasons.index(why) + 1})" if why else equal)
        models = ", ".join(each["models"])
        lines.append(f"| [{name}]({name}.yaml) | {models} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {why}" for number, why in enumerate(reasons, 1))]
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    """Writes cards; returns 1 if one could not be."""
    parser = argparse.ArgumentParser(description="Writes docs/models.")
    parser.add_argument("cards", nargs="*", metavar="NAME", help="default: all")
    chosen, groups = parser.parse_args().cards, alike()
    unknown = set(chosen) - groups.keys()
    if unknown:
        print(f"there is no card of {', '.join(sorted(unknown))}: use {', '.join(groups)}")
        return 2
    names, failed = chosen or list(groups), 0
    with tempfile.TemporaryDirectory() as folder:
        found = {
            (beside, size): run(names, beside, size, Path(folder))
            for size in SIZES
            for beside in BESIDE
        }
    CARDS.mkdir(exist_ok=True)
    for name in names:
        try:
            made = card(groups[name], {way: each[name] for way, each in found.items()})
        except (ValueError, KeyError) as error:
            print(f"{name}: no card: {error}")
            failed = 1
            continue
        text = yaml.safe_dump(made, sort_keys=False, width=98)
        (CARDS / f"{name}.yaml").write_text(f"# Written by scripts/model_cards.py.\n{text}")
    cards = {
        name: yaml.safe_load((CARDS / f"{name}.yaml").read_text())
        for name in groups
        if (CARDS / f"{name}.yaml").is_file()
    }
    (CARDS / "README.md").write_text(table(cards))
    return failed


if __name__ == "__main__":
    sys.exit(main())
