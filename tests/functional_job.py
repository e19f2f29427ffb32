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
from megatron_cp_plugin.core.layout import LAYOUTS, positions
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError
from tests.oracle import relative_error

# Each is another call than the first one of `mistakes`.
WRONG = {
    "algo": "allgather",
    "chunks": 2,
    "causal": False,
    "scale": 0.1,
    "window": -1,
    "kernel": "reference",
    "cu_seqlens": torch.tensor([0, 5, 16]),
    "spans": [(0, 16, 0, 16, "full")],
}


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


def by_hand() -> dict[str, object]:
    """Shards of unequal lengths that `cp.shard` did not make."""
    x = whole(126 + dist.get_rank() % 2)
    return {"error": error_of(cp.attention, x, x, x, algo="ring")}


def two_lengths() -> dict[str, object]:
    """Ranks that were told different global lengths."""
    x = whole(4)
    seq_len = 16 + 2 * (dist.get_rank() == 2)
    return {"error": error_of(cp.attention, x, x, x, algo="ring", seq_len=seq_len)}


def wrong_layout() -> dict[str, object]:
    """Positions of rank 1 are those of another layout."""
    rank = dist.get_rank()
    layout = LAYOUTS["contiguous" if rank == 1 else "zigzag"]
    held = positions(layout, rank, 4, 32)
    right = positions(LAYOUTS["zigzag"], rank, 4, 32)
    return {
        "right": error_of(cp.check_layout, right, algo="zigzag"),
        "wrong": error_of(cp.check_layout, held, algo="zigzag"),
    }


def mistakes() -> dict[str, object]:
    """Rank 1 makes another call than the others, the first one of a group; then all the same."""
    x = cp.shard(whole(16), 1, algo="zigzag").requires_grad_()
    calls = {
        "dtype": {"q": x.float(), "k": x.float(), "v": x.float()},
        "batch": dict.fromkeys("qkv", x.expand(2, -1, -1, -1)),
        "heads": {"k": x[:, :, :2], "v": x[:, :, :2]},
        "value dim": {"v": x[..., :4]},
        "trained": {"q": x.detach()},
        **{name: {name: value} for name, value in WRONG.items()},
    }
    found: dict[str, object] = {}
    for name, wrong in calls.items():
        right = {"q": x, "k": x, "v": x, "algo": "zigzag", "group": dist.new_group()}
        found[name] = error_of(cp.attention, **(right | (wrong if dist.get_rank() == 1 else {})))
        cp.attention(**right).sum().backward()
    other = x.detach().float() if dist.get_rank() == 1 else x
    found["unshard"] = error_of(cp.unshard, other, 1, algo="zigzag")
    linear = {"algo": "lasp2", "layout": "zigzag", "group": dist.new_group()}
    decay = 0.5 if dist.get_rank() == 1 else 0.25
    found["decay"] = error_of(cp.linear_attention, x, x, x, decay=decay, **linear)
    if dist.get_rank() == 1:
        softmax = {"algo": "zigzag", "group": linear["group"]}
        found["function"] = error_of(cp.attention, x, x, x, **softmax)
    else:
        found["function"] = error_of(cp.linear_attention, x, x, x, decay=0.5, **linear)
    return found


def repeated() -> dict[str, object]:
    """Calls that all ranks have made, then some of them on rank 1 and another on the others."""
    group = dist.new_group()
    x, longer = (cp.shard(whole(tokens), 1, algo="zigzag", group=group) for tokens in (16, 32))
    of = {"algo": "zigzag", "group": group}

    def attention(x: Tensor = x, **settings) -> None:
        cp.attention(x, x, x, **of, **settings)

    def linear(**settings) -> None:
        how = {"algo": "lasp2", "layout": "zigzag", "group": group}
        cp.linear_attention(x, x, x, decay=0.5, **how, **settings)

    positions_held = cp.shard(torch.arange(16), 0, **of)
    full, half = [(0, 16, 0, 16, "full")], [(0, 16, 0, 9, "full")]
    calls = {
        "causal": (attention, lambda: attention(causal=False)),
        "dtype": (attention, lambda: attention(x.float())),
        "tokens": (attention, lambda: attention(longer)),
        "length": (lambda: attention(seq_len=16), lambda: attention(longer, seq_len=16)),
        "no length": (lambda: attention(seq_len=16), attention),
        "documents": (
            lambda: attention(cu_seqlens=[0, 5, 16]),
            lambda: attention(cu_seqlens=torch.tensor([0, 7, 16])),
        ),
        "spans": (lambda: attention(spans=full), lambda: attention(spans=half)),
        "sink": (attention, lambda: attention(sink=x.new_zeros(4))),
        "function": (attention, linear),
        "unshard": (lambda: cp.unshard(x, 1, **of), attention),
        "layout": (lambda: cp.check_layout(positions_held, **of), attention),
        "window": (attention, lambda: attention(window=1.5)),
        "list": (attention, lambda: attention(sink=[0.0])),
        "state": (linear, lambda: linear(initial_state=x.new_zeros(1, 4, 8, 8))),
    }
    found: dict[str, object] = {}
    for name, (right, wrong) in calls.items():
        for _ in range(2):
            right()
            if name not in ("length", "window", "list"):
                wrong()
        found[name] = error_of(wrong if dist.get_rank() == 1 else right)
        right()
    return found


def unsplit() -> dict[str, object]:
    """A loss of each rank on a tensor that is put together again; tokens of unequal numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x = whole(18).requires_grad_()
    sum(((other + 1) * x).sin().sum() for other in range(size)).backward()
    c = cp.Context(algo="zigzag", seq_len=18)
    own = c.shard(x.detach()).requires_grad_()
    with cp.record_communication() as log:
        ((rank + 1) * c.unshard(own)).sin().sum().backward()
    error = (own.grad - c.shard(x.grad)).abs().max().item()
    return {
        "error": error,
        "forward": log.bytes(phase="forward"),
        "backward": log.bytes(phase="backward"),
        "refused": error_of(cp.unshard, own, 1, algo="ring", seq_len=18),
    }


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
    found["by_hand"] = by_hand()
    found["two_lengths"] = two_lengths()
    found["wrong_layout"] = wrong_layout()
    found["mistakes"] = mistakes()
    found["repeated"] = repeated()
    found["unsplit"] = unsplit()
    found["timeouts"] = timeouts()
    found["absent"] = absent()
    print(json.dumps(found))
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    main()
