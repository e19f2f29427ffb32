"""How long calls take that all ranks make together."""

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


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
