"""A program on the functional interface, as a user would write it.

functional_job.py [--forget] ALGO...

What its globals hold is held until Python is finalized: the last output, and with `--forget` the
process groups too.
"""

import sys

import torch
import torch.distributed as dist

import megatron_cp_plugin as cp

words = sys.argv[1:]
forget = "--forget" in words
algos = [word for word in words if word != "--forget"]
dist.init_process_group("gloo")
size = dist.get_world_size()
generator = torch.Generator().manual_seed(0)
whole = [torch.randn(1, 120, size, 8, generator=generator) for _ in range(3)]
for algo in 2 * algos:
    q, k, v = (cp.shard(x, 1, algo=algo).requires_grad_() for x in whole)
    if algo in cp.available("softmax"):
        out = cp.attention(q, k, v, algo=algo)
    else:
        out = cp.linear_attention(q, k, v, algo=algo, decay=0.9)
    out.sum().backward()
    cp.unshard(out, 1, algo=algo)
dist.all_reduce(out.detach().sum())
if not forget:
    dist.destroy_process_group()
    cp.release()
