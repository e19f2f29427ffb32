"""Log-probabilities of the labels of some samples: `token_log_probs FOLDER [flags]`.

The model is the one of `megatron-cp train` with the same flags, before its first training step;
samples are of the training data. Every rank that has losses writes `rank00000.pt` into FOLDER.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.train import start
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.process_exit import one_line_errors, whole_program

MODULE = "megatron_cp_plugin.harness.token_log_probs"


@dataclass
class Recorded:
    """The results of one rank.

    Attributes:
        weights: The norm of each of its parameters.
        parts: Of each micro-batch [n]: numbers of its tokens in the micro-batch, log-probabilities
            in float32, labels, and 1 for tokens that count.
        tokens: Of a whole micro-batch.
    """

    weights: dict[str, float] = field(default_factory=dict)
    parts: list[tuple[Tensor, ...]] = field(default_factory=list)
    tokens: int = 0

    def step(self, data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
        """As `pretrain.forward_step`, and keeps the losses."""
        from megatron.core import parallel_state
        from megatron.core.utils import get_attr_wrapped_model

        from megatron_cp_plugin.harness import pretrain

        stage = get_attr_wrapped_model(model, "vp_stage")
        batch = pretrain.next_batch(data_iterator, stage, _number)
        for name, parameter in model.named_parameters():
            norm = torch.linalg.vector_norm(parameter.detach(), dtype=torch.float32)
            self.weights.setdefault(f"{stage} {name}", float(norm))
        output = pretrain.output_of(model, batch)
        if parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage):
            of_tokens = batch["numbers"], -output.float(), batch["labels"], batch["loss_mask"]
            self.parts.append(tuple(x.detach().flatten().cpu() for x in of_tokens))
            self.tokens = output.numel() * parallel_state.get_context_parallel_world_size()
        return output, partial(pretrain.sum_of_losses, batch["loss_mask"])

    def save(self, folder: Path) -> None:
        """Writes this rank's file, on one of the ranks that have the same losses."""
        from megatron.core import parallel_state

        if self.parts and parallel_state.get_tensor_model_parallel_rank() == 0:
            content = {**vars(self), "rank": parallel_state.get_context_parallel_rank()}
            torch.save(content, folder / f"rank{torch.distributed.get_rank():05d}.pt")


def _number(batch: dict[str, Any]) -> None:
    """Adds the numbers of its tokens in the whole micro-batch."""
    if (labels := batch.get("labels")) is not None:
        batch["numbers"] = torch.arange(labels.numel(), device=labels.device).view_as(labels)


@dataclass(frozen=True)
class LogProbs:
    """The results of a job.

    Attributes:
        weights: Norms of parameters, by rank.
        log_probs, labels, counts, ranks: [B,S]; ranks: who held the token.
    """

    weights: list[dict[str, float]]
    log_probs: Tensor
    labels: Tensor
    counts: Tensor
    ranks: Tensor

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Joins the results of all ranks.

        Raises: ContextParallelError: They wrote nothing, or a token is not there exactly once.
        """
        found = [torch.load(path, weights_only=True) for path in sorted(folder.glob("rank*.pt"))]
        if not found:
            raise ContextParallelError(f"no log-probabilities in {folder}: see {folder}.log")
        batches, tokens = len(found[0]["parts"]), found[0]["tokens"]
        kinds = torch.float32, torch.int64, torch.float32, torch.int64
        every = [torch.zeros(batches, tokens, dtype=kind) for kind in kinds]
        seen = torch.zeros(batches, tokens)
        for one in found:
            for row, (numbers, *parts) in enumerate(one["parts"]):
                seen[row, numbers] += 1
                for whole, part in zip(every, (*parts, torch.tensor(one["rank"])), strict=True):
                    whole[row, numbers] = part.to(whole.dtype)
        if not (seen == 1).all():
            raise ContextParallelError(
                f"the ranks of {folder} split {tokens} tokens into parts that are no partition: "
                f"{int((seen != 1).sum())} are missing or there twice"
            )
        return cls([one["weights"] for one in found], *every)


def record(folder: Path, words: Sequence[str]) -> None:
    """One rank: writes its file; ends the process."""
    with whole_program():
        sys.argv[1:] = launch.prepare(words, run_file=True)
        from megatron_cp_plugin.harness import pretrain

        def datasets(counts: list[int], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
            return None, pretrain.build_datasets([counts[1]] * 3, vp_stage)[0], None

        found = Recorded()
        pretrain.run(found.step, datasets)
        found.save(folder)


def main(argv: Sequence[str]) -> int:
    """Starts the ranks, or is one of them; returns the exit code."""
    folder, *words = argv
    if "RANK" in os.environ:
        record(Path(folder), words)
        return 0
    with one_line_errors():
        return start(words, MODULE, folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
