"""The one configuration object, read and checked once and then passed down."""

from dataclasses import dataclass

from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.registry import layout_of


@dataclass(frozen=True)
class ContextParallelConfig:
    """Which algorithm splits the sequence, over how many ranks, with which kernel.

    Attributes:
        algo: a name of `available()`. size: context_parallel_size. kernel: "auto" or a name of
        `kernels.kernel_names()`. options: (name, value) pairs of the algorithm's own options.
        recompute_attention: whether activation checkpointing runs attention a second time.
    """

    algo: str
    size: int
    kernel: str = "auto"
    options: tuple[tuple[str, object], ...] = ()
    recompute_attention: bool = False

    @property
    def layout(self) -> Layout:
        """Raises: ConfigError if the algorithm or an option is unknown."""
        return layout_of(self.algo, dict(self.options))

    def check_sequence(self, seq_length: int) -> None:
        """Raises: ConfigError if the ranks cannot hold equally many tokens in equal chunks."""
        multiple = self.layout.multiple(self.size)
        rest = seq_length % multiple
        if not rest:
            return
        factor = multiple // self.size
        needs = "context_parallel_size" if factor == 1 else f"{factor} * context_parallel_size"
        below = seq_length - rest
        lengths = f"{below} or {below + multiple}" if below else str(multiple)
        other = ""
        if factor > 1 and seq_length % self.size == 0:
            other = ", or --context-parallel-algo ring"
        raise ConfigError(
            f"{self.algo} needs seq_length divisible by {needs} = {multiple}, got {seq_length}: "
            f"use {lengths}{other}"
        )
