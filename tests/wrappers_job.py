"""What wraps programs on the functional interface, on real ranks over gloo: wrappers_job.py WHAT.

Prints as JSON what a rank found.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.parallel import DistributedDataParallel

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import CommunicationError

HEADS, DIM = 4, 4
WIDTH = HEADS * DIM


class Block(nn.Module):
    """A residual block of attention; without an algorithm over the whole sequence."""

    def __init__(self, algo: str | None, group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, dtype=torch.float64)
        self.out = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        self.algo, self.group = algo, group

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, DIM)).unbind(2)
        if self.algo is None:
            q, k, v = (y.transpose(1, 2) for y in (q, k, v))
            out = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        else:
            out = cp.attention(q, k, v, algo=self.algo, group=self.group)
        return x + self.out(out.flatten(2))


def two_blocks(algo: str | None, group: dist.ProcessGroup | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(algo, group), Block(algo, group))


def wrapped() -> dict[str, object]:
    """Errors of gradients by data parallelism around context parallelism of half the ranks."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "cp"))
    group, all_ranks = mesh["cp"].get_group(), init_device_mesh("cpu", (size,))
    whole = torch.randn(2, 24, WIDTH, dtype=torch.float64, generator=torch.manual_seed(1))
    reference = two_blocks(None)
    reference(whole).square().mean().backward()
    want = {name: p.grad for name, p in reference.named_parameters()}

    def ddp(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model)

    def fsdp(model: nn.Module) -> nn.Module:
        for module in (*model.children(), model):
            fully_shard(module, mesh=all_ranks)
        return model

    def compiled(model: nn.Module) -> nn.Module:
        torch._dynamo.reset()
        return torch.compile(ddp(model), backend="eager")

    ways: dict[str, Callable[[nn.Module], nn.Module]] = {"ddp": ddp, "fsdp": fsdp}
    found: dict[str, object] = {}
    for algo in cp.available("softmax"):
        sample = whole[mesh["dp"].get_local_rank()][None]
        own = cp.shard(sample, 1, algo=algo, group=group)
        for way, wrap in (ways | ({"compiled": compiled} if algo == "zigzag" else {})).items():
            inner = two_blocks(algo, group)
            outer = wrap(inner)  # lives until the gradients are summed
            outer(own).square().mean().backward()
            off = {}
            for name, parameter in inner.named_parameters():
                grad = parameter.grad
                grad = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
                off[name] = (grad - want[name]).abs().max().item()
            found[f"{algo}, {way}"] = max(off.values())
    return found


def lost(how: str) -> dict[str, str]:
    """Rank 1 is killed, or put to sleep, in the middle of a step; what the others say."""
    rank, pids = dist.get_rank(), [0] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    group = dist.new_group(timeout=timedelta(seconds=4))
    x = cp.shard(torch.randn(1, 24, 4, 8), 1, algo="zigzag").requires_grad_()
    out = cp.attention(x, x, x, algo="zigzag", group=group)
    dist.barrier()  # the others have the forward's messages
    if rank == 1:
        time.sleep(0.5)  # and have left the barrier
        os.kill(os.getpid(), getattr(signal, how))
    elif rank == 0:
        time.sleep(1)  # and sends to a rank that is gone
    found = {}
    for name, call in {
        "backward": lambda: out.sum().backward(),
        "forward": lambda: cp.attention(x, x, x, algo="zigzag", group=group),
    }.items():
        try:
            call()
        except CommunicationError as error:
            found[name] = str(error)
    if how == "SIGSTOP" and rank == 0:
        os.kill(pids[1], signal.SIGKILL)
    return found


def main() -> None:
    what, *words = sys.argv[1:]
    dist.init_process_group("gloo")
    print("FOUND" + json.dumps({"wrapped": wrapped, "lost": lost}[what](*words)), flush=True)
    if what == "lost":
        os._exit(0)  # a rank is missing from an orderly end
    dist.destroy_process_group()
    cp.release()


if __name__ == "__main__":
    main()
