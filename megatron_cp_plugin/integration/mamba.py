"""Megatron's Mamba-2 layers next to softmax attention of the plugin; see `recurrent`."""

from __future__ import annotations

from copy import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megatron_cp_plugin.integration.documents import ALONE
from megatron_cp_plugin.integration.recurrent import RecurrentSequence, check_layout, refuse
from megatron_cp_plugin.integration.runtime import Runtime


@cache
def served(kind: type) -> type:
    """Returns a subclass of such a layer's mixer, which takes the `runtime` of the run."""

    class StatePassingMamba(kind):
        """All heads of this rank's tokens.

        The state of a head is that of linear attention (Dao and Gu 2024, section 5): with C as
        queries, B as keys, dt x as values, and exp(dt A) as the head's gate.
        """

        def __init__(
            self, *args: Any, runtime: Runtime, pg_collection: Any = None, **kwargs: Any
        ) -> None:
            check_layout(kind, runtime.config)
            alone = copy(pg_collection)
            alone.cp = ALONE  # else Megatron would split heads
            super().__init__(*args, pg_collection=alone, **kwargs)
            self.pg_collection = pg_collection
            self._runtime = runtime

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

            Raises:
                ContextParallelError: Something is asked for that is not served.
            """
            asked = inference_context if inference_params is None else inference_params
            refuse("Mamba", {"inference": asked}, packed_seq_params)
            projected, _ = self.in_proj(hidden_states)
            mixed = projected.transpose(0, 1)
            sequence = RecurrentSequence(
                self._runtime, self.pg_collection.cp, mixed.shape[1], packed_seq_params
            )
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
                queries,
                keys,
                (x * dt[..., None]).to(x.dtype),
                gate=dt * -self.A_log.to(wide).exp(),
                site=self,
            )
            skip = self.D.unflatten(0, (-1, self.headdim if self.D_has_hdim else 1))
            y = ((out + x * skip).flatten(2) * self.act(z)).to(z.dtype)
            y = y.transpose(0, 1).contiguous()
            projected, bias = self.out_proj(self.norm(y) if self.rmsnorm else y)
            return projected, bias

    StatePassingMamba.__name__ = kind.__name__
    return StatePassingMamba
