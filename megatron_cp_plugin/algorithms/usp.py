"""USP: Ulysses inside teams of ranks, a ring between them."""

from dataclasses import dataclass
from math import gcd
from typing import Literal

from megatron_cp_plugin.algorithms.ring import Route, Rule, Rules
from megatron_cp_plugin.algorithms.ulysses import Ulysses
from megatron_cp_plugin.core.algorithm import Algorithm, divisors, number
from megatron_cp_plugin.core.execution.transport import Wanted
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register


@register("usp")
class Usp(Ulysses):
    """Unified sequence parallelism: U consecutive ranks split the heads, P/U teams are a ring.

    The U ranks of a team together hold one chunk (contiguous) or two (zigzag) of the P/U or 2P/U
    of the sequence, so the ring between teams is the ordinary one, and the layout of the tokens
    that of the ring on all P ranks. Where U does not divide H heads of zeros are added, as in
    `ulysses`.

    With S = N/P tokens a rank a rank sends what `ulysses` of U ranks sends, and what the ring of
    P/U ranks sends with N tokens, H/U query heads and V/U KV heads, V = lcm(G, U).

    Kept for the backward, and memory beside it: as `ulysses` with U ranks; the ring holds two
    blocks of 2V/U heads more at a time.

    Source: USP (Fang and Zhao), sections 3 and 4. Differs: pipelined by groups of heads; the
    backward may rotate queries.
    """

    @dataclass(frozen=True)
    class Options(Ulysses.Options):
        """Options of usp.

        Attributes:
            ulysses: U; 0: as many ranks as the KV heads allow without being copied, which is the
                largest common divisor of ranks and KV heads.
            layout: "zigzag", Megatron's own; "contiguous"; or "thd", see ring.
            backward, gradients, route, transport: of the ring, see there.
        """

        # A team of one rank is the ring, one of all ranks is ulysses.
        ulysses: int = number(0, lambda size: divisors(size)[1:-1])
        layout: Literal["zigzag", "contiguous", "thd"] = "zigzag"
        backward: Rule = "auto"
        gradients: Literal["float32", "model"] = "float32"
        route: Route = "ring"
        transport: Wanted = "auto"

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        self.rules = Rules(options.backward, "local", options.gradients, options.route)

    def degree(self, kv_heads: int) -> int:
        return self.options.ulysses or gcd(self.topology.size, kv_heads)

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        assert isinstance(options, cls.Options)
        super().check(options, size=size, heads=heads, kv_heads=kv_heads, causal=causal)
        if options.ulysses < 0 or (options.ulysses and size % options.ulysses):
            allowed = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
            raise ConfigError(
                f"usp needs ulysses to divide context_parallel_size = {size}, got "
                f"{options.ulysses}: use one of {allowed}, or 0 to have it chosen"
            )
