"""Base of the algorithms that send blocks from rank to rank, following their placement."""

from dataclasses import dataclass

from megatron_cp_plugin.core.algorithm import Algorithm, group_counts, number
from megatron_cp_plugin.core.execution.transport import Transport, Wanted
from megatron_cp_plugin.core.head_groups import HeadGroup, successive_groups
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology


class PointToPoint(Algorithm):
    """Attention by blocks that go from rank to rank; subclasses say where they meet."""

    windows = True

    @dataclass(frozen=True)
    class Options(Algorithm.Options):
        """Options of all of them.

        Attributes:
            chunks: groups of heads that are computed one after another, at most as many as KV
                heads; 0: two for long sequences without windows, documents and spans, else one.
            transport: "group" (the process group's own, NCCL or gloo), "peer" (copy engines over
                peer memory: GPUs of one node, of which each exchanges with one other at a time and
                holds two blocks of others at most), or "auto", peer where that is possible.
        """

        chunks: int = number(0, group_counts, least=0)
        transport: Wanted = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.transport = Transport(self.name, topology, options.transport)

    def head_groups(self, shape: Shape, mask: Mask) -> tuple[HeadGroup, ...]:
        """The groups of a placement, as many as option `chunks` says."""
        # Under other masks there is little to compute, and each group costs calls and copies.
        elements = 0 if mask.special else shape.elements(self.topology.size)
        return successive_groups(shape.heads, shape.kv_heads, self.options.chunks, elements)
