"""The functional interface: torch alone, no Megatron."""

from functools import cache

import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.core import layout as layouts
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.comm import communicating_in
from megatron_cp_plugin.core.function import attend
from megatron_cp_plugin.core.topology import Topology

Group = dist.ProcessGroup | Topology | None


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algo: str,
    group: Group = None,
    causal: bool = True,
    scale: float | None = None,
    kernel: str = "auto",
    seq_len: int | None = None,
    **options: object,
) -> Tensor:
    """Softmax attention over a sequence that is split among the ranks of a group.

    A collective operation: all ranks of the group call it with the same settings.

    Args:
        q: [B,S,H,D]; k, v: [B,S,G,D], G dividing H; this rank's shards as `shard` gives them.
        algo: a name of `available()`.
        group: process group of the context-parallel ranks; None: all processes.
        scale: of the scores, default D**-0.5.
        kernel: "auto" or a kernel's name.
        seq_len: global length; needed only where ranks hold unequally many tokens.
        options: of the algorithm.

    Returns: out [B,S,H,D] in q's dtype; differentiable.
    Raises: ConfigError for an unknown name or option, ContextParallelError for shapes that do not
    fit, KernelUnavailableError if the kernel cannot serve them.
    """
    algorithm = _algorithm(algo, group, options)
    if seq_len is None:
        seq_len = q.shape[1] * algorithm.topology.size
    return attend(
        q,
        k,
        v,
        algorithm=algorithm,
        seq_len=seq_len,
        causal=causal,
        scale=scale,
        kernel=kernel,
    )


def shard(x: Tensor, dim: int, *, algo: str, group: Group = None, **options: object) -> Tensor:
    """This rank's part of a whole tensor, in the algorithm's layout.

    Args: x: the whole tensor, the same on all ranks; N tokens along `dim`.

    Returns: S tokens along `dim`, contiguous; differentiable (the gradient is this rank's part).
    Raises: ConfigError for an unknown name or option.
    """
    topology = _topology(group)
    layout = registry.layout_of(algo, options)
    return layouts.shard(x, dim, layout, topology.rank, topology.size)


def unshard(
    x: Tensor,
    dim: int,
    *,
    algo: str,
    group: Group = None,
    seq_len: int | None = None,
    **options: object,
) -> Tensor:
    """The whole tensor of all ranks' parts, in global order: the inverse of `shard`.

    Args: x: S tokens along `dim`. seq_len: as in `attention`.

    Returns: N tokens along `dim`, the same on all ranks. Not differentiable.
    Raises: ConfigError for an unknown name or option.
    """
    topology = _topology(group)
    size = topology.size
    layout = registry.layout_of(algo, options)
    total = x.shape[dim] * size if seq_len is None else seq_len
    moved = x.detach().movedim(dim, 0).contiguous()
    lengths = [layout.length(rank, size, total) for rank in range(size)]
    parts = [moved.new_empty((length, *moved.shape[1:])) for length in lengths]
    others = [rank for rank in range(size) if rank != topology.rank]
    with communicating_in("forward"):
        topology.channel("unshard").exchange(
            [(moved, rank) for rank in others], [(parts[rank], rank) for rank in others]
        ).wait()
    parts[topology.rank] = moved
    return layouts.unshard(parts, 0, layout).movedim(0, dim)


def _topology(group: Group) -> Topology:
    return group if isinstance(group, Topology) else Topology.of(group)


def _algorithm(algo: str, group: Group, options: dict[str, object]) -> Algorithm:
    return _cached(algo, _topology(group), tuple(sorted(options.items())))


@cache
def _cached(algo: str, topology: Topology, options: tuple[tuple[str, object], ...]) -> Algorithm:
    return registry.create(algo, topology, dict(options))


