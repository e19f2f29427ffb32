"""A program on megatron.core that cuts packed batches by itself: cut_batches_job.py WAY [FLAGS].

It knows nothing of the plugin but the lines that put it in force, by WAY: install, models (several,
of other KV heads, or gated delta nets), dynamic (batches choose their ranks), pipeline (of two
stages), algorithms, or launcher, which takes FLAGS. It prints what a model and its gradients are
off by, compared with each document alone through Megatron's own attention, as JSON.
"""

import gc
import json
import logging
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional

from megatron_cp_plugin.spans import prefix_lm
from tests.span_masks import dense

VOCABULARY = 98
# Lengths of documents without padding: odd, shorter than 2P, a single one.
BATCHES: dict[str, tuple[int, ...]] = {
    "odd": (13, 1, 27, 6),
    "short": (1, 2, 1, 3),
    "one": (21,),
}
# Of a batch, whether lengths without padding are given too; FEW of all but one algorithm.
CASES = (("odd", False), ("odd", True), ("short", True), ("one", False))
FEW = CASES[1:3]
SERVED = {"distflash": "thd", "zigzag": "thd", "ulysses": "contiguous", "attention2d": "contiguous"}
SOFTMAX = ("zigzag", "ring", "distflash", "allgather", "attention2d", "ulysses", "usp")
CHOICE: dict[str, Any] = {"tokens": 64, "mean_document": 8}  # what auto has to know


def make_model(config: Any, groups: Any, spec: Any = None, **settings: Any) -> Any:
    """A GPTModel as frameworks build it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    spec = spec or get_gpt_layer_local_spec(multi_latent_attention=config.multi_latent_attention)
    if config.mtp_num_layers:
        settings["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
    return GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=VOCABULARY,
        max_sequence_length=256,
        position_embedding_type="mrope" if config.mrope_section else "rope",
        share_embeddings_and_output_weights=False,
        pg_collection=groups,
        **settings,
    )


def make_config(size: int, *, latent: bool = False, **settings: Any) -> Any:
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = {"num_layers": 2, "hidden_size": 32, "num_attention_heads": 4} | settings
    kind: type = MLATransformerConfig if latent else TransformerConfig
    sizes = {"qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8, "kv_lora_rank": 16}
    sizes |= {"rope_type": "rope", "apply_rope_fusion": False}
    return kind(
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        context_parallel_size=size,
        # What verl and slime set.
        attention_backend=AttnBackend.flash,
        **((sizes if latent else {"num_query_groups": 2}) | settings),
    )


# Angles of time, height and width of heads of 8.
IMAGES = {"mrope_section": [2, 1, 1]}
WHOLE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
RECURRENT = {
    "num_query_groups": 4,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 3,  # Megatron asks for a multiple of the ranks
    "linear_num_value_heads": 6,
    "activation_func": functional.silu,
}
SIX_HEADS = {"hidden_size": 24, "num_attention_heads": 6, "kv_channels": 8}
# Of each kind of model what `make_config` takes.
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    "recomputed": WHOLE_LAYERS,
    "images": IMAGES,
    "latent": {"latent": True},
    "one more token": {"mtp_num_layers": 1},
    "layers that gather": {},
    "2 KV heads": SIX_HEADS | {"num_query_groups": 2},
    "6 KV heads": SIX_HEADS | {"num_query_groups": 6},
    "gated delta nets, one more token": RECURRENT | {"mtp_num_layers": 1},
    "gated delta nets of 4 heads": RECURRENT
    | {"linear_num_key_heads": 4, "linear_num_value_heads": 8},
}
# By ways to install the plugin: algorithms, layouts and kinds of models, one after another in the
# same processes; with "spans" the first half of each document sees itself whole.
INSTALLED: dict[str, list[tuple[str, str, str]]] = {
    "install": [
        *((algo, "thd", "") for algo in SOFTMAX),
        ("distflash", "thd", "recomputed"),
        ("distflash", "thd", "images"),
        ("zigzag", "thd", "one more token: spans"),
        ("zigzag", "thd", "layers that gather"),
    ],
    "models": [
        ("usp", "thd", "2 KV heads"),
        ("attention2d", "thd", "6 KV heads"),
        ("zigzag", "thd", "gated delta nets, one more token"),
    ],
}


def prepare(way: str) -> None:
    """What the CPU needs: Megatron asks for GPUs in sequence parallelism, schedules and recurrent
    layers, whose kernels have stand-ins.
    """
    from megatron_cp_plugin.integration import cpu
    from tests.integration.gated_delta_net_job import use_stand_in

    if way != "install":
        cpu.activate()
        use_stand_in()


def made(kind: str, size: int, groups: Any, **more: Any) -> Any:
    """A model of `KINDS`, on `size` context-parallel ranks."""
    config = make_config(size, **KINDS[kind], **more)
    if kind == "latent":
        config.apply_rope_fusion = size > 1  # is switched off: the CPU has no kernel for it
    if kind == "layers that gather":
        return make_model(config, groups, with_gathering_layer(config))
    if config.experimental_attention_variant:
        from tests.integration.gated_delta_net_job import block

        return make_model(config, groups, block(Namespace(transformer=config)))
    return make_model(config, groups)


class References(dict[str, "Reference"]):
    """Of each kind of model that is asked for; tensor: tensor-parallel ranks."""

    def __init__(self, groups: Any, tensor: int = 1) -> None:
        super().__init__()
        self._groups, self._tensor = alone(groups), tensor

    def __missing__(self, kind: str) -> "Reference":
        model = made(kind, 1, self._groups, tensor_model_parallel_size=self._tensor)
        self[kind] = Reference(model)
        return self[kind]


@contextmanager
def installed(algo: str, layout: str, **how: Any) -> Iterator[None]:
    """Twice, as an actor and a reference do that share a process."""
    from megatron_cp_plugin import megatron as cp_megatron

    given = CHOICE if algo == "auto" else {"layout": layout} | how
    cp_megatron.install(algo, **given)
    cp_megatron.install(algo, **given)
    yield
    cp_megatron.uninstall()


def places_of(tokens: int, *, images: bool) -> Tensor:
    """Position ids of a document [n]; or [n,3], as of text with images in it."""
    places = torch.arange(tokens)
    if not images:
        return places
    return torch.stack((places // 3, places - places % 2, 2 * places % 7), dim=1)


def with_images(model: Any, ids: Tensor) -> Tensor:
    """Embeddings of ids [1,S], every fifth of which stands for a part of an image: [S,1,H], or this
    rank's part of them in sequence parallelism.
    """
    embeddings = model.embedding(ids, None)
    if model.config.sequence_parallel:
        group = model.pg_collection.tp
        ids = ids.chunk(group.size(), dim=1)[group.rank()]
    image = torch.outer(ids[0].double(), torch.arange(1.0, 1 + embeddings.size(2))).sin()
    return torch.where((ids[0] % 5 == 0)[:, None, None], image[:, None].float(), embeddings)


def alone(groups: Any) -> Any:
    """The same process groups, but for a model that neither context nor stages split."""
    from copy import copy

    single = copy(groups)
    made = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    single.cp = single.pp = made[dist.get_rank()]
    return single


class Batch:
    """Documents with labels, packed and cut as frameworks do."""

    def __init__(self, lengths: Sequence[int], rank: int, size: int, layout: str = "thd") -> None:
        self.layout = layout
        draw = torch.Generator().manual_seed(sum(lengths))
        self.rank, self.size = rank, size
        self.ids = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths]
        self.labels = [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths]
        self.tokens = sum(lengths)

    def cut(self, documents: Sequence[Tensor]) -> Tensor:
        """[1,T/P,...]: of each document [n,...], padded to a multiple of 2P, chunks p and 2P-1-p;
        or of all of them the p-th of P parts.
        """
        if self.layout == "contiguous":
            return self.whole(documents).chunk(self.size, dim=1)[self.rank]
        mine = []
        for document in documents:
            chunks = self.whole([document])[0].chunk(2 * self.size)
            mine += [chunks[self.rank], chunks[2 * self.size - 1 - self.rank]]
        return torch.cat(mine)[None]

    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Ids, positions, labels, and which tokens count, [1,T/P] each."""
        places, counts = ([f(len(x)) for x in self.ids] for f in (torch.arange, torch.ones))
        return self.cut(self.ids), self.cut(places), self.cut(self.labels), self.cut(counts)

    def whole(self, documents: Sequence[Tensor]) -> Tensor:
        """[1,T,...]: all documents [n,...], each padded to a multiple of 2P."""
        pack = []
        for document in documents:
            rows = -len(document) % (2 * self.size)
            pack += [document, document.new_zeros(rows, *document.shape[1:])]
        return torch.cat(pack)[None]

    def masks(self, *, spanned: bool) -> list[Tensor | None]:
        """What hides keys of each document alone: those that spans do not name, see `packed`."""
        if not spanned:
            return [None] * len(self.ids)
        lengths = [len(ids) for ids in self.ids]
        return [dense(prefix_lm(n // 2, n), n)[None, None] == 0 for n in lengths]

    def packed(self, *, real: bool, spanned: bool = False) -> Any:
        """packed_seq_params; real: lengths without padding beside those with it; spanned: with
        spans, of which the first half of each document sees itself whole.
        """
        from megatron.core.packed_seq_params import PackedSeqParams

        multiple = 2 * self.size
        lengths = [len(document) for document in self.ids]
        padded = [-(-n // multiple) * multiple for n in lengths]
        bounds, with_padding = (
            torch.tensor([0, *accumulate(each)], dtype=torch.int32) for each in (lengths, padded)
        )
        first = bounds if real else with_padding
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=first,
            cu_seqlens_kv=first,
            max_seqlen_q=max(padded),
            max_seqlen_kv=max(padded),
            cu_seqlens_q_padded=with_padding,
            cu_seqlens_kv_padded=with_padding,
        )
        params.of_the_framework = "kept"
        if not spanned:
            return params
        from megatron_cp_plugin.megatron import attention_spans

        starts = [0, *accumulate(padded)]
        masks = [prefix_lm(n // 2, n, start=at) for n, at in zip(lengths, starts, strict=False)]
        return attention_spans(chain.from_iterable(masks), packed_seq_params=params)


@dataclass(frozen=True)
class Expected:
    """Of a batch: the mean loss, log-probs of the labels, and gradients by parameters' names."""

    loss: float
    log_probs: list[Tensor]
    gradients: dict[str, Tensor]


class Reference:
    """A model that neither context nor stages split, given each document by itself.

    The same batch is computed once, whatever it is compared with: some documents by each rank.
    """

    def __init__(self, model: Any) -> None:
        if (
            getattr(model, "position_embedding_type", None) == "mrope"
        ):  # has the groups of the process, not those of the model
            model.rotary_pos_emb.cp_group = model.pg_collection.cp
        self.model = model
        self._found: dict[tuple[object, ...], Expected] = {}

    def expected(self, batch: "Batch", *, spanned: bool = False) -> Expected:
        """By a forward and backward of each document."""
        key = (*map(len, batch.ids), spanned)
        if key not in self._found:
            self._found[key] = self._in_turn(batch, spanned)
        return self._found[key]

    def _in_turn(self, batch: "Batch", spanned: bool) -> Expected:
        from megatron.core import parallel_state

        sharing = parallel_state.get_data_parallel_group(with_context_parallel=True)
        model, loss = self.model, torch.zeros(1)
        log_probs = [torch.zeros(len(ids)) for ids in batch.ids]
        # Sequence parallelism splits each document evenly: what follows it changes nothing.
        split = model.pg_collection.tp.size() if model.config.sequence_parallel else 1
        model.zero_grad()
        predicted = sum(len(ids) - 1 for ids in batch.ids)
        masks = batch.masks(spanned=spanned)
        images = bool(model.config.mrope_section)
        for number in range(sharing.rank(), len(masks), sharing.size()):
            ids, labels, mask = batch.ids[number], batch.labels[number], masks[number]
            tokens = len(ids)
            counts = torch.ones(1, tokens)
            if further := -tokens % split:
                ids, labels = (functional.pad(each, (0, further)) for each in (ids, labels))
                counts = functional.pad(counts, (0, further))
            places = places_of(len(ids), images=images)[None]
            more: dict[str, Any] = {}
            if images:
                places = places.permute(2, 0, 1)
                more = {"decoder_input": with_images(model, ids[None])}
            settings: dict[str, Any] = more | {"labels": labels[None], "loss_mask": counts}
            losses = model(ids[None], places, mask, **settings)[0, :tokens]
            part = losses.sum() / batch.tokens
            weigh_further_tokens((tokens - 1) / max(1, predicted))
            torch.autograd.backward(part)  # as Megatron does, and the CPU platform needs
            loss += part.detach()
            with torch.no_grad():
                found = log_probs_of(model, ids[None], places, labels, mask=mask, **more)
                log_probs[number] = found[:tokens]
        gradients = [gradient_of(each) for each in model.parameters()]
        for each, gradient in zip(model.parameters(), gradients, strict=True):
            if getattr(each, "sequence_parallel", False):
                dist.all_reduce(gradient, group=model.pg_collection.tp)
        parts = [loss, *log_probs, *gradients]
        together = torch.cat([each.flatten() for each in parts])
        dist.all_reduce(together, group=sharing)
        of_all = together.split([each.numel() for each in parts])
        total, *found = (x.view_as(each) for x, each in zip(of_all, parts, strict=True))
        names = (name for name, _ in model.named_parameters())
        of_names = dict(zip(names, found[len(masks) :], strict=True))
        return Expected(float(total), found[: len(masks)], of_names)


def gradient_of(parameter: Any) -> Tensor:
    """A copy; zeros of what the loss does not depend on."""
    grad = parameter.grad
    return torch.zeros_like(parameter) if grad is None else grad.clone()


def gradients_off(
    parameters: Iterable[tuple[Any, Tensor]], group: Any, tensor: Any = None
) -> float:
    """What gradients are off by, relative to the largest number of each.

    Args: parameters: with what their gradients on all ranks of `group` should add up to. tensor:
        ranks that share what sequence parallelism splits.
    """
    ours, right = zip(*parameters, strict=True)
    together = torch.cat([gradient_of(each).flatten() for each in ours])
    dist.all_reduce(together, group=group)  # one of many numbers: each takes its time
    worst = 0.0
    for each, gradient, whole in zip(
        ours, together.split([each.numel() for each in ours]), right, strict=True
    ):
        if tensor is not None and getattr(each, "sequence_parallel", False):
            dist.all_reduce(gradient, group=tensor)
        scale = whole.abs().max().clamp_min(1e-3)
        worst = max(worst, float((gradient.view_as(whole) - whole).abs().max() / scale))
    return worst


def weigh_further_tokens(weight: float) -> None:
    """Of multi-token prediction, whose loss is a mean over what a forward predicts."""
    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    MTPLossAutoScaler.set_loss_scale(torch.tensor(weight))


def log_probs_of(
    model: Any,
    ids: Tensor,
    places: Tensor,
    labels: Tensor,
    packed: Any = None,
    mask: Tensor | None = None,
    **more: Any,
) -> Tensor:
    """ids and places [1,S], labels [S] -> [S]."""
    more |= {"packed_seq_params": packed, "runtime_gather_output": True}
    logits = model(ids, places, mask, **more)
    return logits[0].float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]


def both_passes(
    model: Any, batch: Batch, packs: Sequence[Any], expected: Expected, tokens: int, **more: Any
) -> tuple[Tensor, float]:
    """The part of a loss of `tokens` tokens, after its backward, and what log-probs are off by.

    Args: packs: packed_seq_params of each pass. more: position_ids, if they are others than those
        of a text, and arguments of the model.
    """
    ids, places, labels, counts = batch.inputs()
    places = more.pop("position_ids", places)
    settings = more | {"labels": labels, "loss_mask": counts, "packed_seq_params": packs[0]}
    loss = (model(ids, places, None, **settings) * counts).sum() / tokens
    weigh_further_tokens(batch.tokens / tokens / batch.size)  # Megatron averages it over the ranks
    torch.autograd.backward(loss)
    with torch.no_grad():
        found = log_probs_of(model, ids, places, labels[0], packs[1], **more)
    off = (found - batch.cut(expected.log_probs)[0]) * counts[0]
    return loss.detach().clone(), float(off.abs().max())


def compare(
    reference: Reference, model: Any, batch: Batch, *, real: bool, spanned: bool
) -> dict[str, float]:
    """What loss, log-probs and gradients are off by."""
    group = model.pg_collection.cp
    model.zero_grad()
    expected = reference.expected(batch, spanned=spanned)
    more: dict[str, Any] = {}
    if model.config.mrope_section:  # images, cut by the caller, or whole
        of_documents = [places_of(len(x), images=True) for x in batch.ids]
        cut = batch.cut if real else batch.whole
        more["position_ids"] = cut(of_documents).permute(2, 0, 1)
        more["decoder_input"] = with_images(model, cut(batch.ids))
    seen: list[Any] = []
    hook = model.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["packed_seq_params"]), with_kwargs=True
    )
    packs = [batch.packed(real=real, spanned=spanned) for _ in range(2)]
    total, log_probs = both_passes(model, batch, packs, expected, batch.tokens, **more)
    hook.remove()
    assert seen[0].of_the_framework == "kept"
    dist.all_reduce(total, group=group)
    parameters = zip(model.parameters(), expected.gradients.values(), strict=True)
    return {
        "loss": abs(float(total) - expected.loss) / expected.loss,
        "log-probs": log_probs,
        "gradients": gradients_off(parameters, group, model.pg_collection.tp),
    }


def compare_all(
    reference: Reference,
    model: Any,
    rank: int,
    size: int,
    layout: str = "thd",
    *,
    spanned: bool = False,
    cases: Sequence[tuple[str, bool]] = FEW,
) -> dict[str, dict[str, float]]:
    """Of `CASES`."""
    model.load_state_dict(reference.model.state_dict(), strict=False)
    return {
        f"{name}{' and padding' if real else ''}": compare(
            reference, model, Batch(BATCHES[name], rank, size, layout), real=real, spanned=spanned
        )
        for name, real in cases
    }


OFFLOADED = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["qkv_linear", "core_attn", "attn_proj"],
    "min_offloaded_tensor_size": 1,
}


class OnHost(saved_tensors_hooks):
    """Stands for Transformer Engine's context: what layers save is elsewhere until it is used.

    Attributes:
        inside_context: Whether it marks what Transformer Engine's own layers save, of which there
            are none here.
        bytes: Of all that was saved.
    """

    inside_context = False

    def __init__(self) -> None:
        self.bytes = 0
        super().__init__(self.away, lambda kept: kept.view_as(kept))

    def away(self, tensor: Tensor) -> Tensor:
        self.bytes += tensor.nbytes
        return tensor.detach().clone(memory_format=torch.contiguous_format)


def as_it_is(x: Tensor) -> Tensor:
    """Takes the place of what waits for a layer's tensors."""
    return x


def use_offloading(model: Any) -> list[int]:
    """Makes Megatron offload what a model's layers save on this CPU, from where it frees it.

    Returns:
        How many bytes it has freed in each pass so far.
    """
    from megatron.core.extensions import transformer_engine
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as offload

    transformer_engine.cpu_offload = Namespace()  # which says only that it is there
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign]
    handler, manager = offload.ChunkOffloadHandler, offload.PipelineOffloadManager
    handler._can_manage_tensor_for_offload = staticmethod(
        lambda tensor: not isinstance(tensor, torch.nn.Parameter)
    )
    freed: list[int] = []

    def count(tensor: Tensor, group: Any) -> None:
        freed[-1] += tensor.nbytes

    def begin(*given: Any) -> None:
        freed.append(0)
        manager.reset_instance()

    offload.OffloadTensorGroup.update_offload_info = lambda group, tensor: count(tensor, group)
    model.register_forward_pre_hook(begin)
    return freed


def left_by_log_probs(model: Any, batch: Batch) -> int:
    """How many tensors the sixth to tenth forward without gradients leave behind."""
    ids, places, *_ = batch.inputs()
    living = []
    for _ in range(2):
        for _ in range(5):
            with torch.no_grad():
                model(ids, places, None, packed_seq_params=batch.packed(real=True))
        gc.collect()
        living.append(sum(isinstance(each, Tensor) for each in gc.get_objects()))
    return living[1] - living[0]


def set_up(size: int, tensor: int = 1, stages: int = 1, **more: Any) -> Any:
    """Process groups, as a worker of a framework makes them; returns them."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor, stages, context_parallel_size=size, **more)
    model_parallel_cuda_manual_seed(7)
    return ProcessGroupCollection.use_mpu_process_groups()


def said_by(call: Callable[..., object], *args: Any, **settings: Any) -> str:
    """What a call is refused with, or nothing."""
    from megatron_cp_plugin.errors import ContextParallelError

    try:
        call(*args, **settings)
    except (AssertionError, ContextParallelError) as error:
        return str(error)
    return ""


def with_gathering_layer(config: Any) -> Any:
    """The spec of all layers, the first of which is as slime has them of its own."""
    from dataclasses import replace

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    sys.path.append(str(Path(__file__).parents[1] / "stand_ins"))
    from slime_plugins.models.hf_attention import HuggingfaceAttention

    block = get_gpt_decoder_block_spec(config, False)
    first, *others = block.layer_specs
    own = replace(first.submodules, self_attention=ModuleSpec(HuggingfaceAttention))
    return replace(block, layer_specs=[replace(first, submodules=own), *others])


def by_install(way: str, size: int) -> dict[str, Any]:
    """The rows of `INSTALLED`."""
    prepare(way)
    groups = set_up(size)
    references, found = References(groups), dict[str, Any]()
    for algo, layout, name in INSTALLED[way]:
        kind, _, spans = name.partition(": ")
        cases = CASES if (algo, name) == ("zigzag", "") else FEW
        how = {"ulysses": 2} if (way, algo) == ("install", "usp") else {}
        reference, rank = references[kind], groups.cp.rank()
        with installed(algo, layout, **how):
            model, more = made(kind, size, groups), {"cases": cases, "spanned": bool(spans)}
            errors = compare_all(reference, model, rank, size, layout, **more)
            found[f"{algo}, {name}"] = errors
    return {"compared": found} | (what_is_said(size, groups) if way == "install" else {})


def what_is_said(size: int, groups: Any) -> dict[str, Any]:
    """In the log, and by refusals."""
    from megatron_cp_plugin import megatron as cp_megatron

    with installed("auto", "thd"):
        other = said_by(cp_megatron.install, "auto", tokens=128)
    with installed("zigzag", "thd"):
        logged: list[str] = []
        say = logging.getLogger("megatron_cp_plugin.integration.installer")
        say.addFilter(lambda record: bool(logged.append(record.getMessage())) or True)
        for _ in range(2):
            make_model(make_config(size, cp_comm_type="a2a"), groups)
        refused = {
            "two choices": other,
            "two algorithms": said_by(cp_megatron.install, "ring"),
            "another size": said_by(make_model, make_config(size + 1), groups),
        }
    without = said_by(make_model, make_config(size), groups)
    return {"logged": logged, "refused": refused, "without": without}


# Of each step the ranks that share a batch, and its documents.
STEPS: dict[int, list[dict[tuple[int, ...], tuple[int, ...]]]] = {
    2: [{(0, 1): (13, 1, 27)}, {(0,): (5, 3), (1,): (9,)}, {(0, 1): (6, 21)}],
    4: [
        {(0, 1, 2, 3): (13, 1, 27)},
        {(0, 1): (9, 4), (2, 3): (21,)},
        {(0,): (5,), (1,): (3, 7), (2, 3): (11, 2)},
    ],
}


def own_batch(
    step: dict[tuple[int, ...], tuple[int, ...]], ranks: Any, layout: str
) -> tuple[Batch, Any]:
    """What this one of some ranks has of a step, and packed_seq_params that say who shares it."""
    from megatron.core import parallel_state

    me = ranks.rank()
    members, lengths = next((m, lengths) for m, lengths in step.items() if me in m)
    batch = Batch(lengths, members.index(me), len(members), layout)
    packed = batch.packed(real=True)
    packed.local_cp_size = len(members)
    if len(members) > 1:
        group = parallel_state.get_hybrid_data_context_parallel_groups(group_size=len(members))
        packed.cp_group = group
    return batch, packed


def compare_steps(
    reference: Reference, model: Any, ranks: Any, layout: str = "thd"
) -> dict[str, float]:
    """What a model is off by whose batches have ranks of their own, all taken together.

    Args:
        ranks: All data- and context-parallel ranks.
    """
    model.load_state_dict(reference.model.state_dict(), strict=False)
    steps = STEPS[ranks.size()]
    whole = [Batch(lengths, 0, 1) for step in steps for lengths in step.values()]
    tokens = sum(batch.tokens for batch in whole)
    expected = [(batch.tokens / tokens, reference.expected(batch)) for batch in whole]
    model.zero_grad()
    total, furthest = torch.zeros(()), 0.0
    for step in steps:
        batch, packed = own_batch(step, ranks, layout)
        theirs = reference.expected(batch)
        loss, off = both_passes(model, batch, (packed, packed), theirs, tokens)
        total, furthest = total + loss, max(furthest, off)
    dist.all_reduce(total, group=ranks)
    loss = sum(weight * each.loss for weight, each in expected)
    parameters = (
        (ours, sum(weight * each.gradients[name] for weight, each in expected))
        for name, ours in model.named_parameters()
    )
    worst = gradients_off(parameters, ranks, model.pg_collection.tp)
    return {"loss": abs(float(total) - loss) / loss, "log-probs": furthest, "gradients": worst}


DYNAMIC = {"hybrid_context_parallel": True}
# By tensor-parallel ranks, beside which the CPU's layers lose gradients of latents.
CHOSEN = {
    1: [
        ("zigzag", "contiguous", ""),
        ("distflash", "thd", "gated delta nets of 4 heads"),
        ("latents sent by zigzag", "thd", "latent"),
        ("distflash", "thd", "recomputed"),
        ("attention2d", "thd", ""),
        ("ulysses", "thd", ""),
    ],
    2: [
        ("zigzag", "thd", ""),
        ("distflash", "thd", "one more token"),
        ("ring", "thd", ""),
        ("allgather", "thd", ""),
        ("usp", "thd", ""),
    ],
}


def of_dynamic_sizes(way: str, size: int, tensor: int = 1) -> dict[str, Any]:
    """Micro-batches that some of the ranks have, of a group that Megatron has made.

    Args:
        size: Context-parallel ranks of the run.
        tensor: Tensor-parallel ranks, with sequence parallelism; the others are data-parallel.
    """
    from megatron.core import parallel_state

    prepare(way)
    groups = set_up(size, tensor, **DYNAMIC)
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    references, found = References(groups, tensor), dict[str, Any]()
    split = DYNAMIC | {"tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1}
    for algo, layout, kind in CHOSEN[tensor]:
        sends = {"send_latents": True} if "latents" in algo else {}
        reference = references[kind]
        with installed(algo.split()[-1], layout, **sends):
            model = made(kind, size, groups, **split)
            errors = compare_steps(reference, model, ranks, layout)
            found[f"{algo}, {layout}, {kind}"] = errors
    with installed("zigzag", "thd"):
        model = made("", size, groups, **split)
    batch = Batch((13, 5), ranks.rank(), ranks.size())
    ids, said = batch.cut(batch.ids), {}
    members = dist.get_process_group_ranks(ranks)
    another = dist.new_group(members, use_local_synchronization=True)
    dist.barrier()  # nothing is sent below: the first rank to end would fail the others here
    tries = {"another group": (another, None), "another size": (ranks, 99)}
    for name, (group, local) in tries.items():
        packed = batch.packed(real=True)
        packed.cp_group, packed.local_cp_size = group, local
        more = {"packed_seq_params": packed}
        said[name] = said_by(model, ids, torch.zeros_like(ids), None, **more)
    return {"compared": found, "refused": said}


class Pipeline:
    """A model in two stages, or in four of which each rank has two, driven as frameworks do."""

    def __init__(self, size: int, groups: Any, *, chunks: int = 1, **settings: Any) -> None:
        """Args: chunks: Stages of a rank."""
        from megatron.core import parallel_state

        stages = groups.pp.size()
        if chunks > 1:
            # Two ranks have messages of both directions under way, which are not to be mixed up.
            settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
            settings["virtual_pipeline_model_parallel_size"] = chunks
            parallel_state.set_virtual_pipeline_model_parallel_world_size(chunks)
        config = make_config(
            size,
            num_layers=stages * chunks,
            pipeline_model_parallel_size=stages,
            pipeline_dtype=torch.float32,
            variable_seq_lengths=True,
            moe_token_dispatcher_type="alltoall",  # else lengths may not vary
            **settings,
        )
        self.group = groups.cp
        self.chunks = [
            make_model(
                config,
                groups,
                pre_process=(groups.pp.rank(), chunk) == (0, 0),
                post_process=(groups.pp.rank(), chunk) == (stages - 1, chunks - 1),
                vp_stage=chunk if chunks > 1 else None,
            )
            for chunk in range(chunks)
        ]

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """By the names that a model has which is not split."""
        for chunk in self.chunks:
            first = chunk.decoder.layers[0].layer_number - 1
            for name, parameter in chunk.named_parameters():
                layer = re.match(r"decoder\.layers\.(\d+)", name)
                rest = name[layer.end() :] if layer else ""
                number = first + int(layer[1]) if layer else 0
                yield (f"decoder.layers.{number}{rest}" if layer else name), parameter

    def load(self, model: Any) -> None:
        """Takes the weights of one that is not split."""
        whole = dict(model.named_parameters())
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(whole[name])

    def gradients_off(self, expected: Sequence[Expected], group: Any) -> float:
        """Of the sum of all batches."""
        return gradients_off(
            (
                (parameter, torch.stack([each.gradients[name] for each in expected]).sum(0))
                for name, parameter in self.named_parameters()
            ),
            group,
        )

    def step(
        self, batches: Sequence[tuple[Batch, Any]], *, log_probs: bool = False
    ) -> list[Tensor]:
        """Of the last stage: losses [], or log-probs [T/P], of batches with packed_seq_params.

        Args: log_probs: In a pass forward only.
        """
        from megatron.core.pipeline_parallel import get_forward_backward_func

        # Megatron's schedules weigh a loss so, where it is a mean.
        weight = len(batches) / self.group.size()

        def forward(data: Iterator[tuple[Batch, Any]], model: Any) -> Any:
            batch, packed = next(data)
            ids, places, labels, counts = batch.inputs()
            more = {} if log_probs else {"labels": labels, "loss_mask": counts}
            out = model(ids, places, None, packed_seq_params=packed, **more)

            def loss(out: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
                if log_probs:
                    kept = out[0].float().log_softmax(-1).gather(-1, labels[0][:, None])[:, 0]
                    return out.sum(), {"kept": kept * counts[0]}
                total = (out * counts).sum() / batch.tokens
                return total * weight, {"kept": total.detach()}

            return out, loss

        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[iter(batches) for _ in self.chunks],
            model=self.chunks,
            num_microbatches=len(batches),
            seq_length=64,
            micro_batch_size=1,
            forward_only=log_probs,
        )
        return [each["kept"] for each in found]


def compare_stages(reference: Reference, pipeline: Pipeline, layout: str) -> dict[str, float]:
    """What losses, log-probs and gradients of one step of all batches are off by."""
    group = pipeline.group
    pipeline.load(reference.model)
    batches = [
        (Batch(lengths, group.rank(), group.size(), layout), real)
        for real in (False, True)
        for lengths in BATCHES.values()
    ]
    expected = [reference.expected(batch) for batch, _ in batches]

    def given() -> list[tuple[Batch, Any]]:
        return [(batch, batch.packed(real=real)) for batch, real in batches]

    off = {"loss": 0.0, "log-probs": 0.0}
    for loss, wanted in zip(pipeline.step(given()), expected, strict=False):
        dist.all_reduce(loss, group=group)
        off["loss"] = max(off["loss"], abs(float(loss) - wanted.loss) / wanted.loss)
    off["gradients"] = pipeline.gradients_off(expected, group)
    found = pipeline.step(given(), log_probs=True)
    for mine, (batch, _), wanted in zip(found, batches, expected, strict=False):
        error = float((mine - batch.cut(wanted.log_probs)[0]).abs().max())
        off["log-probs"] = max(off["log-probs"], error)
    return off | {"seen": float(len(found))}


def of_dynamic_sizes_in_stages(way: str, size: int) -> dict[str, Any]:
    """Two stages, whose micro-batches choose their ranks."""
    from megatron.core import parallel_state

    prepare(way)
    groups = set_up(size, stages=2, **DYNAMIC)
    ranks = parallel_state.get_data_parallel_group(with_context_parallel=True)
    reference, steps = of_all_stages(groups), STEPS[ranks.size()]
    batches = [Batch(lengths, 0, 1) for step in steps for lengths in step.values()]
    expected = [reference.expected(batch) for batch in batches]
    with installed("zigzag", "thd"):
        pipeline = Pipeline(size, groups, **DYNAMIC)
        pipeline.load(reference.model)
        pipeline.step([own_batch(step, ranks, "thd") for step in steps])
        return {"gradients": pipeline.gradients_off(expected, ranks)}


def of_all_stages(groups: Any, **settings: Any) -> Reference:
    """A model that is not split, with the weights of the first rank on all."""
    whole = make_model(make_config(1, **settings), alone(groups))
    dist.broadcast_object_list(weights := [whole.state_dict()])
    whole.load_state_dict(weights[0])
    return Reference(whole)


def beside_pipeline_parallelism(way: str, size: int) -> dict[str, Any]:
    """Two stages, then four, interleaved; all batches are micro-batches of one step."""
    from megatron.core import parallel_state

    prepare(way)
    groups = set_up(size, stages=2)
    found: dict[str, Any] = {"is last": groups.pp.rank() == 1}
    for chunks in (1, 2):
        reference = of_all_stages(groups, num_layers=2 * chunks)
        for algo, layout in list(SERVED.items())[chunks - 1 :: 2]:
            with installed(algo, layout):
                more = WHOLE_LAYERS if algo == "zigzag" else {}
                model = Pipeline(size, groups, chunks=chunks, **more)
                found[f"{algo}, {chunks}"] = compare_stages(reference, model, layout)
        parallel_state.set_virtual_pipeline_model_parallel_world_size(None)
    return found


def of_models(way: str, size: int) -> dict[str, Any]:
    """Every algorithm's, and some that offload activations."""
    from megatron.core.transformer import transformer_block

    groups = set_up(size)
    references, found, left = References(groups), dict[str, Any](), {}
    rank = groups.cp.rank()

    def served(algo: str, layout: str, more: dict[str, Any], **how: Any) -> Any:
        with installed(algo, layout, recompute_attention=True, **how):
            return make_model(make_config(size, **more), groups)

    def note(name: str, model: Any, layout: str, kind: str = "", **how: Any) -> None:
        found[name] = compare_all(references[kind], model, rank, size, layout, **how)

    for algo, layout in (SERVED | {"auto": "thd"}).items():
        model = served(algo, layout, {})
        if algo == "zigzag":
            with_embedding_of_its_own(model)
        note(algo, model, layout, cases=CASES if algo in ("zigzag", "ulysses") else FEW)
        if algo != "auto":
            note(f"{algo}, spans", model, layout, spanned=True)
        if algo in ("zigzag", "ulysses"):
            note(f"{algo}, images", served(algo, layout, IMAGES), layout, "images")
        left[algo] = left_by_log_probs(model, Batch(BATCHES["odd"], rank, size, layout))
    sender = served("zigzag", "thd", KINDS["latent"], send_latents=True)
    linear = sender.decoder.layers[0].self_attention.linear_kv_up_proj
    assert "forward" in vars(linear)
    note("zigzag, latents", sender, "thd", "latent")
    said = generates(model)
    prepare(way)  # Megatron's offloading asks for streams
    moving = served("zigzag", "thd", OFFLOADED)
    freed = use_offloading(moving)
    note("zigzag, offloaded", moving, "thd")
    assert min(freed[::2]) > 0, freed
    host, one = OnHost(), {"cpu_offloading": True, "cpu_offloading_num_layers": 1}
    transformer_block.get_cpu_offload_context = lambda *given: (host, as_it_is)
    note("zigzag, layers offloaded", served("zigzag", "thd", one), "thd")
    assert host.bytes > 0
    return {"compared": found, "left": left, "generates": said}


def generates(model: Any) -> str:
    """What is said of a prompt with a cache of keys."""
    from megatron.core.inference.contexts import StaticInferenceContext

    places, context = torch.arange(4)[None], StaticInferenceContext(1, 4)
    return said_by(model, places, places, None, inference_context=context)


def with_embedding_of_its_own(model: Any) -> None:
    """As in ms-swift: made once the model is, and told the length of the longest document."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    embedding = RotaryEmbedding(8, 1.0)
    embedding.get_rotary_seq_len = lambda *args, **kwargs: 4  # type: ignore[method-assign]
    model.rotary_pos_emb = embedding
    model.rotary_pos_emb.inv_freq = embedding.inv_freq.clone()


def by_launcher() -> dict[str, Any]:
    """As Megatron's own scripts start, but with batches of its own."""
    from megatron_cp_plugin.integration import launch

    sys.argv[1:] = launch.prepare(sys.argv[1:])
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.arguments import parse_and_validate_args
    from megatron.training.initialize import initialize_megatron

    from megatron_cp_plugin import megatron as cp_megatron

    args = parse_and_validate_args()
    initialize_megatron()
    size, groups = args.context_parallel_size, ProcessGroupCollection.use_mpu_process_groups()
    cp_megatron.install(args.context_parallel_algo, layout="thd")  # what a framework may do too
    from megatron.core.models.gpt import GPTModel

    served = GPTModel.__init__
    GPTModel.__init__ = served.__wrapped__  # type: ignore[attr-defined, method-assign]
    own = Reference(make_model(make_config(1), alone(groups)))
    GPTModel.__init__ = served  # type: ignore[method-assign]
    model = make_model(make_config(size), groups)
    return {args.context_parallel_algo: compare_all(own, model, groups.cp.rank(), size)}


WAYS: dict[str, Callable[..., dict[str, Any]]] = {
    **dict.fromkeys(INSTALLED, by_install),
    "dynamic": of_dynamic_sizes,
    "dynamic pipeline": of_dynamic_sizes_in_stages,
    "pipeline": beside_pipeline_parallelism,
    "algorithms": of_models,
}


def main() -> None:
    way = sys.argv.pop(1)
    found = by_launcher() if way == "launcher" else WAYS[way](way, *map(int, sys.argv[1:]))
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
