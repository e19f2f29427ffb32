"""A tiny policy, trained with rewards in Megatron: grpo_job.py WAY SIZE UPDATES FILE.

A plain loop samples answers from the policy itself; a GRPO-like loss, clipped, trains it twice on
each set of answers, by Megatron's schedule, DDP and optimizer, in float64. WAY says how the model
takes rollouts:

    whole   padded rows through Megatron's own attention; SIZE is 1
    rows    packed, and split as verl does, by `Batch` of cut_batches_job.py
    packs   the same for sampling; for training prefixes that rollouts share are merged

The first rank writes rewards, losses and weights to FILE.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import batched
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import megatron_cp_plugin as cp
from tests.integration.cut_batches_job import VOCABULARY, Batch, make_config, make_model, set_up

PROMPTS, ANSWERS, LONGEST, MICRO_BATCHES = 3, 8, 8, 2
END = 1  # of an answer; 0 is padding
RATIO, DUAL = 0.2, 3.0  # clips of the loss

# Each rollout's log-probs: of what follows each of its tokens, [L,V]; or of its labels, [L-1].
type Numbers = list[Tensor]
type Model = Any


def whole(model: Model, rows: Sequence[Tensor]) -> Numbers:
    """Rows padded on the right, on one rank."""
    lengths = [len(row) for row in rows]
    ids = pad_sequence(list(rows), batch_first=True)
    places = torch.arange(ids.size(1))
    later = places > places[:, None]
    logits = model(ids, places.expand_as(ids), later[None, None])
    return [row[:length].log_softmax(-1) for row, length in zip(logits, lengths, strict=True)]


def joined(local: Tensor, batch: Batch, documents: Sequence[Tensor]) -> Numbers:
    """[T/P, ...] of all ranks, in the order of documents; as verl does, own ones alone have
    gradients, so that those of all ranks add up to that of the loss that each of them has.
    """
    group = _groups().cp
    parts = [torch.empty_like(local) for _ in range(batch.size)]
    dist.all_gather(parts, local.detach().contiguous(), group=group)
    parts[batch.rank] = local
    numbers, seats = _numbered(documents), []
    for rank in range(batch.size):
        seats.append(Batch((1,), rank, batch.size).cut(numbers)[0])
    order = torch.cat(seats).argsort(stable=True)
    found = torch.cat(parts)[order[-sum(map(len, documents)) :]]  # behind those of padding
    return list(found.split([len(each) for each in documents]))


def _numbered(documents: Sequence[Tensor]) -> list[Tensor]:
    """Numbers from 1 on, through all."""
    numbers = torch.arange(1, 1 + sum(map(len, documents)))
    return list(numbers.split([len(each) for each in documents]))


def rows(model: Model, documents: Sequence[Tensor]) -> Numbers:
    """Packed, and split over the ranks."""
    group = _groups().cp
    batch = Batch([len(each) for each in documents], group.rank(), group.size())
    ids = batch.cut(documents)
    logits = model(ids, None, None, packed_seq_params=batch.packed(real=False))
    return [each.log_softmax(-1) for each in joined(logits[0], batch, documents)]


def in_packs(model: Model, pack: Any) -> Numbers:
    """Log-probs of labels, for each rollout of a pack."""
    from megatron_cp_plugin.megatron import attention_spans

    group = _groups().cp
    batch = Batch((len(pack.tokens),), group.rank(), group.size())
    seen = attention_spans(pack.spans, pack.positions)
    logits = model(batch.cut([pack.tokens]), None, None, packed_seq_params=seen)
    labels = batch.cut([pack.labels])[0]
    mine = logits[0].log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    (found,) = joined(mine, batch, [pack.tokens])
    return pack.per_rollout(found)


def _groups() -> Any:
    from megatron.core.process_groups_config import ProcessGroupCollection

    return ProcessGroupCollection.use_mpu_process_groups(["cp"])


@dataclass(frozen=True)
class Sampled:
    """A prompt with an answer. Attributes: old, advantages: [answer], of each of its tokens."""

    tokens: Tensor
    prompt: int
    old: Tensor
    advantages: Tensor


def new_prompts(draw: torch.Generator) -> list[Tensor]:
    """PROMPTS of them."""
    lengths = (int(torch.randint(2, 10, (), generator=draw)) for _ in range(PROMPTS))
    return [torch.randint(2, VOCABULARY, (length,), generator=draw) for length in lengths]


def sample(
    look: Callable[[list[Tensor]], Numbers], prompts: Sequence[Tensor], draw: torch.Generator
) -> tuple[list[Sampled], Tensor]:
    """An answer of the policy to each prompt, and their rewards.

    Args: look: log-probs [L,V] of rows.
    """
    found = list(prompts)
    starts, old = [len(row) for row in found], [[] for _ in found]
    for _ in range(LONGEST):
        going = [at for at, row in enumerate(found) if len(row) == starts[at] or row[-1] != END]
        if not going:
            break
        with torch.no_grad():
            seen = look([found[at] for at in going])
        chance = torch.rand(len(found), dtype=torch.float64, generator=draw)
        for at, log_probs in zip(going, seen, strict=True):
            below = log_probs[-1].exp().cumsum(0)
            token = int((below < chance[at] * below[-1]).sum())
            found[at] = torch.cat((found[at], torch.tensor([token])))
            old[at].append(log_probs[-1, token])
    rewards = torch.tensor(
        [reward(row, start) for row, start in zip(found, starts, strict=True)], dtype=torch.float64
    )
    rollouts = [
        Sampled(row, start, torch.stack(each), torch.zeros(len(each), dtype=torch.float64))
        for row, start, each in zip(found, starts, old, strict=True)
    ]
    return rollouts, rewards


def reward(row: Tensor, start: int) -> float:
    """The share of the answer whose tokens are smaller than the last one of its prompt."""
    answer = row[start:]
    return float(((answer != END) & (answer < row[start - 1])).double().mean())


def advantages(rewards: Tensor) -> Tensor:
    """[PROMPTS * ANSWERS], by the other answers to the same prompt."""
    groups = rewards.view(PROMPTS, ANSWERS)
    spread = groups.std(1, keepdim=True) + 1e-6
    return ((groups - groups.mean(1, keepdim=True)) / spread).flatten()


def clipped(found: Tensor, old: Tensor, gains: Tensor, total: int) -> Tensor:
    """The loss of one rollout's answer. Args: total: answers' tokens of all rollouts."""
    ratio = (found - old).exp()
    losses = torch.maximum(-gains * ratio, -gains * ratio.clamp(1 - RATIO, 1 + RATIO))
    return torch.where(gains < 0, torch.minimum(losses, -gains * DUAL), losses).sum() / total


def micro_batches(way: str, rollouts: Sequence[Sampled]) -> list[Any]:
    """What a step of the schedule takes: which rollouts, and the pack that they are."""
    if way != "packs":
        size = -(-len(rollouts) // MICRO_BATCHES)
        return [(list(numbers), None) for numbers in batched(range(len(rollouts)), size)]
    tokens = [each.tokens for each in rollouts]
    packs = cp.pack_rollouts(tokens, budget=120, multiple=2 * _groups().cp.size())
    assert sum(len(pack.tokens) for pack in packs) < sum(map(len, tokens))
    return [(list(pack.rollouts), pack) for pack in packs]


def update(way: str, trained: "Trained", rollouts: Sequence[Sampled]) -> float:
    """One step of the optimizer. Returns: the loss."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    total = sum(len(each.old) for each in rollouts)
    batches = micro_batches(way, rollouts)

    def forward(data: Iterator[Any], model: Model) -> Any:
        numbers, pack = next(data)
        mine = [rollouts[number] for number in numbers]
        documents = [each.tokens for each in mine]
        if pack is not None:
            found = in_packs(model, pack)
        else:
            look = whole if way == "whole" else rows
            found = [
                each[:-1].gather(-1, ids[1:, None])[:, 0]
                for each, ids in zip(look(model, documents), documents, strict=True)
            ]
        losses = [
            clipped(each[one.prompt - 1 :], one.old, one.advantages, total)
            for each, one in zip(found, mine, strict=True)
        ]
        # For the schedule takes the mean of micro-batches.
        loss = torch.stack(losses).sum() * len(batches)
        return loss, lambda loss: (loss, {"loss": loss.detach() / len(batches)})

    trained.model.zero_grad_buffer()
    trained.optimizer.zero_grad()
    found = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=iter(batches),
        model=[trained.model],
        num_microbatches=len(batches),
        seq_length=64,
        micro_batch_size=1,
        forward_only=False,
    )
    trained.optimizer.step()
    return sum(float(each["loss"]) for each in found)


@dataclass(frozen=True)
class Trained:
    """A model in Megatron's DDP, and its optimizer."""

    model: Model
    optimizer: Any

    @classmethod
    def of(cls, size: int) -> "Trained":
        """A new one, the same on all ranks and of any size."""
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.process_groups_config import ProcessGroupCollection

        config = make_config(size)
        model = make_model(config, ProcessGroupCollection.use_mpu_process_groups())
        draw = torch.Generator().manual_seed(11)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                if parameter.dim() > 1:
                    scale = 0.02 if "output_layer" in name else 0.3
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) * scale)
        model = DistributedDataParallel(config, DistributedDataParallelConfig(), model.double())
        config.finalize_model_grads_func = finalize_model_grads
        settings = OptimizerConfig(optimizer="adam", lr=1e-2, weight_decay=0.0, clip_grad=0.0)
        return cls(model, get_megatron_optimizer(settings, [model]))


def main() -> None:
    way, size, updates, file = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    from megatron_cp_plugin.integration import cpu

    cpu.activate()  # Megatron's schedules ask for GPUs
    set_up(size)
    if way != "whole":
        from megatron_cp_plugin import megatron as cp_megatron

        cp_megatron.install("zigzag", layout="thd")
    trained = Trained.of(size)
    look = whole if way == "whole" else rows
    draw = torch.Generator().manual_seed(3)
    rewards, losses = [], []
    for _ in range(updates // 2):
        prompts = [row for row in new_prompts(draw) for _ in range(ANSWERS)]
        rollouts, each = sample(partial(look, trained.model), prompts, draw)
        rewards.append(float(each.mean()))
        for rollout, gain in zip(rollouts, advantages(each), strict=True):
            rollout.advantages.fill_(gain)
        losses += [update(way, trained, rollouts) for _ in range(2)]
    if dist.get_rank() == 0:
        weights = {name: x.detach() for name, x in trained.model.module.named_parameters()}
        torch.save({"rewards": rewards, "losses": losses, "weights": weights}, file)


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
