"""Which machine this is, and where on it a group of ranks is."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import torch

from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.documents import random_documents
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.core.topology import Topology
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.planner.candidates import Options
from megatron_cp_plugin.planner.choose import Kind, Place, choose
from megatron_cp_plugin.planner.explain import sentence
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.registry import AUTO, layout_of

_OF_GPU = {"h200": "h200_nvlink", "h100": "h100_400g", "a800": "a800_4x200g", "b200": "b200"}
_DEFAULT = "h200"
_KERNEL = "flash4"

log = logging.getLogger(__name__)


def machine_named(name: str) -> Machine:
    """A machine by a GPU's name, by that of its file or by a path.

    Raises: ConfigError if there is none.
    """
    return Machine.load(_OF_GPU.get(name.lower(), name))


def machine_here(name: str | None, gpu: str | None) -> tuple[Machine, str]:
    """The machine, and how it was found.

    Args: name: as in `machine_named`; None: by the GPU. gpu: its name; None: there is none.

    Raises: ConfigError if there is none of that name.
    """
    if name is not None:
        return machine_named(name), "as it was named"
    words = (gpu or "").lower().replace("-", " ").split()
    for known in _OF_GPU:
        if known in words:
            return machine_named(known), f"by the name of the GPU, {gpu}"
    why = f"no machine is known for {gpu}" if gpu else "there is no GPU here"
    return machine_named(_DEFAULT), f"by default, for {why}: name yours"


def kernel_on(machine: Machine, name: str) -> str:
    """The machine's kernel of that name; where it does not know it the usual one, or its first."""
    return next(one for one in (name, _KERNEL, *machine.kernels) if one in machine.kernels)


def statistics_of(mask: Mask, seq_len: int, layout: Layout, size: int) -> Mask:
    """A mask that stands for many: documents of random lengths, with about the same mean.

    So that a choice need not be made again for every batch.
    """
    if not mask.documents:
        return mask
    mean = seq_len / (len(mask.documents) + 1)
    return replace(
        mask,
        documents=documents_like(1 << round(mean).bit_length() - 1, seq_len, layout, size),
    )


def documents_like(mean: int, seq_len: int, layout: Layout, size: int) -> tuple[int, ...]:
    """Documents of random lengths with about this mean, padded as the layout needs them."""
    padded = layout.name == PaddedDocuments.name
    return random_documents(seq_len, mean, multiple=layout.multiple(size) if padded else 1)


def choose_for(
    topology: Topology, shape: Shape, mask: Mask, kernel: str, given: Mapping[str, object]
) -> tuple[str, Options]:
    """Algorithm and options for one attention call; a collective operation, once for each shape.

    Args: kernel: name of the one that computes. given: options of `AUTO`: layout, machine.

    Raises: ConfigError: Another option is given, or nothing serves. ContextParallelError: The ranks
        have not chosen the same.
    """
    layout, machine = layout_of(AUTO, given), given.get("machine")
    mask = statistics_of(mask, shape.seq_len, layout, topology.size)
    named = None if machine is None else str(machine)
    return _chosen(topology, shape, mask, kernel, layout.name, named)


@lru_cache(maxsize=256)
def _chosen(
    topology: Topology, shape: Shape, mask: Mask, kernel: str, layout: str, name: str | None
) -> tuple[str, Options]:
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            f"a CUDA graph cannot compare the ranks' choices, got algo {AUTO} for a new shape "
            "while it was captured: make the same call once before"
        )
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    question = shape, mask, kernel, layout, name
    asked = topology.gather((question, gpu))
    check_agreement([repr(question) for question, _ in asked])
    nodes, peer_access = topology.nodes, topology.peer_access
    answer: tuple[str, Options] | ContextParallelError | None = None
    if topology.rank == 0:
        try:
            machine, how = machine_here(name, asked[0][1])
            if not peer_access:
                machine = replace(machine, copy=None)
            place = Place(machine, nodes, kernel_on(machine, kernel))
            choice = choose([Kind("attention", shape, mask)], place, layouts=(layout,))
            log.info("%s (machine found %s)", sentence(choice), how)
            answer = choice.best.algo, choice.best.options
        except ContextParallelError as error:
            answer = error
    answer = topology.gather(answer)[0]
    if isinstance(answer, ContextParallelError):
        raise answer
    assert answer is not None  # rank 0 has one
    return answer


def check_agreement(asked: Sequence[str]) -> None:
    """Raises: ContextParallelError on all ranks if not all ask, or have chosen, the same.

    Args: asked: in words, by rank.
    """
    for rank, other in enumerate(asked):
        if other != asked[0]:
            raise ContextParallelError(
                f"all ranks need the same choice of {AUTO}, got {asked[0]} on rank 0 and {other} "
                f"on rank {rank}: start all with the same settings and versions, or name an "
                "algorithm"
            )
