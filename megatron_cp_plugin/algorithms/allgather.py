"""KV all-gather: every rank computes its own queries against all keys."""

from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.attention2d import GatheredPlacement, GridAlgorithm
from megatron_cp_plugin.core.algorithm import number
from megatron_cp_plugin.core.call import HeadGroup, Shape, head_groups
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.registry import register


@register("allgather")
class KvAllGather(GridAlgorithm):
    """K and V gathered by groups of heads, the next group during the attention of the present one.

    The grid of `attention2d` with a single column. With S = N/P tokens a rank, elements of e
    bytes and gradients of g, a rank sends B*S*(P-1) times 2GDe forward, 2GD(e+g) backward; less
    where blocks are not gathered: with a window or documents, and, over peer memory, 3/4 in the
    mean with a causal mask, for a rank after the owner sees only the first of its two chunks.
    Memory: docs/algorithms.md.

    Source: the scheme of Llama 3 (section 3.3.2, context parallelism). Differs: by groups of
    heads, so that communication overlaps and memory is bounded.
    """

    @dataclass(frozen=True)
    class Options(GridAlgorithm.Options):
        """Options of allgather.

        Attributes:
            gathered_mib: bound on the gathered K and V of a rank in MiB. More than `chunks` groups
                of heads are made until it holds; if single heads are too large the call is refused.
            layout: "zigzag", Megatron's own; "contiguous"; "documents", see zigzag; or "thd", see
                ring.
        """

        gathered_mib: int = number(1024, least=1)
        layout: Literal["zigzag", "contiguous", "documents", "thd"] = "zigzag"

    options: Options

    def grid_shape(self, shape: Shape) -> tuple[int, int]:
        return self.topology.size, 1

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        """See GridAlgorithm.head_groups: more groups if the bound on gathered K and V needs them.

        Raises: ContextParallelError if it cannot be kept.
        """
        groups, size = super().head_groups(shape, mask), self.topology.size
        # One group is computed with while the next one arrives, or is put in order.
        blocks = 2 * size if self.kind(mask) is GatheredPlacement else min(2, size - 1)
        tokens = max(self.layout.length(rank, size, shape.seq_len) for rank in range(size))
        row = (shape.head_dim + shape.value_dim) * shape.element_bytes
        head, count = blocks * shape.batch * tokens * row / 2**20, len(groups)
        while size > 1 and groups[0].kv_heads * head > self.options.gathered_mib:
            count += 1
            if count > shape.kv_heads:
                raise ContextParallelError(
                    f"gathered K and V take {head:.0f} MiB even by single heads, got a bound of "
                    f"{self.options.gathered_mib} MiB: raise it, or shorten the sequence"
                )
            groups = head_groups(shape.heads, shape.kv_heads, count, share_kv=False)
        return groups
