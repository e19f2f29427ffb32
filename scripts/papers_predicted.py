"""What is counted and predicted of the papers' experiments, and what one rank alone measured: the
tables of docs/papers/.

    python scripts/papers_predicted.py                 # all blocks of the pages, some minutes
    python scripts/papers_predicted.py --only figure6

Writes every block that stands between `<!-- generated: NAME DIGEST -->` and `<!-- end -->`. The
digest is that of the block, so that the tests see what was changed by hand. How far predictions are
off is read from docs/predictions.md: write that page first.
"""

import argparse
import csv
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from hashlib import sha256
from pathlib import Path
from textwrap import wrap

import headlines
import predictions
import traffic_table

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.costs import BASELINES, Baseline, cost
from megatron_cp_plugin.planner.dry_run import Event, Memory, Post, RecordedKernel
from megatron_cp_plugin.planner.event_simulation import Timeline, tile_seconds
from megatron_cp_plugin.planner.layer import Layer, planned
from megatron_cp_plugin.planner.machine import Links, Machine, Rate
from megatron_cp_plugin.planner.memory import activation_bytes, memory, memory_of_stage
from megatron_cp_plugin.planner.meta import trace_of
from megatron_cp_plugin.planner.model import MODELS, Model, Recompute, Split
from megatron_cp_plugin.planner.simulate import simulate
from megatron_cp_plugin.planner.step import TrainingStep, nodes_of_split, step

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "papers").glob("*.md"))
K = 1024
MS = 1e3
Options = dict[str, object]
GIB = 2**30
MIB = 2**20
RING: tuple[str, Options] = (headlines.RING[0], {**headlines.RING[1]})

LLAMA = MODELS["llama2-7b"]
GQA = replace(LLAMA, name="llama-gqa", kv_heads=8)
LLAMA_33 = replace(LLAMA, name="llama-33h", hidden=4224, heads=33, kv_heads=33)
LLAMA_13B = Model("llama-13b", 40, 5120, 13824, 40, 40, 128, 32000)
FEW_HEADS = tuple(
    Model(f"llama-{n}h", 1024 // n, 128 * n, 11008, n, n, 128, 32000) for n in (16, 8, 4, 2)
)
GPT = {
    name: Model(name, layers, heads * dim, 4 * heads * dim, heads, heads, dim, 50304, gated=False)
    for name, layers, heads, dim in (
        ("760M", 24, 16, 96),
        ("2.7B", 32, 32, 80),
        ("13B", 40, 40, 128),
        ("66B", 64, 72, 128),
        ("175B", 96, 96, 128),
    )
}
TNL = MODELS["tnl-1b"]
TNL_7B = Model("tnl-7b", 30, 4096, 11264, 32, 32, 128, 64000, linear=True)


@lru_cache
def machine(name: str) -> Machine:
    """Of configs/machines or docs/data."""
    return predictions.machine_of(name)


def pci(nodes_gbit: float) -> Machine:
    """BurstAttention's: 8 A100 over PCI-E a node, a network of so many Gb/s a node."""
    found = machine("a100_ethernet")
    rate = Rate(found.between.exchange.seconds, 0.9 * nodes_gbit / 8 * 1e9)
    return replace(found, gpus_per_node=8, between=Links(rate))


def off(rows: str) -> str:
    """How far predictions of such rows are off, as docs/predictions.md has it."""
    text = (ROOT / "docs" / "predictions.md").read_text()
    found = re.search(
        rf"^\| {re.escape(rows)} \| (\d+) \| ([\d.]+%) \| \d+% \| (\d+%) \|$", text, re.M
    )
    if found is None:
        raise ValueError(f"docs/predictions.md has no errors of {rows}: write it first")
    return f"median error {found[2]}, at most {found[3]}, of {found[1]} numbers"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of markdown."""
    lines = [f"| {' | '.join(header)} |", "| --- |" + " --- |" * (len(header) - 1)]
    return lines + [f"| {' | '.join(row)} |" for row in rows]


def length(tokens: int) -> str:
    """128K for 131072."""
    return f"{tokens // K}K"


def measured(name: str, **wanted: object) -> list[dict[str, str]]:
    """Rows of docs/data/papers_NAME.csv that have these values."""
    with (ROOT / "docs" / "data" / f"papers_{name}.csv").open() as lines:
        return [
            row
            for row in csv.DictReader(lines)
            if all(row[column] == str(value) for column, value in wanted.items())
        ]


def of_cards(rows: Iterable[Mapping[str, str]], title: str) -> list[str]:
    """A line above a table."""
    cards = " and ".join(sorted({row["card"] for row in rows}))
    return [f"**Measured**, one rank alone on one {cards}, without a network, {title}:", ""]


# ---- what takes how long


@lru_cache(maxsize=4096)
def _layer(
    algo: str,
    options: tuple[tuple[str, object], ...],
    shape: Shape | LinearShape,
    mask: Mask,
    on: str,
    nodes: tuple[int, ...],
) -> Timeline:
    given = dict(options)
    transport = str(given.pop("transport", "auto"))
    return simulate(algo, given, shape, mask, _MACHINES[on], nodes, transport=transport)


_MACHINES: dict[str, Machine] = {}


def layer(
    algo: str,
    options: Options,
    shape: Shape | LinearShape,
    on: Machine,
    nodes: Sequence[int],
    mask: Mask | None = None,
) -> Timeline:
    """A layer of attention; the same is simulated once."""
    key = f"{hash(repr(on))}"
    _MACHINES[key] = on
    return _layer(algo, tuple(options.items()), shape, mask or Mask(), key, tuple(nodes))


def whole(
    model: Model,
    split: Split,
    tokens: int,
    on: Machine,
    algo: str = "zigzag",
    options: Options | None = None,
    mask: Mask | None = None,
) -> TrainingStep:
    """A step of training."""
    nodes = nodes_of_split(split, on)
    attention = layer(algo, options or {}, model.shape(tokens, split.tensor), on, nodes, mask)
    return step(model, split, tokens, on, attention=attention.seconds)


def filled(model: Model, ways: int) -> Model:
    """With as many heads as so many ranks can split."""
    heads = -(-model.heads // ways) * ways
    kv_heads = heads if model.kv_heads == model.heads else model.kv_heads
    return replace(model, heads=heads, kv_heads=kv_heads)


def tensor(
    model: Model, ways: int, tokens: int, on: Machine, recompute: Recompute = "none"
) -> float:
    """Seconds of a step by tensor and sequence parallelism; attention too is computed again."""
    model, split = filled(model, ways), Split(tensor=ways, recompute=recompute)
    attention = layer("zigzag", {}, model.shape(tokens, ways), on, (0,))
    again = model.layers * attention.forward.seconds if recompute == "full" else 0.0
    return step(model, split, tokens, on, attention=attention.seconds).seconds + again


def prefill(
    model: Model,
    split: Split,
    tokens: int,
    on: Machine,
    algo: str = "zigzag",
    options: Options | None = None,
    mask: Mask | None = None,
) -> float:
    """Seconds of a forward alone: what full recompute adds to a step, and attention's forward."""
    model = filled(model, split.tensor)
    nodes = nodes_of_split(split, on)
    attention = layer(algo, options or {}, model.shape(tokens, split.tensor), on, nodes, mask)
    once, again = (
        step(model, replace(split, recompute=how), tokens, on, attention=0.0).seconds
        for how in ("none", "full")
    )
    return again - once + model.layers * attention.forward.seconds


# ---- Attention2D

HERE: Mapping[str, tuple[str, Options]] = {
    "ring, as TE p2p": RING,
    "zigzag": ("zigzag", {}),
    "attention2d": ("attention2d", {}),
    "attention2d-no": ("attention2d-no", {}),
    "attention2d-o": ("attention2d-o", {}),
}


def attention2d_table1() -> list[str]:
    """Whole Qs that a rank sends."""
    sizes = traffic_table.SIZES
    return table(["32:32 heads", *(f"P = {n}" for n in sizes)], traffic_table.rows(32, 32, sizes))


def attention2d_cards() -> list[str]:
    """What leaves the busiest GPU, and the busiest node of four that share a card."""
    tokens, rows = 64 * K, []
    shape = Shape(1, tokens, 32, 32, 128)
    ways: Mapping[str, Callable[[int], tuple[str, Options]]] = {
        "Ring Attention, as TE's": lambda size: RING,
        "attention2d-no, square": lambda size: _grid(size, "no"),
        "attention2d-o, square": lambda size: _grid(size, "o"),
        "zigzag": lambda size: ("zigzag", {"gradients": "model"}),
        "attention2d": lambda size: ("attention2d", {}),
    }
    found: dict[tuple[str, int], tuple[float, float]] = {}
    for name, way in ways.items():
        row = [name]
        for size in (16, 64):
            algo, options = way(size)
            algorithm = planned(algo, size, shape, Mask(), options)
            plans = [algorithm.plan(shape, Mask(), phase) for phase in PHASES]
            nodes, unit = [rank // 4 for rank in range(size)], shape.query_width * 2 * tokens / size
            each = [sum(plan.sent(n, shape).bytes for plan in plans) / unit for n in range(size)]
            out = [
                sum(plan.sent(n, shape, nodes).bytes for plan in plans) / unit for n in range(size)
            ]
            cards = [sum(out[start : start + 4]) for start in range(0, size, 4)]
            found[name, size] = max(each), max(cards)
            ring = found["Ring Attention, as TE's", size]
            for own, of_ring in zip(found[name, size], ring, strict=True):
                row.append(f"{own:.0f}, {of_ring / own:.2f}x")
        rows.append(row)
    header = ["", "16: a GPU", "16: a card", "64: a GPU", "64: a card"]
    lines = [
        "Units of one rank's Q that leave the GPU that sends most, and the card of the node that "
        "sends most if four GPUs share one, forward and backward, causal, 32:32 heads, **counted**;"
        " and how many times fewer than the ring's:",
        "",
    ]
    return lines + table(header, rows)


# Ms of steps of 12 layers, 64K tokens, 2 GPUs, by TE's p2p and by zigzag: docs/benchmarks.md.
MEASURED_GPT = {"760M": (850.8, 698.6), "2.7B": (1693.4, 1457.8)}


def gpt3_steps() -> list[str]:
    """Steps of the GPT-3 shapes on 2 GPUs."""
    on = machine("h200_nvlink")
    rows, errors = [], []
    for name, times in MEASURED_GPT.items():
        model = replace(GPT[name], layers=12, vocabulary=32000)
        for way, measured in zip((RING, ("zigzag", {})), times, strict=True):
            got = whole(model, Split(context=2), 64 * K, on, *way).seconds * MS
            errors.append(f"{got / measured - 1:+.0%}")
    for name, layers, lengths in (
        ("760M", 8, (32, 128)),
        ("2.7B", 8, (32, 128)),
        ("13B", 8, (32, 128)),
        ("66B", 4, (8, 32)),
        ("175B", 3, (8,)),
    ):
        model = replace(GPT[name], layers=layers, vocabulary=32000)
        for tokens in (n * K for n in lengths):
            found = [whole(model, Split(context=2), tokens, on, *way) for way in HERE.values()]
            rows.append([f"{name}, {layers} layers, {length(tokens)}", *_ms(found)])
    lines = [
        f"2 GPUs, ms a step, **predicted** (steps of Llama-7B: {off('steps: ours, 2 GPUs')}; "
        f"against the steps that were measured, above: the ring {errors[0]} and {errors[2]} of "
        f"TE's, zigzag {errors[1]} and {errors[3]}):",
        "",
    ]
    return lines + table(["", *HERE], rows)


def _ms(found: Iterable[TrainingStep]) -> list[str]:
    return [f"{one.seconds * MS:.0f}" for one in found]


def gpt3_nodes() -> list[str]:
    """The 2.7B on emulated nodes: two ranks share a GPU."""
    on = machine("h200_emulated_nodes")
    shared = replace(
        on,
        matmul_flops=on.matmul_flops / on.ranks_per_gpu,
        memory_bytes_per_second=on.memory_bytes_per_second / on.ranks_per_gpu,
    )
    model = replace(GPT["2.7B"], layers=4, vocabulary=32000)
    rows = []
    for what, split, tokens in (
        ("CP 4, 16K", Split(context=4), 16 * K),
        ("CP 4, 32K", Split(context=4), 32 * K),
        ("CP 2, PP 2, 4 micro-batches, 32K", Split(context=2, pipeline=2, micro_batches=4), 32 * K),
        ("CP 2, DP 2, 32K", Split(context=2, data=2), 32 * K),
    ):
        found = []
        for algo, options in HERE.values():
            attention = layer(algo, options, model.shape(tokens), on, nodes_of_split(split, on))
            found.append(step(model, split, tokens, shared, attention=attention.seconds))
        rows.append([what, *_ms(found)])
    lines = [
        "The 2.7B, 4 layers, 4 ranks on 2 GPUs as two emulated nodes, ms a step, **predicted** "
        f"(layers alone: {off('emulated nodes, 2 x 2')}; the ring is predicted too fast):",
        "",
    ]
    return lines + table(["", *HERE], rows)


def _grid(size: int, variant: str) -> tuple[str, Options]:
    side = int(size**0.5)
    return f"attention2d-{variant}", {"rows": side, "cols": side}


def _over_the_ring(
    model: Model, size: int, tokens: int, on: Machine, batch: int, recompute: Recompute
) -> tuple[float, float, float]:
    """Seconds a step: the ring, `no`, `overlap`."""
    split = Split(context=size, micro_batches=batch, recompute=recompute)
    ways = (RING, _grid(size, "no"), _grid(size, "o"))
    ring, no, overlap = (whole(model, split, tokens, on, *way).seconds for way in ways)
    return ring, no, overlap


def figure4() -> list[str]:
    """Speed-ups over the ring of the three models, 16 and 64 GPUs."""
    on, rows = machine("a100_ethernet"), []
    for size in (16, 64):
        for name, batch in (("760M", 64), ("2.7B", 32), ("13B", 16)):
            row = [f"{size} GPUs, {name}"]
            for tokens in (8 * K, 32 * K, 128 * K):
                again = name == "13B" and tokens >= 64 * K
                ring, no, overlap = _over_the_ring(
                    GPT[name], size, tokens, on, batch, "full" if again else "none"
                )
                row.append(f"{ring / no:.1f}x, {ring / overlap:.1f}x")
            rows.append(row)
    return table(["`no`, `overlap` over the ring", "8K", "32K", "128K"], rows)


def figure5() -> list[str]:
    """Strong scaling of the 2.7B from 16 to 64 GPUs."""
    on, rows = machine("a100_ethernet"), []
    for tokens in (8 * K, 16 * K, 32 * K, 64 * K, 128 * K):
        few, many = (_over_the_ring(GPT["2.7B"], size, tokens, on, 32, "none") for size in (16, 64))
        rows.append(
            [length(tokens)]
            + [f"{a:.1f}, {b:.1f}, {a / b:.2f}x" for a, b in zip(few, many, strict=True)]
        )
    return table(["s on 16, on 64 GPUs, gain", "ring", "`no`", "`overlap`"], rows)


def figure6() -> list[str]:
    """One pipeline stage of the 66B and of the 175B on 64 nodes of one H100."""
    on, rows = machine("h100_ethernet"), []
    for name, layers in (("66B", 8), ("175B", 6)):
        model, row = replace(GPT[name], layers=layers), [f"{name}, {layers} layers"]
        for tokens in (8 * K, 16 * K, 32 * K, 64 * K, 128 * K):
            ring, no, overlap = _over_the_ring(model, 64, tokens, on, 16, "none")
            row.append(f"{ring / no:.1f}x, {ring / overlap:.1f}x")
        rows.append(row)
    return table(["`no`, `overlap` over the ring", "8K", "16K", "32K", "64K", "128K"], rows)


# ---- LASP


def lasp_table4() -> list[str]:
    """Seconds a step of LASP + DDP."""
    cells: dict[int, dict[int, str]] = {}
    for row, one in predictions.steps():
        if row.source.startswith("LASP"):
            fitted = one.seconds == row.host_seconds
            error = "*f*" if fitted else f"{one.seconds / row.seconds - 1:+.0%}"
            cell = f"{row.seconds:.2f} / {one.seconds:.2f}, {error}"
            cells.setdefault(row.gpus, {})[row.tokens] = cell
    lengths = sorted({tokens for found in cells.values() for tokens in found})
    rows = [[f"{gpus} GPUs", *(found.get(n, "") for n in lengths)] for gpus, found in cells.items()]
    known, held = off(f"steps: {LASP}, the host's time (fitted to)"), off(f"steps: {LASP}")
    lines = [
        "Seconds a step, theirs / **predicted**. *f*: the prediction is the time of their program "
        f"with 2K tokens on as many GPUs, to which it is fitted ({known}). All others: {held}, "
        "which is what the simulator is worth here. Not in the table: 2K to 64K tokens, whose "
        "steps are that constant too, and cells that are OOM there.",
        "",
    ]
    return lines + table(["theirs / predicted", *map(length, lengths)], rows)


LASP = "LASP + DDP, A100"
# Theirs, GB of a GPU: DDP, FSDP; tokens/s in the paper's Table 4.
LASP_GB = {
    (16, 64): (28.3, 11.0),
    (16, 128): (36.1, 19.0),
    (16, 256): (51.7, 35.2),
    (16, 512): (None, 67.5),
    (32, 512): (51.7, 34.8),
    (32, 1024): (None, 67.1),
    (64, 1024): (51.7, 34.6),
    (64, 2048): (None, 66.9),
    (128, 2048): (51.7, 33.8),
    (128, 4096): (None, 66.2),
}


def _gib_of_tnl(split: Split, tokens: int) -> float:
    return sum(memory(TNL, split, tokens).values())


def lasp_memory() -> list[str]:
    """Memory of a GPU by LASP with DDP, and with FSDP."""
    rows = []
    for (gpus, kilo), theirs in LASP_GB.items():
        splits = (
            Split(context=gpus, distributed_optimizer=False),
            Split(context=gpus, sharded=True),
        )
        cells = [
            f"{'OOM' if gb is None else gb} / {_gib_of_tnl(split, kilo * K) * GIB / 1e9:.1f}"
            for gb, split in zip(theirs, splits, strict=True)
        ]
        rows.append([f"{kilo}K", str(gpus), f"{kilo // gpus}K", *cells])
    header = ["tokens", "GPUs", "a GPU", "LASP + DDP, GB", "LASP + FSDP, GB"]
    lines = [
        "Theirs / **predicted** by the planner's count (`planner/memory.py`), which has "
        "Megatron-FSDP's buffers in place of torch's:",
        "",
    ]
    return lines + table(header, rows)


# Theirs on 8 A100: longest in thousands of tokens, tokens/s.
LASP_TABLE3 = {
    ("DDP", "none"): (12, 131286.0, 96, 126829.4),
    ("DDP", "full"): (64, 117429.5, 496, 100837.8),
    ("FSDP", "none"): (16, 145303.6, 120, 138598.8),
    ("FSDP", "full"): (96, 114464.0, 768, 106578.3),
}


def lasp_table3() -> list[str]:
    """The longest sequences on 8 A100, and their throughput."""
    on, rows = machine("a100_8x100g"), []
    recompute: Recompute
    for (backend, recompute), theirs in LASP_TABLE3.items():  # type: ignore[assignment]
        sharded = backend == "FSDP"
        for ways, split in enumerate(
            (
                Split(data=8, recompute=recompute, distributed_optimizer=sharded, sharded=sharded),
                Split(
                    context=8, recompute=recompute, distributed_optimizer=sharded, sharded=sharded
                ),
            )
        ):
            own = 4 * K
            while _gib_of_tnl(split, own + 4 * K) <= 0.9 * on.memory_gib:
                own += 4 * K
            kilo, rate = theirs[2 * ways : 2 * ways + 2]
            one = whole(TNL, split, int(kilo) * K, on, "lasp")
            name = f"{backend}{' + AC' * (recompute == 'full')}{' + LASP' * ways}"
            got = one.tokens / one.seconds
            rows.append(
                [
                    name,
                    f"{kilo}K / {length(own)}",
                    f"{rate:.0f} / {got:.0f}, {got / rate - 1:+.0%}",
                ]
            )
    lines = [
        "TNL-1B, 8 A100 of 80 GB, theirs / **predicted**: the longest sequence in steps of 4K "
        "that fits into 90% of the memory, and tokens/s at their longest, as by our program on "
        "one node:",
        "",
    ]
    return lines + table(["backend", "longest", "tokens/s"], rows)


def lasp_table1() -> list[str]:
    """MiB that a rank sends of a layer's forward, by the paper's formulas and by ours."""
    tokens, width, heads = 256 * K, TNL.hidden, TNL.heads
    whole_mib = tokens * width * 2 / MIB
    state = width * (width // heads)
    ways = (8, 16, 64)

    def row(*cells: str, values: Iterable[float]) -> list[str]:
        return [*cells, *(f"{value:.1f}" for value in values)]

    def linear(algo: str, ranks: int) -> float:
        shape = TNL.shape(tokens)
        assert isinstance(shape, LinearShape)
        made = Layer(algo, (), shape, Mask(), (0,) * ranks, False).on(ranks // 2)
        posts = (one for one in trace_of(made, shape, Mask()).forward if isinstance(one, Post))
        return sum(one.bytes + sum(size for _, size in one.sends) for one in posts) / MIB

    tensors = (4 * whole_mib * (n - 1) / n for n in ways)
    rows = [
        row("LASP", "B d^2 / h", values=[state * 2 / MIB] * 3),
        row("", "ours: `lasp`, states in float32", values=(linear("lasp", n) for n in ways)),
        row("", "ours: `lasp2`, all states to all", values=(linear("lasp2", n) for n in ways)),
        row("DeepSpeed-Ulysses", "4 B N d / T", values=(4 * whole_mib / n for n in ways)),
        row("", "ours: `linear_ulysses`", values=(linear("linear_ulysses", n) for n in ways)),
        row(
            "Megatron-SP",
            "2 B N d + 4 B N d / T",
            values=(2 * whole_mib + 4 * whole_mib / n for n in ways),
        ),
        row("", "counted: two gathers, two scatters, as rings", values=tensors),
    ]
    lines = [
        "MiB that the rank that sends most sends in a layer's forward: TNL-1B (d = 2048, 16 heads)"
        ", bf16, N = 256K. In elements the paper's Megatron-SP counts two whole tensors and four "
        "shards; rings of P ranks send four times (T - 1) / T of a whole one, attention and MLP. "
        "With 64 ranks Ulysses fills 16 heads up to 64:",
        "",
    ]
    return lines + table(["", "", *(f"T = {n}" for n in ways)], rows)


LINEAR = ("lasp", "lasp2", "linear_ulysses")


def _linear_tensor(model: Model, split: Split, tokens: int, on: Machine) -> TrainingStep:
    """Some heads of all tokens: as much work as all heads of some tokens, without messages."""
    one = layer("lasp", {}, model.shape(tokens // split.tensor), on, (0,))
    return step(model, split, tokens, on, attention=one.seconds)


def lasp_figure4_here() -> list[str]:
    """Steps of TNL-1B and -7B on 2 GPUs."""
    on, rows = machine("h200_nvlink"), []
    cases: tuple[tuple[Model, Recompute, tuple[int, ...]], ...] = (
        (TNL, "none", (32, 64, 128)),
        (TNL_7B, "full", (32, 64)),
    )
    for model, recompute, lengths in cases:
        for tokens in (n * K for n in lengths):
            found = [
                whole(model, Split(context=2, recompute=recompute), tokens, on, algo)
                for algo in LINEAR
            ]
            found.append(_linear_tensor(model, Split(tensor=2, recompute=recompute), tokens, on))
            what = f"{model.name.upper()}, {length(tokens)}, recompute {recompute}"
            rows.append([what, *_ms(found)])
    lines = [
        f"2 GPUs, ms a step, **predicted** ({off('steps: ours, linear attention')}, all of them "
        "steps of TNL-1B by lasp2; no step of lasp, of linear_ulysses, of tensor parallelism or of "
        "the 7B was compared):",
        "",
    ]
    return lines + table(["", *LINEAR, "tensor + sequence parallel"], rows)


def lasp_figure4() -> list[str]:
    """Tokens a second on 64 A100."""
    on, rows, rates = machine("a100_8x100g"), [], {}
    lengths = [n * K for n in (32, 64, 128, 256, 512, 1024, 2048, 4096)]
    for model in (TNL, TNL_7B):
        # As many heads as 64 ranks of Ulysses and of Megatron can split.
        model = replace(model, heads=64, kv_heads=64, head_dim=model.hidden // 64)
        for name in ("lasp", "linear_ulysses", "Megatron-SP"):
            row = [f"{model.name.upper()}, {name}"]
            for tokens in lengths:
                if name == "Megatron-SP":
                    one = _linear_tensor(model, Split(tensor=64), tokens, on)
                else:
                    one = whole(model, Split(context=64), tokens, on, name)
                rate = rates[model.name, name, tokens] = tokens / one.seconds / 1e3
                row.append(f"{rate:.0f}" + ("" if one.fits(on) else " (2)"))
            rows.append(row)
    lasp, ulysses, megatron = (
        rates[TNL.name, name, 256 * K] for name in ("lasp", "linear_ulysses", "Megatron-SP")
    )
    lines = [
        f"At 256K TNL-1B by LASP is {lasp / ulysses:.2f}x of Ulysses (theirs 1.38x) and "
        f"{lasp / megatron:.2f}x of Megatron-SP (2.36x). Here TNL-1B has 64 heads of 32, and "
        "TNL-7B 64 of 64, in place of 16 and 32 of 128: as many as 64 ranks of Ulysses and of "
        "Megatron-SP can split. The states of LASP are smaller with them, by 4 and by 2:",
        "",
    ]
    return lines + table(["thousand tokens a second", *map(length, lengths)], rows)


# ---- DISTFLASHATTN and LightSeq

NCCL: Options = {"transport": "group"}  # as theirs
PAPERS = "distflash-paper"
THEIRS = {
    # Megatron-LM, DISTFLASHATTN: 7B, GQA, 33H.
    (8, 64): ((6.81, 5.98), (6.60, 5.61), (8.37, 6.08)),
    (8, 128): ((20.93, 17.26), (20.53, 16.86), (25.75, 17.77)),
    (8, 256): ((72.75, 58.46), (71.93, 57.01), (90.21, 59.96)),
    (16, 128): ((14.26, 12.75), (14.21, 9.74), (20.63, 13.12)),
    (16, 256): ((43.44, 30.21), (43.20, 28.49), (62.78, 31.33)),
    (16, 512): ((147.06, 106.37), (146.38, 102.34), (216.70, 107.76)),
}


def _distflash(model: Model, gpus: int, tokens: int, on: Machine) -> float:
    split = Split(context=gpus, recompute="full")
    return whole(model, split, tokens, on, PAPERS, NCCL).seconds


def distflash_table1() -> list[str]:
    """Megatron-LM beside DISTFLASHATTN on 8 and 16 A100."""
    on, rows = machine("a100_8x100g"), []
    for (gpus, kilo), _ in THEIRS.items():
        row = [f"{gpus} GPUs, {kilo}K"]
        for model in (LLAMA, GQA, LLAMA_33):
            megatron = tensor(model, gpus, kilo * K, on, "full")
            ours = _distflash(model, gpus, kilo * K, on)
            row.append(f"{megatron:.2f} / {ours:.2f}, {megatron / ours:.2f}x")
        rows.append(row)
    one, two = "DISTFLASHATTN, A100, one node", "DISTFLASHATTN, A100, a card of 100 Gb/s a GPU"
    lines = [
        "**Predicted**, Megatron-LM / DISTFLASHATTN in seconds (its own steps of the 7B: "
        f"{off('steps: ' + one)} on one node; {off('steps: ' + two)} on two):",
        "",
    ]
    return lines + table(["", "LLaMA-7B", "LLaMA-GQA", "LLaMA-33H"], rows)


# Ms of steps of Llama-7B of 4 layers on 2 GPUs, by thousands of tokens: docs/benchmarks.md.
MEASURED_LLAMA = {
    "tp": {32: 319, 64: 846, 128: 2611},
    "distflash": {32: 300, 64: 781, 128: 2328},
    "zigzag": {32: 296, 64: 786, 128: 2323},
    "ulysses": {32: 305, 64: 791, 128: 2375},
}


def _llama_errors() -> str:
    """Of predictions of these steps."""
    on, model, found = machine("h200_nvlink"), replace(LLAMA, layers=4), []
    for name, times in MEASURED_LLAMA.items():
        errors = []
        for kilo, measured in times.items():
            if name == "tp":
                got = tensor(model, 2, kilo * K, on)
            else:
                got = whole(model, Split(context=2), kilo * K, on, name).seconds
            errors.append(f"{got * MS / measured - 1:+.0%}")
        found.append(f"{name} {', '.join(errors)}")
    return "; ".join(found)


def distflash_table1_here() -> list[str]:
    """Tensor parallelism, and ours, on 2 GPUs."""
    on, rows = machine("h200_nvlink"), []
    algos = ("distflash", PAPERS, "zigzag", "ulysses", "ring")
    for model in (LLAMA, GQA, LLAMA_33):
        model = replace(model, layers=4)
        for kilo in (32, 64, 128):
            by_tensor = tensor(model, 2, kilo * K, on)
            found = [whole(model, Split(context=2), kilo * K, on, algo) for algo in algos]
            cells = _ms(found)
            for index in (0, 1):
                cells[index] += f", {by_tensor / found[index].seconds:.2f}x"
            rows.append([f"{model.name}, {kilo}K", f"{by_tensor * MS:.0f}", *cells])
    lines = [
        "2 GPUs, 4 layers, ms a step, **predicted** (the 7B against what was measured: "
        f"{_llama_errors()}). `distflash` shares the last step, by copy engines, and is what was "
        "measured; `distflash-paper` is Algorithm 2, by which one of two ranks has 1.5 units to "
        "compute and the other 0.5:",
        "",
    ]
    return lines + table(["", "tp", *algos], rows)


def irregular_heads() -> list[str]:
    """Attention alone, 2 GPUs."""
    on, rows = machine("h200_nvlink"), []
    algos = ("zigzag", "distflash", "attention2d", "allgather", "ulysses", "usp")
    for heads, kv_heads in ((33, 33), (33, 11), (2, 2), (7, 1)):
        for tokens in (32 * K, 128 * K):
            shape = Shape(1, tokens, heads, kv_heads, 128)
            times = [layer(algo, {}, shape, on, (0, 0)).seconds * MS for algo in algos]
            what = f"{heads}:{kv_heads}, {length(tokens)}"
            rows.append([what, *(f"{time:.1f}" for time in times)])
    lines = [f"2 GPUs, ms forward + backward, **predicted** ({off('plans, 2 GPUs')}):", ""]
    return lines + table(["", *algos], rows)


def heads_alone() -> list[str]:
    """A rank of 8, its own 16K tokens; a share of tensor parallelism, all 128K."""
    rows, found = [], measured("rank", ranks=8, tokens=16 * K)
    every = [row for row in found if row["heads"] != "32:32"]
    algos = list(dict.fromkeys(row["algorithm"] for row in every))
    for heads in dict.fromkeys(row["heads"] for row in every):
        own = {row["algorithm"]: row for row in every if row["heads"] == heads}
        n_heads, kv_heads = (-(-int(n) // 8) for n in heads.split(":"))
        alone = measured("rank", ranks=1, heads=f"{n_heads}:{kv_heads}")
        cells = [f"{float(own[algo]['step_ms']):.1f}" if algo in own else "" for algo in algos]
        tensor = f"{float(alone[0]['step_ms']):.1f}" if alone else ""
        rows.append([heads, f"{float(own['zigzag']['limit_ms']):.1f}", *cells, tensor])
    title = (
        "P = 8, 128K tokens, ms forward + backward; the limit is the kernel's time for all heads"
    )
    lines = of_cards(every, f"{title} divided by 8")
    return lines + table(["heads", "limit", *algos, "tensor parallel"], rows)


def distflash_owner() -> list[str]:
    """The busiest rank's step, by who helps in the last step."""
    found = measured("rank", tokens=16 * K, heads="32:32")
    algos = list(dict.fromkeys(row["algorithm"] for row in found))
    rows = []
    for size in dict.fromkeys(row["ranks"] for row in found):
        own = {row["algorithm"]: row for row in found if row["ranks"] == size}
        cells = [
            f"{(ms := float(own[algo]['step_ms'])):.1f}, {ms / float(own[algo]['limit_ms']):.2f}"
            if algo in own
            else ""
            for algo in algos
        ]
        rows.append([size, f"{float(own['distflash']['limit_ms']):.1f}", *cells])
    title = "16K tokens a rank, 32:32 heads, the busiest rank's forward + backward, ms and over the"
    return of_cards(found, f"{title} limit") + table(["P", "limit", *algos], rows)


def few_heads() -> list[str]:
    """The longest sequence on 16 A100 of 40 GB, and on 2 H200."""
    rows = []
    for model in FEW_HEADS:
        ways = model.heads
        split = _longest(model, Split(context=16, recompute="full"), 40.0, sharded=16)
        stages, by_heads = 16 // ways, Split(tensor=ways, recompute="full")
        head = _longest(model, replace(by_heads, data=stages), 40.0, sharded=stages)
        by_stages = replace(by_heads, pipeline=stages, micro_batches=stages)
        piped = _longest(model, by_stages, 40.0, sharded=1)
        on = machine("h200_nvlink")
        own = _longest(model, Split(context=2, recompute="full"), on.memory_gib, sharded=1)
        seconds = whole(model, Split(context=2, recompute="full"), own, on, "distflash").seconds
        rows.append(
            [
                model.name,
                length(head),
                length(piped),
                length(split),
                f"{split // head}x, {split / piped:g}x",
                f"{length(own)}, {seconds:.0f} s a step",
            ]
        )
    header = ["", "TP x DP", "TP x PP", "distflash", "longer", "distflash, 2 H200, ZeRO-1"]
    lines = [
        "**Predicted**, the longest sequence (powers of two) that fits into 90% of 16 A100 of 40 GB"
        " with full recompute: tensor times data parallelism, tensor times pipeline parallelism "
        "with as many micro-batches as stages, distflash with FSDP; and distflash on 2 H200. "
        "Measured peaks of Llama-7B's four layers were 31.5 and 17.5 GiB where this count has 30.9 "
        "and 16.8:",
        "",
    ]
    return lines + table(header, rows)


# Theirs, GB: two GPUs of each of eight stages.
PIPELINE_GB = (31.5, 28.7, 26.0, 24.6, 21.8, 20.5, 17.9, 32.0)


def pipeline_stages() -> list[str]:
    """Memory of the stages of Llama-2H, TP 2, PP 8."""
    model, rows = FEW_HEADS[-1], [["theirs, 128K", *map(str, PIPELINE_GB)]]
    split = Split(tensor=2, pipeline=8, micro_batches=8, recompute="full")
    for kilo in (64, 128):
        each = (sum(memory_of_stage(model, split, kilo * K, n).values()) for n in range(8))
        rows.append([f"predicted, {kilo}K", *(f"{gib * GIB / 1e9:.1f}" for gib in each)])
    lines = [
        "GB of a GPU by stage, theirs / **predicted** (full recompute, 8 micro-batches, of which "
        "stage i holds 8 - i; the last stage has the logits). From stage to stage theirs falls by "
        "2.3 GB, which is 64K tokens, as the paper's section 4.3 has it, not the 128K of the "
        "table's caption:",
        "",
    ]
    return lines + table(["", *(f"stage {n}" for n in range(8))], rows)


def rematerialization() -> list[str]:
    """Bytes that a layer keeps for its backward, for each token of a rank."""
    rows = []
    for model in (LLAMA, GQA):
        width, heads, kept_out = model.hidden, model.heads, 2 * model.heads * model.head_dim
        layer_input, lse = 2 * width, 4 * heads
        whole_layer = activation_bytes(model, Split())
        rows.append(
            [
                model.name,
                f"{whole_layer:.0f}",
                f"{layer_input}",
                f"{2 * width} + {kept_out} + {lse} = {2 * width + kept_out + lse}",
                f"{layer_input} + {kept_out} + {lse} = {layer_input + kept_out + lse}",
            ]
        )
    lines = [
        "Bytes a token and layer keep for the backward, bf16, **counted**. Theirs stands at "
        "attention's output: what runs again begins with the output and the residual stream before "
        "it is added, so both are kept, and lse. Ours keeps the layer's input, attention's output "
        "and lse. The two are equal, so a checkpoint at attention's output was not built:",
        "",
    ]
    header = ["", "no recompute", "layer's input (attention twice)", "theirs", "ours"]
    return lines + table(header, rows)


def ring_self_attention() -> list[str]:
    """The longest sequence of Ring Self-Attention, which keeps all scores of its rows."""
    rows = []
    for gpus, theirs in ((8, "32K, > 256K"), (16, "64K, > 512K")):
        row = [f"{gpus} A100 of 80 GB", theirs]
        for scores in (True, False):
            tokens, split = 8 * K, Split(context=gpus, recompute="full")
            while True:
                longer = 2 * tokens
                gib = _sharded(LLAMA, split, longer, gpus)
                if scores:
                    gib += SCORES * LLAMA.heads * longer * (longer / gpus) * 2 / GIB
                if gib > 0.9 * 80e9 / GIB:
                    break
                tokens = longer
            row.append(length(tokens))
        rows.append(row)
    lines = [
        "Llama-7B, full recompute, FSDP: the longest sequence in powers of two that fits into 90% "
        f"of the memory, **predicted**, with {SCORES} tensors of B H N^2 / P scores of 2 bytes at "
        "a time in the backward of a layer (probabilities, their gradients, those of the scores):",
        "",
    ]
    header = ["", "theirs: RSA, DISTFLASHATTN", "with scores", "without"]
    return lines + table(header, rows)


SCORES = 3


def distflash_waiting() -> list[str]:
    """The share of rank-steps in which ranks wait, by area."""
    rows = []
    for size in (3, 4, 5, 8, 16):
        shape = Shape(1, size * 512, 8, 8, 128)
        each = (
            cost(algo, size, shape).idle for algo in ("distflash-unbalanced", PAPERS, "distflash")
        )
        ring = (size * size - size) / (2 * size * size)
        balanced = 0.0 if size % 2 else 1 / (2 * size)
        rows.append([str(size), f"{ring:.1%}", f"{balanced:.1%}", *(f"{one:.1%}" for one in each)])
    lines = [
        "Theirs in steps, the ring (P^2 - P) / 2P^2 and balanced 1 / 2P for even P; ours "
        "**counted** by area, blocks on the diagonal as the half work that they are:",
        "",
    ]
    header = ["P", "theirs, ring", "balanced", "`distflash-unbalanced`", f"`{PAPERS}`", "distflash"]
    return lines + table(header, rows)


def _longest(model: Model, split: Split, gib: float, sharded: int) -> int:
    """Tokens, a power of two, whose step fits into 0.9 of so much. Args: sharded: ways in which
    weights and gradients are split too.
    """
    tokens = 8 * K
    while _sharded(model, split, 2 * tokens, sharded) <= 0.9 * gib:
        tokens *= 2
    return tokens


def _sharded(model: Model, split: Split, tokens: int, ways: int) -> float:
    """GiB of a GPU, where weights and gradients are split too in so many ways."""
    found = memory(model, split, tokens)
    weights = found["parameters and gradients"]
    return sum(found.values()) - weights + weights / ways


def distflash_figure5() -> list[str]:
    """Balance on 8 A100; overlap on two boxes."""
    on, rows = machine("a100_8x100g"), []
    lengths = [n * K for n in (4, 8, 16, 32, 64, 128, 256)]
    for name, algo in (
        ("unbalanced", "distflash-unbalanced"),
        ("balanced", PAPERS),
        ("last step shared", "distflash"),
    ):
        row = [f"8 GPUs over one: {name}"]
        for tokens in lengths:
            shape = Shape(1, tokens, 32, 32, 128)
            one = layer("zigzag", {}, shape, on, (0,)).forward.seconds
            many = layer(algo, NCCL, shape, on, (0,) * 8).forward.seconds
            row.append(f"{one / many:.1f}x")
        rows.append(row)
    free = Links(Rate(0.0, 1e18))
    at_once = replace(on, inside=free, between=free, copy=None, group_share=1.0)
    nodes = (0,) * 8 + (1,) * 8
    for name, overlap in (("blocking", "false"), ("overlapped", "true")):
        row = [f"16 GPUs, exposed: {name}"]
        for tokens in lengths:
            shape = Shape(1, tokens, 32, 32, 128)
            options = NCCL | {"overlap": overlap}
            took, bare = (
                layer(PAPERS, options, shape, m, nodes).forward.seconds for m in (on, at_once)
            )
            row.append(f"{took / bare - 1:.0%}")
        rows.append(row)
    return table(["forward, 32 heads of 128", *map(length, lengths)], rows)


def distflash_merges() -> list[str]:
    """What merges take of a rank's forward, and merges and sums of both passes."""
    rows = []
    for kilo in (128, 512):
        for algo in ("distflash", "zigzag"):
            row = [f"{algo}, {kilo}K"]
            for size in (2, 4, 8, 16):
                shape = Shape(1, kilo * K, 32, 32, 128)
                layer = Layer(algo, (), shape, Mask(), (0,) * size, peer_access=True)
                found = trace_of(layer.on(size - 1), shape, Mask())
                both = (*found.forward, *found.backward)
                row.append(f"{_merging(found.forward):.1%}, {_merging(both):.1%}")
            rows.append(row)
            ran = measured("merges", tokens=kilo * K, algorithm=algo)
            if ran:
                rows.append([f"the same, {ran[0]['card']}", *map(_merged, ran)])
    return table(["", "P = 2", "P = 4", "P = 8", "P = 16"], rows)


def _merged(row: Mapping[str, str]) -> str:
    """As `_merging`, of the forward and of both passes, of what a profiler has seen."""
    names = ("forward_ms", "merges_ms", "backward_ms", "sums_ms")
    forward, merges, backward, sums = (float(row[name]) for name in names)
    both = merges + sums
    return f"{merges / (forward + merges):.1%}, {both / (forward + backward + both):.1%}"


def _merging(events: Sequence[Event]) -> float:
    """The share of merges and sums, each alone."""
    on = machine("h200_nvlink")
    kernels = sum(
        tile_seconds(on, "flash4", one) for one in events if isinstance(one, RecordedKernel)
    )
    merges = sum(
        on.operation_seconds + one.bytes / on.memory_bytes_per_second
        for one in events
        if isinstance(one, Memory) and one.name in ("merge", "sum")
    )
    return merges / (kernels + merges)


def distflash_table5() -> list[str]:
    """Attention run twice against once, on 8 and 16 A100."""
    on, rows = machine("a100_8x100g"), []
    for gpus in (8, 16):
        row = [f"{gpus} GPUs"]
        for kilo in (8, 16, 32):
            split, tokens = Split(context=gpus, recompute="full"), gpus * kilo * K
            attention = layer(PAPERS, NCCL, LLAMA.shape(tokens), on, nodes_of_split(split, on))
            once = step(LLAMA, split, tokens, on, attention=attention.seconds).seconds
            twice = once + LLAMA.layers * attention.forward.seconds
            row.append(f"{twice:.1f} / {once:.1f} s, {twice / once:.2f}x")
        rows.append(row)
    return table(["twice / once", "8K a GPU", "16K", "32K"], rows)


LIGHTSEQ = {
    "Llama-7B": (
        (5.29, 4.29, 6.85),
        (14.26, 11.61, 12.75),
        (43.44, 37.53, 30.21),
        (147.06, 134.09, 106.37),
    ),
    "Llama-33H": (
        (7.52, 6.42, 7.03),
        (20.63, 17.47, 13.12),
        (62.78, 56.63, 31.33),
        (216.70, 202.89, 107.76),
    ),
}


def lightseq() -> list[str]:
    """Three systems on 16 A100."""
    on, rows = machine("a100_8x100g"), []
    for (name, theirs), model in zip(LIGHTSEQ.items(), (LLAMA, LLAMA_33), strict=True):
        for tokens, seconds in zip((64 * K, 128 * K, 256 * K, 512 * K), theirs, strict=True):
            split = Split(context=16, recompute="full")
            # Ulysses computes attention again with the layer, as Megatron's.
            attention = layer("ulysses", {}, model.shape(tokens), on, nodes_of_split(split, on))
            by_heads = step(model, split, tokens, on, attention=attention.seconds).seconds
            got = (
                tensor(model, 16, tokens, on, "full"),
                by_heads + model.layers * attention.forward.seconds,
                _distflash(model, 16, tokens, on),
            )
            cells = [
                f"{a:.2f} / {b:.2f}, {b / a - 1:+.0%}" for a, b in zip(seconds, got, strict=True)
            ]
            rows.append([f"{name}, {length(tokens)}", *cells])
    header = ["theirs / predicted, error", "Megatron-LM", "DeepSpeed-Ulysses", "LightSeq"]
    return table(header, rows)


# ---- BurstAttention


def burst_table1() -> list[str]:
    """What a rank sends without a mask, in whole tensors of B Z N d."""
    size, tokens, rows = 8, 64 * K, []
    shape = Shape(1, tokens, 32, 32, 128)
    unit = tokens * shape.query_width * 2 * (size - 1) / size
    theirs = {
        "RingAttention": "2, 6",
        "Tensor Parallelism": "4, 4",
        "BurstAttention": "2, 3 + 2 N / d",
    }
    baselines = {one.name: one for one in BASELINES}
    for name, ours, found in (
        ("RingAttention", "Ring Self-Attention", baselines["Ring Self-Attention"]),
        ("Tensor Parallelism", "tensor + sequence", baselines["tensor + sequence parallel"]),
        ("BurstAttention", "`burst`", ("burst", {})),
        ("", "`ring`, its default", ("ring", {})),
        ("", "`ring:backward=kv:gradients=model`", (RING[0], RING[1])),
    ):
        if isinstance(found, Baseline):
            got = found.cost(size, shape)
        else:
            got = cost(found[0], size, shape, Mask(causal=False), found[1])
        cells = (f"{x / unit:.2f}" for x in (got.forward_bytes, got.backward_bytes))
        rows.append([name, theirs.get(name, ""), ours, ", ".join(cells)])
    lines = [
        "Forward, backward, in units of B Z N d times (P - 1) / P, no mask, 32 heads of 128, P = 8,"
        " **counted**. In tensor parallelism with sequence parallelism two more gathers are for "
        "gradients of weights:",
        "",
    ]
    return lines + table(["", "theirs", "ours", "counted"], rows)


# Seconds to the first token of the 7B on 2 H200, measured: docs/benchmarks.md, "The first token".
FIRST_TOKEN = {
    "tp": {16: 0.2644, 32: 0.6635, 64: 1.7993, 128: 5.6730},
    "zigzag": {16: 0.2241, 32: 0.5980, 64: 1.6125, 128: 4.9281},
}
BURST: tuple[str, Options] = ("burst", {})


def burst_prefill_here() -> list[str]:
    """Seconds to the first token on 2 H200."""
    on, rows = machine("h200_nvlink"), []
    errors: dict[str, list[str]] = {name: [] for name in FIRST_TOKEN}
    for model in (LLAMA, LLAMA_13B):
        for kilo in (16, 32, 64, 128, 256):
            tokens = kilo * K
            times = {"tp": prefill(model, Split(tensor=2), tokens, on)}
            for algo in ("ring", "zigzag"):
                times[algo] = prefill(model, Split(context=2), tokens, on, algo)
            times["one GPU"] = prefill(model, Split(), tokens, on)
            rows.append(
                [f"{model.name}, {length(tokens)}", *(f"{time:.2f}" for time in times.values())]
            )
            for name, measured in FIRST_TOKEN.items():
                if model is LLAMA and kilo in measured:
                    errors[name].append(f"{times[name] / measured[kilo] - 1:+.0%}")
    said = "; ".join(f"{name} {', '.join(found)}" for name, found in errors.items())
    what = f"of the 7B to 128K, above: {said}; no row of 256K and none of the 13B was measured"
    lines = [f"2 H200, seconds, **predicted** ({what}):", ""]
    return lines + table(["", "tp", "ring", "zigzag", "one GPU"], rows)


def burst_prefill() -> list[str]:
    """Seconds to the first token on 8 A100 over PCI-E, and on 32."""
    rows, full = [], Mask(causal=False)
    lengths = [n * K for n in (8, 16, 32, 64, 128, 256)]
    for model in (LLAMA, LLAMA_13B):
        for gpus in (8, 32):
            if model.heads % gpus:
                continue
            row = [f"{model.name}, {gpus} GPUs"]
            for tokens in lengths:
                by_heads = prefill(model, Split(tensor=gpus), tokens, pci(600))
                ring = prefill(model, Split(context=gpus), tokens, pci(600), *BURST, mask=full)
                row.append(f"{by_heads:.2f} / {ring:.2f}")
            rows.append(row)
    return table(["Megatron V3 / BurstAttention, s", *map(length, lengths)], rows)


def burst_training() -> list[str]:
    """Steps of LLaMA-7b on 8 and 32 A100 over PCI-E."""
    rows, full = [], Mask(causal=False)
    lengths = [n * K for n in (8, 16, 32, 64, 128, 256)]
    for gpus in (8, 32):
        row = [f"{gpus} GPUs"]
        for tokens in lengths:
            by_heads = tensor(LLAMA, gpus, tokens, pci(600))
            ring = whole(LLAMA, Split(context=gpus), tokens, pci(600), *BURST, mask=full).seconds
            row.append(f"{by_heads:.2f} / {ring:.2f}, {by_heads / ring:.2f}x")
        rows.append(row)
    for gpus in (8, 32):
        row = [f"{gpus} GPUs, GiB"]
        for tokens in lengths:
            by_heads = sum(memory(LLAMA, Split(tensor=gpus), tokens).values())
            ring = _sharded(LLAMA, Split(context=gpus), tokens, gpus)
            row.append(f"{by_heads:.0f} / {ring:.0f}")
        rows.append(row)
    return table(["Megatron V3 / BurstAttention (+ZeRO)", *map(length, lengths)], rows)


def burst_figure4a() -> list[str]:
    """13b, 64K tokens, by GPUs."""
    rows, full = [], Mask(causal=False)
    for name, on, sizes in (
        ("A100, PCI-E", pci(600), (1, 2, 4, 8)),
        ("H200, NVLink", machine("h200_nvlink"), (1, 2, 4, 8)),
    ):
        cells = []
        for gpus in sizes:
            by_heads = prefill(LLAMA_13B, Split(tensor=gpus), 64 * K, on)
            ring = prefill(LLAMA_13B, Split(context=gpus), 64 * K, on, *BURST, mask=full)
            cells.append(f"{by_heads:.2f} / {ring:.2f}")
        rows.append([name, *cells])
    return table(["Megatron V3 / BurstAttention, s", "1 GPU", "2", "4", "8"], rows)


def burst_batches() -> list[str]:
    """Attention of 4K tokens with larger batches on 2 GPUs; steps of the 7b on 8 A100."""
    on, rows = machine("h200_nvlink"), []
    batches = (1, 2, 4, 8)
    for algo in ("ring", "zigzag"):
        row = [f"2 H200, attention, {algo}, ms"]
        for batch in batches:
            shape = Shape(batch, 4 * K, 32, 32, 128)
            row.append(f"{layer(algo, {}, shape, on, (0, 0)).seconds * MS:.2f}")
        rows.append(row)
    split, full = Split(context=8), Mask(causal=False)
    ring, by_heads = ["8 A100, step, BurstAttention, tokens/s"], ["the same, Megatron V3"]
    for batch in batches:
        # Beside attention, sequences side by side take what a long one takes.
        shape = Shape(batch, 4 * K, LLAMA.heads, LLAMA.kv_heads, LLAMA.head_dim)
        attention = layer(*BURST, shape, pci(600), (0,) * 8, full)
        one = step(LLAMA, split, batch * 4 * K, pci(600), attention=attention.seconds)
        ring.append(f"{batch * 4 * K / one.seconds:.0f}")
        attention = layer("zigzag", {}, replace(shape, heads=4, kv_heads=4), pci(600), (0,))
        one = step(LLAMA, Split(tensor=8), batch * 4 * K, pci(600), attention=attention.seconds)
        by_heads.append(f"{batch * 4 * K / one.seconds:.0f}")
    return table(["batch", *map(str, batches)], [*rows, ring, by_heads])


def burst_lao() -> list[str]:
    """All pairs, with local attention optimisation and without."""
    rows, used = [], measured("rank", ranks=8, mask="full", rank=7)
    for tokens in dict.fromkeys(row["tokens"] for row in used):
        fused, plain = (row for row in used if row["tokens"] == tokens)
        times = [float(row["step_ms"]) for row in (fused, plain)]
        gib = [float(row["peak_gib"]) for row in (fused, plain)]
        rows.append(
            [
                f"{length(int(tokens))}, {length(8 * int(tokens))}",
                *(f"{ms:.1f}" for ms in times),
                f"{times[1] / times[0]:.1f}x",
                *(f"{x:.2f}" for x in gib),
            ]
        )
    title = "the last of 8, 32:32 heads, no mask, forward + backward"
    header = ["tokens a rank, in all", "`burst`, ms", "`burst:kernel=reference`", "slower"]
    return of_cards(used, title) + table([*header, "GiB", "GiB without LAO"], rows)


def burst_batches_alone() -> list[str]:
    """What a rank of 8 takes for its part of 4K tokens."""
    found = measured("rank", ranks=8, tokens=512, mask="full")
    rows = []
    for algo in dict.fromkeys(row["algorithm"] for row in found):
        own = [row for row in found if row["algorithm"] == algo]
        cells = (f"{float(row['step_ms']):.1f}, {float(row['idle_ms']):.1f}" for row in own)
        rows.append([algo, *cells])
    title = "P = 8, 4K tokens, 32:32 heads, no mask, ms forward + backward, and of them idle"
    batches = dict.fromkeys(row["batch"] for row in found)
    return of_cards(found, title) + table(["batch", *batches], rows)


def burst_backward() -> list[str]:
    """What travels in the backward, 128K tokens, 2 GPUs."""
    on, rows = machine("h200_nvlink"), []
    ways = [(algo, back) for algo in ("ring", "zigzag") for back in ("kv", "query")]
    for kv_heads in (32, 8, 4):
        row = [f"32:{kv_heads}"]
        for algo, back in ways:
            shape = Shape(1, 128 * K, 32, kv_heads, 128)
            found = layer(algo, {"backward": back}, shape, on, (0, 0))
            row.append(f"{found.seconds * MS:.1f}")
        rows.append(row)
    lines = [
        f"2 GPUs, 128K tokens, ms forward + backward, **predicted** ({off('plans, 2 GPUs')}):",
        "",
    ]
    return lines + table(["heads", *(f"{algo}, {back}" for algo, back in ways)], rows)


BLOCKS: Mapping[str, Callable[[], list[str]]] = {
    function.__name__: function
    for function in (
        attention2d_table1,
        attention2d_cards,
        gpt3_steps,
        gpt3_nodes,
        figure4,
        figure5,
        figure6,
        lasp_table1,
        lasp_table3,
        lasp_table4,
        lasp_memory,
        lasp_figure4_here,
        lasp_figure4,
        distflash_waiting,
        distflash_table1,
        distflash_table1_here,
        irregular_heads,
        heads_alone,
        distflash_owner,
        few_heads,
        ring_self_attention,
        pipeline_stages,
        rematerialization,
        distflash_figure5,
        distflash_table5,
        distflash_merges,
        lightseq,
        burst_table1,
        burst_prefill_here,
        burst_prefill,
        burst_training,
        burst_figure4a,
        burst_batches,
        burst_batches_alone,
        burst_lao,
        burst_backward,
    )
}


_EMULATED = ("layers on emulated nodes", "emulated nodes, 2 x 2")
_TWO_BOXES = ("DISTFLASHATTN's steps", "steps: DISTFLASHATTN, A100, a card of 100 Gb/s a GPU")
_RINGS = ("layers of BurstEngine, 32 A800", "published: BurstEngine, A800")
# Rows of docs/predictions.md that come nearest to blocks that name none themselves.
NEAREST: Mapping[str, tuple[str, str]] = {
    "figure4": _EMULATED,
    "figure5": _EMULATED,
    "figure6": _EMULATED,
    "lasp_table3": ("steps of TNL-1B as by our program", "steps: ours, linear attention"),
    "lasp_figure4": (
        "LASP's steps, as by our program like these",
        "steps: LASP + DDP, A100, as by our program",
    ),
    "distflash_figure5": _TWO_BOXES,
    "distflash_table5": _TWO_BOXES,
    "burst_prefill": _RINGS,
    "burst_training": _RINGS,
    "burst_figure4a": _RINGS,
    "burst_batches": _RINGS,
}


def nearest(name: str) -> list[str]:
    """How far off that is."""
    if name not in NEAREST:
        return []
    what, rows = NEAREST[name]
    return [f"The nearest that was compared, {what}: {off(rows)}.", ""]


def digest(body: str) -> str:
    """Of what stands in a block."""
    return sha256(body.strip().encode()).hexdigest()[:8]


def blocks(text: str) -> dict[str, tuple[str, str]]:
    """Digest and body of each block of a page, by name."""
    mark = re.compile(r"<!-- generated: (\w+) (\w+) -->\n(.*?)<!-- end -->", re.S)
    return {name: (known, body) for name, known, body in mark.findall(text)}


def body_of(lines: Iterable[str]) -> str:
    """Lines as they stand in a block."""
    return "\n".join(line if line.startswith("|") else "\n".join(wrap(line, 118)) for line in lines)


def written(text: str, name: str, lines: Sequence[str]) -> str:
    """The page with another block. Raises: ValueError if it has no such block, or two."""
    block = re.compile(rf"<!-- generated: {name} \w+ -->\n.*?<!-- end -->", re.S)
    body = body_of(lines)
    new = f"<!-- generated: {name} {digest(body)} -->\n\n{body}\n\n<!-- end -->"
    text, count = block.subn(lambda found: new, text)
    if count != 1:
        raise ValueError(f"the page needs one block {name}, has {count}")
    return text


def page_of(name: str) -> Path:
    """The page that has a block. Raises: ValueError if none has, or two."""
    found = [page for page in PAGES if name in blocks(page.read_text())]
    if len(found) != 1:
        raise ValueError(f"docs/papers/ needs one block {name}, has {len(found)}")
    return found[0]


def lines_of(name: str) -> list[str]:
    """A block, made anew."""
    return [*nearest(name), *BLOCKS[name]()]


def main() -> None:
    """Writes the blocks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=BLOCKS, default=list(BLOCKS))
    parser.add_argument("--print", action="store_true", help="to the terminal, not to the pages")
    args = parser.parse_args()
    for name in args.only:
        lines = lines_of(name)
        if args.print:
            print(f"{name}\n" + "\n".join(lines), flush=True)
        else:
            page = page_of(name)
            page.write_text(written(page.read_text(), name, lines))


if __name__ == "__main__":
    main()
