"""Megatron's gated delta net layers next to softmax attention of the plugin.

Their states pass from rank to rank by `lasp2`, in the layout of the run, and begin anew at each
document; Megatron exchanges tokens for heads. Weights and checkpoints are Megatron's.
"""

from __future__ import annotations

from functools import cache, partial
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
from megatron_cp_plugin.integration.settings import GATED, Settings
from megatron_cp_plugin.kernels.linear import resolve_linear


def is_layer(module: Any) -> bool:
    """Whether a module, or the class of one, is such a layer's attention."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    kind = module if isinstance(module, type) else type(module)
    return issubclass(kind, GatedDeltaNet)


def has_layers(model: nn.Module) -> bool:
    """Whether such layers are in a model."""
    return any(map(is_layer, model.modules()))


def check_layout(config: ContextParallelConfig) -> None:
    """Raises: ConfigError if tokens are where states do not pass."""
    asked = SimpleNamespace(experimental_attention_variant=GATED[0])
    check("gated layer", Settings(asked, config))


@cache
def served(kind: type) -> type:
    """Returns a subclass of such a layer's attention, which takes the `runtime` of the run."""

    class StatePassingDeltaNet(kind):
        """All heads of this rank's tokens."""

        def __init__(self, *args: Any, runtime: Runtime, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            group = self.pg_collection.cp
            self._rank, self._ranks = group.rank(), group.size()
            self._algorithm = runtime.recurrent_algorithm(group)
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
            """As Megatron's.

            Args:
                hidden_states: [s,b,hidden] (s / TP with sequence parallelism).
                attention_mask: Ignored: tokens see earlier ones of their document.
                inference_context: Must be None.
                packed_seq_params: A `DocumentMask`, or None.
                sequence_len_offset: Must be None.
                inference_params: Must be None.
                kwargs: Ignored, as by Megatron: for layers of softmax attention.

            Returns:
                [s,b,hidden] and the bias to add, if any.

            Raises:
                ContextParallelError: Something is asked for that is not served.
            """
            refused = {
                "inference": inference_context or inference_params,
                "a sequence offset": sequence_len_offset,
                "spans": getattr(packed_seq_params, "spans", None),
            }
            for what, value in refused.items():
                if value is not None:
                    raise ContextParallelError(
                        f"gated delta net layers do not support {what}: leave it out"
                    )
            mixed, _ = self.in_proj(hidden_states)
            tokens, batch, _ = mixed.shape
            seq_len = tokens * self._ranks
            documents = starts_of(packed_seq_params, seq_len)
            check_padding(packed_seq_params, seq_len, causal=True)
            qkv, gate, beta, alpha = mixed.transpose(0, 1).split(self.feat_dim_split, -1)
            qkv = short_convolution(
                qkv,
                self.conv1d.weight.squeeze(1),
                self.conv1d.bias,
                route=self._algorithm.route_of(seq_len, documents),
                rank=self._rank,
                channel=self._algorithm.topology.channel("states"),
            )
            gate = gate.reshape(batch, tokens, -1, self.value_head_dim)
            prepared = self._prepare_input_for_gated_delta_rule(
                self.act_fn(qkv), gate, batch, tokens, beta, alpha
            )
            query, key, value, gate, beta, alpha = prepared
            log_decay, beta = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
            out, _ = attend_linearly(
                query * self.key_head_dim**-0.5,
                key,
                value,
                gate=log_decay,
                beta=beta,
                algorithm=self._algorithm,
                seq_len=seq_len,
                documents=documents,
                kernel_for=partial(resolve_linear, "auto"),
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
