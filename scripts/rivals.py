"""Other packages' context parallelism behind one call, for benchmark_attention.py.

Every adapter takes and returns local zigzag shards [B,S,H,D] like ours; of packed documents zigzag
inside each, as Transformer Engine wants its THD form. yunchang is not here: its release 0.6.4 has
no backward with torch's kernels.
"""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.errors import ConfigError

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]

NAMES = ("te:p2p", "te:all_gather", "te:a2a", "te:a2a+p2p", "ring_flash_attn:zigzag")
PACKED = ("te:p2p", "te:all_gather", "te:a2a")  # those that take packed documents

_MODULES = {"te": "transformer_engine", "ring_flash_attn": "ring_flash_attn"}


def installed(names: tuple[str, ...] = NAMES) -> tuple[str, ...]:
    """Those of the rivals whose package is here.

    Call it before the first use of cuDNN: Transformer Engine's library wants to load its own.
    """
    found = []
    for name in names:
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
    name: str,
    heads: int,
    kv_heads: int,
    head_dims: tuple[int, int],
    causal: bool,
    bounds: tuple[int, ...] | None = None,
) -> Attention:
    """A rival's attention over the default process group.

    Args: head_dims: of q and k, and of v. bounds: 0, ..., N: where packed documents begin and end,
        all multiples of twice the number of ranks.

    Raises: ConfigError if the name is unknown, or the rival has no use for these nodes, or takes no
    documents.
    """
    package, _, mode = name.partition(":")
    if name not in NAMES:
        raise ConfigError(f"unknown rival {name!r}: use one of {', '.join(NAMES)}")
    if bounds is not None:
        if name not in PACKED:
            raise ConfigError(f"{name} takes no documents here: use one of {', '.join(PACKED)}")
        return _thd(mode, heads, kv_heads, head_dims, bounds)
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


def _thd(
    mode: str, heads: int, kv_heads: int, head_dims: tuple[int, int], bounds: tuple[int, ...]
) -> Attention:
    """Transformer Engine's THD form: causal within documents, their lengths as all ranks have them
    together.
    """
    import transformer_engine.pytorch as te

    module = te.DotProductAttention(
        heads,
        head_dims,
        num_gqa_groups=kv_heads,
        attn_mask_type="padding_causal",
        qkv_format="thd",
        attention_dropout=0.0,
    ).cuda()
    ranks = list(range(dist.get_world_size()))
    module.set_context_parallel_group(dist.group.WORLD, ranks, torch.cuda.Stream(), mode)
    # One tensor for all: that is how it knows that there is no padding between documents.
    lengths = torch.tensor(bounds, dtype=torch.int32, device="cuda")
    longest = max(stop - start for start, stop in pairwise(bounds))
    packed = {
        **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), lengths),
        **dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), lengths),
        **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
    }

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = module(q[0], k[0], v[0], **packed)
        return out.view(*q.shape[:3], head_dims[1])

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
