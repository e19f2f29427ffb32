"""KV all-gather: every rank computes its own queries against all keys."""

from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.algorithms.grid import GridAlgorithm
from megatron_cp_plugin.algorithms.grid_placements import (
    GatheredPlacement,
    GridBlocksPlacement,
    GridPlacement,
)
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.layout import Layout, Zigzag
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register


@register("allgather")
class KvAllGather(GridAlgorithm):
    """K and V gathered by groups of heads, the next group during the attention of the present one.

    The grid of `attention2d` with a single column. With S = N/P tokens a rank, elements of e
    bytes and gradients of g, a rank sends B*S*(P-1) times 2GDe forward, 2GD(e+g) backward.

    Kept for the backward: q, k, v, out and lse of the rank's own tokens. Of the gathered K and V
    there are two groups of heads at a time, `gathered_mib` at most. All that a rank holds beside
    its inputs and results is that of `attention2d` with C = 1 and R = P.

    Over peer memory nothing is gathered: copy engines push block by block, straight from the owner,
    and a rank holds two of them at a time. With a causal mask it sends 3/4 of the bytes at most,
    for a rank after the owner sees only the first of its two chunks.

    Source: the scheme of Llama 3 (section 3.3.2, context parallelism). Differs: by groups of
    heads, so that communication overlaps and memory is bounded.
    """

    layout: Layout = Zigzag()

    @dataclass(frozen=True)
    class Options(GridAlgorithm.Options):
        """Options of allgather.

        Attributes:
            gathered_mib: bound on the gathered K and V of a rank in MiB. More groups of heads are
                made until it holds; if single heads are too large the call is refused.
            chunks: number of groups of heads at least, if there are as many KV heads; 0: 4, or
                fewer where that would be too little work for each.
            gradients: dtype in which partial dK and dV travel; they are summed in float32.
            layout: "zigzag", Megatron's own; "contiguous"; or "thd", see ring.
        """

        gathered_mib: int = 1024
        layout: Literal["zigzag", "contiguous", "thd"] = "zigzag"

    options: Options
    cols = 1

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.layout = self.layout_for(options)
        self.gathered_bytes = options.gathered_mib * 2**20

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        """See Algorithm.layout_for."""
        assert isinstance(options, cls.Options)
        return NAMED[options.layout]

    @property
    def kind(self) -> type[GridPlacement]:
        """See GridAlgorithm.kind."""
        return GridBlocksPlacement if self.pushed else GatheredPlacement

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        """See Algorithm.check."""
        assert isinstance(options, cls.Options)
        super().check(options, size=size, heads=heads, kv_heads=kv_heads, causal=causal)
        if options.gathered_mib < 1:
            raise ConfigError(
                f"allgather needs gathered_mib >= 1, got {options.gathered_mib}: leave it out"
            )
