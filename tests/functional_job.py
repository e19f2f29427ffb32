"""The functional interface on the real ranks of a job over gloo: prints as JSON what a rank saw.

torchrun --nproc-per-node 4 tests/functional_job.py SNIPPET
"""

import contextlib
import io
import json
import os
import runpy
import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.process_groups import _timeout_of, topology_of
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError
from tests.oracle import relative_error


def error_of(call, *args, **kwargs) -> str | None:
    try:
        call(*args, **kwargs)
    except ContextParallelError as error:
        return str(error)
    return None


def whole(tokens: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, 4, 8, generator=generator, dtype=torch.float64)


def attend(algo: str, tokens: int, **settings) -> Tensor:
    x = cp.shard(whole(tokens), 1, algo=algo)
    if algo in cp.available("linear"):
        return cp.linear_attention(x, x, x, algo=algo, decay=0.9, **settings)
    return cp.attention(x, x, x, algo=algo, **settings)


def without_a_group() -> dict[str, object]:
    """Before init_process_group."""
    x = whole(16)
    return {
        "shard": error_of(cp.shard, x, 1, algo="zigzag"),
        "attention": error_of(cp.attention, x, x, x, algo="zigzag"),
        "linear": error_of(cp.linear_attention, x, x, x, decay=0.5),
    }


def uneven(algo: str) -> dict[str, object]:
    """510 tokens without seq_len, after 512 and before it with seq_len; all in one job."""
    even = attend(algo, 512).shape[1]
    first = error_of(attend, algo, 510)
    right = attend(algo, 510, seq_len=510).shape[1]
    again = error_of(attend, algo, 510)
    return {"even": even, "first": first, "right": right, "again": again}


def absent() -> dict[str, object]:
    """Rank 1 does not come: to a call, to the making of a further group."""
    found: dict[str, object] = {}
    dist.barrier()  # whoever comes much later than the others makes no such group with them
    groups = [dist.new_group(timeout=timedelta(seconds=2)) for _ in range(2)]
    of_group = topology_of(groups[1])
    of_group.channel("first")
    if dist.get_rank() != 1:
        for name, call in {
            "call": lambda: cp.attention(*[whole(4)] * 3, algo="zigzag", group=groups[0]),
            "group": lambda: of_group.channel("second"),
        }.items():
            try:
                call()
            except CommunicationError as error:
                found[name] = str(error)
    dist.barrier()
    return found


def timeouts() -> list[float]:
    """In seconds, of the further groups that calls have made so far."""
    return [_timeout_of(reference()).total_seconds() for reference in topology_of(None)._further]


def snippet(file: Path) -> dict[str, object]:
    """The README's, as it is printed there."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        names = runpy.run_path(str(file))
    generator = torch.manual_seed(0)
    q, k, v = (torch.randn(1, 512, 8, 64, generator=generator).transpose(1, 2) for _ in range(3))
    want = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
    return {"printed": printed.getvalue(), "error": relative_error(names["whole"], want)}


def main() -> None:
    found: dict[str, object] = {"without_a_group": without_a_group()}
    file = Path(sys.argv[1])
    found["snippet"] = snippet(file)
    # What the snippet left in torchrun's store is of a group that is no more.
    dist.init_process_group(
        "gloo",
        init_method=f"file://{file.with_suffix('.store')}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=20),
    )
    for algo in cp.available():
        found[algo] = uneven(algo)
    found["timeouts"] = timeouts()
    found["absent"] = absent()
    print(json.dumps(found))
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    main()
