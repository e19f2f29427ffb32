"""USP: Ulysses inside teams of ranks, a ring, or a grid, between them."""

from dataclasses import dataclass, field, replace
from math import gcd
from typing import Literal

from megatron_cp_plugin.algorithms.attention2d import GridBlocksPlacement, cheapest, row_major
from megatron_cp_plugin.algorithms.ring import BackwardRule
from megatron_cp_plugin.algorithms.ulysses import Ulysses
from megatron_cp_plugin.core.algorithm import Algorithm, divisors, number
from megatron_cp_plugin.core.call import HeadGroup, Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.document_layout import BalancedTeams
from megatron_cp_plugin.core.layout import Grouped, Layout
from megatron_cp_plugin.core.placement import BlockPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import register


@register("usp")
class Usp(Ulysses):
    """Unified sequence parallelism: U consecutive ranks split the heads, P/U teams are a ring.

    With route "grid" the teams are a grid of R rows and C columns, R * C = P/U, in place of the
    ring: queries meet keys as in `attention2d`, for each rank's share of the heads. With teams that
    are nodes, the bytes between nodes fall with the root of the number of nodes.

    The U ranks of a team together hold one chunk (contiguous) or two (zigzag) of the P/U or 2P/U
    of the sequence, so the ring between teams is the ordinary one, and tokens have the layout of
    the ring on all P ranks, but for documents (see option layout). Where U does not divide H heads
    of zeros are added, as in `ulysses`.

    With S = N/P tokens a rank a rank sends what `ulysses` of U ranks sends, and what the ring of
    P/U ranks sends with N tokens, H/U query heads and V/U KV heads, V = lcm(G, U); or the grid of
    as many ranks, see `attention2d`, where a mask hides nothing, and less where it hides rows.
    Memory: docs/algorithms.md.

    Where several groups of heads share a KV head, its keys cross between teams once, unless they
    go on in a relay: a rank would hold the keys of all teams.

    Source: USP (Fang and Zhao), sections 3 and 4. Differs: pipelined by groups of heads; the
    backward may rotate queries. Of the grid: Attention2D, section 5.
    """

    @dataclass(frozen=True)
    class Options(Ulysses.Options):
        """Options of usp.

        Attributes:
            ulysses: U; 0: as many ranks as the KV heads allow without being copied, which is the
                largest common divisor of ranks and KV heads.
            layout: "zigzag", Megatron's own; "contiguous"; "documents", see zigzag: with teams that
                are nodes, keys that a node needs cross once to it, through all its network cards;
                if U is given, a team's ranks hold its tokens in order; or "thd", see ring.
            route: of the ring, see there; or "grid".
            backward, gradients: of the ring, see there.
            keep: as of ulysses; "exchanged" keeps keys of other teams too, as "auto" of the ring.
            rows: R; 0: the number of rows that sends the fewest bytes.
        """

        # A team of one rank is the ring, one of all ranks is ulysses.
        ulysses: int = number(0, lambda size: divisors(size)[1:-1])
        layout: Literal["zigzag", "documents", "contiguous", "thd"] = "zigzag"  # type: ignore[assignment]
        backward: BackwardRule = "auto"
        gradients: Literal["float32", "model"] = "float32"
        route: Literal["auto", "ring", "straight", "double", "grid"] = field(
            default="auto", metadata={"worth_trying": lambda size: ("auto", "grid")}
        )
        rows: int = number(0, least=0)

    options: Options

    def __init__(self, topology: Topology, options: Options) -> None:
        super().__init__(topology, options)
        given = {name: getattr(options, name) for name in ("backward", "gradients", "route")}
        given["keep"] = "auto" if options.keep == "exchanged" else "local"
        self.rules = replace(self.rules, **given)  # not used where teams are a grid

    @classmethod
    def layout_for(cls, options: Algorithm.Options) -> Layout:
        """See Registered.layout_for: with "documents", that of teams whose size is given."""
        assert isinstance(options, cls.Options)
        if options.layout == "documents" and options.ulysses:
            return BalancedTeams(members=options.ulysses)
        return super().layout_for(options)

    def degree(self, kv_heads: int) -> int:
        return self.options.ulysses or gcd(self.topology.size, kv_heads)

    def between_teams(
        self, layout: Grouped, groups: tuple[HeadGroup, ...], shape: Shape, mask: Mask, phase: Phase
    ) -> BlockPlacement:
        """See Ulysses.between_teams: a ring or a grid."""
        if self.options.route != "grid":
            return super().between_teams(layout, groups, shape, mask, phase)
        rows, cols = self.grid_shape(shape, layout.members)
        several = 1 not in (rows, cols)
        nodes = self.topology.nodes[:: layout.members] if several else (0,) * rows * cols
        grid, backward = row_major(rows, cols, nodes), phase == "backward"
        return GridBlocksPlacement(layout, rows * cols, groups, grid=grid, backward=backward)

    def grid_shape(self, shape: Shape, members: int) -> tuple[int, int]:
        """R and C of the grid of teams. Args: members: of a team."""
        teams = self.topology.size // members
        return cheapest(teams, self.options.rows, shape.travel_bytes())

    @classmethod
    def check(
        cls, options: Algorithm.Options, *, size: int, heads: int, kv_heads: int, causal: bool
    ) -> None:
        assert isinstance(options, cls.Options)
        if options.rows and options.route != "grid":
            raise ConfigError(
                f"usp takes rows with route grid, got rows {options.rows} with route "
                f"{options.route}: leave rows out"
            )
        teams = size // (options.ulysses or gcd(size, kv_heads))
        for what, got, whole in (
            (f"ulysses to divide context_parallel_size = {size}", options.ulysses, size),
            (f"rows to divide its {teams} teams", options.rows, teams),
        ):
            if got and got not in divisors(whole):
                allowed = ", ".join(map(str, divisors(whole)))
                raise ConfigError(
                    f"usp needs {what}, got {got}: use one of {allowed}, or 0 to have it chosen"
                )
