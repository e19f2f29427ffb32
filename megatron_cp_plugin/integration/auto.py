"""`--context-parallel-algo auto`: replaces the name by the planner's choice.

This happens before anything else reads the algorithm's name; from then on everything, refusals
included, is as if the chosen algorithm had been named.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import MEAN_DOCUMENT, ContextParallelConfig
from megatron_cp_plugin.core.agree import gathered
from megatron_cp_plugin.core.algorithm import divisors
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.process_groups import ProcessGroupTopology
from megatron_cp_plugin.core.document_layout import Balanced, BalancedTeams, PaddedDocuments
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration import example_spans
from megatron_cp_plugin.integration.args import PluginFlags, document_lengths
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.planner.choose import GIB, CallSite, Choice, Combination, Kind, choose
from megatron_cp_plugin.planner.detected_machine import (
    SPARE,
    check_agreement,
    chosen_by_first,
    documents_like,
    kernel_on,
    machine_here,
)
from megatron_cp_plugin.planner.explain import sentence, table
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.memory import memory
from megatron_cp_plugin.planner.model import Model, Split
from megatron_cp_plugin.planner.shortlist import measure, shortlist


class Resolved(NamedTuple):
    """A run's choice by simulation.

    Attributes:
        said: A line about the choice.
        contenders: Combinations to measure once there are process groups, with the flags that name
            them; the chosen one first, and alone if a machine was named.
    """

    flags: PluginFlags
    said: list[str]
    contenders: Mapping[Combination, PluginFlags]
    kinds: tuple[Kind, ...]


def resolve_auto(flags: PluginFlags, args: Any, device: torch.device) -> Resolved:
    """Chooses the algorithms of a run, from settings that all of its ranks know.

    Raises: ContextParallelError if the arguments are not enough for a choice; or, if no algorithm
    is accepted, the refusal of the fastest.
    """
    settings = Settings(args)
    check("sizes", settings)
    layers = kinds_of_layers(flags, settings)
    kinds = counted(layers)
    here = device.type == "cuda" and flags.machine is None
    gpu = torch.cuda.get_device_name(device) if here else None
    machine, how = machine_here(flags.machine, gpu)
    site = CallSite(
        machine,
        nodes_of(settings, machine.gpus_per_node),
        kernel_on(machine, flags.kernel),
        _memory_bytes(settings, machine, kinds[0]),
    )
    errors: list[ContextParallelError] = []

    def named(combination: Combination) -> PluginFlags:
        rows = zip(kinds, combination.rows, strict=True)
        algorithms = {kind.name: row.algo for kind, row in rows}
        each = tuple(algorithms[kind.name] for kind in layers)
        return replace(
            flags,
            algo=combination.algo,
            options=combination.options,
            by_auto=True,
            layers=each if len(set(each)) > 1 else (),
        )

    def refusal(combination: Combination) -> str | None:
        try:
            check_arguments(args, named(combination).config(args.context_parallel_size), device)
        except ContextParallelError as error:
            errors.append(error)
            return str(error)
        return None

    try:
        choice = choose(
            kinds,
            site,
            layouts=possible_layouts(settings, packed=any(kind.mask.resolved for kind in kinds)),
            runs_again=flags.recompute_attention and settings.recomputes is not None,
            refusal=refusal,
        )
    except ConfigError:
        if errors:
            raise errors[0] from None
        raise
    listed = shortlist(choice, kinds, refusal) if here else (choice.best,)
    contenders = {one: named(one) for one in listed}
    said = list(_said(choice, flags, settings, how))
    return Resolved(contenders[listed[0]], said, contenders, tuple(kinds))


def fastest(
    resolved: Resolved, group: dist.ProcessGroup, device: torch.device
) -> tuple[PluginFlags, str | None]:
    """The contender that is fastest on the GPUs of the job; a collective operation of all ranks.

    Returns: Its flags, and a line about the choice; None if nothing was measured.
    """
    if len(resolved.contenders) == 1:
        return resolved.flags, None
    contenders, kernel = tuple(resolved.contenders), resolved.flags.kernel
    with _further_topology(group) as topology:
        found = measure(contenders, resolved.kinds, topology, kernel, device, _over_the_job)
    if found is None:
        return resolved.flags, None
    flags = resolved.contenders[found.best]
    words = [f"--context-parallel-algo {flags.algo}"]
    if flags.options:
        words.append("--cp-options " + " ".join(f"{name}={value}" for name, value in flags.options))
    if flags.layers:
        words.append(f'--cp-layers "{", ".join(flags.layers)}"')
    return flags, f"{found}; to pin the fastest one: {' '.join(words)}"


def _over_the_job[T](mine: T) -> list[T]:
    """Every rank's object; a collective operation of all ranks of the job."""
    assert dist.group.WORLD is not None
    return gathered(mine, dist.group.WORLD)


@contextmanager
def _further_topology(group: dist.ProcessGroup) -> Iterator[Topology]:
    """The ranks of a group, for channels that are used once."""
    topology = ProcessGroupTopology(group)
    try:
        yield topology
    finally:
        topology.destroy_further_groups()


def resolve_model(
    asked: ContextParallelConfig, model: Any, group: dist.ProcessGroup
) -> ContextParallelConfig:
    """Chooses the algorithm of a model that a program builds by itself.

    World rank 0 chooses for all, one algorithm for all layers; a collective operation of all ranks
    of the job.

    Args: asked: with auto, and a number of tokens; the layout of its options stays.

    Raises: ContextParallelError: On all ranks, if nothing serves the model, or ranks ask otherwise.
    """
    layout = asked.layout.name
    with _further_topology(group) as topology:
        best = chosen_by_first(
            kinds_of_model(model, asked),
            topology,
            asked.kernel,
            dict(asked.options).get("machine"),
            # By a tensor: the CPU platform answers for torch.cuda as if there were a GPU.
            torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu").device,
            gather=_over_the_job,
            first=dist.get_rank() == 0,
            assumed=_assumed(asked.mean_document),
            layouts=(layout,),
            runs_again=asked.recompute_attention and Settings(model).recomputes is not None,
            refusal=of_several,
        )
    options = tuple(sorted((dict(best.options) | {"layout": layout}).items()))
    return replace(asked, algo=best.algo, options=options, by_auto=True)


def of_several(combination: Combination) -> str | None:
    """Why layers of one model cannot have it."""
    if len({(row.algo, row.options) for row in combination.rows}) == 1:
        return None
    return "all layers need the same algorithm where a program splits batches itself"


def kinds_of_model(model: Any, asked: ContextParallelConfig) -> list[Kind]:
    """The kinds of attention layers of a model whose batches a program cuts."""
    assert asked.tokens is not None
    multiple = asked.layout.multiple(asked.size)
    tokens = -(-asked.tokens // multiple) * multiple
    lengths = document_lengths(asked.mean_document, "mean_document")
    drawn = documents_like(lengths, tokens, asked.layout, asked.size)
    masks = [Mask(documents=documents) for documents in drawn]
    settings = Settings(model)
    shape = settings.shape(tokens)
    return counted(_softmax(settings, number, shape, masks) for number in range(model.num_layers))


def counted(layers: Iterable[Kind]) -> list[Kind]:
    """Each kind of layers once, with their number."""
    return [replace(kind, count=count) for kind, count in Counter(layers).items()]


def _softmax(settings: Settings, number: int, shape: Shape, masks: Sequence[Mask]) -> Kind:
    """The kind of a layer, counted from 0.

    Args: masks: without its window: the mask to simulate, then those to measure.
    """
    window = settings.window_of_layer(number + 1)
    name = "full attention" if window is None else f"windows of {window} tokens"
    mask, *measured = (replace(one, window=window) for one in masks)
    return Kind(name, shape, mask, measured=tuple(measured))


def check_same_choice(flags: PluginFlags) -> None:
    """Compares the choices of all ranks of the job. Raises: as `check_agreement`."""
    mine = f"{flags.algo} {dict(flags.options)} {', '.join(flags.layers)}".strip()
    check_agreement(_over_the_job(mine))


def _said(choice: Choice, flags: PluginFlags, settings: Settings, how: str) -> Iterator[str]:
    assumed = _assumed(flags.mean_document) if settings.packing else ""
    masks = (table.kind.mask for table in choice.tables)
    seen = next((mask for mask in masks if mask.slices is not None), None)
    if flags.example_spans is not None and seen is not None:
        assumed += example_spans.words(flags.example_spans, seen, settings.tokens)
    yield f"{sentence(choice)} (machine found {how}{assumed})"
    if flags.explain:
        yield f"candidates of auto\n{table(choice)}"


def _assumed(mean_document: str | int | None) -> str:
    """The lengths of packed documents that a choice assumes, in words."""
    if mean_document is None:
        return f"; documents of {MEAN_DOCUMENT} tokens on average, by default"
    return f"; documents {document_lengths(mean_document, '').label}"


def kinds_of_layers(flags: PluginFlags, settings: Settings) -> list[Kind]:
    """The kind of each layer of the model that has attention of ours."""
    seq_length = settings.tokens
    sizes = {
        "--num-layers": settings.num_layers,
        "--num-attention-heads": settings.num_attention_heads,
        "--hidden-size": settings.hidden_size,
        "--seq-length": seq_length,
    }
    pattern = settings.hybrid_layer_pattern
    for flag, value in sizes.items():
        if value is None and not (pattern and flag == "--num-layers"):
            raise ConfigError(
                f"auto needs the size of the model, got no {flag}: give it, or name an algorithm"
            )
    shape = settings.shape(seq_length)
    drawn: tuple[tuple[int, ...], ...] = ((),)  # documents of some batches
    if settings.packing and not pattern:
        lengths = document_lengths(flags.mean_document, "--cp-mean-document")
        drawn = documents_like(lengths, seq_length, Contiguous(), settings.ranks)
    masks = [Mask(documents=documents) for documents in drawn]
    if flags.example_spans:
        masks = [example_spans.mask_of(flags.example_spans, seq_length, drawn[0])]
    if pattern:
        softmax = Kind("full attention", shape, masks[0])
        return [softmax] * max(1, sum(letter in "*+" for letter in pattern))
    kinds = flags.layers or (("softmax",) if flags.linear_model is None else ("linear",))
    head_dim = settings.head_dims[1]
    dims = settings.split_heads[1], flags.features(head_dim), head_dim
    states = LinearShape(settings.samples, seq_length, *dims, settings.dtype.itemsize)
    linear = Kind("linear attention", states, Mask())
    return [
        linear
        if kinds[number % len(kinds)] == "linear"
        else _softmax(settings, number, shape, masks)
        for number in range(settings.num_layers)
    ]


def _memory_bytes(settings: Settings, machine: Machine, kind: Kind) -> float | None:
    """Bytes of a GPU that are left for attention, roughly; None: nothing is left by this count."""
    left = machine.memory_gib * (1 - SPARE)
    if None not in (settings.vocab_size, settings.micro_batch_size, settings.num_layers):
        left -= sum(memory_of(settings, kind.shape).values())
    return left * GIB if left > 0 else None


def memory_of(settings: Settings, shape: Shape | LinearShape) -> dict[str, float]:
    """GiB of the GPU that needs most, without attention, as in `planner.memory`."""
    model, experts = _model(settings, shape), settings.num_experts or 0
    strategy = settings.data_parallel_sharding_strategy
    by_megatron = settings.use_megatron_fsdp and strategy == "optim_grads_params"
    ranks = settings.tensor * settings.ranks
    data = max(1, settings.world_size // ranks // settings.stages)
    samples = settings.global_batch_size or settings.samples * data
    split = Split(
        settings.tensor,
        settings.ranks,
        settings.stages,
        data,
        (settings.expert_model_parallel_size or 1) if experts else 1,
        (settings.expert_tensor_parallel_size or settings.tensor) if experts else 1,
        max(1, samples // data // settings.samples),
        "full" if settings.recompute_granularity == "full" else "none",
        distributed_optimizer=bool(settings.use_distributed_optimizer),
        sharded=bool(settings.use_torch_fsdp2 or by_megatron),
    )
    return memory(model, split, settings.samples * shape.seq_len)


def _model(settings: Settings, shape: Shape | LinearShape) -> Model:
    experts = settings.num_experts or 0
    wide = settings.ffn_hidden_size or 4 * settings.hidden_size
    layers, latent = settings.num_layers, bool(settings.multi_latent_attention)
    return Model(
        "this model",
        layers,
        settings.hidden_size,
        (settings.moe_ffn_hidden_size or wide) if experts else wide,
        settings.num_attention_heads,
        settings.kv_heads,
        shape.head_dim,
        settings.vocab_size,
        gated=bool(settings.swiglu),
        experts=experts,
        active=settings.moe_router_topk if experts else 0,
        shared=(settings.moe_shared_expert_intermediate_size or 0) if experts else 0,
        dense=layers - layers_with_experts(settings.moe_layer_freq, layers) if experts else 0,
        dense_ffn=wide if experts else 0,
        value_dim=shape.value_dim,
        query_rank=(settings.q_lora_rank or 0) if latent else 0,
        key_rank=(settings.kv_lora_rank or 0) if latent else 0,
        rotary_dim=(settings.qk_pos_emb_head_dim or 0) if latent else 0,
        tied=not settings.untie_embeddings_and_output_weights,
    )


def layers_with_experts(frequency: int | Sequence[int] | None, layers: int) -> int:
    """Number of layers with experts, by `--moe-layer-freq`: every n-th from the first on, or as a
    list says.
    """
    if frequency is None or isinstance(frequency, int):
        return -(-layers // (frequency or 1))
    return sum(map(bool, frequency))


def nodes_of(settings: Settings, gpus_per_node: int) -> tuple[int, ...]:
    """The node of each rank of the first context-parallel group; tensor parallelism is inside."""
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", min(gpus_per_node, settings.world_size)))
    tensor = settings.tensor
    return tuple(rank * tensor // processes for rank in range(settings.ranks))


def possible_layouts(settings: Settings, *, packed: bool) -> tuple[str, ...]:
    """Layouts that Megatron's batches can have."""
    size, seq_length = settings.ranks, settings.tokens
    if settings.is_recurrent and size > 1:
        return ("zigzag",)
    found = tuple(
        name
        for name, layout in registry.layouts().items()
        if seq_length % layout.multiple(size) == 0
        and name != PaddedDocuments.name
        and (packed or not layout.follows_documents)
    )
    if not found:
        every = [ContextParallelConfig(name, size) for name in registry.available("softmax")]
        min(every, key=lambda one: one.layout.multiple(size)).check_sequence(seq_length)
    teams = divisors(size)[1:-1] if Balanced.name in found else ()
    return (*found, *[BalancedTeams(members=each).name for each in teams])
