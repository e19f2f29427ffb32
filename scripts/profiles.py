"""What a GPU did in a profiled step, for the benchmarks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

Span = tuple[str, float, float]  # name, start and end in microseconds

# Whose name holds one of the words belongs to the class; the first that fits.
CLASSES = {
    "communication": ("nccl",),
    "copies": ("memcpy", "memset"),
    "attention": ("flash", "fmha", "sdpa", "attn"),
    "matrix products": ("gemm", "nvjet", "cublas", "xmma"),
}


def new_profiler() -> Any:
    """A profiler of this process's GPU; the step inside must end by synchronizing."""
    from torch.profiler import ProfilerActivity, profile

    return profile(activities=[ProfilerActivity.CUDA])


def device_spans(events: Sequence[Any]) -> list[Span]:
    """Device activity of a profile, by start."""
    rows = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in events
        if str(getattr(event, "device_type", "")).endswith("CUDA")
        # Those of the profiler itself, and what lies over several kernels.
        and not event.name.startswith(("Activity", "_Attention", "nccl:", "Optimizer", "## "))
    ]
    return sorted(rows, key=lambda row: row[1])


def class_of(name: str) -> str:
    """Which of `CLASSES` a kernel belongs to, or "other"."""
    lower = name.lower()
    for found, words in CLASSES.items():
        if any(word in lower for word in words):
            return found
    return "other"


def computes(span: Span) -> bool:
    """Copies between memories and NCCL's kernels do not compute."""
    return class_of(span[0]) not in ("communication", "copies")


def computing(spans: Sequence[Span]) -> tuple[float, float]:
    """(time in which some kernel computes, time from the first to the last of them), in us."""
    kernels = [s for s in spans if computes(s)]
    busy, reached = 0.0, kernels[0][1]
    for _, start, end in kernels:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - kernels[0][1]


def by_class(spans: Sequence[Span]) -> dict[str, float]:
    """Milliseconds of each class of device activity, and those without computation ("waiting").

    Activities at the same time count in full each.
    """
    total: dict[str, float] = defaultdict(float)
    for name, start, end in spans:
        total[class_of(name)] += (end - start) / 1000
    busy, whole = computing(spans)
    return dict(total) | {"waiting": (whole - busy) / 1000}


def gaps(spans: Sequence[Span], count: int = 40) -> list[str]:
    """The longest times without computation: milliseconds, how often, kernels before and after,
    what else went on.
    """
    total: dict[str, float] = defaultdict(float)
    times: Counter[str] = Counter()
    kernels = [s for s in spans if computes(s)]
    before = kernels[0]
    for kernel in kernels[1:]:
        if kernel[1] > before[2]:
            others = {
                class_of(name)
                for name, start, end in spans
                if start < kernel[1] and end > before[2] and not computes((name, start, end))
            }
            beside = ", ".join(sorted(others)) or "nothing"
            text = f"{before[0][:60]} -> {kernel[0][:60]} beside {beside}"
            total[text] += (kernel[1] - before[2]) / 1000
            times[text] += 1
        if kernel[2] > before[2]:
            before = kernel
    between = sorted(total, key=total.__getitem__, reverse=True)[:count]
    return [f"{total[text]:9.3f} {times[text]:5d} {text}" for text in between]


def longest(spans: Sequence[Span], count: int = 40) -> list[str]:
    """The kernels that took most time: milliseconds, launches, name."""
    time: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for name, start, end in spans:
        time[name] += (end - start) / 1000
        launches[name] += 1
    names = sorted(time, key=time.__getitem__, reverse=True)[:count]
    return [f"{time[name]:9.3f} {launches[name]:5d} {name[:160]}" for name in names]
