"""Steps of ever new packs, lengths and spans: memory of the host stays as it is.

600 of four ranks over gloo, and 200 of one rank of 64 with a million tokens, whose messages go
nowhere. With -s the tests print the CPU time of a step, too, which no test holds.
"""

import random
import sys
import time
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import pytest
import torch
import torch.distributed as dist

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.registry import create
from tests.integration.megatron_job import run_warm
from tests.test_host import Idle

# Of the steps: of four ranks, of one of 64.
QUARTERS = 150, 50


def resident_mib() -> float:
    """Of this process."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) / 1024


def over(step: Callable[[random.Random], None], quarter: int) -> str:
    """At the end of each quarter of the steps: MiB in memory, and milliseconds of a step."""
    draw, found = random.Random(0), []
    for _ in range(4):
        started = time.process_time()
        for _ in range(quarter):
            step(draw)
        milliseconds = 1e3 * (time.process_time() - started) / quarter
        found.append(f"{resident_mib():.1f} MiB {milliseconds:.1f} ms")
    return ", ".join(found)


def grown(said: str) -> float:
    """MiB from the middle of the steps, when caches are full, to their end."""
    print(said)
    _, middle, _, last = (float(each.split()[0]) for each in said.split(", "))
    return last - middle


def starts(draw: random.Random, tokens: int, mean: int) -> tuple[int, ...]:
    """Where documents of a pack begin, other than the first one."""
    lengths = (1 + int(draw.expovariate(1 / mean)) for _ in range(2 * tokens // mean))
    return tuple(start for start in accumulate(lengths) if start < tokens)


def step_of_a_rank(draw: random.Random) -> None:
    """By a random algorithm, and every fourth with gradients: the same on all ranks."""
    algo, layout = draw.choice((("zigzag", "zigzag"), ("zigzag", "documents"), ("ring", "")))
    tokens, kind = 8 * draw.randrange(4, 24), draw.randrange(3)
    more: dict[str, object] = {"layout": layout} if layout else {}
    if kind or layout == "documents":
        more["cu_seqlens"] = [0, *starts(draw, tokens, 20), tokens]
    if kind == 2:
        middle = draw.randrange(1, tokens)
        more["spans"] = [(0, middle, 0, middle, "full"), (middle, tokens, middle, tokens, "causal")]
    context = cp.Context(algo=algo, seq_len=tokens, **more)
    x = context.shard(torch.ones(1, tokens, 2, 8)).requires_grad_(not draw.randrange(4))
    out = context.attention(x, x, x)
    if x.requires_grad:
        out.sum().backward()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_ranks(tmp_path: Path) -> None:
    job = run_warm(tmp_path, ranks=4, script=Path(__file__)).succeeded()
    assert max(grown(process.stdout.splitlines()[-1]) for process in job.processes) < 2.5


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_one_rank_of_64_with_a_million_tokens() -> None:
    size, tokens, kernel = 64, 2**20, Idle()
    group = DryRunGroup(size - 1, (0,) * size, peer_access=False)
    algorithm = create("zigzag", group, {"layout": "documents"})

    def step(draw: random.Random) -> None:
        mask = Mask(documents=starts(draw, tokens, 2**14))
        on = algorithm.layout.for_documents(mask.resolved)
        x = torch.empty(1, on.length(size - 1, size, tokens), 8, 64, device="meta")
        setting = x.shape, x.shape, x.shape, x.dtype, x.device, False
        compiled = algorithm.compiled(*setting, tokens, mask, None, lambda problem: kernel)
        out, _, saved = compiled.forward.attend(x, x, x)
        compiled.backward().differentiate(out, saved)

    assert grown(over(step, QUARTERS[1])) < 4


if __name__ == "__main__":
    dist.init_process_group("gloo")
    print(over(step_of_a_rank, QUARTERS[0]))
    dist.barrier()
