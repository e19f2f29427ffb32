"""A training script that cuts its batches by itself, in many ways, and sees which are refused.

Before training it gives the model every one of WAYS; `--way NAME` trains with that one only.
"""

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch

OF_TOKENS = ("tokens", "labels", "loss_mask", "position_ids")
Batch = dict[str, Any]
# Ways from this one on are seen on every rank by itself.
SEEN_BY_ALL = 3


def taken(batch: Batch, positions: torch.Tensor, *keys: str) -> Batch:
    """The tokens at some positions of [b, N], of all keys or of some."""
    chosen = [key for key in keys or OF_TOKENS if batch[key] is not None]
    return batch | {key: batch[key][:, positions] for key in chosen}


class Ways:
    """Ways to cut a whole batch for this rank; `right` is Megatron's function, as hooked."""

    def __init__(self, right: Callable[[Batch], Batch], rank: int, size: int) -> None:
        self._right, self._rank, self._size = right, rank, size

    def _by(self, layout: str, rank: int, size: int, whole: Batch, *keys: str) -> Batch:
        from megatron_cp_plugin.core.layout import LAYOUTS, positions

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

    def fine(self) -> dict[str, Callable[[Batch], Batch]]:
        """By name, those that it must take."""
        return {
            "right": self._right,
            "copies": lambda whole: {k: _copy(v) for k, v in self._right(whole).items()},
        }

    def _by_document(self, whole: Batch) -> Batch:
        from megatron_cp_plugin.core.layout import Zigzag

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


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


def _documents(padded: list[int], real: list[int] | None = None) -> Batch:
    return {"documents": (torch.tensor(real or padded), torch.tensor(padded))}


def main() -> None:
    """Trains with the script's own loop and another forward step."""
    from megatron_cp_plugin.integration import launch
    from megatron_cp_plugin.process_exit import one_line_errors

    way = None
    if "--way" in sys.argv:
        place = sys.argv.index("--way")
        way = sys.argv[place + 1]
        del sys.argv[place : place + 2]
    with one_line_errors():
        sys.argv[1:] = launch.prepare(sys.argv[1:], run_file=True)
        from megatron_cp_plugin.harness import pretrain

        serve(pretrain, way)
        pretrain.run()


def serve(pretrain: Any, way: str | None) -> None:
    """Lets the program of the plugin cut batches otherwise."""
    from megatron.core import mpu
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_cp_plugin.errors import ContextParallelError

    hooked = pretrain.get_batch_on_this_cp_rank
    pretrain.get_batch_on_this_cp_rank = lambda batch, **_: batch
    tried: dict[str, str] = {}

    def forward(model: Any, local: Batch) -> Any:
        packed = None
        if "documents" in local:
            real, padded = (bounds.int() for bounds in local["documents"])
            packed = PackedSeqParams("thd", real, real, padded, padded)
        return model(
            local["tokens"],
            local["position_ids"],
            local["attention_mask"],
            labels=local["labels"],
            loss_mask=local["loss_mask"],
            packed_seq_params=packed,
            inference_context=local.get("cache"),
        )

    def forward_step(data_iterator: Any, model: Any) -> Any:
        group = mpu.get_context_parallel_group()
        ways = Ways(
            lambda batch: hooked(batch, is_hybrid_cp=False, cp_group=group),
            group.rank(),
            group.size(),
        )
        whole = pretrain.next_batch(data_iterator, None)
        if way is not None:
            return finish(pretrain, forward, model, ways.all()[way](dict(whole)))
        names = list(ways.all())
        # At first all ranks agree; after a batch that was right each refuses by itself.
        when = "later" if tried else "first"
        if tried:
            names = [] if len(tried) > len(names) + 2 else names[SEEN_BY_ALL:]
        for name in names:
            key = f"{when}: {name}"
            try:
                forward(model, ways.all()[name](dict(whole)))
                tried[key] = ""
            except ContextParallelError as error:
                tried[key] = str(error)
        for name, cut in ways.fine().items():
            forward(model, cut(dict(whole)))
            tried[f"{when}: {name}"] = "taken"
        print("TRIED" + json.dumps(tried), flush=True)
        return finish(pretrain, forward, model, ways.fine()["right"](dict(whole)))

    pretrain.forward_step = forward_step


def finish(pretrain: Any, forward: Any, model: Any, local: Batch) -> Any:
    """What a forward step returns."""
    return forward(model, local), partial(pretrain.sum_of_losses, local["loss_mask"])


if __name__ == "__main__":
    main()
