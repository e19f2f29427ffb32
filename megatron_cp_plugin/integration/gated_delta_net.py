"""Megatron's gated delta net layers next to softmax attention of the plugin; see `recurrent`."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from megatron_cp_plugin.integration.recurrent import RecurrentSequence, check_layout, refuse
from megatron_cp_plugin.integration.runtime import Runtime


@cache
def served(kind: type) -> type:
    """Returns a subclass of such a layer's attention, which takes the `runtime` of the run."""

    class StatePassingDeltaNet(kind):
        """All heads of this rank's tokens."""

        def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
            check_layout(kind, runtime.config)
            super().__init__(*args, **kwargs)
            self._runtime = runtime
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

            Raises:
                ContextParallelError: Something is asked for that is not served.
            """
            asked = inference_context if inference_params is None else inference_params
            offset = {"inference": asked, "a sequence offset": sequence_len_offset}
            refuse("gated delta net", offset, packed_seq_params)
            mixed, _ = self.in_proj(hidden_states)
            tokens, batch, _ = mixed.shape
            sequence = RecurrentSequence(
                self._runtime, self.pg_collection.cp, tokens, packed_seq_params
            )
            qkv, gate, beta, alpha = mixed.transpose(0, 1).split(self.feat_dim_split, -1)
            qkv = sequence.convolved(qkv, self.conv1d.weight, self.conv1d.bias)
            gate = gate.reshape(batch, tokens, -1, self.value_head_dim)
            prepared = self._prepare_input_for_gated_delta_rule(
                self.act_fn(qkv), gate, batch, tokens, beta, alpha
            )
            query, key, value, gate, beta, alpha = prepared
            log_decay, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
            out = sequence.attended(
                query * self.key_head_dim**-0.5,
                key,
                value,
                gate=log_decay,
                beta=beta,
                site=self,
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

    StatePassingDeltaNet.__name__ = kind.__name__
    return StatePassingDeltaNet
