"""Checks that a model's inputs were split by the run's layout, and refuses others."""

from __future__ import annotations

import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.agree import Digest, SameCall, words_of
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.devices import capturing
from megatron_cp_plugin.core.document_layout import describe_mismatch
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError
from megatron_cp_plugin.integration import attention_mask
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.batch import (
    Batches,
    Cut,
    LaterValues,
    is_multimodal,
    other_samples,
)
from megatron_cp_plugin.integration.documents import (
    ALONE,
    DocumentMask,
    PositionsOfPacks,
    check_cutting,
    document_mask,
    group_of,
)
from megatron_cp_plugin.integration.example_spans import EXAMPLE_SPANS
from megatron_cp_plugin.integration.recurrent import is_gated_delta_net, is_mamba
from megatron_cp_plugin.integration.rope import use_layout
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.integration.spec import use_attention

# Arguments of a model that hold tokens, and the keys of a batch that they come from.
_ARGUMENTS = {
    "input_ids": "tokens",
    "labels": "labels",
    "loss_mask": "loss_mask",
    "position_ids": "position_ids",
}
_REMEDY = (
    "pass whole samples to megatron.core.utils.get_batch_on_this_cp_rank, imported after the "
    "plugin is installed, and its results to the model unchanged"
)


@dataclass
class _Call:
    """A forward pass of a model: its arguments by name, its ranks, and its mask."""

    model: Any
    given: dict[str, Any]
    group: dist.ProcessGroup
    mask: DocumentMask | None = None

    @property
    def parts(self) -> int:
        """Number of ranks over which hidden states are scattered within a context-parallel rank."""
        config = self.model.config
        return config.tensor_model_parallel_size if Settings(config).sequence_parallel else 1

    @property
    def tokens(self) -> int | None:
        """Number of tokens of each sequence on this rank; None: another stage knows."""
        hidden, ids = self.given.get("decoder_input"), self.given.get("input_ids")
        if isinstance(hidden, Tensor):
            return hidden.size(0) * self.parts
        if not getattr(self.model, "pre_process", True) or not isinstance(ids, Tensor):
            return None  # some callers pass whole samples to later stages, which ignore them
        return ids.size(-1)

    @property
    def received(self) -> Tensor | None:
        """Hidden states [s,b,h] of the stage before."""
        found: Tensor | None = getattr(getattr(self.model, "decoder", None), "input_tensor", None)
        return found

    @property
    def local_tokens(self) -> int | None:
        """Number of tokens that this rank holds, even if arguments are whole; None: unknown."""
        given, mask = self.given, self.mask
        if not getattr(self.model, "pre_process", True):
            hidden = self.received
            return None if hidden is None else hidden.size(0) * self.parts
        for name in ("labels", "loss_mask"):
            if isinstance(given.get(name), Tensor):
                tokens: int = given[name].size(-1)
                return tokens
        if mask is not None and mask.seq_len:
            return mask.seq_len // self.group.size()
        # Some callers embed whole samples, cut their embeddings, and hand on the whole ids.
        found = [given["input_ids"].size(-1)] if isinstance(given.get("input_ids"), Tensor) else []
        if isinstance(given.get("decoder_input"), Tensor):
            found.append(given["decoder_input"].size(0) * self.parts)
        return min(found, default=None)


class Inputs(ABC):
    """Checks a model's arguments, and replaces packed_seq_params by a mask.

    In every call the context-parallel ranks compare their findings and what they share before
    anything else is sent, so that all refuse what one refuses; and the stages of a pipeline compare
    theirs. What only a GPU knows, they compare at the end of the forward pass, where the host
    hardly waits; in the first call, and on CPUs, at its beginning.
    """

    def __init__(
        self, model: nn.Module, runtime: Runtime, group: dist.ProcessGroup, later: LaterValues
    ) -> None:
        """Args: later: what a GPU finds."""
        self._runtime = runtime
        self._group = group
        self._later = later
        # Layers whose state runs along the sequence, regardless of spans.
        self._recurrent = any(is_gated_delta_net(m) or is_mamba(m) for m in model.modules())
        self._stages = _stages_of(model)
        self._layers: tuple[ContextParallelAttention, ...] = ()
        self._is_first = True
        self._topology: Topology | None = None  # whose ranks compare when the model has run
        self._forward: Any = None
        model.register_forward_pre_hook(self, with_kwargs=True)
        model.register_forward_hook(self.leave)

    def __call__(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A hook that runs before a model's forward pass."""
        called = SameCall(self._runtime.topology(self._group), "the model")
        with self._later, called as made:
            made.refusal = _other_inputs
            first = self._stages.first() if self._stages else {}
            bound = self._bound(model, args, kwargs)
            call = _Call(model, bound.arguments, self._group)
            call.group = self._group_of(model, call.given.get("packed_seq_params"))
            made.topology = self._runtime.topology(call.group)
            _check_cache(call)
            call.mask = self._mask_of(call)
            _check_spans(call, self._runtime.config, carries=self._recurrent)
            _check_capture(call)
            self._cut_whole(call)
            self._check(call)
            _check_parts(call)
            held = _of_batch(call)
            _check_stages(first, held)
            self._look_at_mask(call)
            layers = tuple(layer.settings for layer in self._layers)
            made.values = {
                **held,
                "dtype": _dtypes(model),
                "set of attention layers": Digest(layers),
                "checks": self._later.names,
            }
            if self._is_first or not self._later.waits:
                made.values |= self._later.take()
        self._is_first = False
        self._topology = made.topology if self._later.names else None
        self._held = held
        self._runtime.mask = call.mask
        if call.mask is not None:
            call.given["packed_seq_params"] = call.mask
        return bound.args, bound.kwargs

    def _bound(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> inspect.BoundArguments:
        """Arguments by name."""
        forward = getattr(model.forward, "__func__", model.forward)  # refers to no model
        if forward is not self._forward:  # programs may replace it
            if self._forward is None:
                self._prepare(model)
                layers = (m for m in model.modules() if isinstance(m, ContextParallelAttention))
                self._layers = tuple(layers)
            self._forward, self._signature = forward, inspect.signature(model.forward)
        return self._signature.bind(*args, **kwargs)

    def _prepare(self, model: nn.Module) -> None:  # noqa: B027  (most need nothing)
        """Runs before the first call."""

    def _group_of(self, model: Any, packed: Any) -> dist.ProcessGroup:
        """The context-parallel ranks of a micro-batch."""
        return self._group

    def _cut_whole(self, call: _Call) -> None:
        """Keeps this rank's part of arguments that may be whole although tokens are cut.

        These are multimodal position ids [3,b,N], which Megatron's position embedding would cut,
        and embeddings [N,b,H] with images inserted before the split.
        """
        given, mask, group = call.given, call.mask, call.group
        ids, hidden, size = given.get("position_ids"), given.get("decoder_input"), group.size()
        multimodal = isinstance(ids, Tensor) and is_multimodal(ids)
        if multimodal and mask is not None and mask.positions is not None:
            raise ContextParallelError(
                "position_ids of time, height and width say where tokens are, got "
                "attention_positions beside them: leave attention_positions out"
            )
        if size == 1 or not (multimodal or isinstance(hidden, Tensor)):
            return
        local = call.local_tokens
        whole: dict[str, tuple[Any, int, int]] = {
            "decoder_input": (hidden, 0, call.parts),
            "position_ids": (ids if multimodal else None, 2, 1),
        }
        for name, (tensor, dim, parts) in whole.items():
            if local is None or tensor is None or tensor.size(dim) * parts == local:
                continue
            tokens = tensor.size(dim)
            if parts > 1:
                raise ContextParallelError(
                    f"decoder_input needs the {local} tokens of a context-parallel rank scattered "
                    f"over {parts} tensor-parallel ranks, got {tokens} instead of "
                    f"{local // parts}: split it like labels before it is scattered"
                )
            if tokens != local * size:
                raise ContextParallelError(
                    f"{name} needs the {local} tokens of this rank, or the {local * size} of the "
                    f"whole sequence, got {tokens}: split it like labels, or not at all"
                )
            documents = mask.resolved(tokens) if mask is not None else ()
            mine = self._runtime.positions(group, tokens, tensor.device, documents)
            given[name] = tensor.index_select(dim, mine)

    def __deepcopy__(self, memo: dict[int, Any]) -> Inputs:
        """Models may be copied; process groups may not."""
        return self

    def leave(self, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Runs after a model's forward pass; on a GPU the host waits for its beginning."""
        topology, self._topology = self._topology, None
        if topology is not None:
            with SameCall(topology, "the end of the model") as made:
                made.refusal = other_samples
                made.values = self._later.take()
        if self._stages:
            self._stages.tell(self._held)

    @abstractmethod
    def _mask_of(self, call: _Call) -> DocumentMask | None:
        """The mask, from a model's arguments."""

    @abstractmethod
    def _check(self, call: _Call) -> None:
        """Raises: ContextParallelError if tokens do not belong to the mask."""

    def _look_at_mask(self, call: _Call) -> None:
        """Begins to look at attention_mask; spans are in its place."""
        mask, of_call, group = call.given.get("attention_mask"), call.mask, call.group
        tokens = call.local_tokens
        if not isinstance(mask, Tensor) or capturing(mask) or tokens is None:
            return
        if of_call is not None and of_call.spans is not None:
            return
        starts = of_call.starts if of_call is not None else ()
        total, causal = tokens * group.size(), all(layer.settings[0] for layer in self._layers)
        places = self._runtime.positions(group, total, mask.device, starts)
        found = attention_mask.differs(mask, places, total, starts, causal=causal)
        refuse = partial(attention_mask.refuse, shape=mask.shape)
        self._later.add("attention_mask", found, refuse)


class SplitInputs(Inputs):
    """Inputs from batches that the plugin has cut; others are refused."""

    def __init__(self, model: nn.Module, batches: Batches, group: dist.ProcessGroup) -> None:
        """Args: batches: what was cut; its runtime is told whom tokens see in what comes next."""
        super().__init__(model, batches.runtime, group, batches.later)
        self._batches = batches
        self._cut: Cut | None = None

    def _mask_of(self, call: _Call) -> DocumentMask | None:
        given, own = call.given, call.group
        self._cut = _cut_of(given, self._batches, own) if own.size() > 1 else None
        packed = given.get("packed_seq_params")
        group = group_of(packed, own)
        if group not in (own, ALONE) or group.size() != own.size():
            raise ContextParallelError(
                "packed sequences need the context-parallel group of the run, got another "
                "cp_group: leave it out"
            )
        mask = document_mask(packed, own)
        spans = self._batches.spans_of(map(given.get, _ARGUMENTS))
        if spans is None:
            return mask
        if mask is not None and mask.spans is not None:
            raise ContextParallelError(
                "a batch's attention_spans say which keys a query sees, got others for the model "
                "beside them: give them to one of the two"
            )
        return spans.beside(mask)

    def _check(self, call: _Call) -> None:
        resolved = None if self._cut is None else self._cut.resolved
        seen = call.mask or DocumentMask()
        if resolved is not None and (resolved.spans, resolved.starts) != (seen.spans, seen.starts):
            by, got = (
                f"{len(each.starts) + 1} documents and {len(each.spans or ())} spans"
                for each in (resolved, seen)
            )
            raise ContextParallelError(
                f"a batch was split by {by}, and the model got others, {got}: give both the same "
                "cu_seqlens and attention_spans, or leave the option layout=documents out"
            )


class CutInputs(Inputs):
    """Inputs from batches that callers have cut, checked against packed_seq_params."""

    def __init__(self, model: nn.Module, runtime: Runtime, group: dist.ProcessGroup) -> None:
        super().__init__(model, runtime, group, LaterValues())
        self._positions: dict[dist.ProcessGroup, PositionsOfPacks] = {}

    def _prepare(self, model: nn.Module) -> None:
        # Frameworks give a model other position embeddings, or layers, once it is built.
        use_layout(model, self._runtime)
        use_attention(model, self._runtime)

    def _group_of(self, model: Any, packed: Any) -> dist.ProcessGroup:
        """Refuses other ranks than those of the run, where a layer would not know of them."""
        group = group_of(packed, self._group)
        if group is self._group:
            return group
        self._runtime.check_group(group)
        settings = Settings(model.config)
        weights = settings.moe_aux_loss_coeff
        reasons = {
            "DSA layers split documents": settings.is_sparse,
            "Megatron sums the losses of --moe-aux-loss-coeff": any(
                weights if isinstance(weights, list) else [weights]
            ),
        }
        for reason in (reason for reason, applies in reasons.items() if applies):
            raise ContextParallelError(
                f"{reason} over the {self._group.size()} context-parallel ranks of the run, got "
                f"packed_seq_params of {group.size()}: leave one of the two out"
            )
        return group

    def _mask_of(self, call: _Call) -> DocumentMask | None:
        self._later.clear()  # of a call that has failed
        packed = call.given.get("packed_seq_params")
        check_cutting(packed, self._runtime.config.layout)
        return document_mask(packed, call.group)

    def _check(self, call: _Call) -> None:
        tokens, mask, group = call.tokens, call.mask, call.group
        size = group.size()
        if tokens is None:
            return
        total = tokens * size
        if mask is not None and mask.has_documents and mask.seq_len != total:
            raise ContextParallelError(
                "packed_seq_params need the lengths of all documents as they were split, "
                f"padding included: {total} tokens on {size} ranks of {tokens}, got "
                f"{mask.seq_len}: give cu_seqlens_q_padded of whole documents, and each rank "
                "its part of each"
            )
        layout = self._runtime.config.layout.for_documents(mask.starts if mask else ())
        layout.spans(group.rank(), size, total)
        positions, ids = call.given.get("position_ids"), call.given.get("input_ids")
        if size == 1 or not (mask is None or mask.has_documents):
            return
        if not isinstance(positions, Tensor) or not isinstance(ids, Tensor) or capturing(positions):
            return
        if positions.shape == ids.shape:  # else left as they were before samples were packed
            packs = PositionsOfPacks(self._runtime.config.layout, group)
            look = self._positions.setdefault(group, packs)
            check = partial(look.check, mask=mask, seq_len=total)
            self._later.add("position_ids", positions[0], check)


def _other_inputs(name: str, words: Sequence[str], rank: int) -> str:
    """Says that ranks have other inputs, as of `SameCall.refusal`."""
    return (
        f"all context-parallel ranks need one {name}, got {words[0]} on rank 0 and {words[rank]} "
        f"on rank {rank}: pass each of them its part of one batch"
    )


def _dtypes(model: nn.Module) -> tuple[torch.dtype, torch.dtype | None]:
    """Of parameters, and of autocast; None: there is none."""
    parameter = next(model.parameters(), torch.empty(0))
    device = parameter.device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return parameter.dtype, cast


def _of_batch(call: _Call) -> dict[str, object]:
    """What all ranks and all stages share of a micro-batch."""
    mask, ids = call.mask or DocumentMask(), call.given.get("input_ids")
    hidden = call.given.get("decoder_input")
    if not getattr(call.model, "pre_process", True):
        ids, hidden = None, call.received
    batch = ids.size(0) if isinstance(ids, Tensor) else None
    batch = hidden.size(1) if isinstance(hidden, Tensor) else batch
    documents = mask.seq_len, mask.starts, mask.padding
    return {
        "training": torch.is_grad_enabled(),
        "number of tokens": call.local_tokens if call.tokens is None else call.tokens,
        "batch size": batch,
        "packed_seq_params": Digest(documents if call.mask and mask.has_documents else None),
        "attention_spans": Digest(mask.spans),
        "attention_positions": Digest(mask.positions),
    }


class Stages:
    """Lets the stages of a pipeline compare what they share of each micro-batch.

    A later stage runs after the first one, so that they cannot wait for each other: the first stage
    leaves its values in a store when a forward pass has ended, and the last of the others to read
    them deletes them.
    """

    def __init__(
        self, ranks: Sequence[int], rank: int, chunk: int, chunks: int, *, is_first: bool
    ) -> None:
        """All stages make them in the same order.

        Args:
            ranks: the pipeline's, in the job.
            rank: the index of this one.
            chunk, chunks: index and number of a rank's virtual stages, which are one model.
        """
        built = _store().add(f"megatron_cp_plugin/models/{ranks[rank]}", 1)
        self._key = f"megatron_cp_plugin/stages/{ranks[0]}/{built - chunk}"
        self._readers = len(ranks) * chunks - 1
        self._is_first, self._calls = is_first, 0

    def first(self) -> dict[str, list[str]]:
        """The first stage's values of this call, as text and in words; {}: this is the first one.

        Raises: CommunicationError if the first stage does not come.
        """
        if self._is_first:
            return {}
        store, key = _store(), f"{self._key}/{self._calls}"
        self._calls += 1
        try:
            found: dict[str, list[str]] = json.loads(store.get(key))
        except RuntimeError as error:
            raise CommunicationError(
                "a pipeline stage lost the first one in a comparison; has it died? "
                f"({str(error).splitlines()[0]})"
            ) from error
        if store.add(f"{key}/read", 1) == self._readers:
            store.delete_key(key)
            store.delete_key(f"{key}/read")
        return found

    def tell(self, values: Mapping[str, object]) -> None:
        """Leaves the first stage's values of a call that has ended for the others."""
        if self._is_first:
            said = {name: [repr(value), words_of(value)] for name, value in values.items()}
            _store().set(f"{self._key}/{self._calls}", json.dumps(said))
            self._calls += 1


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _stages_of(model: Any) -> Stages | None:
    """The stages of a model's pipeline; None: it has one."""
    group: Any = getattr(getattr(model, "pg_collection", None), "pp", ALONE)
    if group.size() == 1:
        return None
    ranks, chunk = dist.get_process_group_ranks(group), getattr(model, "vp_stage", None) or 0
    chunks = getattr(model.config, "virtual_pipeline_model_parallel_size", None) or 1
    return Stages(ranks, group.rank(), chunk, chunks, is_first=getattr(model, "pre_process", True))


def _check_stages(first: Mapping[str, list[str]], held: Mapping[str, object]) -> None:
    """Refuses values that differ from the first stage's. Args: first: as of `Stages.first`."""
    for name, value in held.items() if first else ():
        theirs, words = first[name]
        unknown = repr(None) in (theirs, repr(value)) and not isinstance(value, Digest)
        if theirs != repr(value) and not unknown:
            raise ContextParallelError(
                f"all pipeline stages need one {name}, got {words} on the first stage and "
                f"{words_of(value)} on this one: give every stage the same batch"
            )


def _check_spans(call: _Call, config: ContextParallelConfig, *, carries: bool) -> None:
    """Refuses spans if a layer would ignore them."""
    mask = call.mask
    if mask is None or mask.spans is None:
        return
    settings = Settings(call.model.config)
    reasons = {
        "recurrent layers carry their state on along the sequence": carries,
        "DSA layers choose the keys that a query sees": settings.is_sparse,
        "layers of linear attention see all earlier tokens": config.has_linear_layers,
    }
    for reason in (reason for reason, applies in reasons.items() if applies):
        raise ContextParallelError(f"{reason}, got attention_spans: leave one of the two out")
    if settings.mtp_num_layers:
        stops = (stop for one in mask.spans for stop in one[1:2])
        ends = (index(stop) for stop in stops if isinstance(stop, SupportsIndex))
        mask.sample_starts(mask.seq_len or max(ends, default=0))
    if config.by_auto and not config.for_spans:
        raise ContextParallelError(
            "auto chooses before it sees a batch, got attention_spans after it chose "
            f"{config.algo}: name an algorithm, such as {config.algo}, or in a run of Megatron "
            f"give it those of a batch by {EXAMPLE_SPANS}"
        )


def _check_cache(call: _Call) -> None:
    """Refuses generation: Megatron counts the positions of its caches by whole sequences."""
    for name in ("inference_context", "inference_params"):
        if call.given.get(name) is not None and call.group.size() > 1:
            raise ContextParallelError(
                f"context parallelism does not support Megatron's KV cache, got {name} with "
                f"context_parallel_size {call.group.size()}: leave it out, generate with a model "
                "of context_parallel_size 1 without the plugin, or decode by cp.decode_attention"
            )


def _check_parts(call: _Call) -> None:
    """Refuses tokens that tensor-parallel ranks cannot share, at which Megatron's layers fail."""
    ids, parts, size = call.given.get("input_ids"), call.parts, call.group.size()
    embeds = getattr(call.model, "pre_process", True) and call.given.get("decoder_input") is None
    if embeds and isinstance(ids, Tensor) and ids.size(-1) % parts:
        raise ContextParallelError(
            f"--sequence-parallel needs tokens of a context-parallel rank divisible by "
            f"tensor_model_parallel_size = {parts}, got {ids.size(-1)}: pad the sequence to a "
            f"multiple of {parts * size}"
        )


def _check_capture(call: _Call) -> None:
    settings, mask = Settings(call.model.config), call.mask
    if mask and settings.captures_attention:
        got = "attention_spans" if mask.spans is not None else "packed sequences"
        other = got if got == "attention_spans" else "packed_seq_params"
        raise ContextParallelError(
            f"--cuda-graph-impl {settings.graphs} keeps the documents of the batch that was "
            f"captured, got {got}: use --cuda-graph-impl transformer_engine --cuda-graph-modules "
            f"mlp, or leave it or {other} out"
        )


def serves_inputs(model: nn.Module) -> bool:
    """Whether a model's inputs are checked here already."""
    return any(isinstance(hook, Inputs) for hook in model._forward_pre_hooks.values())


def _cut_of(given: Mapping[str, Any], batches: Batches, group: dist.ProcessGroup) -> Cut | None:
    """The cutting that a model's tensors come from; None: it has no such tensors, as inside a
    pipeline.
    """
    config = batches.runtime.config
    found: list[Cut] = []
    tokens = 0
    for name, key in _ARGUMENTS.items():
        tensor = given.get(name)
        if not isinstance(tensor, Tensor):
            continue
        cut = batches.cut_of(key, tensor)
        if cut is None and tensor.dim() == 3 and found and tensor.size(2) == tokens * group.size():
            continue  # positions of the whole sequence
        if cut is None:
            changed = "that it has not split, or that was changed since"
            why = changed if batches.has_cut else "and split none"
            whose = _whose(given.get("position_ids"), batches, group)
            raise ContextParallelError(
                f"{config.algo} needs batches that the plugin splits by the "
                f"{config.layout.name} layout, got {name} {list(tensor.shape)} {why}{whose}: "
                f"{_REMEDY}"
            )
        found.append(cut)
        tokens = tensor.size(-1)
    if given.get("decoder_input") is not None and not found:
        raise ContextParallelError(
            f"{config.algo} needs position_ids or labels to identify the tokens of decoder_input, "
            f"got none: {_REMEDY}"
        )
    if any(cut is not found[0] for cut in found):
        raise ContextParallelError(
            f"a model takes tensors of one batch, got those of several: {_REMEDY}"
        )
    return found[0] if found else None


def _whose(position_ids: Any, batches: Batches, group: dist.ProcessGroup) -> str:
    """Which tokens position ids [b, S] belong to, in words and in brackets."""
    known = isinstance(position_ids, Tensor) and not is_multimodal(position_ids)
    if not known or batches.runtime.follows_documents:
        return ""
    layout, size = batches.runtime.config.layout, group.size()
    tokens = position_ids.size(1) * size
    mismatch = describe_mismatch(position_ids, layout, group.rank(), size, tokens)
    return f" ({mismatch})" if mismatch else ""
