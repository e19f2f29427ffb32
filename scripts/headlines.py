"""The papers' headline ratios, predicted: tables and charts for docs/data/predictions.md."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import megatron_cp_plugin  # noqa: F401  (registers the algorithms)
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.model import MODELS, Model, Split
from megatron_cp_plugin.planner.step import step

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"
PICTURES = ROOT / "docs" / "pictures"
# Transformer Engine's ring: K, V and their gradients travel, all in the model's dtype.
RING = (
    "zigzag",
    {"transport": "group", "backward": "kv", "keep": "local", "gradients": "model"},
)
GPT = {
    "2.7B": Model("gpt-2.7b", 32, 2560, 10240, 32, 32, 80, 50304, gated=False),
    "175B": Model("gpt-175b", 6, 12288, 49152, 96, 96, 128, 50304, gated=False),
}
K = 1024


def grids() -> dict[str, dict[int, tuple[float, float]]]:
    """Attention2D over the ring at 128K tokens: of a layer and of a step, by GPUs."""
    found: dict[str, dict[int, tuple[float, float]]] = {}
    for name, machine, model in (
        ("A100, 4 a node", "a100_ethernet", GPT["2.7B"]),
        ("H100, 1 a node", "h100_ethernet", GPT["175B"]),
    ):
        for size in (16, 64, 256, 1024):
            side = int(size**0.5)
            no = {"variant": "no", "chunks": 1, "rows": side, "cols": side}
            steps = [
                step(
                    model,
                    Split(context=size, micro_batches=16),
                    128 * K,
                    Machine.load(DATA / f"{machine}.yaml"),
                    algo,
                    options,
                )
                for algo, options in (RING, ("attention2d", no))
            ]
            ring, grid = (one.parts["attention"] for one in steps)
            ratios = ring / grid, steps[0].seconds / steps[1].seconds
            found.setdefault(name, {})[size] = ratios
    return found


def linear() -> dict[str, dict[int, float]]:
    """Tokens a second of TNL-1B on 64 A100 by length in K, with heads for 64 ranks of Ulysses."""
    machine = Machine.load(DATA / "a100_8x100g.yaml")
    model = replace(MODELS["tnl-1b"], heads=64, kv_heads=64, head_dim=32)
    found: dict[str, dict[int, float]] = {"LASP": {}, "Ulysses": {}, "Megatron-SP": {}}
    for length in (32, 64, 128, 256, 512):
        tokens = length * K
        lasp = step(model, Split(context=64), tokens, machine, "lasp")
        split = step(model, Split(context=64), tokens, machine, "linear_ulysses")
        # One head a rank, of all tokens: the same work as LASP's without its messages.
        alone = step(model, Split(), tokens // 64, machine, "lasp").parts["attention"]
        tensor = step(model, Split(tensor=64), tokens, machine, attention=alone / model.layers)
        for name, one in zip(found, (lasp, split, tensor), strict=True):
            found[name][length] = tokens / one.seconds
    return found


def section() -> list[str]:
    """Lines of the page; writes the charts."""
    by_gpus, by_length = grids(), linear()
    _draw_grids(by_gpus)
    _draw_linear(by_length)
    lines = [
        "## The papers' headline ratios",
        "",
        "Networks are not given there: 100 Gb/s Ethernet a node is assumed for Attention2D, a card",
        "of 100 Gb/s a GPU for LASP. So these say which way and how steeply, not how much.",
        "",
        "Attention2D (`variant=no`) over the ring, 128K tokens, layer / step of 16 micro-batches:",
        "",
        "| | 16 GPUs | 64 | 256 | 1,024 | published |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    said = (
        "step at least 2.4x on 16, 4x on 64 (GPT 2.7B)",
        "step up to 9.4x on 64 (175B, one pipeline stage)",
    )
    for (name, ratios), words in zip(by_gpus.items(), said, strict=True):
        cells = " | ".join(f"{a:.1f}x / {b:.1f}x" for a, b in ratios.values())
        lines.append(f"| {name} | {cells} | {words} |")
    lines += ["", "![](../pictures/predicted_attention2d.svg)", ""]
    lines += [
        "TNL-1B on 64 A100, thousand tokens a second by length, as by our program (LASP's own",
        "steps took much longer than this predicts of them: the last row of the first table):",
        "",
        "| | " + " | ".join(f"{length}K" for length in by_length["LASP"]) + " |",
        "| --- |" + " --- |" * len(by_length["LASP"]),
    ]
    for name, rates in by_length.items():
        lines.append(f"| {name} | " + " | ".join(f"{r / 1e3:.0f}" for r in rates.values()) + " |")
    lasp, split, tensor = (by_length[name][256] for name in by_length)
    lines += [
        "",
        f"LASP at 256K: {lasp / split:.2f}x of Ulysses (published 1.38x), {lasp / tensor:.2f}x of "
        "Megatron-SP (2.36x).",
        "",
        "![](../pictures/predicted_lasp.svg)",
        "",
    ]
    return lines


def _draw_grids(found: Mapping[str, Mapping[int, Sequence[float]]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7.6, 3.4))
    for (name, ratios), color in zip(found.items(), ("tab:blue", "tab:orange"), strict=True):
        for place, label, style in ((0, "layer", "-"), (1, "step", "--")):
            values = [ratio[place] for ratio in ratios.values()]
            axes.plot(
                list(ratios),
                values,
                style,
                color=color,
                marker="o",
                markersize=4,
                label=f"{name}, {label}",
            )
    published = {16: 2.4, 64: 4.0}
    axes.plot(
        list(published),
        list(published.values()),
        "^",
        color="tab:blue",
        label="A100, published: at least",
    )
    axes.plot([64], [9.4], "v", color="tab:orange", label="H100, published: up to")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks([16, 64, 256, 1024], ["16", "64", "256", "1,024"])
    axes.set_yticks([1, 2, 4, 8, 16], ["1x", "2x", "4x", "8x", "16x"])
    axes.set_xlabel("GPUs")
    axes.set_ylabel("times as fast as the ring")
    axes.set_title("Attention2D over the ring, 128K tokens: predicted", fontsize=10)
    # Beside the lines; its own are long enough to tell dashes.
    axes.legend(fontsize=7, handlelength=4, loc="center left", bbox_to_anchor=(1.0, 0.5))
    _save(figure, "predicted_attention2d")


def _draw_linear(found: Mapping[str, Mapping[int, float]]) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.4))
    lengths = list(found["LASP"])
    for number, (name, rates) in enumerate(found.items()):
        places = [place + (number - 1) * 0.27 for place in range(len(lengths))]
        axes.bar(places, [rate / 1e3 for rate in rates.values()], 0.25, label=name)
    axes.set_xticks(range(len(lengths)), [f"{length}K" for length in lengths])
    axes.set_xlabel("tokens of a sequence")
    axes.set_ylabel("thousand tokens a second")
    axes.set_title("TNL-1B on 64 A100: predicted", fontsize=10)
    axes.legend(fontsize=8)
    _save(figure, "predicted_lasp")


def _save(figure: object, name: str) -> None:
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    mpl.rcParams["svg.hashsalt"] = name
    path = PICTURES / f"{name}.svg"
    plt.tight_layout()
    plt.savefig(path, metadata={"Date": None})
    plt.close()
    lines = (line.rstrip() for line in path.read_text().splitlines())
    path.write_text("\n".join(lines) + "\n")
