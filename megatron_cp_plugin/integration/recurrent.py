"""Megatron's recurrent layers: gated delta nets and Mamba-2, whose states pass by `lasp2`.

States and the halo of short convolutions pass from rank to rank in the layout of the run, and begin
anew at each document; Megatron exchanges tokens for heads. Weights and checkpoints are Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.linear.convolution import short_convolution
from megatron_cp_plugin.core.linear.function import attend_linearly
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import check_padding, starts_of
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import GATED, MAMBA, Settings
from megatron_cp_plugin.kernels.linear import resolve_linear


class RecurrentSequence:
    """A micro-batch of this rank's tokens, as its recurrent layers go through it.

    Attributes:
        seq_len: Tokens of all ranks.
        documents: Where documents begin, as of `core.linear.function.attend_linearly`.
    """

    def __init__(self, runtime: Runtime, group: Any, tokens: int, packed: Any) -> None:
        """Args:
        runtime: The run's layout.
        group: The context-parallel group of the run.
        tokens: Of this rank.
        packed: A `DocumentMask`, or None.
        """
        group = getattr(packed, "group", None) or group
        self._algorithm, self._rank = runtime.recurrent_algorithm(group), group.rank()
        self.seq_len = tokens * group.size()
        self.documents = starts_of(packed, self.seq_len)
        check_padding(packed, self.seq_len, causal=True)

    def convolved(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A short causal convolution [b,s,c] of each channel by weight [c,1,width]."""
        return short_convolution(
            x,
            weight.squeeze(1),
            bias,
            route=self._algorithm.route_of(self.seq_len, self.documents),
            rank=self._rank,
            channel=self._algorithm.topology.channel("states"),
        )

    def attended(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        gate: Tensor,
        beta: Tensor | None = None,
        site: nn.Module,
    ) -> Tensor:
        """Outputs [b,s,h,e] of states that pass through all ranks; see `attend_linearly`."""
        out, _ = attend_linearly(
            query,
            key,
            value,
            gate=gate,
            beta=beta,
            algorithm=self._algorithm,
            seq_len=self.seq_len,
            documents=self.documents,
            kernel_for=partial(resolve_linear, "auto"),
            site=site,
        )
        return out


def refuse(layers: str, given: Mapping[str, Any], packed: Any) -> None:
    """Refuses arguments that are not served.

    Args:
        layers: Their name for users.
        given: By their names for users, arguments that must be None.
        packed: As of `RecurrentSequence`.

    Raises:
        ContextParallelError: One is not None, or there are spans.
    """
    for what, value in {**given, "spans": getattr(packed, "spans", None)}.items():
        if value is not None:
            raise ContextParallelError(f"{layers} layers do not support {what}: leave it out")


def is_gated_delta_net(module: Any) -> bool:
    """Whether a module, or the class of one, is a gated delta net layer's attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return _is(module, GatedDeltaNet)


def is_mamba(module: Any) -> bool:
    """Whether a module, or the class of one, is a Mamba layer's mixer."""
    from megatron.core.ssm.mamba_mixer import MambaMixer

    return _is(module, MambaMixer)


def has_layers(model: nn.Module) -> bool:
    """Whether such layers are in a model."""
    return any(is_gated_delta_net(module) or is_mamba(module) for module in model.modules())


def check_layout(kind: type, config: ContextParallelConfig) -> None:
    """Raises: ConfigError if tokens are where states do not pass."""
    asked = {"experimental_attention_variant": GATED[0]}
    if is_mamba(kind):
        asked = {"hybrid_layer_pattern": MAMBA}
    check("recurrent layer", Settings(SimpleNamespace(**asked), config))


def _is(module: Any, kind: type) -> bool:
    return issubclass(module if isinstance(module, type) else type(module), kind)
