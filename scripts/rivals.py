"""Other packages' context parallelism behind one call, for benchmark_attention.py.

Every adapter takes and returns local zigzag shards [B,S,H,D] like ours. yunchang is not here: its
release 0.6.4 has no backward with torch's kernels.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.process_groups import topology_of
from megatron_cp_plugin.errors import ConfigError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

NAMES = ("te:p2p", "te:all_gather", "te:a2a", "te:a2a+p2p", "ring_flash_attn:zigzag")


_MODULES = {"te": "transformer_engine", "ring_flash_attn": "ring_flash_attn"}


def installed() -> tuple[str, ...]:
    """Names of the rivals whose package is here.

    Call it before the first use of cuDNN: Transformer Engine's library wants to load its own.
    """
    found = []
    for name in NAMES:
        module = _MODULES[name.split(":")[0]]
        if find_spec(module) is not None:
            try:
                import_module("transformer_engine.pytorch" if module[0] == "t" else module)
            except (ImportError, OSError) as error:
                print(f"{module} is installed but cannot be loaded: {error}", file=sys.stderr)
                continue
            found.append(name)
    return tuple(found)


def make(
    name: str, heads: int, kv_heads: int, head_dims: tuple[int, int], causal: bool
) -> Attention:
    """A rival's attention over the default process group.

    Args: head_dims: of q and k, and of v.

    Raises: ConfigError if the name is unknown, or a2a+p2p has no use for these nodes.
    """
    package, _, mode = name.partition(":")
    if name not in NAMES:
        raise ConfigError(f"unknown rival {name!r}: use one of {', '.join(NAMES)}")
    if package == "te":
        return _transformer_engine(mode, heads, kv_heads, head_dims, causal)
    return _ring_flash_attn(causal)


def _transformer_engine(
    mode: str, heads: int, kv_heads: int, head_dims: tuple[int, int], causal: bool
) -> Attention:
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        heads,
        head_dims,
        num_gqa_groups=kv_heads,
        attn_mask_type="causal" if causal else "no_mask",
        qkv_format="bshd",
        attention_dropout=0.0,
    ).cuda()
    ranks = list(range(dist.get_world_size()))
    groups = _by_node(ranks) if mode == "a2a+p2p" else dist.group.WORLD
    module.set_context_parallel_group(groups, ranks, torch.cuda.Stream(), mode)

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return module(q, k, v).view(*q.shape[:3], head_dims[1])

    return attention


def _by_node(ranks: list[int]) -> list[dist.ProcessGroup]:
    """This rank's group inside its node, and that of the same places in all nodes."""
    nodes = topology_of(None).nodes
    inside = nodes.count(nodes[0])
    if inside in (1, len(ranks)) or [nodes[r] for r in ranks] != sorted(nodes):
        raise ConfigError(f"te:a2a+p2p needs several nodes of several ranks, got nodes {nodes}")
    within = [ranks[start : start + inside] for start in range(0, len(ranks), inside)]
    across = [ranks[place::inside] for place in range(inside)]
    found = []
    for members in (within, across):
        group, _ = dist.new_subgroups_by_enumeration(members)
        assert isinstance(group, dist.ProcessGroup)
        found.append(group)
    return found


def _ring_flash_attn(causal: bool) -> Attention:
    from ring_flash_attn import zigzag_ring_flash_attn_func

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return zigzag_ring_flash_attn_func(q, k, v, causal=causal)

    return attention
