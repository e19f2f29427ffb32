"""Estimates a training step of a whole model: its time, and the memory of a GPU.

Around attention, which is simulated, everything is counted: matrix products by their sizes
(`planner.products`), what reads and writes activations, collective operations at the rates of their
links, the bubble of a pipeline. It is enough to say what fits, and which way of splitting a model
is worth to be tried.

Left out are dropout, padding of the vocabulary, routers, imbalance between experts and between
stages of a pipeline (the stage with the embedding or the logits has more to do), the host, overlap
of tensor-parallel and expert-parallel messages with computation, and contention for the network
between messages of attention and of sharded parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron_cp_plugin.core.communication.record import Operation
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.memory import memory, own_parameters
from megatron_cp_plugin.planner.model import Model, Split
from megatron_cp_plugin.planner.products import Product, passes_seconds

# How often a layer reads or writes a tensor of one activation: norms, residual sums, rotations,
# activation functions and gradients of them all. Of a profile of Llama 7B's layers, 128K tokens on
# 4 H200: 70 ms of kernels of a step that are neither attention nor matrix products.
_TOUCHED = 200
_LOGIT_BYTES = 40  # that are read and written for each logit, forward and backward


@dataclass(frozen=True)
class TrainingStep:
    """The time and memory of a step.

    Attributes:
        tokens: of it, on all ranks.
        memory: GiB of the GPU that needs most, by purpose.
    """

    split: Split
    seconds: float
    tokens: int
    parts: Mapping[str, float]
    memory: Mapping[str, float]

    @property
    def gib(self) -> float:
        """Of the GPU that needs most."""
        return sum(self.memory.values())

    def fits(self, machine: Machine) -> bool:
        """Whether it fits, with a tenth of the memory left for buffers that are not counted."""
        return self.gib <= machine.memory_gib * 0.9


def nodes_of_split(split: Split, machine: Machine) -> tuple[int, ...]:
    """The node of each context-parallel rank of the first group."""
    stride = split.tensor
    return tuple(rank * stride // machine.gpus_per_node for rank in range(split.context))


def step(
    model: Model,
    split: Split,
    tokens: int,
    machine: Machine,
    *,
    attention: float,
    attention_gib: float = 0.0,
) -> TrainingStep:
    """A step of training.

    Args:
        attention: seconds of one layer's.
        attention_gib: memory that it needs beside its inputs and results.

    Raises: ConfigError if the model cannot be split like this.
    """
    check_split(model, split, tokens)
    parts = _times(model, split, tokens, machine, attention)
    return TrainingStep(
        split,
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
            f"and pipeline {split.pipeline}: use a divisor of {model.layers}"
        )
    _check_sharded(model, split)
    if split.expert_tensor > 1:
        raise ConfigError(
            f"a step of {model.name} needs whole experts, got expert_tensor "
            f"{split.expert_tensor}: use 1"
        )
    rows = (
        ("heads", model.heads, "tensor", split.tensor),
        ("tokens", tokens, "tensor * context", split.tensor * split.context),
        ("experts", max(1, model.experts), "expert", split.expert),
        ("tensor * context * data", split.stage_gpus, "expert", split.expert),
    )
    for what, count, name, ways in rows:
        if count % ways:
            raise ConfigError(
                f"{model.name} needs {what} divisible by {name}, got {count} {what} and {name} "
                f"{ways}: use a divisor of {count}"
            )


def _check_sharded(model: Model, split: Split) -> None:
    if not split.sharded:
        return
    needs = None
    if split.pipeline > 1:
        needs = f"no pipeline, got pipeline {split.pipeline}"
    elif split.data * split.context == 1:
        needs = "ranks with the same parameters, got data 1 and context 1"
    elif model.linear and split.tensor > 1:
        needs = f"whole layers of linear attention, got tensor {split.tensor}"
    if needs:
        raise ConfigError(
            f"{model.name} with sharded parameters needs {needs}: use 1 pipeline stage and data or "
            "context parallelism, or leave parameters whole"
        )


def _times(
    model: Model, split: Split, tokens: int, machine: Machine, attention: float
) -> dict[str, float]:
    again = split.recompute == "full"
    layers = -(-model.layers // split.pipeline)
    local = tokens / split.context
    touched = layers * _TOUCHED * (4 / 3 if again else 1) * model.hidden * 2
    touched += _LOGIT_BYTES * model.vocabulary / split.pipeline
    to_experts = copies = 0.0
    if model.experts:
        _, to_experts, copies = dispatch(model, split, tokens, machine)
    passes = layers * model.expert_share * (3 if again else 2)
    touched_seconds = local / split.tensor * touched / machine.memory_bytes_per_second
    each = {
        "attention": layers * attention,
        "matrix products": _product_seconds(model, split, local, machine, layers, again=again),
        "other kernels": touched_seconds + passes * copies,
        "tensor-parallel messages": layers * _tensor(model, split, local, machine, again=again),
        "expert-parallel messages": passes * to_experts,
    }
    count = split.micro_batches
    parts = {name: seconds * count for name, seconds in each.items() if seconds}
    if split.sharded:
        computing = attention * layers + each["matrix products"] + each["other kernels"]
        exposed = _sharding(model, split, machine, layers, computing)
        parts["messages of sharded parameters"] = exposed * count
    if split.pipeline > 1:
        message = machine.between.exchange.time(2 * local / split.tensor * model.hidden)
        bubble = (split.pipeline - 1) * (sum(each.values()) + 2 * message)
        parts["pipeline bubble"] = bubble
    parts["gradients and optimizer"] = _optimizer(model, split, machine)
    return parts


def _product_seconds(
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
        rows = local / split.tensor * model.active / of_rank
        of_experts = sum(
            passes_seconds(machine, one, rows, of_rank, again=again)
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


class Dispatch(NamedTuple):
    """How tokens come to the experts of a layer and back, in one pass.

    Attributes:
        name: as of `--moe-token-dispatcher-type`.
        messages: seconds.
        copies: seconds in which copies of tokens are made, sorted by experts, and added.
    """

    name: str
    messages: float
    copies: float


def dispatch(model: Model, split: Split, tokens: int, machine: Machine) -> Dispatch:
    """The faster one of two dispatchers of Megatron.

    - alltoall: a copy of each token goes to each of its experts.
    - allgather: each token goes once to all expert-parallel ranks.

    All experts get equally many tokens here, which training only comes near. The weights of a
    token's experts, which go along, are not counted.

    Args: tokens: of a micro-batch, on all ranks.
    """
    ranks, row = split.expert, 2 * tokens / split.context / split.tensor * model.hidden
    copies = row * model.active
    exchanged, gathered = copies * (ranks - 1) / ranks, row * (ranks - 1)
    ways: tuple[tuple[str, tuple[Operation, Operation], float, float], ...] = (
        ("alltoall", ("all_to_all", "all_to_all"), exchanged, 2 * row + 6 * copies),
        ("allgather", ("all_gather", "reduce_scatter"), gathered, 2 * (row * ranks + copies)),
    )
    found = []
    for name, there_and_back, sent, touched in ways:
        messages = 0.0
        if ranks > 1:
            each = (machine.collective_seconds(one, ranks, 1, sent) for one in there_and_back)
            messages = sum(each)
        found.append(Dispatch(name, messages, touched / machine.memory_bytes_per_second))
    return min(found, key=lambda one: one.messages + one.copies)


def _sharding(model: Model, split: Split, machine: Machine, layers: int, computing: float) -> float:
    """Seconds that messages of sharded parameters add to those that a micro-batch computes.

    Parameters are gathered in bfloat16 for the forward, and again for the backward, and gradients
    scattered in float32. All that hides behind what other layers compute, but for the first gather
    and the last reduce-scatter; kernels are slower meanwhile (`Machine.group_share`).
    """
    gather = scatter = 0.0
    for own, copies in own_parameters(model, split):
        if copies > 1:
            stride, part = split.stage_gpus // copies, own * (copies - 1) / copies
            gather += machine.collective_seconds("all_gather", copies, stride, 2 * part)
            scatter += machine.collective_seconds("reduce_scatter", copies, stride, 4 * part)
    ends = (gather + scatter) / layers
    hidden = 2 * gather + scatter - ends
    slower = min(computing, hidden) * (1 - machine.group_share)
    return ends + slower + max(0.0, hidden - computing - slower)


def _optimizer(model: Model, split: Split, machine: Machine) -> float:
    """Gradients are summed in float32, states updated, and parameters gathered in bfloat16."""
    seconds = 0.0
    for own, copies in own_parameters(model, split):
        split_states = split.distributed_optimizer or split.sharded
        touched = own * 4 * 6 / (copies if split.sharded else 1)
        touched += own * 16 * 2 / (copies if split_states else 1)
        seconds += touched / machine.memory_bytes_per_second
        if copies > 1 and not split.sharded:
            stride = split.stage_gpus // copies
            part = own * (copies - 1) / copies
            seconds += machine.collective_seconds("reduce_scatter", copies, stride, 4 * part)
            seconds += machine.collective_seconds("all_gather", copies, stride, 2 * part)
    return seconds
