"""A training script that goes on to make a process group of its own, and tells of all there are."""

import runpy
import sys
from datetime import timedelta
from pathlib import Path


def make_group_of_all() -> None:
    """By all ranks, in the ordinary way; prints the size, minutes and name of each other one."""
    import torch
    from torch import distributed as dist
    from torch.distributed import distributed_c10d

    cpu = torch.device("cpu")
    groups = [
        f"{group.size()} {group._get_backend(cpu).options._timeout.total_seconds() / 60:g} "
        f"{group.group_desc}"
        for group in distributed_c10d._world.pg_map
    ]
    group = dist.new_group(list(range(dist.get_world_size())), timeout=timedelta(seconds=8))
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    print(f"rank {dist.get_rank()} summed {int(total)}, groups: {', '.join(sorted(groups))}.")


if __name__ == "__main__":
    if "--hybrid-layer-pattern" in sys.argv:
        runpy.run_path(str(Path(__file__).with_name("hybrid_job.py")), run_name="__main__")
    else:
        from megatron_cp_plugin.harness import pretrain

        pretrain.run()
    make_group_of_all()
