"""Megatron's recurrent layers: gated delta nets and Mamba-2, whose states pass by `lasp2`.

States and the halo of short convolutions pass from rank to rank in the layout of the run, and begin
anew at each document; Megatron exchanges tokens for heads. Weights and checkpoints are Megatron's.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.linear.convolution import short_convolution
from megatron_cp_plugin.core.linear.function import attend_linearly
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import ALONE, starts_of
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import GATED, MAMBA, Settings
from megatron_cp_plugin.kernels.linear import resolve_linear


class RecurrentSequence:
    """This rank's tokens of a micro-batch, as its recurrent layers process them.

    Attributes:
        seq_len: Tokens of all ranks.
        documents: Positions where documents begin, as in `core.linear.function.attend_linearly`.
    """

    def __init__(self, layer: Any, tokens: int, packed: Any) -> None:
        """Args: layer: as of `served`. packed: a `DocumentMask`, or None."""
        group = getattr(packed, "group", None) or layer.pg_collection.cp
        self._layer, self._rank = layer, group.rank()
        self._algorithm = layer.runtime.recurrent_algorithm(group)
        self.seq_len = tokens * group.size()
        self.documents = starts_of(packed, self.seq_len, causal=True)

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
        self, query: Tensor, key: Tensor, value: Tensor, *, gate: Tensor, beta: Tensor | None = None
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
            recompute_key=self._layer,
        )
        return out


def _refuse_arguments(layers: str, given: Mapping[str, Any], packed: Any) -> None:
    """Refuses arguments, by their names for users, that are not None, and spans."""
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


def _check_states_pass(config: ContextParallelConfig, **asked: str) -> None:
    """Raises: ConfigError for a layout in which states cannot pass."""
    check("recurrent layer", Settings(SimpleNamespace(**asked), config))


def _is(module: Any, kind: type) -> bool:
    return issubclass(module if isinstance(module, type) else type(module), kind)


@cache
def served(kind: type) -> type:
    """Returns a subclass of such a layer's attention or mixer, which takes a run's `runtime`."""
    ours = _mamba(kind) if is_mamba(kind) else _delta_net(kind)
    ours.__name__ = kind.__name__
    return ours


def _mamba(kind: Any) -> type:
    class StatePassingMamba(kind):
        """All heads of this rank's tokens.

        The state of a head is that of linear attention (Dao and Gu 2024, section 5): with C as
        queries, B as keys, dt x as values, and exp(dt A) as the head's gate.
        """

        def __init__(
            self, *args: Any, runtime: Runtime, pg_collection: Any = None, **kwargs: Any
        ) -> None:
            _check_states_pass(runtime.config, hybrid_layer_pattern=MAMBA)
            alone = copy(pg_collection)
            alone.cp = ALONE  # else Megatron would split heads
            super().__init__(*args, pg_collection=alone, **kwargs)
            self.pg_collection = pg_collection
            self.runtime = runtime

        def forward(
            self,
            hidden_states: Tensor,
            inference_context: Any = None,
            *,
            inference_params: Any = None,
            packed_seq_params: Any = None,
        ) -> tuple[Tensor, Tensor | None]:
            """As Megatron's, of [s,b,hidden] (s / TP with sequence parallelism) and a
            `DocumentMask`, or None.

            Raises: ContextParallelError: Something is asked for that is not served.
            """
            asked = {"inference": inference_context or inference_params}
            _refuse_arguments("Mamba", asked, packed_seq_params)
            projected, _ = self.in_proj(hidden_states)
            mixed = projected.transpose(0, 1)
            sequence = RecurrentSequence(self, mixed.shape[1], packed_seq_params)
            inner, groups = self.d_inner_local_tp, self.ngroups_local_tp
            states = groups * self.d_state
            z, convolved, dt = mixed.split([inner, inner + 2 * states, self.nheads_local_tp], -1)
            convolved = sequence.convolved(convolved, self.conv1d_weight, self.conv1d_bias)
            x, keys, queries = self.act(convolved).split([inner, states, states], -1)
            x = x.unflatten(-1, (-1, self.headdim))
            keys, queries = (one.unflatten(-1, (groups, -1)) for one in (keys, queries))
            wide = torch.promote_types(dt.dtype, torch.float32)
            dt = functional.softplus(dt.to(wide) + self.dt_bias.to(wide))
            out = sequence.attended(
                queries, keys, (x * dt[..., None]).to(x.dtype), gate=dt * -self.A_log.to(wide).exp()
            )
            skip = self.D.unflatten(0, (-1, self.headdim if self.D_has_hdim else 1))
            y = ((out + x * skip).flatten(2) * self.act(z)).to(z.dtype)
            y = y.transpose(0, 1).contiguous()
            projected, bias = self.out_proj(self.norm(y) if self.rmsnorm else y)
            return projected, bias

    return StatePassingMamba


def _delta_net(kind: Any) -> type:
    class StatePassingDeltaNet(kind):
        """All heads of this rank's tokens."""

        def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
            _check_states_pass(runtime.config, experimental_attention_variant=GATED[0])
            super().__init__(*args, **kwargs)
            self.runtime = runtime
            self.cp_size = 1  # every rank has all heads, whose numbers follow from it
            self._setup_variant_attrs()

        def forward(
            self,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            inference_context: Any = None,
            packed_seq_params: Any = None,
            sequence_len_offset: Any = None,
            *,
            inference_params: Any = None,
            **kwargs: Any,
        ) -> tuple[Tensor, Tensor | None]:
            """As Megatron's, of [s,b,hidden] (s / TP with sequence parallelism) and a
            `DocumentMask`, or None; what is for layers of softmax attention is ignored.

            Raises: ContextParallelError: Something is asked for that is not served.
            """
            asked = {"inference": inference_context or inference_params}
            asked |= {"a sequence offset": sequence_len_offset}
            _refuse_arguments("gated delta net", asked, packed_seq_params)
            mixed, _ = self.in_proj(hidden_states)
            tokens, batch, _ = mixed.shape
            sequence = RecurrentSequence(self, tokens, packed_seq_params)
            qkv, gate, beta, alpha = mixed.transpose(0, 1).split(self.feat_dim_split, -1)
            qkv = sequence.convolved(qkv, self.conv1d.weight, self.conv1d.bias)
            gate = gate.reshape(batch, tokens, -1, self.value_head_dim)
            prepared = self._prepare_input_for_gated_delta_rule(
                self.act_fn(qkv), gate, batch, tokens, beta, alpha
            )
            query, key, value, gate, beta, alpha = prepared
            log_decay, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
            out = sequence.attended(
                query * self.key_head_dim**-0.5, key, value, gate=log_decay, beta=beta
            )
            if not self.recompute_norm_out:
                return self.out_proj(self._normalized(out, gate))
            from megatron.core.tensor_parallel import CheckpointWithoutOutput

            checkpoint = CheckpointWithoutOutput()
            projected, bias = self.out_proj(checkpoint.checkpoint(self._normalized, out, gate))
            checkpoint.discard_output_and_register_recompute(projected)
            return projected, bias

        def _normalized(self, out: Tensor, gate: Tensor) -> Tensor:
            """[b,s,h,d] twice -> [s,b,h*d]."""
            batch, tokens, *_ = out.shape
            normalized: Tensor = self._apply_gated_norm(out, gate)
            return normalized.reshape(batch, tokens, -1).transpose(0, 1).contiguous()

    return StatePassingDeltaNet
