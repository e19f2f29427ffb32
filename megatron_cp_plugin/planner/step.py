"""Estimates a training step of a whole model: its time, and the memory of a GPU.

Around attention, which is simulated, everything is counted: matrix products by their sizes
(`planner.products`), what reads and writes activations, collective operations at the rates of their
links, the bubble of a pipeline. It is enough to say what fits, and which way of splitting a model
is worth to be tried.

What is left out: dropout, padding of the vocabulary, routers, imbalance between experts and between
stages of a pipeline (the stage with the embedding or the logits has more to do), the host, overlap
of tensor-parallel and expert-parallel messages with computation.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from megatron_cp_plugin.core.chunked_loss import CHUNK_TOKENS
from megatron_cp_plugin.core.comm import Operation
from megatron_cp_plugin.core.linear import LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.experts import Dispatch
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.products import Product, passes_seconds
from megatron_cp_plugin.planner.simulate import PassTime, Timeline, simulate

Recompute = Literal["none", "full"]
_GIB = 2**30
# How often a layer reads or writes a tensor of one activation: norms, residual sums, rotations,
# activation functions and gradients of them all. Of a profile of Llama 7B's layers, 128K tokens on
# 4 H200: 70 ms of kernels of a step that are neither attention nor matrix products.
_TOUCHED = 200
_LOGIT_BYTES = 40  # that are read and written for each logit, forward and backward


@dataclass(frozen=True)
class Model:
    """The sizes of a decoder.

    Attributes:
        ffn: width of a layer's MLP, or of an expert. gated: it has three matrices, else two.
        experts: of a layer; 0: an MLP in their place. active: of them for each token.
        shared: width of an expert that all tokens have beside the others; 0: none.
        dense, dense_ffn: how many first layers have an MLP in place of experts, and its width.
        value_dim: of a head; 0: head_dim. query_rank, key_rank: of the latents of multi-latent
            attention, whose keys have rotary elements of `rotary_dim` that all heads share; 0: it
            has none. linear: layers of linear attention. tied: embedding and logits share a matrix.
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

    @property
    def attention_matrices(self) -> tuple[Product, ...]:
        """Of a layer."""
        value_dim = self.value_dim or self.head_dim
        out = Product(self.heads * value_dim, self.hidden, by_inner=True)
        of_queries = self.heads * self.head_dim
        if not self.key_rank:
            of_keys = self.kv_heads * (self.head_dim + value_dim)
            return Product(self.hidden, of_queries + of_keys), out
        of_keys = self.kv_heads * (self.head_dim - self.rotary_dim + value_dim)
        return (
            Product(self.hidden, self.query_rank),
            Product(self.query_rank, of_queries),
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
        return sum(one.parameters for one in self.mlp_matrices(self.ffn))

    @property
    def layer_parameters(self) -> int:
        """Of a layer with all its experts."""
        beside = sum(one.parameters for one in self.mlp_matrices(self.shared))
        of_experts = max(1, self.experts) * self.expert_parameters
        return self.attention_parameters + of_experts + beside

    @property
    def dense_parameters(self) -> int:
        """Of one of the first layers, without experts."""
        mlp = sum(one.parameters for one in self.mlp_matrices(self.dense_ffn))
        return self.attention_parameters + mlp

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

    @property
    def embedding_parameters(self) -> int:
        """Of embedding and logits."""
        return (1 if self.tied else 2) * self.hidden * self.vocabulary

    @property
    def parameters(self) -> int:
        """All of them."""
        with_experts = (self.layers - self.dense) * self.layer_parameters
        return with_experts + self.dense * self.dense_parameters + self.embedding_parameters

    def shape(self, tokens: int, tensor: int = 1) -> Shape | LinearShape:
        """Of attention of one of `tensor` ranks, over all tokens of a sequence."""
        heads, value_dim = self.heads // tensor, self.value_dim or self.head_dim
        if self.linear:
            return LinearShape(1, tokens, heads, self.head_dim, value_dim)
        kv_heads = max(1, self.kv_heads // tensor)
        return Shape(1, tokens, heads, kv_heads, self.head_dim, value_dim=value_dim)


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
        expert, expert_tensor: how experts are split among the ranks of a stage, which are counted
            expert tensor, expert, expert data.
        micro_batches: sequences of each data-parallel rank in a step. recompute: "full": a layer's
            forward runs again in the backward, but for attention. chunked_loss: logits are made in
            chunks, and a second time in the backward. distributed_optimizer: its states are split
            among the ranks that have the same parameters.
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

    @property
    def gpus(self) -> int:
        """Number of them."""
        return self.stage_gpus * self.pipeline

    @property
    def stage_gpus(self) -> int:
        """Of a stage of the pipeline."""
        return self.tensor * self.context * self.data

    def counts_ends(self, model: Model) -> bool:
        """Whether embedding and logits stand in the place of a layer each of their stages."""
        even = not model.layers % self.pipeline
        return not even and not (model.layers + 2) % self.pipeline

    def last_layers(self, model: Model) -> int:
        """Layers of the last stage, where all others have equally many; below 1: there are none."""
        if self.counts_ends(model):
            return -(-model.layers // self.pipeline) - 1
        return model.layers - (self.pipeline - 1) * -(-model.layers // self.pipeline)


@dataclass(frozen=True)
class Step:
    """What a step takes.

    Attributes:
        seconds: of a step. tokens: of it, on all ranks. parts: seconds of which it consists.
        memory: GiB of the GPU that needs most, by what it is for.
    """

    seconds: float
    tokens: int
    parts: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def gib(self) -> float:
        """Of the GPU that needs most."""
        return sum(self.memory.values())

    def fits(self, machine: Machine, spare: float = 0.1) -> bool:
        """Whether it fits. Args: spare: share of the memory for what is not counted."""
        return self.gib <= machine.memory_gib * (1 - spare)


def nodes_of(split: Split, machine: Machine) -> tuple[int, ...]:
    """The node of each context-parallel rank of the first group."""
    stride = split.tensor
    return tuple(rank * stride // machine.gpus_per_node for rank in range(split.context))


def step(
    model: Model,
    split: Split,
    tokens: int,
    machine: Machine,
    algo: str = "zigzag",
    options: Mapping[str, object] | None = None,
    *,
    mask: Mask | None = None,
    attention: Timeline | None = None,
    attention_gib: float = 0.0,
) -> Step:
    """A step of training on sequences of so many tokens.

    Args:
        algo, options: of attention. mask: default: causal. attention: one layer's, if it is known
            already. attention_gib: what attention needs beside its inputs and results.

    Raises: ConfigError if the model cannot be split like this.
    """
    check_split(model, split, tokens)
    if attention is None:
        shape, nodes = model.shape(tokens, split.tensor), nodes_of(split, machine)
        attention = simulate(algo, options or {}, shape, mask or Mask(), machine, nodes)
    parts = _times(model, split, tokens, machine, attention)
    return Step(
        sum(parts.values()),
        tokens * split.data * split.micro_batches,
        parts,
        {**memory(model, split, tokens), "attention": attention_gib},
    )


def check_split(model: Model, split: Split, tokens: int) -> None:
    """Raises: ConfigError if the model cannot be split like this."""
    if split.last_layers(model) < 1:
        raise ConfigError(
            f"{model.name} needs layers for all stages of a pipeline, got {model.layers} layers "
            f"and pipeline {split.pipeline}: use a divisor of {model.layers} or of "
            f"{model.layers + 2}"
        )
    rows = (
        ("heads", model.heads, "tensor", split.tensor),
        ("tokens", tokens, "tensor * context", split.tensor * split.context),
        ("experts", max(1, model.experts), "expert", split.expert),
        ("width of an expert", model.ffn, "expert_tensor", split.expert_tensor),
        (
            "tensor * context * data",
            split.stage_gpus,
            "expert * expert_tensor",
            split.expert * split.expert_tensor,
        ),
    )
    for what, count, name, ways in rows:
        if count % ways:
            raise ConfigError(
                f"{model.name} needs {what} divisible by {name}, got {count} {what} and {name} "
                f"{ways}: use a divisor of {count}"
            )


def _times(
    model: Model, split: Split, tokens: int, machine: Machine, attention: Timeline
) -> dict[str, float]:
    again = split.recompute == "full"
    layers = -(-model.layers // split.pipeline)
    local = tokens / split.context
    touched = layers * _TOUCHED * (4 / 3 if again else 1) * model.hidden * 2
    touched += _LOGIT_BYTES * model.vocabulary / split.pipeline
    to_experts, copies = _experts(model, split, tokens, machine)
    passes = layers * model.expert_share * (3 if again else 2)
    touched_seconds = local / split.tensor * touched / machine.memory_bytes_per_second
    each = {
        "attention": layers * attention.seconds,
        "matrix products": _products(model, split, local, machine, layers, again=again),
        "other kernels": touched_seconds + passes * copies,
        "tensor-parallel messages": layers * _tensor(model, split, local, machine, again=again),
        "expert-parallel messages": passes * to_experts,
    }
    count = split.micro_batches
    parts = {name: seconds * count for name, seconds in each.items() if seconds}
    if split.pipeline > 1:
        message = machine.between.exchange.time(2 * local / split.tensor * model.hidden)
        bubble = (split.pipeline - 1) * (sum(each.values()) + 2 * message)
        parts["pipeline bubble"] = bubble
    parts["gradients and optimizer"] = _optimizer(model, split, machine)
    return parts


def _products(
    model: Model, split: Split, local: float, machine: Machine, layers: int, *, again: bool
) -> float:
    """Of all layers of a stage, and its share of the logits."""

    def seconds(matrices: Iterable[Product], *, again: bool) -> float:
        return sum(
            passes_seconds(machine, one.split(split.tensor), local, again=again) for one in matrices
        )

    of_mlp = seconds(model.mlp_matrices(model.dense_ffn or model.ffn), again=again)
    if model.experts:
        of_rank = model.experts // split.expert
        rows = local / split.tensor * model.active * split.expert_tensor / of_rank
        of_experts = sum(
            passes_seconds(machine, one.split(split.expert_tensor), rows, of_rank, again=again)
            for one in model.mlp_matrices(model.ffn)
        )
        if model.shared:
            of_experts += seconds(model.mlp_matrices(model.shared), again=again)
        of_mlp += model.expert_share * (of_experts - of_mlp)
    layer = seconds(model.attention_matrices, again=again) + of_mlp
    logits = seconds([Product(model.hidden, model.vocabulary)], again=split.chunked_loss)
    return layers * layer + logits / split.pipeline  # of the last stage: the mean


def _tensor(model: Model, split: Split, local: float, machine: Machine, *, again: bool) -> float:
    """Of a layer: an all-gather and a reduce-scatter round attention and the MLP, each pass.

    Experts get their tokens otherwise, but for one that all tokens have.
    """
    if split.tensor == 1:
        return 0.0
    size = 2 * local * model.hidden * (split.tensor - 1) / split.tensor
    passes = 3 if again else 2
    rounds = 2 if model.shared else 2 - model.expert_share
    operations: tuple[Operation, ...] = ("all_gather", "reduce_scatter")
    seconds = sum(machine.collective_seconds(one, split.tensor, 1, size) for one in operations)
    return passes * rounds * seconds


def dispatch(model: Model, split: Split, tokens: int) -> Dispatch:
    """How tokens come to the experts of a layer. Args: tokens: of a micro-batch, on all ranks."""
    local = tokens / split.context / split.tensor
    return Dispatch(local, model.hidden, model.active, split.expert, split.expert_tensor)


def _experts(model: Model, split: Split, tokens: int, machine: Machine) -> tuple[float, float]:
    """Of a pass of a layer: messages to and from experts, and copies for them."""
    if not model.experts:
        return 0.0, 0.0
    found = dispatch(model, split, tokens)
    name = found.fastest(machine)
    return found.message_seconds(name, machine), found.copy_seconds(name, machine)


def _optimizer(model: Model, split: Split, machine: Machine) -> float:
    """Gradients are summed in float32, states updated, and parameters gathered in bfloat16."""
    seconds = 0.0
    for own, copies in _own_parameters(model, split):
        touched = own * 4 * 6 + own * 16 * 2 / (copies if split.distributed_optimizer else 1)
        seconds += touched / machine.memory_bytes_per_second
        if copies > 1:
            stride = split.stage_gpus // copies
            part = own * (copies - 1) / copies
            seconds += machine.collective_seconds("reduce_scatter", copies, stride, 4 * part)
            seconds += machine.collective_seconds("all_gather", copies, stride, 2 * part)
    return seconds


def _own_parameters(model: Model, split: Split, stage: int = 0) -> Iterator[tuple[float, int]]:
    """Of a GPU of a stage, and how many GPUs have the same: experts, and all others."""
    layers, copies = _layers_of(model, split, stage), split.data * split.context
    before = sum(_layers_of(model, split, earlier) for earlier in range(stage))
    dense = min(layers, max(0, model.dense - before)) if model.experts else layers
    with_experts = layers - dense
    experts = model.experts * model.expert_parameters
    whole: float = dense * (model.dense_parameters if model.dense_ffn else model.layer_parameters)
    whole += with_experts * (model.layer_parameters - experts)
    if stage in (0, split.pipeline - 1):
        whole += model.embedding_parameters / min(2, split.pipeline)
    yield whole / split.tensor, copies
    if model.experts:
        ways = split.expert * split.expert_tensor
        yield with_experts * experts / ways, split.stage_gpus // ways


def _layers_of(model: Model, split: Split, stage: int) -> int:
    """Of a stage of a pipeline."""
    if 0 < stage == split.pipeline - 1:
        return split.last_layers(model)
    return -(-model.layers // split.pipeline) - (split.counts_ends(model) and stage == 0)


def memory(model: Model, split: Split, tokens: int) -> dict[str, float]:
    """GiB of the stage of a pipeline that needs most.

    That is the first one, which holds the most micro-batches, or the first whose layers all have
    experts.

    Args: tokens: of a micro-batch, on all context-parallel ranks.
    """
    later = 0
    while sum(_layers_of(model, split, stage) for stage in range(later)) < model.dense:
        later += 1
    stages = sorted({0, min(later, split.pipeline - 1)})
    found = [_memory_of(model, split, tokens, stage) for stage in stages]
    return max(found, key=lambda parts: sum(parts.values()))


def _memory_of(model: Model, split: Split, tokens: int, stage: int) -> dict[str, float]:
    parameters = list(_own_parameters(model, split, stage))
    states = sum(own / (copies if split.distributed_optimizer else 1) for own, copies in parameters)
    local = tokens / split.context / split.tensor
    held = min(split.pipeline - stage, split.micro_batches)
    layers = _layers_of(model, split, stage)
    layer = _activation_bytes(model, split) * local
    kept = 2 * model.hidden * local
    if split.recompute == "full":
        kept += 2 * model.heads * (model.value_dim or model.head_dim) * local  # of attention
    at_a_time = min(CHUNK_TOKENS / split.tensor, local) if split.chunked_loss else local
    logits = 6 * model.vocabulary * at_a_time
    activations = held * layers * (layer if split.recompute == "none" else kept)
    working = max(logits, layer if split.recompute == "full" else 0.0)
    return {
        "parameters and gradients": sum(own for own, _ in parameters) * 6 / _GIB,
        "optimizer": states * 12 / _GIB,
        "activations": activations / _GIB,
        "logits, or a layer run again": working / _GIB,
    }


def _activation_bytes(model: Model, split: Split) -> float:
    """Of a token, that a layer keeps for its backward, in bfloat16."""
    value_dim = model.value_dim or model.head_dim
    width = (model.heads + model.kv_heads) * model.head_dim + model.kv_heads * value_dim
    width += model.query_rank + model.key_rank
    out = model.heads * value_dim
    of_ffn = 3 if model.gated else 2
    mlp: float = of_ffn * (model.dense_ffn or model.ffn)
    if model.experts:
        # The tokens as they come to experts, too: whole, to each part of an expert.
        of_experts = of_ffn * (model.ffn * model.active + model.shared)
        of_experts += model.hidden * model.active * split.expert_tensor
        mlp += model.expert_share * (of_experts - mlp)
    return 2.0 * (4 * model.hidden + width + out + mlp)


def only(seconds: float) -> Timeline:
    """A layer of attention of which only the time is known."""
    nothing = PassTime(0.0, 0.0, 0.0, {})
    return Timeline(PassTime(seconds, seconds, 0.0, {}), nothing, (), 0)
