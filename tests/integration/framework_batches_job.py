"""Batches as trainers' own code cuts them: framework_batches_job.py TRAINER LAYOUT SIZE ALGORITHMS.

TRAINER: verl or slime, which must be installed. It prints, for each algorithm, what loss and
gradients of a model are off by, compared with each document alone through Megatron's own attention,
as JSON. Where Transformer Engine is missing an empty module takes its name, for some of them cannot
be imported without; nothing of it is called but what `_partitioned` says.
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


TRAINERS: dict[str, tuple[str, Trainer]] = {
    "verl": ("verl", by_verl),
    "slime": ("slime.backends", by_slime),
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
        one = -logits.float().log_softmax(-1).gather(-1, ids[1:, None]).sum()
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
        cp_megatron.install(algo, layout=layout)
        model = make_model(make_config(int(size)), groups)
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
