"""Times Megatron training steps per algorithm, beside Megatron over Transformer Engine.

    python scripts/benchmark_train.py --shape llama7b --layers 4 --tokens 128K --gpus 4 \
        --runs zigzag,te:p2p,te:a2a --recompute none,full

Each run is one torchrun of scripts/pretrain_gpt.py on random data, batch 1, bf16, distributed
optimizer; runs differ in nothing but the algorithm. `te:MODE` is Megatron's own path with
`--cp-comm-type MODE`. Prints a table, writes markdown and JSON.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
H200_DENSE_BF16_TFLOPS = 989.0


@dataclass(frozen=True)
class Model:
    """A model's shape."""

    layers: int
    hidden: int
    heads: int
    ffn: int
    kv_heads: int
    swiglu: bool

    def flops(self, layers: int, tokens: int, vocabulary: int) -> float:
        """Of one training step without recompute: matrix products, and causal attention."""
        kv = self.hidden * self.kv_heads / self.heads
        linear = layers * (
            2 * self.hidden**2
            + 2 * self.hidden * kv
            + (3 if self.swiglu else 2) * self.hidden * self.ffn
        )
        linear += self.hidden * vocabulary
        attention = layers * tokens * self.hidden  # 4 * N^2 / 2 a layer, forward
        return 6.0 * tokens * linear + 6.0 * tokens * attention


# GPT-3 shapes of Attention2D, Table 3; Llama-2-7B.
SHAPES = {
    "gpt3-760m": Model(24, 1536, 16, 6144, 16, False),
    "gpt3-2.7b": Model(32, 2560, 32, 10240, 32, False),
    "gpt3-13b": Model(40, 5120, 40, 20480, 40, False),
    "llama7b": Model(32, 4096, 32, 11008, 32, True),
}
VOCABULARY = 32000


@dataclass(frozen=True)
class Row:
    """One run. Medians over iterations; memory is the greatest of rank 0."""

    name: str
    recompute: str
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    memory_gib: float = 0.0
    loss: float = 0.0
    note: str = ""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Times Megatron training steps per algorithm.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama7b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has; labelled scaled")
    parser.add_argument("--tokens", default="128K")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--runs", default="zigzag,te:p2p")
    parser.add_argument("--recompute", default="none", help="none, full: comma-separated")
    parser.add_argument("--iters", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--extra", default="", help="further flags of Megatron, for all runs")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a run")
    parser.add_argument("--output", type=Path, default=Path("results/train"))
    return parser.parse_args()


def command(args: argparse.Namespace, name: str, recompute: str, tokens: int) -> list[str]:
    """The torchrun of one contender."""
    shape = SHAPES[args.shape]
    kv_heads = args.kv_heads or shape.kv_heads
    flags: dict[str, object] = {
        "context-parallel-size": args.gpus,
        "num-layers": args.layers or shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "seq-length": tokens,
        "max-position-embeddings": tokens,
        "position-embedding-type": "rope",
        "transformer-impl": "transformer_engine",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": VOCABULARY,
        "micro-batch-size": 1,
        "global-batch-size": 1,
        "train-iters": args.warmup + args.iters,
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "normalization": "RMSNorm",
        "log-interval": 1,
        "eval-iters": 0,
        "eval-interval": 1000,
    }
    switches = [
        "bf16",
        "mock-data",
        "use-distributed-optimizer",
        "disable-bias-linear",
        "untie-embeddings-and-output-weights",
        "no-gradient-accumulation-fusion",
        "no-create-attention-mask-in-dataloader",
        "log-throughput",
    ]
    if shape.swiglu:
        switches.append("swiglu")
    if kv_heads != shape.heads:
        switches.append("group-query-attention")
        flags["num-query-groups"] = kv_heads
    if recompute == "full":
        flags |= {
            "recompute-granularity": "full",
            "recompute-method": "uniform",
            "recompute-num-layers": 1,
        }
    algo, *options = name.split(":")
    chosen: list[str] = []
    if algo == "te":
        flags["cp-comm-type"] = options[0]
    else:
        chosen = ["--context-parallel-algo", algo]
        if options:
            chosen += ["--cp-options", *options]
    return [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(args.gpus)),
        str(ROOT / "scripts" / "pretrain_gpt.py"),
        *(word for flag, value in flags.items() for word in (f"--{flag}", str(value))),
        *(f"--{switch}" for switch in switches),
        *chosen,
        *args.extra.split(),
    ]


def run(args: argparse.Namespace, name: str, recompute: str, tokens: int) -> Row:
    """Runs one contender and reads its log."""
    args.output.mkdir(parents=True, exist_ok=True)
    log_path = args.output / f"{name.replace(':', '_').replace('=', '_')}_{recompute}.log"
    with log_path.open("w") as log:
        try:
            code = subprocess.run(
                command(args, name, recompute, tokens),
                stdout=log,
                stderr=subprocess.STDOUT,
                # Megatron's own path refuses to start without it on Hopper; ours sets it itself.
                env={**os.environ, "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
                timeout=args.timeout,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = -1
    text = log_path.read_text(errors="replace")
    times = [float(t) for t in re.findall(r"elapsed time per iteration \(ms\): ([\d.]+)", text)]
    losses = re.findall(r"lm loss: ([\d.E+-]+)", text)
    memory = [float(m) for m in re.findall(r"max allocated: ([\d.]+)", text)]
    if code or len(times) <= args.warmup:
        return Row(name, recompute, note=f"failed (exit {code}), see {log_path.name}")
    step_ms = statistics.median(times[args.warmup :])
    shape = SHAPES[args.shape]
    flops = shape.flops(args.layers or shape.layers, tokens, VOCABULARY)
    return Row(
        name,
        recompute,
        step_ms,
        tokens / step_ms * 1000,
        flops / (step_ms / 1000) / args.gpus / (H200_DENSE_BF16_TFLOPS * 1e12),
        max(memory, default=0.0) / 1024,
        float(losses[-1]),
    )


HEADER = ["run", "recompute", "ms / step", "tokens / s", "MFU", "max allocated GiB", "last loss"]


def cells(row: Row) -> list[str]:
    """A row as text."""
    if row.note:
        return [row.name, row.recompute, row.note, "", "", "", ""]
    return [
        row.name,
        row.recompute,
        f"{row.step_ms:.0f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.mfu:.3f}",
        f"{row.memory_gib:.1f}",
        f"{row.loss:.6f}",
    ]


def main() -> int:
    """Runs all contenders one after another."""
    args = parse()
    tokens = int(args.tokens.rstrip("K")) * (1024 if args.tokens.endswith("K") else 1)
    shape = SHAPES[args.shape]
    scaled = f", scaled to {args.layers} layers" if args.layers else ""
    title = f"{args.shape} shape{scaled}, {tokens // 1024}K tokens, CP {args.gpus}, bf16, batch 1"
    rows = []
    for recompute, name in product(args.recompute.split(","), args.runs.split(",")):
        row = run(args, name, recompute, tokens)
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    table = Table(title=title)
    for header in HEADER:
        table.add_column(header, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*cells(row))
    Console(width=130).print(table)
    lines = [f"**{title}**", "", "| " + " | ".join(HEADER) + " |", "|" + " --- |" * len(HEADER)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in rows]
    (args.output / "table.md").write_text("\n".join(lines) + "\n")
    data = {"title": title, "shape": asdict(shape), "rows": [asdict(row) for row in rows]}
    (args.output / "rows.json").write_text(json.dumps(data, indent=1))
    return 1 if any(row.note for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
