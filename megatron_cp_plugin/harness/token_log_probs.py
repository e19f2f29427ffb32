"""Log-probabilities of the labels of some samples: `token_log_probs FOLDER BATCH [flags]`.

The model is the one of `megatron-cp train` with the same flags, before its first training step;
samples are from the training data, or from a file BATCH ("-": none). Every rank that has losses
writes `rank00000.pt` into FOLDER, see `Recorded`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_cp_plugin.core.masks.slices import Slice
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.train import start
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.process_exit import one_line_errors, whole_program

MODULE = "megatron_cp_plugin.harness.token_log_probs"
_OF_SAMPLES = ("tokens", "labels", "loss_mask", "position_ids")
_OF_SPANS = ("attention_spans", "attention_positions")


@dataclass
class Recorded:
    """The results of one rank.

    Attributes:
        mask: Spans of a file of samples, as a batch has them.
        weights: The norm of each of its parameters.
        parts: Of each micro-batch [n]: numbers of its tokens in the micro-batch, log-probabilities
            in float32, labels, and 1 for tokens that count.
        tokens: Of a whole micro-batch.
    """

    mask: Mapping[str, Any] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)
    parts: list[tuple[Tensor, ...]] = field(default_factory=list)
    tokens: int = 0

    def step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        """As `pretrain.forward_step`, and keeps the losses."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_attr_wrapped_model

        from megatron_cp_plugin.harness import pretrain

        stage = get_attr_wrapped_model(model, "vp_stage")
        batch = pretrain.next_batch(data_iterator, stage, self._add)
        for name, parameter in model.named_parameters():
            norm = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)
            self.weights.setdefault(f"{stage} {name}", float(norm))
        output = pretrain.output_of(model, batch)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage):
            of_tokens = batch["numbers"], -output.float(), batch["labels"], batch["loss_mask"]
            self.parts.append(tuple(x.detach().flatten().cpu() for x in of_tokens))
            self.tokens = output.numel() * parallel_state.get_context_parallel_world_size()
        return output, partial(pretrain.sum_of_losses, batch["loss_mask"])

    def _add(self, batch: dict[str, Any]) -> None:
        """The numbers of its tokens in the whole micro-batch, and the file's spans."""
        batch |= self.mask
        if (labels := batch.get("labels")) is not None:
            numbers = torch.arange(labels.numel(), device=labels.device)
            batch["numbers"] = numbers.view_as(labels)

    def save(self, folder: Path) -> None:
        """Writes this rank's file, on one of the ranks that have the same losses."""
        from megatron.core import parallel_state

        if self.parts and parallel_state.get_tensor_model_parallel_rank() == 0:
            context = parallel_state.get_context_parallel_rank()
            content = {name: getattr(self, name) for name in ("weights", "parts", "tokens")}
            content["rank"] = context
            torch.save(content, folder / f"rank{torch.distributed.get_rank():05d}.pt")


def read_batch(path: str | Path) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Samples of a file, as Megatron's datasets have them; and the spans that all of them have.

    Args:
        path: A file of `torch.save`: a dict of "tokens" [b,s], int64, and, if they are not simply
            what follows, "labels" [b,s] and "loss_mask" [b,s]; with "attention_spans", as
            `Pack.batch()`, also "attention_positions" [s] or [b,s].

    Raises:
        ConfigError: It is no such file.
    """
    what = 'a batch is a dict of "tokens" [b,s], and perhaps "labels" and "loss_mask"'
    mask = {}
    try:
        with torch.serialization.safe_globals([Slice]):
            found = torch.load(path, map_location="cpu", weights_only=True)
        found = {name: given for name, given in found.items() if given is not None}
        tokens = found["tokens"]
        assert tokens.dim() == 2
        assert tokens.dtype == torch.int64
        others = {"labels": tokens.roll(-1, 1), "loss_mask": torch.ones(tokens.shape)}
        if "labels" not in found:
            others["loss_mask"][:, -1] = 0
        others |= {"position_ids": torch.arange(tokens.size(1)).expand_as(tokens)}
        if "attention_spans" in found:
            mask = {name: found.pop(name) for name in _OF_SPANS if name in found}
            found.pop("position_ids", None)  # the spans' positions count
        unknown = found.keys() - {"tokens", "labels", "loss_mask"}
        if unknown:
            raise ConfigError(f"{what}, got {', '.join(map(str, unknown))} in {path}: leave it out")
        every = others | found
        assert all(x.shape == tokens.shape for x in every.values())
    except (OSError, KeyError, AssertionError, AttributeError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{what}, written by torch.save, got {path}: {error!r}") from None
    every["loss_mask"] = (every["loss_mask"] != 0).float()
    rows = range(len(tokens))
    return [{name: every[name][at].contiguous() for name in _OF_SAMPLES} for at in rows], mask


def record(folder: Path, batch: str, words: Sequence[str]) -> None:
    """One rank: writes its file; ends the process."""
    with whole_program():
        sys.argv[1:] = launch.prepare(words, run_file=True)
        from megatron_cp_plugin.harness import pretrain

        samples, mask = read_batch(batch) if batch != "-" else ([], {})
        found = Recorded(mask)

        def datasets(counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
            if samples:
                return None, [samples], None  # a list of datasets
            # Of the training data only.
            return None, pretrain.build_datasets([counts[1]] * 3, vp_stage)[0], None

        pretrain.run(found.step, datasets)
        found.save(folder)


def main(argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them; returns the exit code."""
    folder, batch, *words = argv
    if "RANK" in os.environ:
        record(Path(folder), batch, words)
        return 0
    with one_line_errors():
        return start(words, MODULE, folder, batch)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
