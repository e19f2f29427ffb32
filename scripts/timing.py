"""The GPU of a rank, and how long calls take that all ranks make together."""

import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megatron_cp_plugin.errors import ConfigError


def take_gpu(instead: str) -> torch.device:
    """Makes the GPU of this rank of the node, or of a lone process, the current one.

    Args: instead: what a user can do without GPUs.

    Raises: ConfigError if there are fewer GPUs than ranks of the node.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise ConfigError(f"needs a GPU for each of {ranks} ranks, got {found}: {instead}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def join(device: str) -> None:
    """Joins the other processes of a torchrun; without torchrun this process is alone.

    Args: device: type of the tensors that are sent, "cuda" or "cpu".
    """
    backend = "nccl" if device == "cuda" else "gloo"
    if "RANK" in os.environ:
        dist.init_process_group(backend, timeout=timedelta(minutes=5))
    else:
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def align(device: torch.device) -> None:
    """Lets all ranks begin together."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize()


def maximum(value: float, device: torch.device) -> float:
    """The greatest value of any rank."""
    tensor = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return float(tensor)


def time_ms(body: Callable[[], object], device: torch.device, *, warmup: int, iters: int) -> float:
    """Median time of a call; the maximum over ranks."""
    times = []
    for index in range(warmup + iters):
        align(device)
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in "ab")
            start.record()
            body()
            stop.record()
            torch.cuda.synchronize()
            elapsed = start.elapsed_time(stop)
        else:
            begin = time.perf_counter()
            body()
            elapsed = 1000 * (time.perf_counter() - begin)
        if index >= warmup:
            times.append(elapsed)
    return maximum(statistics.median(times), device)
