"""The runtime object of a run: one configuration, one layout, one algorithm per process group.

Further process groups of context-parallel ranks have Megatron's settings for theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.devices import kept_on_device
from megatron_cp_plugin.core.communication.process_groups import ProcessGroupTopology, topology_of
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import Contiguous, Documents, positions
from megatron_cp_plugin.core.linear.algorithm import LinearAlgorithm, StatePassing
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.documents import ALONE, DocumentMask
from megatron_cp_plugin.integration.settings import Settings


class Runtime:
    """Serves batch slicing, position embeddings and attention of one run from one layout.

    Attributes: mask: mask of the micro-batch whose forward runs; None: tokens see all earlier ones.
        Not valid in computations that the backward may repeat.
    """

    def __init__(self, config: ContextParallelConfig, *, callers: bool = False) -> None:
        """Args: callers: See `is_cut_by_callers`; they always do with the layout thd."""
        self.config = config
        self._callers = callers
        self.mask: DocumentMask | None = None
        self._layout = config.layout
        self._algorithms: dict[tuple[str, dist.ProcessGroup], Any] = {}
        self._by_algo: dict[str, Runtime] = {}
        self._topologies: dict[dist.ProcessGroup, Topology] = {ALONE: VirtualWorld(1).topology(0)}

    def set_up(self, group: dist.ProcessGroup, new_group: Callable[[list[int]], object]) -> None:
        """Lets a group's ranks make further groups by `new_group`, when calls need them.

        Args: new_group: makes a group of some world ranks, which call it.
        """
        if group.size() > 1 and group not in self._topologies:
            self._topologies[group] = ProcessGroupTopology(group, new_group)

    def algorithm(self, group: dist.ProcessGroup) -> Algorithm:
        """Returns the algorithm over a context-parallel group, whose ranks make it together."""
        options = dict(self.config.options)
        if self.config.send_latents and "chunks" in registry.option_names(self.config.algo):
            options = {"chunks": 1} | options  # latents are of all heads
        return self._made(registry.create, self.config.algo, group, options)

    def linear_algorithm(self, group: dist.ProcessGroup) -> LinearAlgorithm:
        """Returns the algorithm of linear attention over a group; otherwise as `algorithm`."""
        options = dict(self.config.options)
        return self._made(registry.create_linear, self.config.algo, group, options)

    def recurrent_algorithm(self, group: dist.ProcessGroup) -> StatePassing:
        """Returns the algorithm that passes the states of Megatron's own recurrent layers, as
        `algorithm`.
        """
        layout = self._layout if group.size() > 1 else Contiguous()
        return self._made(registry.create_linear, "lasp2", group, {"layout": layout.name})

    def _made(
        self,
        create: Callable[..., Any],
        algo: str,
        group: dist.ProcessGroup,
        options: dict[str, object],
    ) -> Any:
        if (algo, group) not in self._algorithms:
            self._algorithms[algo, group] = create(algo, self.topology(group), options)
        return self._algorithms[algo, group]

    def topology(self, group: dist.ProcessGroup) -> Topology:
        """Returns the ranks of a context-parallel group."""
        if group.size() == 1:
            return self._topologies[ALONE]
        return self._topologies.get(group) or topology_of(group)

    def serving(self, algo: str) -> Runtime:
        """Returns the runtime for the layers with one of the run's algorithms."""
        if algo == self.config.algo:
            return self
        if algo not in self._by_algo:
            config = replace(self.config, algo=algo, options=self.config.options_of(algo))
            if registry.kind_of(algo) != registry.kind_of(self.config.algo):
                # The chosen kernel is for the other kind of attention.
                config = replace(config, kernel="auto")
            self._by_algo[algo] = Runtime(config)
            self._by_algo[algo]._topologies = self._topologies
        return self._by_algo[algo]

    @property
    def has_groups(self) -> bool:
        """Whether several process groups were set up, so that micro-batches may choose one."""
        return len(self._topologies) > 1

    def check_group(self, group: dist.ProcessGroup) -> None:
        """Refuses groups that were not set up, if others were."""
        if group.size() > 1 and self.has_groups and group not in self._topologies:
            raise ContextParallelError(
                f"packed_seq_params need a cp_group that was there when the model was built, got "
                f"another one of {group.size()} ranks: let initialize_model_parallel make it, by "
                "hybrid_context_parallel or dynamic_context_parallel"
            )

    @property
    def is_cut_by_callers(self) -> bool:
        """Whether the callers of a model cut its batches, not the plugin."""
        return self._callers or self._layout.name == PaddedDocuments.name

    @property
    def follows_documents(self) -> bool:
        """Whether the tokens that a rank holds depend on the documents."""
        return self._layout.follows_documents

    def positions(
        self,
        group: dist.ProcessGroup,
        seq_len: int,
        device: torch.device,
        documents: Documents = (),
    ) -> Tensor:
        """Returns the global positions of this rank's tokens, int64 [S], in local order."""
        layout = self._layout.for_documents(documents)
        return _positions(layout, group.rank(), group.size(), seq_len, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        """Layer specs, which carry the runtime, may be copied; process groups may not."""
        return self


# All tensors of a batch, and the angles of its positions, ask for the same ones.
_positions = kept_on_device(maxsize=16)(positions)


def set_up_groups(
    runtime: Runtime, args: Any | None, config: TransformerConfig, groups: Any
) -> None:
    """Sets up the groups of context-parallel ranks that a model's micro-batches may have.

    Raises: ConfigError: The model is configured for another number of context-parallel ranks.
    """
    own = parallel_state.get_context_parallel_group() if groups is None else groups.cp
    if config.context_parallel_size != own.size():
        raise ConfigError(
            "a model's context_parallel_size must be the size of its context-parallel group, "
            f"{own.size()}, got {config.context_parallel_size}: set it in the model's "
            "configuration before the model is built"
        )
    new_group = _new_group(args)
    for group in (own, *_dynamic(Settings(config))):
        runtime.set_up(group, new_group)


def _dynamic(settings: Settings) -> list[Any]:
    """Groups of data- and context-parallel ranks of which a micro-batch may have one, by size."""
    groups: dict[int, Any] = {}
    for name in ("_HYBRID_DP_CP_GROUPS", "_DYNAMIC_DP_CP_GROUPS"):  # the second one after 0.20
        groups |= getattr(parallel_state, name, {})
    # Of two ranks Megatron makes no further groups; verl sets groups up, but not the model.
    if not (groups or settings.hybrid_context_parallel or settings.dynamic_context_parallel):
        return []
    full = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return [*(groups[size] for size in sorted(groups)), full]


def _new_group(args: Any | None) -> Callable[[list[int]], object]:
    """Makes a group with the timeout and the NCCL options that context-parallel groups have."""
    options: dict[str, dict[str, Any]] = {}
    common: Any = {"group_desc": "CONTEXT_PARALLEL_GROUP", "use_local_synchronization": True}
    if args is None:
        return partial(parallel_state.create_group, **common)
    if args.nccl_communicator_config_path is not None:
        text = Path(args.nccl_communicator_config_path).read_text()
        options = yaml.safe_load(text) or {}
    if "cp" in (Settings(args).high_priority_stream_groups or ()):
        options.setdefault("cp", {})["is_high_priority_stream"] = True
    timeout = timedelta(minutes=args.distributed_timeout_minutes)

    def new_group(ranks: list[int]) -> object:
        # Megatron keeps a list of the groups whose timeouts it changes after the first step. Torch
        # changes the options of a group, so that each needs its own.
        return parallel_state.create_group(
            ranks,
            timeout=timeout,
            pg_options=parallel_state.get_nccl_options("cp", options),
            **common,
        )

    return new_group
