"""Batches as trainers' own code cuts them: framework_batches_job.py TRAINER LAYOUT SIZE ALGORITHMS.

An algorithm may be named with the tokens of a chunk of log-probabilities, as zigzag+5.

TRAINER: verl, slime, swift, bridge, skyrl or nemo, which must be installed. It prints, for each
algorithm, what loss and gradients of a model are off by, compared with each document alone through
Megatron's own attention, as JSON. Where Transformer Engine is missing an empty module takes its
name, for some of them cannot be imported without; nothing of it is called but what `_partitioned`
says.
"""

import importlib.machinery
import json
import sys
import types
from argparse import Namespace
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any
from unittest.mock import MagicMock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from tests.integration.cut_batches_job import (
    VOCABULARY,
    alone,
    gradients_off,
    make_config,
    make_model,
    set_up,
)

# Odd ones, some shorter than 2P, a single one.
BATCHES = {"odd": (13, 2, 27, 6), "short": (2, 3, 2), "one": (21,)}
# A document's part in the loss: that of this rank, or the whole, of which it knows its own part's
# gradient.
type Loss = tuple[Tensor, bool]
type Trainer = Callable[[Any, Sequence[Tensor], str], Loss]


def by_verl(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """The forward pass of its Megatron engine."""
    from verl.models.mcore.model_forward import gptmodel_forward_model_engine

    ids = torch.nested.as_nested_tensor(list(documents), layout=torch.jagged)

    def log_probs(logits: Tensor, label: Tensor) -> dict[str, Tensor]:
        return {"log_probs": logits.float().log_softmax(-1).gather(-1, label[..., None])[..., 0]}

    out = gptmodel_forward_model_engine(
        model,
        ids,
        {},
        logits_processor=log_probs,
        logits_processor_args={"label": ids},
        cp_layout="zigzag" if layout == "thd" else layout,
    )
    return -sum(part[:-1].sum() for part in out["log_probs"].unbind()), True


def by_slime(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """Its batches, the call of its model, and the pieces of logits that its losses take."""
    from slime.backends.megatron_utils.data import DataIterator, get_batch
    from slime.backends.megatron_utils.loss import get_responses

    answers = [len(document) - 1 for document in documents]
    data = {
        "tokens": list(documents),
        "total_lengths": [len(document) for document in documents],
        "response_lengths": answers,
        "loss_masks": [torch.ones(length) for length in answers],
    }
    iterator = DataIterator(data, [list(range(len(documents)))])
    contiguous = layout == "contiguous"
    batch = get_batch(iterator, list(data), 4, contiguous)
    logits = model(
        input_ids=batch["tokens"],
        position_ids=None,
        attention_mask=None,
        labels=None,
        packed_seq_params=batch["packed_seq_params"],
        loss_mask=batch["full_loss_masks"],
    )
    pieces = get_responses(
        logits.float(),
        args=Namespace(rollout_temperature=1.0, allgather_cp=contiguous),
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=data["total_lengths"],
        response_lengths=answers,
    )
    parts = [-x.log_softmax(-1).gather(-1, y[:, None]).sum() for x, y in pieces]
    return sum(parts) + 0 * logits.sum(), False


def by_swift(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """Its collator, and how its trainer prepares a batch."""
    from megatron.core import parallel_state
    from swift.megatron.trainers.utils import prepare_batch
    from swift.megatron.utils import get_padding_to
    from swift.template.base import Template

    args = Namespace(
        task_type="causal_lm",
        pipeline_model_parallel_size=1,
        tensor_model_parallel_size=1,
        context_parallel_size=parallel_state.get_context_parallel_world_size(),
        sequence_parallel=False,
        padding_free=True,
        is_multimodal=False,
        cp_partition_mode="zigzag" if layout == "thd" else layout,
        attention_backend="flash",
        fp8_recipe=None,
    )
    of_collator = {
        "tokenizer": Namespace(pad_token_id=0),
        "padding_side": "right",
        "is_training": True,
        "use_megatron": True,
        "padding_free": True,
        "sequence_parallel_size": args.context_parallel_size,
        "_data_collator_mm_data": lambda self, row: {},
    }
    template = object.__new__(type("OfTokens", (Template,), of_collator))
    rows = [
        {"input_ids": ids, "labels": [-100, *ids[1:]], "length": len(ids)}
        for ids in (document.tolist() for document in documents)
    ]
    data = template._data_collator(rows, padding_to=get_padding_to(args))
    batch = prepare_batch(args, data)
    for name in ("loss_scale", "channel"):
        batch.pop(name, None)
    losses = model(**batch)
    return losses[batch["labels"] != -100].sum() + 0 * losses.sum(), False


def by_bridge(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """Its packed_seq_params, of both forms of its data sets, and the places of a rank's tokens."""
    from megatron.bridge.training.utils import packed_seq_utils
    from megatron.core import parallel_state

    assert layout == "thd"
    group = parallel_state.get_context_parallel_group()
    multiple = 2 * group.size()
    real, padded, whole = [0], [0], []
    for document in documents:
        room = -(-len(document) // multiple) * multiple
        real.append(real[-1] + len(document))
        padded.append(padded[-1] + room)
        tokens = torch.nn.functional.pad(document, (0, room - len(document)))
        labels = torch.nn.functional.pad(document[1:], (0, room - len(document) + 1))
        whole.append(torch.stack([tokens, labels, torch.arange(room) < len(document) - 1]))
    bounds, with_padding = (torch.tensor([each], dtype=torch.int32) for each in (real, padded))
    longest = torch.tensor(max(b - a for a, b in pairwise(padded)))
    if len(documents) % 2:
        ends = torch.tensor([[-1, -1]], dtype=torch.int32)
        data = {
            "cu_seqlens": torch.cat([with_padding, ends], 1),
            "cu_seqlens_unpadded": torch.cat([bounds, ends], 1),
            "max_seqlen": longest,
        }
    else:
        data = {
            "cu_seqlens_q": bounds,
            "cu_seqlens_kv": bounds,
            "cu_seqlens_q_padded": with_padding,
            "cu_seqlens_kv_padded": with_padding,
            "max_seqlen_q": longest,
            "max_seqlen_kv": longest,
        }
    packed = packed_seq_utils.get_packed_seq_params(data)
    mine = packed_seq_utils.get_packed_seq_cp_partition_indices(
        packed,
        total_tokens=padded[-1],
        cp_size=group.size(),
        cp_rank=group.rank(),
        device=torch.device("cpu"),
    )
    ids, labels, counts = torch.cat(whole, 1)[:, None, mine]
    places = torch.cat([torch.arange(b - a) for a, b in pairwise(padded)])
    losses = model(
        input_ids=ids,
        position_ids=places[None, mine],
        attention_mask=None,
        labels=labels,
        packed_seq_params=packed,
    )
    return (losses * counts).sum(), False


def by_skyrl(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """Its packing of rows that are padded on the left, and the log-probs and the mean entropy that
    its losses take.
    """
    from megatron.core import parallel_state
    from skyrl.backends.skyrl_train.distributed.megatron import megatron_utils, model_utils

    assert layout == "thd"
    longest = max(map(len, documents))
    rows = torch.stack([functional.pad(ids, (longest - len(ids), 0)) for ids in documents])
    seen = rows > 0
    tokens, packed = megatron_utils.preprocess_packed_seqs(rows, seen)
    rooms = packed.cu_seqlens_q_padded.diff().tolist()
    targets = [
        functional.pad(ids, (0, room - len(ids)))
        for ids, room in zip(documents, rooms, strict=True)
    ]
    logits = model(tokens, None, None, packed_seq_params=packed)
    log_probs = model_utils.from_parallel_logits_to_logprobs_packed_sequences(
        logits.float(),
        torch.cat(targets)[None],
        packed.cu_seqlens_q_padded,
        longest,
        vocab_start_index=0,
        vocab_end_index=logits.shape[-1],
        group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=parallel_state.get_context_parallel_group(),
        attention_mask=seen,
    )
    entropy, own_part = model_utils.vocab_parallel_entropy_packed_sequences(
        logits.float(),
        packed.cu_seqlens_q_padded,
        longest,
        longest - 1,
        seen,
        None,
        parallel_state.get_context_parallel_group(),
    )
    return own_part - log_probs.sum() + (entropy - own_part).detach(), True


def by_nemo(model: Any, documents: Sequence[Tensor], layout: str) -> Loss:
    """Its micro-batches, and the log-probs that its losses take."""
    from megatron.core import parallel_state
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict
    from nemo_rl.distributed.model_utils import from_parallel_logits_to_logprobs_packed_sequences
    from nemo_rl.models.megatron.data import process_microbatch

    assert layout == "thd"
    group = parallel_state.get_context_parallel_group()
    longest = max(map(len, documents))
    data = BatchedDataDict(
        input_ids=torch.stack([functional.pad(x, (0, longest - len(x))) for x in documents]),
        input_lengths=torch.tensor([len(ids) for ids in documents]),
    )
    batch = process_microbatch(
        data,
        seq_length_key="input_lengths",
        pad_individual_seqs_to_multiple_of=2 * group.size(),
        pack_sequences=True,
    )
    logits = model(
        input_ids=batch.input_ids_cp_sharded,
        position_ids=batch.position_ids,
        attention_mask=batch.attention_mask,
        packed_seq_params=batch.packed_seq_params,
    )
    log_probs = from_parallel_logits_to_logprobs_packed_sequences(
        logits.float(),
        batch.input_ids,
        batch.cu_seqlens_padded,
        longest,
        vocab_start_index=0,
        vocab_end_index=logits.shape[-1],
        group=parallel_state.get_tensor_model_parallel_group(),
        cp_group=group,
    )
    real = torch.arange(1, longest) < data["input_lengths"][:, None]
    # The backward of its gather sums what the ranks pass to it: each has the whole loss.
    return -(log_probs * real).sum() / group.size(), False


TRAINERS: dict[str, tuple[str, Trainer]] = {
    "verl": ("verl", by_verl),
    "slime": ("slime.backends", by_slime),
    "swift": ("mcore_bridge", by_swift),
    "bridge": ("megatron.bridge", by_bridge),
    "skyrl": ("skyrl.backends", by_skyrl),
    "nemo": ("nemo_rl", by_nemo),
}


class _Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def _partitioned(bounds: Tensor, total: int, size: int, rank: int) -> Tensor:
    """Transformer Engine's thd_get_partitioned_indices: chunks p and 2P-1-p of each document."""
    chunks = [
        torch.arange(start, stop).view(2 * size, -1)[[rank, 2 * size - 1 - rank]].flatten()
        for start, stop in pairwise(bounds.tolist())
    ]
    found = torch.cat(chunks)
    assert len(found) * size == total
    return found


def do_without_transformer_engine() -> None:
    """Megatron itself knows that there is none."""
    from megatron.core import utils
    from megatron.core.extensions import transformer_engine as extension

    if find_spec("transformer_engine") is not None:
        return
    for name in ("transformer_engine", "transformer_engine.pytorch"):
        sys.modules[name] = _Empty(name)
        sys.modules[name].__spec__ = importlib.machinery.ModuleSpec(name, None)
    for name, value in vars(extension).items():
        if value is None:
            setattr(extension, name, type(name, (torch.nn.Module,), {}))
    utils.tex = Namespace(thd_get_partitioned_indices=_partitioned)


def provided(trainer: str, config: Any, groups: Any) -> Any:
    """The model as the trainer's own code makes it: of Megatron-Bridge or of mcore-bridge."""
    from dataclasses import fields

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if trainer not in ("bridge", "swift"):
        return make_model(config, groups)
    of_model = {f.name: getattr(config, f.name) for f in fields(TransformerConfig) if f.init}
    if trainer == "swift":
        from mcore_bridge.config import ModelConfig
        from mcore_bridge.model.gpt_model import GPTModel

        own = {"swiglu": False, "padded_vocab_size": VOCABULARY, "max_position_embeddings": 256}
        own |= {"window_attn_skip_freq": None, "moe_layer_freq": "1", "mcore_model_type": "gpt"}
        return GPTModel(ModelConfig(**of_model | own), get_gpt_layer_local_spec())
    from megatron.bridge.models.gpt_provider import GPTModelProvider

    provider = GPTModelProvider(
        **of_model,
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        seq_length=256,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    provider._pg_collection = groups
    return provider.provide(pre_process=True, post_process=True)


def compare(
    reference: Any, model: Any, documents: Sequence[Tensor], part: Trainer, layout: str
) -> dict[str, float]:
    """What loss and gradients are off by."""
    group = model.pg_collection.cp
    reference.zero_grad()
    model.zero_grad()
    wanted = torch.zeros(())
    for ids in documents:
        logits = reference(ids[None], torch.arange(len(ids))[None], None)[0, :-1]
        every = logits.float().log_softmax(-1)
        one = -every.gather(-1, ids[1:, None]).sum()
        if part is by_skyrl:
            one = one - (every.exp() * every).sum() / sum(len(x) - 1 for x in documents)
        torch.autograd.backward(one)
        wanted += one.detach()
    loss, is_whole = part(model, documents, layout)
    torch.autograd.backward(loss)
    found = loss.detach().clone()
    if not is_whole:
        dist.all_reduce(found, group=group)
    right = (parameter.grad for parameter in reference.parameters())
    worst = gradients_off(zip(model.parameters(), right, strict=True), group)
    return {"loss": float(abs(found - wanted) / wanted), "gradients": worst}


def main() -> None:
    from megatron_cp_plugin.integration import cpu

    cpu.activate()
    do_without_transformer_engine()
    from megatron_cp_plugin import megatron as cp_megatron

    trainer, layout, size, algos = sys.argv[1:]
    part = TRAINERS[trainer][1]
    groups = set_up(int(size))
    reference = make_model(make_config(1), alone(groups))
    draw = torch.Generator().manual_seed(5)
    found: dict[str, Any] = {}
    for algo in algos.split(","):
        name, _, chunk = algo.partition("+")
        cp_megatron.install(name, layout=layout, chunked_loss=int(chunk) if chunk else None)
        model = provided(trainer, make_config(int(size)), groups)
        model.load_state_dict(reference.state_dict(), strict=False)
        found[algo] = {
            name: compare(
                reference,
                model,
                [torch.randint(1, VOCABULARY, (n,), generator=draw) for n in lengths],
                part,
                layout,
            )
            for name, lengths in BATCHES.items()
        }
        cp_megatron.uninstall()
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
