"""Random settings: a run either trains with the losses of CP=1, or is refused in one line.

`pytest tests/integration/test_random_runs.py --random-runs 500` tries that many, other ones at each
call, and goes on after a failure.
"""

import argparse
import re
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, event, given, settings
from hypothesis import strategies as st
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import Recording
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.layers import options_by_name
from tests.integration.megatron_job import Job, run_warm
from tests.random_tests import examples

pytestmark = pytest.mark.timeout(0)

STEPS = 2
FIXED = tuple(
    f"--train-iters {STEPS} --lr 1e-3 --min-lr 1e-4 --lr-decay-style constant --mock-data "
    "--tokenizer-type NullTokenizer --vocab-size 120 --make-vocab-size-divisible-by 64 "
    "--eval-iters 0 --eval-interval 1000 --log-interval 1 --attention-dropout 0 "
    "--hidden-dropout 0 --init-method-std 0.2 --max-position-embeddings 256 "
    "--cp-platform cpu".split()
)
# Relative error of a loss. One ulp of bfloat16 is 4e-3, and the losses are sums over many tokens.
BOUNDS = {"": 1e-5, "--bf16": 4e-3, "--fp16": 1e-3}

# What an option may be given, right and wrong; other options have their declared choices.
NUMBERS = {"rows": (0, 1, 2, 3, 4), "ulysses": (0, 1, 2, 3, 4)}
NUMBERS |= {"chunks": (-1, 0, 1, 2, 3, 4), "gathered_mib": (0, 1, 1024), "groups": (0, 1, 2)}
ASKED_TOO_MUCH = (
    "--attention-dropout 0.1",
    "--reset-attention-mask",
    "--position-embedding-type mrope",
    "--multi-latent-attention --cache-mla-latents",
    "--qk-clip",
    "--cuda-graph-impl local",
    "--context-parallel-algo zigzga",
    "--cp-kernel cudnn",
    "--cp-options nonsense=1",
    "--cp-linear-model transnormer",
)


@dataclass(frozen=True)
class Run:
    """One command line.

    Attributes:
        model: what a run without context parallelism has too. choice: the plugin's flags.
        size: context parallel; tensor, pipeline: the other sizes. ranks: processes.
    """

    model: tuple[str, ...]
    choice: tuple[str, ...]
    size: int
    tensor: int
    pipeline: int
    ranks: int

    @property
    def flags(self) -> tuple[str, ...]:
        return (*self.model, *self.choice, "--context-parallel-size", str(self.size))

    @property
    def dtype(self) -> str:
        return next((flag for flag in self.model if flag in BOUNDS), "")


@st.composite
def options(draw: st.DrawFn, algo: str) -> list[str]:
    """Some options of an algorithm with some values, not all of them allowed."""
    cls = registry.algorithm_class(algo)
    names = draw(st.lists(st.sampled_from(registry.option_names(algo)), max_size=2, unique=True))
    words = []
    for name in names:
        if name in NUMBERS:
            value: object = draw(st.sampled_from(NUMBERS[name]))
        else:
            default = getattr(cls.Options(), name)
            hint = registry.get_type_hints(cls.Options)[name]
            choices = (True, False) if isinstance(default, bool) else registry.get_args(hint)
            value = draw(st.sampled_from(choices or (default,)))
        words.append(f"{name}={value}")
    return ["--cp-options", *words] if words else []


def beside(first: str) -> list[str]:
    """The other algorithms of softmax attention that can have the layout of one of them."""
    found = []
    for name in set(registry.available("softmax")) - {first}:
        with suppress(ContextParallelError):
            options_by_name((first, name), first, ())
            found.append(name)
    return sorted(found)


@st.composite
def choices(draw: st.DrawFn, size: int, layers: int, stages: int) -> list[str]:
    """The plugin's flags."""
    algos = st.sampled_from(registry.available("softmax"))
    kinds = ["algo"] * 4 + ["layers", "linear", "comm type"] + ["stages"] * (6 if stages > 1 else 0)
    kind = draw(st.sampled_from(kinds))
    words: list[str] = []
    if kind == "algo":
        algo = draw(algos)
        words += ["--context-parallel-algo", algo, *draw(options(algo))]
    elif kind == "layers":
        names = draw(st.lists(algos, min_size=1, max_size=3))
        words += ["--cp-layers", ", ".join(names)]
    elif kind == "stages":
        # Other algorithms on each pipeline stage, or from layer to layer.
        count, each = draw(st.sampled_from([(stages, max(1, layers // stages)), (layers, 1)]))
        first = draw(algos)
        others = st.lists(st.sampled_from(beside(first)), min_size=count - 1, max_size=count - 1)
        names = [first, *draw(others)]
        words += ["--cp-layers", ", ".join(f"{name}*{each}" for name in names)]
        # Without it layers beside a contiguous one may be refused.
        words += draw(st.sampled_from([[], ["--cp-options", "layout=contiguous"]]))
    elif kind == "linear":
        linear = st.sampled_from(registry.available("linear"))
        names = draw(st.lists(st.one_of(linear, algos), min_size=1, max_size=2))
        model = draw(st.sampled_from(["transnormer", "linear_transformer"]))
        words += ["--cp-layers", ", ".join(names), "--cp-linear-model", model]
    else:
        types = st.sampled_from(["p2p", "a2a", "all_gather", "a2a+p2p"])
        count = draw(st.sampled_from([1, layers]))
        given_types = draw(st.lists(types, min_size=count, max_size=count))
        words += ["--cp-comm-type", *given_types]
        if "a2a+p2p" in given_types:
            inner = draw(st.sampled_from([1, 2, 3]))
            words += ["--hierarchical-context-parallel-sizes", str(inner), str(size // inner)]
    kernel = draw(st.sampled_from(["auto"] * 4 + ["reference", "torch_cpu"]))
    if kernel != "auto":
        words += ["--cp-kernel", kernel]
    return words


@st.composite
def latents(draw: st.DrawFn) -> list[str]:
    """Multi-latent attention."""
    words = ["--multi-latent-attention", "--rope-type", draw(st.sampled_from(["rope", "yarn"]))]
    for name, sizes in {
        "kv-lora-rank": (8, 16),
        "qk-head-dim": (4, 8, 16),
        "qk-pos-emb-head-dim": (4, 8),
        "v-head-dim": (4, 8, 12, 32),
        "q-lora-rank": (0, 12),
    }.items():
        size = draw(st.sampled_from(sizes))
        words += [f"--{name}", str(size)] if size else []
    return [*words, "--rotary-scaling-factor", str(draw(st.sampled_from([1, 4])))]


@st.composite
def runs(draw: st.DrawFn, most_ranks: int) -> Run:
    def some(*flags: str, none: int = 2) -> None:
        """Adds one of the flags, or none of them."""
        model.extend(draw(st.sampled_from([""] * none + list(flags))).split())

    def rarely() -> bool:
        return draw(st.sampled_from(range(12))) == 7

    sizes = [
        (size, tensor, pipeline, data)
        for size in (3, 2, 2, 2, 4, 4, 6, 8, 1)
        for tensor in (1, 2)
        for pipeline in (1, 2)
        for data in (1, 2)
        if size * tensor * pipeline * data <= most_ranks
    ]
    size, tensor, pipeline, data = draw(st.sampled_from(sizes))
    ranks = size * tensor * pipeline * data
    layers = draw(st.sampled_from([1, 2, 3] if rarely() else [pipeline, 2 * pipeline]))
    heads = draw(st.sampled_from([1, 2, 3] if rarely() else [2, 4, 4, 6, 8, 12]))
    micro = draw(st.sampled_from([1, 1, 2]))
    model = ["--num-layers", str(layers), "--num-attention-heads", str(heads)]
    model += ["--hidden-size", str(heads * draw(st.sampled_from([4, 8, 16])))]
    # Of all lengths, those that every layout takes are most of interest.
    odd = [1, size, size * tensor]
    multiple = draw(st.sampled_from(odd if rarely() else [2 * size * tensor]))
    model += ["--seq-length", str(multiple * draw(st.integers(1, max(1, 96 // multiple))))]
    batch = micro * data * draw(st.sampled_from([1, 2, 4]))
    model += ["--micro-batch-size", str(micro), "--global-batch-size", str(batch)]
    model += ["--tensor-model-parallel-size", str(tensor)]
    model += ["--pipeline-model-parallel-size", str(pipeline)]
    some("--position-embedding-type rope", "--position-embedding-type none", none=1)
    latent = tensor == 1 and draw(st.sampled_from([False] * 5 + [True]))
    if latent:
        model += draw(latents())
    if "rope" in model:
        some("--rotary-percent 0.5", "--rotary-base 500", none=3)
        if not latent:
            some("--rotary-interleaved", none=6)
    if not latent and draw(st.booleans()):
        fitting = [n for n in (1, 2, 3, 4, 6) if heads % n == 0]
        groups = draw(st.sampled_from([2, 3, 5] if rarely() else fitting))
        model += ["--group-query-attention", "--num-query-groups", str(groups)]
    some("--kv-channels 8", "--kv-channels 6", "--kv-channels 32", none=4)
    some("--bf16", "--fp16", none=4)
    if "--fp16" in model:
        model += ["--initial-loss-scale", "256"]
    some(
        "--recompute-granularity selective",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--recompute-granularity full --recompute-method block --recompute-num-layers 1",
        "--recompute-granularity selective --recompute-modules core_attn mlp",
    )
    if tensor > 1:
        some("--sequence-parallel", none=1)
    if pipeline > 1:
        some("--num-layers-per-virtual-pipeline-stage 1")
    some("--use-distributed-optimizer", "--use-distributed-optimizer --overlap-grad-reduce")
    some("--swiglu")
    some("--normalization RMSNorm")
    some("--untie-embeddings-and-output-weights")
    some("--disable-bias-linear", "--add-qkv-bias")
    some("--qk-layernorm", none=5)
    if not latent:
        some("--qk-l2-norm", "--attention-output-gate", none=8)
    some("--apply-query-key-layer-scaling", none=6)
    some("--softmax-type learnable", "--softmax-type off-by-one", none=6)
    some("--window-size 8,0", "--window-size 8,0 --window-attn-skip-freq 2", none=8)
    some("--calculate-per-token-loss")
    some("--mtp-num-layers 1", "--mtp-num-layers 2", none=6)
    some("--deterministic-mode", none=4)
    some("--eod-mask-loss", "--reset-position-ids", none=8)
    some("--accumulate-allreduce-grads-in-fp32", none=4)
    choice = draw(choices(size, layers, pipeline))
    if "--recompute-granularity" in model and draw(st.booleans()):
        choice.append("--cp-recompute-attention")
    if draw(st.booleans()):
        choice += ["--cp-chunked-loss", "7"]
    if rarely():
        choice += draw(st.sampled_from(ASKED_TOO_MUCH)).split()
    return Run(tuple(model), tuple(choice), size, tensor, pipeline, ranks)


def losses(folder: Path, *flags: str, ranks: int) -> tuple[list[float] | None, Job]:
    """Trains; None in place of the losses if the run did not end well."""
    shutil.rmtree(folder, ignore_errors=True)
    job = run_warm(folder, *FIXED, *flags, "--cp-record", str(folder), ranks=ranks)
    if any(process.returncode for process in job.processes):
        return None, job
    return Recording.load(folder).losses()["lm loss"], job


def problem_with(run: Run, folder: Path) -> str | None:
    """Says what is wrong with the way a run ended; None if it is as it should be."""
    got, job = losses(folder / "split", *run.flags, ranks=run.ranks)
    if got is None:
        codes = [process.returncode for process in job.processes]
        if set(codes) != {2}:
            return f"exit codes {codes}: {job.text[-1500:]}"
        said = [re.findall(r"megatron_cp_plugin: error: (.*)", p.stderr) for p in job.processes]
        if {len(lines) for lines in said} != {1} or "Traceback" in job.text:
            return f"not one line: {job.text[-1500:]}"
        event("refused")
        print("refused:", said[0][0], flush=True)
        return None
    # Megatron's own attention, or where there is none of that kind, the same on one rank.
    linear = "--cp-linear-model" in run.choice
    alone = run.choice if linear else ("--context-parallel-algo", "megatron")
    ranks = run.tensor * run.pipeline
    want, reference = losses(folder / "alone", *run.model, *alone, ranks=ranks)
    if want is None:
        return f"trains, and without context parallelism does not: {reference.text[-1500:]}"
    event("trained")
    print("trained:", run.ranks, "ranks", *run.flags, flush=True)
    if len(got) != STEPS or got != pytest.approx(want, rel=BOUNDS[run.dtype]):
        return f"losses {got}, not {want}"
    return None


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@examples(80)
@given(run=runs(16))
def test_start_up_checks_pass_or_say_why_not(parser: argparse.ArgumentParser, run: Run) -> None:
    """The checks alone, which need no processes: on anything they return, or raise one line."""
    refusal = None
    try:
        flags, rest = split_flags((*FIXED, *run.flags))
        flags.check()
        args = parser.parse_args(rest)
        args.world_size = run.ranks
        flags.comm_type.check_model(args)
        assert flags.algo is not None
        check_arguments(args, flags.config(run.size), torch.device("cpu"))
    except ContextParallelError as error:
        refusal = str(error)
    event("passed" if refusal is None else "refused")
    assert refusal is None or re.fullmatch(r"[^\n]{20,400}", refusal)


@pytest.mark.slow
def test_random_runs(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    asked = request.config.getoption("--random-runs")
    wanted = asked or 1
    tried: set[Run] = set()
    problems: list[str] = []

    @settings(
        max_examples=3 * wanted,  # some come more than once
        deadline=None,
        derandomize=not asked,
        database=None,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
    )
    @given(runs(4) if asked else runs(3).filter(lambda run: run.size > 1 and run.ranks <= 4))
    def attempt(run: Run) -> None:
        if run in tried or len(tried) == wanted:
            return
        tried.add(run)
        found = problem_with(run, tmp_path)
        if found:
            problems.append(f"{run.ranks} ranks: {' '.join(run.flags)}\n{found}\n")
            print(problems[-1], flush=True)

    attempt()
    assert len(tried) > wanted / 2
    assert not problems, "\n".join(problems)
