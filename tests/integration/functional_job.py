"""A program on the functional interface, as a user would write it: functional_job.py ALGO..."""

import sys

import torch
import torch.distributed as dist

import megatron_cp_plugin as cp


def main(algos):
    dist.init_process_group("gloo")
    size = dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    whole = [torch.randn(1, 120, size, 8, generator=generator) for _ in range(3)]
    for algo in 2 * algos:
        q, k, v = (cp.shard(x, 1, algo=algo).requires_grad_() for x in whole)
        out = cp.attention(q, k, v, algo=algo)
        out.sum().backward()
        cp.unshard(out, 1, algo=algo)
    dist.destroy_process_group()
    cp.release()


main(sys.argv[1:])
