"""`megatron-cp doctor`: what is installed, what `auto` takes, and whether results are correct here.

Under torchrun the check runs on the real ranks and their network; alone, on four virtual ranks of
this process.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import lcm
from platform import python_version
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin import functional, registry
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.devices import capture
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.kernel import KernelCall, Problem, Statistics
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels import kernel_names, resolve
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.kernels.selfcheck import accuracy, distance

PACKAGES = (
    "torch",
    "megatron-core",
    "flash-attn-4",
    "flash-attn",
    "fla-core",
    "transformer-engine",
    "triton",
    "apex",
)
# What does not work without a package: anywhere, and on GPUs; the first on GPUs from Hopper on.
_TRAINING = "no training: pip install 'megatron-cp-plugin[megatron]', or a checkout on PYTHONPATH"
_ON_GPUS = {
    "flash-attn-4": "attention by another kernel",
    "fla-core": "linear attention by the kernel chunked",
    "transformer-engine": "Megatron needs --transformer-impl local",
}
VIRTUAL_RANKS = 4
TOKENS_PER_RANK = 32
HALF_BOUND = 2e-2


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        right: whether the machine computes it right; None: nothing was computed.
        costs: the functions that the machine lacks because this is missing.
    """

    topic: str
    name: str
    text: str
    right: bool | None = None
    costs: str = ""

    @property
    def failed(self) -> bool:
        """Whether the machine would compute something wrong."""
        return self.right is False


def examine(heads: int = 32, kv_heads: int = 8, head_dims: Sequence[int] = (128,)) -> list[Finding]:
    """Examines this machine; under torchrun a collective operation of all ranks.

    Args: heads, kv_heads, head_dims: of the models that kernels are to serve.
    """
    device = join()
    findings = _installed()
    for head_dim in head_dims:
        findings += _kernel_findings(device, heads, kv_heads, head_dim)
    findings += _topology()
    for head_dim in head_dims:
        findings += _parity(device, head_dim)
    return findings + _graphs(device, head_dims[0])


def verdict(findings: Sequence[Finding]) -> str:
    """Returns in one line whether all is right, and which packages and functions are missing."""
    failed = [f"{finding.topic} {finding.name}" for finding in findings if finding.failed]
    if failed:
        return f"verdict: WRONG: {', '.join(dict.fromkeys(failed))}: do not train with them here"
    checked = sum(finding.right is True for finding in findings)
    missing = [f"{finding.name} ({finding.costs})" for finding in findings if finding.costs]
    return f"verdict: ok, {checked} results are right; missing: {'; '.join(missing) or 'nothing'}"


def measured(device: torch.device, heads: int, kv_heads: int, head_dim: int) -> dict[str, object]:
    """The measurements of a report; a collective operation of all ranks.

    Returns: `machine`: as `megatron-cp calibrate` measures it. `ms`: by algorithm a causal forward
        and backward of `tokens` tokens a rank, on the slowest rank; text where one refuses.
    """
    from megatron_cp_plugin.planner.calibrate import Calibration

    topology, times = topology_of(None), dict[str, float | str]()
    calibration = Calibration(topology, device, (heads, kv_heads, head_dim))
    tokens = 16384 if calibration.cuda else 2 * TOKENS_PER_RANK
    shapes = [(1, tokens, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    for name in registry.available("softmax"):
        inputs = [torch.randn(shape, device=device, dtype=calibration.dtype) for shape in shapes]
        step = _both_passes(name, inputs, topology, seq_len=tokens * topology.size)
        try:
            times[name] = 1e3 * calibration.together(step)
        except ContextParallelError as refusal:
            times[name] = str(refusal)
    return {"machine": calibration.machine("report").values(), "tokens": tokens, "ms": times}


def join() -> torch.device:
    """Joins the other processes of a torchrun, if any; returns the device to compute on."""
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "WORLD_SIZE" in os.environ and not dist.is_initialized():
        dist.init_process_group("nccl" if cuda else "gloo")
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


def leave() -> None:
    """Leaves the processes that `join` has joined."""
    if dist.is_initialized():
        dist.destroy_process_group()
        functional.release()


def _installed() -> list[Finding]:
    findings = [Finding("installed", "python", python_version())]
    cuda = torch.cuda.is_available()
    costs = {"megatron-core": _TRAINING} | (_ON_GPUS if cuda else {})
    if cuda and torch.cuda.get_device_capability() < (9, 0):
        del costs["flash-attn-4"]
    for package in PACKAGES:
        try:
            finding = Finding("installed", package, version(package))
        except PackageNotFoundError:
            cost = costs.get(package, "")
            finding = Finding("installed", package, "not installed", costs=cost)
            if package == "megatron-core" and find_spec("megatron") is not None:
                finding = Finding("installed", package, "a checkout")
                if find_spec("pybind11") is None:
                    cost = "data helpers of the checkout cannot be compiled: pip install pybind11"
                    findings.append(Finding("installed", "pybind11", "not installed", costs=cost))
        findings.append(finding)
    if cuda:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        findings.append(Finding("installed", "NCCL", nccl))
        findings.append(Finding("installed", "GPU", torch.cuda.get_device_name()))
    else:
        findings.append(Finding("installed", "GPU", "none", costs="only the CPU path was tried"))
    return findings


def _kernel_findings(
    device: torch.device, heads: int, kv_heads: int, head_dim: int
) -> list[Finding]:
    """Every kernel that serves a model, against attention in float64."""
    findings = []
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    problem = Problem(device, dtype, heads, kv_heads, head_dim)
    for name in kernel_names():
        try:
            found = accuracy(resolve(name, problem), problem)
        except ContextParallelError as error:
            findings.append(Finding("kernels", name, str(error)))
            continue
        text = f"head dim {head_dim}: error {found.error:.1e} (at most {found.bound:.0e})"
        if not found.right:
            text += f" in {found.where}"
        findings.append(Finding("kernels", name, text, found.right))
    if dist.is_initialized():
        findings = _worst(findings)
    shape = f"{dtype}, heads {heads}:{kv_heads}, head dim {head_dim}".removeprefix("torch.")
    findings.append(Finding("kernels", "auto", f"{resolve('auto', problem).name} for {shape}"))
    return findings


def _worst(findings: list[Finding]) -> list[Finding]:
    """Each finding from the first rank where it is wrong, or else from this rank."""
    worst = []
    for mine, *others in zip(findings, *topology_of(None).gather(findings), strict=True):
        wrong = [(rank, one) for rank, one in enumerate(others) if one.failed]
        for rank, one in wrong[:1]:
            mine = replace(one, text=f"{one.text} on rank {rank}")
        worst.append(mine)
    return worst


def _topology() -> list[Finding]:
    if not dist.is_initialized():
        text = f"one process: {VIRTUAL_RANKS} virtual ranks; start with torchrun for real ones"
        return [Finding("topology", "ranks", text, costs="only virtual ones were tried")]
    topology = topology_of(None)
    nodes = len(set(topology.nodes))
    access = "yes" if topology.peer_access else "no"
    return [
        Finding("topology", "ranks", f"{topology.size} over {dist.get_backend()}, {nodes} node(s)"),
        Finding("topology", "peer memory", access),
    ]


def _parity(device: torch.device, head_dim: int) -> list[Finding]:
    """Every softmax algorithm against attention over the unsplit sequence in float64."""
    dtype, bound = (torch.bfloat16, HALF_BOUND) if device.type == "cuda" else (torch.float64, 1e-10)
    whole = _whole_inputs(device, dtype, head_dim)
    expected = _unsplit(whole)
    findings = []
    for name in registry.available("softmax"):
        try:
            error = max(_everywhere(partial(_error, name, whole, expected)))
        except ContextParallelError as refusal:
            findings.append(Finding("parity", name, f"refused: {refusal}", costs="refused here"))
            continue
        text = f"head dim {head_dim}: error {error:.1e} (at most {bound:.0e})"
        findings.append(Finding("parity", name, text, error <= bound))
    return findings


def _whole_inputs(device: torch.device, dtype: torch.dtype, head_dim: int) -> list[Tensor]:
    """q, k, v and dout of the unsplit sequence, the same on all ranks: [1, N, heads, D]."""
    size = dist.get_world_size() if dist.is_initialized() else VIRTUAL_RANKS
    heads = lcm(8, size)
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(
            (1, TOKENS_PER_RANK * size, n, head_dim),
            generator=generator,
            device=device,
            dtype=torch.float32,
        ).to(dtype)
        for n in (heads, heads // 2, heads // 2, heads)
    ]


def _graphs(device: torch.device, head_dim: int) -> list[Finding]:
    """One attention for each transport, captured in a CUDA graph, against the unsplit sequence."""
    topic = "CUDA graphs"
    if device.type != "cuda":
        return [Finding(topic, "capture", "not tried: no GPU")]
    if not dist.is_initialized():
        return [Finding(topic, "capture", "not tried: one process, start with torchrun")]
    whole = _whole_inputs(device, torch.bfloat16, head_dim)
    expected = _unsplit(whole)
    transports = ("peer", "group") if topology_of(None).peer_access else ("group",)
    findings = []
    for transport in transports:
        failures: list[str] = []
        error = max(_everywhere(partial(_replay_error, transport, whole, expected, failures)))
        text = f"captured and replayed: error {error:.1e} (at most {HALF_BOUND:.0e})"
        if failures or error == float("inf"):
            text = f"failed: {failures[0] if failures else 'on another rank'}"
        name = f"zigzag, transport {transport}"
        findings.append(Finding(topic, name, text, error <= HALF_BOUND))
        if findings[-1].failed:
            break  # what CUDA says after a failed capture says nothing more
    return findings


def _unsplit(whole: list[Tensor]) -> list[Tensor]:
    q, k, v, dout = (x.double() for x in whole)
    kernel, scale = Reference(), q.shape[3] ** -0.5
    call = KernelCall(q, k, v, scale, causal=True)
    out, lse = kernel.forward(call)
    statistics = Statistics(lse, out=out)
    return [out, *kernel.backward(call, dout, statistics)]


def _everywhere(body: Callable[[Topology], float]) -> list[float]:
    """Results of all ranks."""
    if not dist.is_initialized():
        return run_virtual(VIRTUAL_RANKS, body)
    topology = topology_of(None)
    return topology.gather(body(topology))


def _error(name: str, whole: list[Tensor], expected: list[Tensor], topology: Topology) -> float:
    """The greatest relative error of this rank's output and gradients; inf for NaN."""
    results = _both_passes(name, _local_parts(name, whole, topology), topology)()
    return max(map(distance, results, _local_parts(name, expected, topology)))


def _both_passes(
    name: str, inputs: Sequence[Tensor], topology: Topology, **options: Any
) -> Callable[[], tuple[Tensor, ...]]:
    """Forward and backward of attention. Args: inputs: q, k, v and dout of this rank."""
    *leaves, dout = inputs
    for x in leaves:
        x.requires_grad_()

    def step() -> tuple[Tensor, ...]:
        out = functional.attention(*leaves, algo=name, group=topology, **options)
        return (out.detach(), *torch.autograd.grad(out, leaves, dout))

    return step


def _replay_error(
    transport: str,
    whole: list[Tensor],
    expected: list[Tensor],
    failures: list[str],
    topology: Topology,
) -> float:
    """As `_error`, of zigzag's replay with other inputs than it was captured with.

    Args: failures: gets one line if it cannot be captured.
    """
    given = _local_parts("zigzag", whole, topology)
    inputs = [torch.ones_like(x) for x in given]
    step = _both_passes("zigzag", inputs, topology, transport=transport)
    try:
        graph, results = capture(step, torch.cuda.synchronize)
        with torch.no_grad():
            for target, x in zip(inputs, given, strict=True):
                target.copy_(x)
        graph.replay()
        torch.cuda.synchronize()
    except (ContextParallelError, RuntimeError) as error:
        failures.append(str(error).splitlines()[0])
        return float("inf")
    return max(map(distance, results, _local_parts("zigzag", expected, topology)))


def _local_parts(name: str, whole: Sequence[Tensor], topology: Topology) -> list[Tensor]:
    """This rank's parts of whole tensors [B, N, ...] under an algorithm's layout."""
    layout = registry.layout_of(name, {})
    return [shard(x, 1, layout, topology.rank, topology.size) for x in whole]
