"""A model's sizes, and how it is split among GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.planner.products import Product

Recompute = Literal["none", "full"]


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder.

    Attributes:
        ffn: width of a layer's MLP, or of an expert.
        gated: it has three matrices, else two.
        experts: of a layer; 0: an MLP in their place.
        active: of them for each token.
        shared: width of an expert that all tokens have beside the others; 0: none.
        dense, dense_ffn: how many first layers have an MLP in place of experts, and its width.
        value_dim: of a head; 0: head_dim.
        query_rank, key_rank: of the latents of multi-latent attention, whose keys have rotary
            elements of `rotary_dim` that all heads share; 0: it has none; only query_rank 0:
            queries have none.
        linear: layers of linear attention, whose outputs are gated as TransNormerLLM's.
        tied: embedding and logits share a matrix.
    """

    name: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    gated: bool = True
    experts: int = 0
    active: int = 0
    shared: int = 0
    dense: int = 0
    dense_ffn: int = 0
    value_dim: int = 0
    query_rank: int = 0
    key_rank: int = 0
    rotary_dim: int = 0
    linear: bool = False
    tied: bool = False

    def __post_init__(self) -> None:
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.head_dim)

    @property
    def attention_matrices(self) -> tuple[Product, ...]:
        """Of a layer."""
        out = Product(self.heads * self.value_dim, self.hidden, by_inner=True)
        of_queries = self.heads * self.head_dim
        if not self.key_rank:
            of_keys = self.kv_heads * (self.head_dim + self.value_dim)
            of_gates = out.inner if self.linear else 0
            return Product(self.hidden, of_queries + of_keys + of_gates), out
        of_keys = self.kv_heads * (self.head_dim - self.rotary_dim + self.value_dim)
        queries: tuple[Product, ...] = (Product(self.hidden, of_queries),)
        if self.query_rank:
            down = Product(self.hidden, self.query_rank)
            queries = (down, Product(self.query_rank, of_queries))
        return (
            *queries,
            Product(self.hidden, self.key_rank + self.rotary_dim),
            Product(self.key_rank, of_keys),
            out,
        )

    @property
    def attention_parameters(self) -> int:
        """Of a layer."""
        return sum(one.parameters for one in self.attention_matrices)

    @property
    def expert_parameters(self) -> int:
        """Of an expert, or of a layer's MLP."""
        return self.mlp_parameters(self.ffn)

    @property
    def layer_parameters(self) -> int:
        """Of a layer with all its experts."""
        mlp = max(1, self.experts) * self.expert_parameters + self.mlp_parameters(self.shared)
        return self.attention_parameters + mlp

    @property
    def dense_parameters(self) -> int:
        """Of one of the first layers, without experts."""
        return self.attention_parameters + self.mlp_parameters(self.dense_ffn)

    @property
    def expert_share(self) -> float:
        """Of the layers that have experts."""
        return (self.layers - self.dense) / self.layers if self.experts else 0.0

    def mlp_matrices(self, width: int) -> tuple[Product, ...]:
        """Of an MLP, or of an expert."""
        return (
            Product(self.hidden, (2 if self.gated else 1) * width),
            Product(width, self.hidden, by_inner=True),
        )

    def mlp_parameters(self, width: int) -> int:
        """Of `mlp_matrices`."""
        return sum(one.parameters for one in self.mlp_matrices(width))

    @property
    def embedding_parameters(self) -> int:
        """Of embedding and logits."""
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All of them."""
        with_experts = (self.layers - self.dense) * self.layer_parameters
        return with_experts + self.dense * self.dense_parameters + self.embedding_parameters

    def flop(self, tokens: int, pairs: float) -> float:
        """FLOP of forward and backward of a sequence, without recomputation.

        Args: pairs: of a query and a key that see each other.
        """
        mlp = self.active * self.expert_parameters if self.experts else self.expert_parameters
        mlp += self.mlp_parameters(self.shared)
        with_experts = self.layers - self.dense
        weights = with_experts * (self.attention_parameters + mlp + self.hidden * self.experts)
        weights += self.dense * self.dense_parameters + self.hidden * self.vocabulary
        attention = 2 * self.heads * (self.head_dim + self.value_dim) * pairs
        if self.linear:
            attention = 4 * self.heads * self.head_dim * self.value_dim * tokens
        return 3.0 * (2 * weights * tokens + self.layers * attention)

    def shape(self, tokens: int, tensor: int = 1) -> Shape | LinearShape:
        """Of attention of one of `tensor` ranks, over all tokens of a sequence."""
        heads = self.heads // tensor
        if self.linear:
            return LinearShape(1, tokens, heads, self.head_dim, self.value_dim)
        kv_heads = max(1, self.kv_heads // tensor)
        return Shape(1, tokens, heads, kv_heads, self.head_dim, value_dim=self.value_dim)


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("llama2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
        Model("llama3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
        Model("llama3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
        Model("llama3-405b", 126, 16384, 53248, 128, 8, 128, 128256),
        Model("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936),
        Model("qwen3-30b-a3b", 48, 2048, 768, 32, 4, 128, 151936, experts=128, active=8),
        Model("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, experts=8, active=2),
        Model(
            "deepseek-v3",
            *(61, 7168, 2048, 128, 128, 192, 129280),
            experts=256,
            active=8,
            shared=2048,
            dense=3,
            dense_ffn=18432,
            value_dim=128,
            query_rank=1536,
            key_rank=512,
            rotary_dim=64,
        ),
        Model("tnl-1b", 16, 2048, 5632, 16, 16, 128, 64000, linear=True),
    )
}


@dataclass(frozen=True)
class Split:
    """How a model is split among GPUs. Ranks are counted tensor, context, data, pipeline.

    Attributes:
        expert: ranks of a stage among which experts are split.
        expert_tensor: ranks that split each expert; only memory is known of more than 1.
        micro_batches: sequences of each data-parallel rank in a step.
        recompute: "full": a layer's forward runs again in the backward, but for attention.
        chunked_loss: logits are made in chunks, and a second time in the backward.
        distributed_optimizer: its states are split among the ranks that have the same parameters.
        sharded: the parameters and gradients are, too, as Megatron-FSDP does it; each layer's are
            gathered when they are needed.
    """

    tensor: int = 1
    context: int = 1
    pipeline: int = 1
    data: int = 1
    expert: int = 1
    expert_tensor: int = 1
    micro_batches: int = 1
    recompute: Recompute = "none"
    chunked_loss: bool = False
    distributed_optimizer: bool = True
    sharded: bool = False

    @property
    def gpus(self) -> int:
        """Number of them."""
        return self.stage_gpus * self.pipeline

    @property
    def stage_gpus(self) -> int:
        """Of a stage of the pipeline."""
        return self.tensor * self.context * self.data

    def last_layers(self, model: Model) -> int:
        """Layers of the last stage, where all others have equally many; below 1: there are none."""
        return model.layers - (self.pipeline - 1) * -(-model.layers // self.pipeline)
