"""A model takes no tokens but those that the plugin has cut for it, however a script gets them."""

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import LAYOUTS, Zigzag, positions
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.inputs import SplitInputs
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.ranks import on_ranks

OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
Batch = dict[str, Any]
# Ways from this one on are seen on every rank by itself.
SEEN_BY_ALL = 3


def taken(batch: Batch, positions: torch.Tensor, *keys: str) -> Batch:
    """The tokens at some positions of [b, N], of all keys or of some."""
    chosen = [key for key in keys or OF_TOKENS if batch[key] is not None]
    return batch | {key: batch[key][:, positions] for key in chosen}


class Ways:
    """Ways to cut a whole batch for this rank; `right` is the plugin's own."""

    def __init__(self, right: Callable[[Batch], Batch], rank: int, size: int) -> None:
        self._right, self._rank, self._size = right, rank, size

    def _by(self, layout: str, rank: int, size: int, whole: Batch, *keys: str) -> Batch:
        length = next(whole[key].size(1) for key in OF_TOKENS if whole[key] is not None)
        return taken(whole, positions(LAYOUTS[layout], rank, size, length), *keys)

    def all(self) -> dict[str, Callable[[Batch], Batch]]:
        """By name, those that must be refused: first those that look right on some rank."""
        mine = self._rank, self._size
        return {
            "cut before": lambda whole: self._right(self._by("contiguous", *mine, whole)),
            "cut before, counted anew": self._cut_before,
            "other samples on each rank": self._other_samples,
            "contiguous": partial(self._by, "contiguous", *mine),
            "zigzag": partial(self._by, "zigzag", *mine),
            "cyclic": partial(self._by, "cyclic", *mine),
            "ranks swapped": partial(self._by, "zigzag", self._rank ^ 1, self._size),
            "another size": partial(self._by, "zigzag", self._rank, 2 * self._size),
            "not cut": lambda whole: dict(whole),
            "zigzag in each document": self._by_document,
            "rolled by one": self._rolled,
            "labels rolled by one": partial(self._rolled, keys=("labels",)),
            "tokens and labels of two batches": self._two_batches,
            "changed in place": self._changed,
            "positions of its own": self._positions,
            "labels shorter": lambda whole: self._right(whole | {"labels": whole["labels"][:, 8:]}),
            "padding between documents": self._padded,
            "a cache of keys": lambda whole: self._right(whole) | {"cache": object()},
        }

    def _by_document(self, whole: Batch) -> Batch:
        # As Transformer Engine cuts documents that are padded to a multiple of 2P.
        length = whole["tokens"].size(1)
        first = 2 * self._size
        bounds = [0, first, length]
        spans = Zigzag().spans
        chosen = [
            start + position
            for start, stop in pairwise(bounds)
            for span in spans(self._rank, self._size, stop - start)
            for position in span.positions
        ]
        return taken(whole, torch.tensor(chosen)) | _documents(bounds)

    def _rolled(self, whole: Batch, keys: tuple[str, ...] = OF_TOKENS) -> Batch:
        right = self._right(whole)
        return right | {key: right[key].roll(-1, 1) for key in keys}

    def _two_batches(self, whole: Batch) -> Batch:
        return self._right(dict(whole)) | {"labels": self._right(dict(whole))["labels"]}

    def _changed(self, whole: Batch) -> Batch:
        right = self._right(whole)
        right["tokens"].copy_(right["tokens"].flip(1))
        return right

    def _positions(self, whole: Batch) -> Batch:
        right = self._right(whole)
        tokens = right["tokens"]
        return right | {"position_ids": torch.arange(1, tokens.size(1) + 1).expand_as(tokens)}

    def _cut_before(self, whole: Batch) -> Batch:
        batch = self._by("contiguous", self._rank, self._size, whole)
        tokens = batch["tokens"]
        anew = torch.arange(tokens.size(1)).expand_as(tokens)
        return self._right(batch | {"position_ids": anew})

    def _other_samples(self, whole: Batch) -> Batch:
        return self._right(whole | {"tokens": whole["tokens"] + self._rank})

    def _padded(self, whole: Batch) -> Batch:
        length = whole["tokens"].size(1)
        return self._right(whole) | _documents([0, 10, length], [0, 12, length])


def _documents(padded: list[int], real: list[int] | None = None) -> Batch:
    return {"documents": (torch.tensor(real or padded), torch.tensor(padded))}


class Model(nn.Module):
    """Takes what models of Megatron do."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace()

    def forward(
        self,
        input_ids: Any,
        position_ids: Any,
        attention_mask: Any,
        labels: Any = None,
        loss_mask: Any = None,
        packed_seq_params: Any = None,
        inference_context: Any = None,
    ) -> None:
        """Megatron's names."""


def give(model: Model, local: Batch) -> None:
    """As a script's forward step does."""
    packed = None
    if "documents" in local:
        real, padded = (bounds.int() for bounds in local["documents"])
        packed = PackedSeqParams("thd", real, real, padded, padded)
    model(
        local["tokens"],
        local["position_ids"],
        local["attention_mask"],
        labels=local["labels"],
        loss_mask=local["loss_mask"],
        packed_seq_params=packed,
        inference_context=local.get("cache"),
    )


@pytest.mark.parametrize(
    ("algorithm", "size", "own"),
    [("zigzag", 2, "zigzag"), ("ring", 2, "contiguous"), ("attention2d", 4, "cyclic")],
)
def test_a_batch_that_was_cut_otherwise_is_refused(algorithm: str, size: int, own: str) -> None:
    """At first all ranks agree; after a batch that was right each refuses by itself."""
    options = (("variant", "no"),) if own == "cyclic" else ()
    config = ContextParallelConfig(algorithm, size, options=options)
    text = torch.randint(126, (1, 65), generator=torch.Generator().manual_seed(1))

    def rank(group: Any) -> None:
        model, batches = Model(), Batches(Runtime(config))
        SplitInputs(model, batches, group)
        whole = {"tokens": text[:, :-1], "labels": text[:, 1:], "loss_mask": torch.ones(1, 64)}
        whole |= {"position_ids": torch.arange(64)[None], "attention_mask": None}
        ways = Ways(lambda batch: batches.shard(batch, group), group.rank(), size)
        names = list(ways.all())
        for tried in (names, names[SEEN_BY_ALL:]):
            for name in tried:
                said = ""
                try:
                    give(model, ways.all()[name](dict(whole)))
                except ContextParallelError as error:
                    said = str(error)
                # Tokens that a script cuts by the very layout of the run are the right ones.
                assert said or name == own, f"rank {group.rank()} took a batch {name}"
                assert "\n" not in said
            give(model, batches.shard(dict(whole), group))
            cut = batches.shard(dict(whole), group)
            give(model, {key: None if x is None else x.clone() for key, x in cut.items()})

    on_ranks(size, rank)
