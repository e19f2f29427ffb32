"""Times Megatron training steps per algorithm, beside Megatron over Transformer Engine.

    python scripts/benchmark_train.py --shape llama7b --layers 4 --tokens 32K,64K,128K --gpus 4 \
        --runs zigzag,te:p2p,te:a2a --recompute none,full,full-twice
    python scripts/benchmark_train.py --shape tnl-1b --tokens 32K,64K --per-gpu --longest \
        --gpus 1,2,4 --runs lasp,lasp2,linear_ulysses --recompute none,full
    python scripts/benchmark_train.py --shape llama7b --tokens 16K,32K,64K --longest --gpus 2 \
        --runs tp,tp-v1,zigzag,ulysses --prefill
    python scripts/benchmark_train.py --shape gpt3-2.7b --layers 8 --tokens 32K --gpus 2 \
        --net nodes --pipeline 2 --micro-batches 4 --runs te:p2p,zigzag,attention2d:variant=no
    python scripts/benchmark_train.py --shape llama3-8b --tokens 128K,256K,512K --gpus 4 \
        --runs zigzag --recompute full --states bfloat16 --lean-loss --warmup 1 --iters 2,1,1

Every combination of run, recompute, CUDA graphs and number of GPUs is one torchrun of
benchmark_train_job.py, which measures all lengths (one, where a graph fixes it): random data,
micro-batches of 1, bf16, distributed optimizer. Runs differ in nothing but the algorithm.
`te:MODE` is Megatron's own path with `--cp-comm-type MODE`; `tp` is no context parallelism but
Megatron's tensor and sequence parallelism on as many GPUs, of which the model gets more heads if
they do not divide its own; `tp-v1` is tensor parallelism alone, whose ranks all-reduce; `tp:ALGO`
has the attention kernel that ALGO takes at context-parallel size 1. Jobs start ahead, as far as
they need no GPU, while others measure; those of fewer GPUs go side by side. `--net sockets` is a
slow network, as in benchmark_attention.py; `--net nodes` takes every GPU twice, as a rank of each
of two nodes that reach each other through loopback. `--pipeline`, `--data` and `--tensor` take
their share of the ranks, the algorithm has the rest.

MFU is the work of a step without recompute (see `work`: six operations a weight and token,
and half of all scores) over step time, number of GPUs and the dense bf16 peak of an H100 or H200.
The JSON has the memory of the fullest rank at points of a step.

Prints a table, writes markdown and JSON. Running out of memory is a result. Without a
GPU, the tiny shapes show that it works. A waiting job holds a CUDA context on each of its GPUs,
about half a GiB that the next one's longest sequence lacks; `--ahead 1` keeps it to one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise, product
from pathlib import Path

import torch
from benchmark_train_job import Plan, Report, read_reports
from forks import free_port
from reports import report as write_report

from megatron_cp_plugin.document_lengths import lengths_of
from megatron_cp_plugin.planner.model import Model
from megatron_cp_plugin.process_exit import one_line_errors
from megatron_cp_plugin.terminal import check_folder, tokens_of

ROOT = Path(__file__).resolve().parent.parent
HOPPER_DENSE_BF16_TFLOPS = 989.0  # H100 (SXM) and H200


def work(model: Model, bounds: Sequence[int]) -> float:
    """FLOP of one training step without recompute: matrix products, and half of all scores.

    Args: bounds: of documents of a sequence, from 0 to its tokens.
    """
    pairs = sum((end - start) ** 2 for start, end in pairwise(bounds)) / 2
    return model.flop(bounds[-1], pairs)


def prefill_work(model: Model, tokens: int) -> float:
    """FLOP of a forward with logits of the last token alone."""
    return work(model, (0, tokens)) / 3 - 2.0 * (tokens - 1) * model.hidden * model.vocabulary


# GPT-3 shapes of Attention2D, Table 3; Llama-2; the variants of it in DISTFLASHATTN, section 4;
# TransNormerLLM-385M, -1B and -7B, with the sizes of their published configurations.
SHAPES = {
    model.name: model
    for model in (
        Model("gpt3-760m", 24, 1536, 6144, 16, 16, 96, 32000, gated=False),
        Model("gpt3-2.7b", 32, 2560, 10240, 32, 32, 80, 32000, gated=False),
        Model("gpt3-13b", 40, 5120, 20480, 40, 40, 128, 32000, gated=False),
        Model("gpt3-66b", 64, 9216, 36864, 72, 72, 128, 32000, gated=False),
        Model("gpt3-175b", 96, 12288, 49152, 96, 96, 128, 32000, gated=False),
        Model("gpt-small", 8, 1024, 4096, 16, 4, 64, 32000),  # at 8K tokens the host is the limit
        Model("llama7b", 32, 4096, 11008, 32, 32, 128, 32000),
        Model("llama13b", 40, 5120, 13824, 40, 40, 128, 32000),
        Model("llama-gqa", 32, 4096, 11008, 32, 8, 128, 32000),
        Model("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Model("llama-33h", 32, 4224, 11008, 33, 33, 128, 32000),
        Model("llama-16h", 64, 2048, 11008, 16, 16, 128, 32000),
        Model("llama-8h", 128, 1024, 11008, 8, 8, 128, 32000),
        Model("llama-4h", 256, 512, 11008, 4, 4, 128, 32000),
        Model("llama-2h", 512, 256, 11008, 2, 2, 128, 32000),
        Model("tnl-0.4b", 24, 1024, 2816, 8, 8, 128, 64000, linear=True),
        Model("tnl-1b", 16, 2048, 5632, 16, 16, 128, 64000, linear=True),
        Model("tnl-7b", 30, 4096, 11264, 32, 32, 128, 64000, linear=True),
        Model("tiny", 2, 64, 128, 4, 2, 16, 256),
        Model("tiny-3h", 2, 48, 128, 3, 3, 16, 256),
        Model("tnl-tiny", 2, 64, 128, 4, 4, 16, 256, linear=True),
    )
}
FULL = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
# full-twice: attention too, as Megatron does by itself.
RECOMPUTE = {
    "none": "",
    "selective": "--recompute-granularity selective",
    "full": FULL,
    "full-twice": f"{FULL} --cp-recompute-attention",
}


# Who captures what (--cuda-graph-impl of Megatron), and what it asks for.
GRAPHS = {
    "none": "",
    "local": "--cuda-graph-impl local",
    "transformer_engine": "--cuda-graph-impl transformer_engine",
    "full_iteration": "--cuda-graph-impl full_iteration --no-check-for-nan-in-loss-and-grad",
}
# What of a model's state a rank has a part of: of the optimizer's, or of the parameters too.
SHARDING = {
    "optimizer": "--use-distributed-optimizer",
    "torch-fsdp2": "--use-torch-fsdp2 --ckpt-format torch_dist",
    "megatron-fsdp": "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
    "--use-distributed-optimizer --ckpt-format fsdp_dtensor",
}
_BFLOAT16 = (
    "--use-precision-aware-optimizer --grad-reduce-in-bf16 --main-grads-dtype bf16 "
    "--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16"
)
# What gradients and the optimizer's states are: float32; gradients and moments in bfloat16, with
# weights of 32 bits (8 bytes a weight in place of 16, 6 of 12 of them sharded); or states of the
# host, which computes Adam's step.
STATES = {
    "float32": "",
    "bfloat16": _BFLOAT16,
    "host": "--use-precision-aware-optimizer --grad-reduce-in-bf16 --optimizer-cpu-offload "
    "--overlap-cpu-optimizer-d2h-h2d",
}
# All through TCP sockets of one host: a stand-in for a slow network.
SOCKETS = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_SOCKET_IFNAME": "lo"}
# Two nodes of one host: to NCCL and to us they are two if their NCCL_HOSTID differ.
NODES = {"NCCL_SOCKET_IFNAME": "lo"}
NETWORKS: dict[str, dict[str, str]] = {"default": {}, "sockets": SOCKETS, "nodes": NODES}
NETWORK_TITLES = {
    "default": "",
    "sockets": ", TCP sockets of one host, emulating a slow network",
    "nodes": ", two emulated nodes: a rank of each on every GPU, TCP loopback between them",
}
# Runs without context parallelism.
TENSOR = ("tp", "tp-v1")
CAPTURE_STEPS = 6  # until all is captured, whoever does it


@dataclass(frozen=True)
class Case:
    """One torchrun.

    Attributes: devices: numbers of its GPUs. lengths: global tokens. graphs: one of GRAPHS.
    """

    name: str
    recompute: str
    devices: tuple[int, ...]
    lengths: tuple[int, ...]
    graphs: str = "none"

    @property
    def slug(self) -> str:
        """A name for files."""
        name = self.name.replace(":", "_").replace("=", "_")
        captured = f"_{self.graphs}_{self.lengths[0]}" if self.graphs != "none" else ""
        return f"{name}_{self.recompute}_{len(self.devices)}{captured}"


@dataclass(frozen=True)
class Row:
    """One run at one length. The median of the steps; memory is the greatest of any rank."""

    name: str
    recompute: str
    gpus: int
    tokens: int
    graphs: str = "none"
    step_ms: float = 0.0
    tokens_per_s: float = 0.0
    mfu: float = 0.0
    memory_gib: float = 0.0
    loss: float = 0.0
    note: str = ""
    points_gib: dict[str, float] = field(default_factory=dict)
    profile_ms: tuple[dict[str, float], ...] = ()


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Times Megatron training steps per algorithm.")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama7b")
    parser.add_argument("--layers", type=int, help="fewer than the shape has; labelled scaled")
    parser.add_argument("--tokens", default="128K", help="lengths, comma-separated: 32K,64K,1M")
    parser.add_argument("--per-gpu", action="store_true", help="--tokens are those of each GPU")
    parser.add_argument(
        "--longest",
        action="store_true",
        help="after the last length, double it until memory is exhausted",
    )
    parser.add_argument("--gpus", default="4", help="numbers of GPUs, comma-separated")
    parser.add_argument("--runs", default="zigzag,te:p2p")
    parser.add_argument(
        "--recompute", default="none", help=f"comma-separated, of {', '.join(RECOMPUTE)}"
    )
    parser.add_argument(
        "--graphs", default="none", help=f"CUDA graphs; comma-separated, of {', '.join(GRAPHS)}"
    )
    parser.add_argument("--micro-batches", type=int, default=1, help="in each step")
    parser.add_argument("--pipeline", type=int, default=1, help="pipeline-parallel size")
    parser.add_argument("--data", type=int, default=1, help="data-parallel size")
    parser.add_argument("--tensor", type=int, default=1, help="tensor-parallel size")
    parser.add_argument(
        "--iters", type=steps_of, default=(5,), help="of each length, comma-separated, or of all"
    )
    parser.add_argument("--warmup", type=steps_of, default=(2,), help="steps before, likewise")
    parser.add_argument(
        "--prefill",
        action="store_true",
        help="a step is a forward alone: the time to the first token of a prompt, whose logit is "
        "in the place of the loss; there are neither gradients nor an optimizer",
    )
    parser.add_argument(
        "--sharding",
        choices=sorted(SHARDING),
        default="optimizer",
        help="of the state of a model over data and context parallelism; default: %(default)s",
    )
    parser.add_argument(
        "--states",
        choices=sorted(STATES),
        default="float32",
        help="gradients and optimizer; host: on the CPU; default: %(default)s",
    )
    parser.add_argument(
        "--lean-loss",
        action="store_true",
        help="ours in chunks; Megatron's by its own fused kernel, since it refuses that of TE",
    )
    parser.add_argument(
        "--documents",
        type=documents_of,
        default="",
        help="packed documents of random lengths, as in benchmark_attention.py: 16K, FILE.csv",
    )
    parser.add_argument("--net", choices=sorted(NETWORKS), default="default")
    parser.add_argument("--kv-heads", type=int)
    parser.add_argument("--extra", default="", help="further flags of Megatron, for all runs")
    parser.add_argument("--timeout", type=int, default=300, help="seconds a job may measure")
    parser.add_argument("--ahead", type=int, default=4, help="jobs that start before their turn")
    parser.add_argument(
        "--profile",
        action="store_true",
        help="what the GPUs do in one more step of each length: to the JSON, rank 0's to the log",
    )
    parser.add_argument("--output", type=Path, default=Path("results/train"))
    args = parser.parse_args()
    for graphs in args.graphs.split(","):
        if graphs not in GRAPHS:
            parser.error(f"--graphs takes {', '.join(GRAPHS)}, got {graphs}")
        if graphs != "none" and args.longest:
            parser.error("--longest needs graphs of one length: use --graphs none")
    if args.prefill and (args.recompute, args.graphs, args.micro_batches) != ("none", "none", 1):
        parser.error(
            f"--prefill has no backward, got --recompute {args.recompute} --graphs {args.graphs} "
            f"--micro-batches {args.micro_batches}: leave them out"
        )
    for gpus in map(int, args.gpus.split(",")):
        ranks, split = gpus * nodes_of(args), args.pipeline * args.data * args.tensor
        if ranks % split:
            parser.error(
                f"--pipeline {args.pipeline}, --data {args.data} and --tensor {args.tensor} need a "
                f"multiple of {split} ranks, got {ranks}: change --gpus"
            )
    if args.prefill and args.pipeline * args.data > 1:
        parser.error(
            f"--prefill is of one prompt on ranks that all have the whole model, got --pipeline "
            f"{args.pipeline} --data {args.data}: leave them out"
        )
    if args.sharding != "optimizer" and args.states != "float32":
        parser.error(f"--sharding {args.sharding} needs --states float32, got {args.states}")
    for name, recompute in product(args.runs.split(","), args.recompute.split(",")):
        if recompute not in RECOMPUTE:
            parser.error(f"--recompute takes {', '.join(RECOMPUTE)}, got {recompute}")
        shape = SHAPES[args.shape]
        if args.tensor > 1 and name.partition(":")[0] in TENSOR:
            parser.error(f"{name} takes all ranks, got --tensor {args.tensor}: leave it out")
        if shape.linear and (name.startswith("te:") or name in TENSOR):
            parser.error(f"{args.shape} has linear attention, {name} is softmax attention")
    return args


def documents_of(text: str) -> str:
    """The words of a distribution; "": none. Raises: ArgumentTypeError as `lengths_of`."""
    if text:
        lengths_of(text)
    return text


def steps_of(text: str) -> tuple[int, ...]:
    """Numbers of steps, of each length or of all."""
    return tuple(map(int, text.split(",")))


def nodes_of(args: argparse.Namespace) -> int:
    """How many nodes the GPUs stand for."""
    return 2 if args.net == "nodes" else 1


def plan_cases(args: argparse.Namespace) -> list[Case]:
    """All torchruns, most GPUs first, those of few spread over the machine."""
    sizes = sorted(map(int, args.gpus.split(",")), reverse=True)
    load = [0] * sizes[0]
    cases = []
    ways = product(sizes, args.recompute.split(","), args.graphs.split(","), args.runs.split(","))
    for size, recompute, graphs, name in ways:
        if recompute == "full-twice" and (name.startswith("te:") or name in TENSOR):
            continue  # which is what its "full" does
        places = [range(first, first + size) for first in range(0, sizes[0] - size + 1, size)]
        place = min(places, key=lambda devices: max(load[device] for device in devices))
        busy = max(load[device] for device in place)
        for device in place:
            load[device] = busy + 1
        scale = size if args.per_gpu else 1
        lengths = tuple(scale * n for n in sorted(map(tokens_of, args.tokens.split(","))))
        for own in [lengths] if graphs == "none" else [(length,) for length in lengths]:
            cases.append(Case(name, recompute, tuple(place), own, graphs))
    return cases


def context_size(args: argparse.Namespace, case: Case) -> int:
    """Context-parallel size of what has no tensor parallelism in its place."""
    return len(case.devices) * nodes_of(args) // (args.pipeline * args.data * args.tensor)


def plan_of(args: argparse.Namespace, case: Case) -> Plan:
    """What a case's job measures, without its gate."""
    return Plan(
        case.lengths,
        args.longest,
        tuple(n + (CAPTURE_STEPS if case.graphs != "none" else 0) for n in args.warmup),
        args.iters,
        shape_of(args).vocabulary,
        "",
        args.profile,
        args.prefill,
        args.documents,
        2 * context_size(args, case),
    )


def command(
    args: argparse.Namespace, case: Case, gate: Path, port: int, node: int = 0
) -> list[str]:
    """The torchrun of one case, on one of its nodes."""
    nodes = nodes_of(args)
    size = context_size(args, case)
    plan = replace(plan_of(args, case), gate=str(gate))
    # Flags of the algorithm come last, for some take the place of the model's.
    flags = model_flags(args, case.lengths[0]) | algorithm_flags(args, case.name, size)
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--nnodes", str(nodes), "--node-rank", str(node), "--master-addr", "127.0.0.1"),
        *("--nproc-per-node", str(len(case.devices)), "--master-port", str(port)),
        *(str(ROOT / "scripts" / "benchmark_train_job.py"), json.dumps(asdict(plan))),
        *words_of(flags),
        *RECOMPUTE[case.recompute].split(),
        *GRAPHS[case.graphs].split(),
        *SHARDING[args.sharding].split(),
        *STATES[args.states].split(),
        *args.extra.split(),
    ]


def shape_of(args: argparse.Namespace) -> Model:
    """The shape that is trained."""
    shape = SHAPES[args.shape]
    return replace(
        shape, layers=args.layers or shape.layers, kv_heads=args.kv_heads or shape.kv_heads
    )


def model_flags(args: argparse.Namespace, tokens: int) -> dict[str, object]:
    """Megatron's flags for a shape and how it is trained, see `words_of`."""
    shape = shape_of(args)
    flags: dict[str, object] = {
        "pipeline-model-parallel-size": args.pipeline,
        "num-layers": shape.layers,
        "hidden-size": shape.hidden,
        "ffn-hidden-size": shape.ffn,
        "num-attention-heads": shape.heads,
        "kv-channels": shape.head_dim,
        "seq-length": tokens,
        "max-position-embeddings": tokens,
        "position-embedding-type": "none" if shape.linear else "rope",
        "tokenizer-type": "NullTokenizer",
        "vocab-size": shape.vocabulary,
        "micro-batch-size": 1,
        "global-batch-size": args.micro_batches * args.data,
        "train-iters": 10**6,  # the plan ends it
        "lr": 1e-4,
        "lr-decay-style": "constant",
        "attention-dropout": 0.0,
        "hidden-dropout": 0.0,
        "normalization": "RMSNorm",
        "log-interval": 10**6,
        "eval-iters": 0,
        "eval-interval": 10**7,
        "dataloader-type": "external",
        "mock-data": True,
        "disable-bias-linear": True,
        "untie-embeddings-and-output-weights": True,
        "no-gradient-accumulation-fusion": True,
        "no-create-attention-mask-in-dataloader": True,
    }
    if args.documents:
        flags["dataloader-inter-document-masking"] = True
    if args.prefill:
        flags |= {"skip-train": True, "eval-iters": 10**6}
    if torch.cuda.is_available():
        flags |= {"transformer-impl": "transformer_engine", "bf16": True}
    if shape.gated:
        flags["swiglu"] = True
    if shape.kv_heads != shape.heads:
        flags |= {"group-query-attention": True, "num-query-groups": shape.kv_heads}
    return flags


def algorithm_flags(args: argparse.Namespace, name: str, size: int) -> dict[str, object]:
    """The flags that split a layer over `size` GPUs as the name of a run says."""
    shape = shape_of(args)
    algo, *options = name.split(":")
    flags: dict[str, object] = {"context-parallel-size": size}
    if args.tensor > 1:
        flags |= {"tensor-model-parallel-size": args.tensor, "sequence-parallel": True}
    if algo in TENSOR:
        flags = {"context-parallel-size": 1, "tensor-model-parallel-size": size}
        flags["num-attention-heads"] = -(-shape.heads // size) * size
        if size > 1 and algo == "tp":
            flags["sequence-parallel"] = True
        algo, *options = options or ["megatron"]
    if args.lean_loss and algo in ("te", "megatron"):
        flags |= {"cross-entropy-loss-fusion": True, "cross-entropy-fusion-impl": "native"}
    elif args.lean_loss:
        flags["cp-chunked-loss"] = True
    if algo == "te":
        return flags | {"context-parallel-algo": "megatron", "cp-comm-type": options[0]}
    flags["context-parallel-algo"] = algo
    if options:
        flags["cp-options"] = options
    if shape.linear:
        flags["cp-linear-model"] = "transnormer"
    return flags


def words_of(flags: Mapping[str, object]) -> Iterator[str]:
    """A command line of flags: True is a flag without a value, a list several values."""
    for flag, value in flags.items():
        yield f"--{flag}"
        if value is not True:
            yield from map(str, value if isinstance(value, list) else [value])


class Job:
    """A torchrun, or one on each node, that waits for its turn."""

    def __init__(self, args: argparse.Namespace, case: Case, folder: Path) -> None:
        self.case = case
        self._gate = folder / f"gate_{case.slug}"
        self._log = args.output / f"{case.slug}.log"
        self._timeout = args.timeout
        self._began: float | None = None
        everything = ",".join(map(str, range(128)))
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", everything).split(",")
        environment = {
            **os.environ,
            # Megatron's own path refuses to start with more on Hopper, and with sharded
            # parameters without.
            "CUDA_DEVICE_MAX_CONNECTIONS": "1" if args.sharding == "optimizer" else "8",
            **NETWORKS[args.net],
            "CUDA_VISIBLE_DEVICES": ",".join(visible[device] for device in case.devices),
        }
        nodes, port = nodes_of(args), free_port()
        with self._log.open("w") as log:
            self._processes = [
                subprocess.Popen(
                    command(args, case, self._gate, port, node),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment | ({"NCCL_HOSTID": f"node{node}"} if nodes > 1 else {}),
                )
                for node in range(nodes)
            ]

    def go(self) -> None:
        """Lets the job touch its GPUs."""
        self._began = time.monotonic()
        self._gate.touch()

    @property
    def going(self) -> bool:
        return self._began is not None

    @property
    def finished(self) -> bool:
        """Whether it has ended, by itself or because its time is over."""
        late = self._began is not None and time.monotonic() - self._began > self._timeout
        if late or any(process.poll() for process in self._processes):
            self.stop()  # a node does not see that another one has failed
        return all(process.poll() is not None for process in self._processes)

    @property
    def _code(self) -> int:
        """0, or the exit code of a node that failed, if possible by itself."""
        return max((p.returncode for p in self._processes if p.returncode), default=0)

    def stop(self) -> None:
        """Ends it; torchrun ends its ranks."""
        for process in self._processes:
            if process.poll() is None:
                process.terminate()
        for process in self._processes:
            process.wait()

    def rows(self, args: argparse.Namespace) -> list[Row]:
        """What it measured; a row without figures where it failed."""
        case = self.case
        reports = read_reports(self._log.read_text(errors="replace"))
        rows = [row(args, case, report) for report in reports]
        done = {report.tokens for report in reports}
        missing = [tokens for tokens in case.lengths if tokens not in done]
        exhausted = any(report.out_of_memory for report in reports)
        if self._code == 0 or exhausted:
            note = "out of memory"
        else:
            note = f"failed (exit {self._code}), see {self._log.name}"
            missing = missing or [0]  # it measured all that was asked, and failed nevertheless
        size = len(case.devices)
        return rows + [
            Row(case.name, case.recompute, size, n, case.graphs, note=note) for n in missing
        ]


def row(args: argparse.Namespace, case: Case, report: Report) -> Row:
    """A report in the terms of the table."""
    size = len(case.devices)
    if report.out_of_memory:
        return Row(
            case.name, case.recompute, size, report.tokens, case.graphs, note="out of memory"
        )
    step_ms = statistics.median(report.step_ms)
    shape = shape_of(args)
    sequences = args.micro_batches * args.data
    if args.prefill:
        flops = prefill_work(shape, report.tokens)
    else:
        flops = work(shape, plan_of(args, case).bounds(report.tokens)) * sequences
    return Row(
        case.name,
        case.recompute,
        size,
        report.tokens,
        case.graphs,
        step_ms,
        sequences * report.tokens / step_ms * 1000,
        flops / (step_ms / 1000) / size / (HOPPER_DENSE_BF16_TFLOPS * 1e12),
        report.memory_bytes / 2**30,
        report.loss,
        points_gib={name: size / 2**30 for name, size in report.points_bytes.items()},
        profile_ms=report.profile_ms,
    )


def run_all(args: argparse.Namespace, cases: Sequence[Case]) -> Iterator[Row]:
    """Runs all cases; a job's turn comes when its GPUs are free and no earlier job wants them."""
    waiting = list(cases)
    jobs: list[Job] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            while waiting or jobs:
                while waiting and sum(not job.going for job in jobs) < max(1, args.ahead):
                    jobs.append(Job(args, waiting.pop(0), Path(folder)))
                wanted: set[int] = set()
                for job in jobs:
                    if not job.going and wanted.isdisjoint(job.case.devices):
                        job.go()
                    wanted |= set(job.case.devices)
                for job in [job for job in jobs if job.finished]:
                    jobs.remove(job)
                    yield from job.rows(args)
                time.sleep(0.05)
        finally:
            for job in jobs:
                job.stop()


def tokens_text(tokens: int) -> str:
    """128K for 131072."""
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


HEADER = ["run", "recompute", "GPUs", "tokens", "CUDA graphs", "ms / step", "tokens / s"]
HEADER += ["MFU", "max allocated GiB", "loss"]
PREFILL_HEADER = [*HEADER[:5], "ms to first token", *HEADER[6:9], "largest logit"]


def cells(row: Row) -> list[str]:
    """A row as text."""
    first = [row.name, row.recompute, str(row.gpus), tokens_text(row.tokens), row.graphs]
    if row.note:
        return [*first, row.note, "", "", "", ""]
    return [
        *first,
        f"{row.step_ms:.1f}",
        f"{row.tokens_per_s:.0f}",
        f"{row.mfu:.3f}",
        f"{row.memory_gib:.1f}",
        f"{row.loss:.6f}",
    ]


def main() -> int:
    """Runs everything. Returns 1 if a job failed."""
    args = parse()
    check_folder("--output", args.output)
    args.output.mkdir(parents=True, exist_ok=True)
    scaled = f", scaled to {args.layers} layers" if args.layers else ""
    kind = "bf16" if torch.cuda.is_available() else "float32 on a CPU"
    batches = "" if args.micro_batches == 1 else f", {args.micro_batches} micro-batches"
    title = f"{args.shape} shape{scaled}, {kind}, batch 1{batches}"
    title += ", forward alone" if args.prefill else ""
    title += f", sharded by {args.sharding}" if args.sharding != "optimizer" else ""
    title += f", {args.pipeline} pipeline stages" if args.pipeline > 1 else ""
    title += f", data parallel {args.data}" if args.data > 1 else ""
    title += f", tensor parallel {args.tensor}" if args.tensor > 1 else ""
    title += f", states {args.states}" if args.states != "float32" else ""
    title += ", lean loss" if args.lean_loss else ""
    title += f", packed documents {args.documents}" if args.documents else ""
    title += NETWORK_TITLES[args.net]
    names = PREFILL_HEADER if args.prefill else HEADER
    rows = []
    for row in run_all(args, plan_cases(args)):
        rows.append(row)
        print(json.dumps(asdict(row)), flush=True)
    rows.sort(key=lambda row: (row.gpus, row.tokens))
    write_report(rows, names, cells, title, args.output, {"shape": asdict(shape_of(args))})
    return 1 if any(row.note.startswith("failed") for row in rows) else 0


if __name__ == "__main__":
    with one_line_errors("benchmark_train: error"):
        sys.exit(main())
