"""Linear attention layers that replace Megatron's SelfAttention.

Everything around them is Megatron's: norms, MLP, embeddings, pipeline, optimizer, checkpoints.

Shapes in Megatron's order: s local tokens, b batch, h heads of this tensor-parallel rank, g groups
of them that share a key, a value and so a state, d head dim.
"""

from __future__ import annotations

from abc import abstractmethod
from functools import partial
from math import exp, log2
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from megatron_cp_plugin.core.linear.function import attend_linearly
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import SplitByHeads, is_causal
from megatron_cp_plugin.integration.documents import starts_of
from megatron_cp_plugin.integration.gated_norm import gated_norm
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.kernels.linear import resolve_linear

_REFUSED = {
    "key_value_states": "cross attention",
    "inference_context": "inference",
    "attention_bias": "attention bias",
    "sequence_len_offset": "a sequence offset",
}


class LinearSelfAttention(MegatronModule):
    """Projections, linear attention over all context-parallel ranks, projection.

    Groups are split over the tensor-parallel ranks. The rows of linear_qkv are ordered by group, in
    each group queries, key, value and gates, so a checkpoint fits every tensor-parallel size.
    """

    _gated: bool

    def __init__(
        self,
        config: TransformerConfig,
        submodules: SelfAttentionSubmodules,
        layer_number: int,
        attn_mask_type: AttnMaskType = AttnMaskType.causal,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        pp_layer_offset: int | None = None,
        name: str | None = None,
        *,
        runtime: Runtime,
    ) -> None:
        """Builds the module; a collective operation of the context-parallel ranks.

        Args: as Megatron's SelfAttention; submodules have no core attention, and cp_comm_type and
            pp_layer_offset no meaning. runtime: the run's layout and algorithm.

        Raises: ContextParallelError: The model asks for what these layers do not compute.
        """
        super().__init__(config=config)
        check("linear layer", Settings(config, runtime.config))
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        self.pg_collection = pg_collection
        self.layer_number = layer_number
        tensor_size, tensor_rank = pg_collection.tp.size(), pg_collection.tp.rank()
        groups = config.num_query_groups or config.num_attention_heads
        self._groups, self._head_dim = groups // tensor_size, config.kv_channels
        queries = config.num_attention_heads // groups
        self._heads_of_parts = [queries, 1, 1, *([queries] if self._gated else [])]
        self._causal = is_causal(attn_mask_type)
        self._runtime = runtime
        self._kernel_for = partial(resolve_linear, runtime.config.kernel)
        self._cp_size = pg_collection.cp.size()
        self._algorithm = runtime.linear_algorithm(pg_collection.cp)
        first = tensor_rank * self._groups
        self._decay = Decay(self._rates(groups)[first : first + self._groups])
        self._recompute = Settings(config).recomputes == "selective"
        width = config.num_attention_heads * config.kv_channels
        self.linear_qkv = submodules.linear_qkv(
            config.hidden_size,
            sum(self._heads_of_parts) * groups * config.kv_channels,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_bias_linear or config.add_qkv_bias,
            skip_bias_add=False,
            is_expert=False,
            tp_comm_buffer_name="qkv",
            tp_group=pg_collection.tp,
            **_name_argument(name, "linear_qkv"),
        )
        self.linear_proj = submodules.linear_proj(
            width,
            config.hidden_size,
            config=config,
            init_method=config.output_layer_init_method,
            bias=config.add_bias_linear,
            input_is_parallel=True,
            skip_bias_add=True,
            is_expert=False,
            tp_comm_buffer_name="proj",
            tp_group=pg_collection.tp,
            **_name_argument(name, "linear_proj"),
        )

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        *,
        packed_seq_params: Any = None,
        **others: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Computes the layer's attention.

        Args:
            hidden_states: [s,b,hidden] (s / TP with sequence parallelism).
            attention_mask: Ignored: the mask follows from the mask type and the layout.
            packed_seq_params: A `DocumentMask`, or None: a state begins anew at each document.
            others: Must be None or False, but for rotary embeddings, which are for a hybrid model's
                layers of softmax attention.

        Returns: [s,b,hidden] and the bias to add, if any.

        Raises: ContextParallelError: Something is asked for that these layers do not compute, or
        documents of another number of tokens.
        """
        for name, value in others.items():
            if value is not None and value is not False and not name.startswith("rotary_pos_"):
                raise ContextParallelError(
                    f"linear attention does not support {_REFUSED.get(name, name)}: leave it out"
                )
        mixed, _ = self.linear_qkv(hidden_states)
        seq_len = len(mixed) * self._cp_size
        documents = starts_of(packed_seq_params, seq_len, causal=self._causal)
        if packed_seq_params is not None and packed_seq_params.spans is not None:
            raise ContextParallelError("linear attention does not support spans: leave them out")
        compute = partial(self._core, documents=documents)
        core = (
            tensor_parallel.checkpoint(compute, False, mixed) if self._recompute else compute(mixed)
        )
        out, bias = self.linear_proj(core)
        return out, bias

    def _core(self, mixed: Tensor, documents: tuple[int, ...] = ()) -> Tensor:
        """The computation between the projections: [s,b,g*heads of parts*d] -> [s,b,h*d]."""
        mixed = mixed.unflatten(2, (self._groups, -1, self._head_dim))
        parts = (part.flatten(2, 3) for part in mixed.split(self._heads_of_parts, 3))
        return self._combine(*parts, documents=documents).flatten(2)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, documents: tuple[int, ...]) -> Tensor:
        """Linear attention of [s,b,h,d], [s,b,g,d], [s,b,g,e] -> [s,b,h,e]."""
        out, _ = attend_linearly(
            q.transpose(0, 1),
            k.transpose(0, 1),
            v.transpose(0, 1),
            algorithm=self._algorithm,
            seq_len=q.shape[0] * self._cp_size,
            decay=self._decay,
            causal=self._causal,
            documents=documents,
            kernel_for=self._kernel_for,
            recompute_key=self,
        )
        return out.transpose(0, 1)

    @abstractmethod
    def _rates(self, groups: int) -> tuple[float, ...]:
        """Decay rates of all groups of the model."""

    @abstractmethod
    def _combine(self, *parts: Tensor, documents: tuple[int, ...]) -> Tensor:
        """The layer's attention [s,b,h,d], from the parts of the projection: [s,b,h or g,d]."""


class LinearizedPositions(SplitByHeads):
    """LRPE: features [x cos(n theta), x sin(n theta)] of a token at position n.

    Products of two tokens' features depend on the distance of the tokens. There is one angle for
    each channel, and it is learned.

    Source: Linearized Relative Positional Encoding (Qin et al., 2023), as in TransNormerLLM's
    published model: theta = 10000 ** (-2 i / width) for channel i of the whole width.

    Attributes: theta: [g,d] of this tensor-parallel rank: queries have their key's.
    """

    def __init__(self, config: TransformerConfig, tp_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config=config)
        self.tp_group = tp_group
        groups, head_dim = config.num_query_groups or config.num_attention_heads, config.kv_channels
        channel = torch.arange(groups * head_dim, dtype=torch.float64)
        theta = (10000 ** (-2 * channel / (groups * head_dim))).view(groups, head_dim)
        mine = theta.chunk(tp_group.size())[tp_group.rank()]
        if not config.use_cpu_initialization:
            mine = mine.cuda()
        self.theta = nn.Parameter(mine.to(config.params_dtype))
        tensor_parallel.set_tensor_model_parallel_attributes(self.theta, True, 0, 1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """Returns the features of x [s,b,h or g,d] at positions [s]: twice as many."""
        shared = x.shape[2] // len(self.theta)
        theta = self.theta.repeat_interleave(shared, 0) if shared > 1 else self.theta
        wide = accumulation_dtype(x.dtype)
        angle = positions.to(wide)[:, None, None] * theta.to(wide)
        x_wide = x.transpose(0, 1).to(wide)  # in the order of attention, which then makes no copy
        features = torch.cat((x_wide * angle.cos(), x_wide * angle.sin()), dim=-1)
        return features.to(x.dtype).transpose(0, 1)


class TransNormerAttention(LinearSelfAttention):
    """TransNormerLLM's: decay by head and layer, output normalised and gated, no softmax.

    The first layer has linearized positions (LRPE) besides.

    Source: TransNormerLLM (arXiv 2307.14995), sections 3.1 to 3.3, and its published model.
    Differs: heads may share keys and values; groups have the rates and angles of as many heads.
    """

    _gated = True

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.positions = None
        if self.layer_number == 1:
            self.positions = LinearizedPositions(config, self.pg_collection.tp)

    def _rates(self, groups: int) -> tuple[float, ...]:
        return transnormer_rates(groups, self.layer_number, self.config.num_layers)

    def _combine(self, *parts: Tensor, documents: tuple[int, ...]) -> Tensor:
        q, k, v, gate = parts
        if self.positions is None:
            q, k = functional.silu(q), functional.silu(k)
        else:
            group = self.pg_collection.cp
            tokens = q.shape[0] * group.size()
            places = self._runtime.positions(group, tokens, q.device, documents)
            how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            q, k = (checkpoint(self._positioned, x, places, **how) for x in (q, k))
        out = self._attend(q, k, v, documents)
        return gated_norm(out, gate, self.config.layernorm_epsilon, self.pg_collection.tp)

    def _positioned(self, x: Tensor, places: Tensor) -> Tensor:
        """Features of queries or keys, which attention keeps; the angles are made twice."""
        assert self.positions is not None
        features: Tensor = self.positions(functional.silu(x), places)
        return features


class LinearTransformerAttention(LinearSelfAttention):
    """The Linear Transformer's: features elu(x) + 1, every output divided by its weights' sum.

    The sum of weights travels with the state, as one more column of the values.

    Source: Transformers are RNNs (Katharopoulos et al., 2020), equations 7 to 12.
    """

    _gated = False
    _columns = 8  # the ones, and zeros that keep rows aligned for the kernels
    _epsilon = 1e-6

    def _rates(self, groups: int) -> tuple[float, ...]:
        return (1.0,) * groups

    def _combine(self, *parts: Tensor, documents: tuple[int, ...]) -> Tensor:
        q, k, v = parts
        one = v.new_zeros((*v.shape[:-1], self._columns))
        one[..., 0] = 1.0
        q, k = functional.elu(q) + 1, functional.elu(k) + 1
        out = self._attend(q, k, torch.cat((v, one), dim=-1), documents)
        values, weights = out.split((v.shape[-1], self._columns), dim=-1)
        return values / (weights[..., :1] + self._epsilon)


# Of config.LINEAR_MODELS.
MODELS: dict[str, type[LinearSelfAttention]] = {
    "transnormer": TransNormerAttention,
    "linear_transformer": LinearTransformerAttention,
}


def transnormer_rates(heads: int, layer_number: int, layers: int) -> tuple[float, ...]:
    """Returns the decay rates of all heads of a layer, counted from 1.

    exp(-slope * (1 - l / (L - 1) + 1e-5)) for layer l = 0..L-1, with slopes that fall
    geometrically from head to head as in ALiBi: short memories in the first layers, long ones in
    the last.
    """
    depth = (layer_number - 1) / (layers - 1) if layers > 1 else 0.0
    return tuple(exp(-slope * (1 - depth + 1e-5)) for slope in _slopes(heads))


def _slopes(heads: int) -> list[float]:
    if log2(heads).is_integer():
        return [2.0 ** (-8 * (head + 1) / heads) for head in range(heads)]
    # Those of the power of 2 below, then every other one of the power of 2 above.
    below = 2 ** int(log2(heads))
    return _slopes(below) + _slopes(2 * below)[::2][: heads - below]


def _name_argument(module: str | None, part: str) -> dict[str, str]:
    """The argument that names a projection, for the versions of Megatron that take it."""
    return {} if module is None else {"name": f"{module}.{part}"}
