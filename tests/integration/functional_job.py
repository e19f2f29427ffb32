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
    c = cp.Context(algo=algo)
    q, k, v = (c.shard(x).requires_grad_() for x in whole)
    if algo in cp.available("softmax"):
        out = c.attention(q, k, v)
    else:
        out = c.linear_attention(q, k, v, decay=0.9)
    out.sum().backward()
    c.unshard(out)
dist.all_reduce(out.detach().sum())
if not forget:
    dist.destroy_process_group()
    cp.release()
