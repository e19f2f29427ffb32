"""A training script whose micro-batches bring masks of all kinds, each another one.

`--mask dense` gives the model a mask [b, 1, N, N], as Megatron takes it; `--mask spans` gives the
batch attention_spans; `--mask given` gives them to the model itself; `--mask first` gives them to
the batch of a pipeline's first stage only. Rotary embeddings take other positions than those in the
sequence. With `--documents` these are packed besides, and the dense mask has a window of `--seen`
tokens.
"""

import sys
from collections import Counter
from functools import partial
from random import Random
from typing import Any

import torch

from megatron_cp_plugin import spans
from megatron_cp_plugin.core.masks.slices import KINDS
from tests.span_masks import Spans, dense, random_spans


def mask_of(number: int, tokens: int, bounds: list[int] | None) -> Spans:
    """That of a micro-batch; every query sees something, for Megatron lets it see all otherwise.

    Args: bounds: within which documents; None: not within any.
    """
    half, source = tokens // 2, Random(number)
    masks = [
        spans.shared_prefix((half - 4, [5, (11, [half - 20, 5]), 3])),
        spans.image_blocks(tokens, [(0, 5), (half - 3, half + 9)]),
        spans.prefix_lm(half, half + 7) + spans.documents([half + 7, tokens - 9, tokens]),
        spans.block_diffusion(half, 10),
    ]
    if number % 5 < len(masks):
        return masks[number % 5]
    while not dense(found := random_spans(source, tokens), tokens, bounds).any(1).all():
        pass
    return found


def bounds_of(number: int, tokens: int) -> list[int]:
    """Cumulative lengths of the documents of a micro-batch."""
    return [0, 9 + 5 * (number % 3), tokens - 11, tokens]


def positions_of(number: int, tokens: int) -> torch.Tensor:
    """Of a micro-batch's tokens; every other one goes by the order of its tokens."""
    order = list(range(tokens))
    if number % 2 == 0:
        Random(number).shuffle(order)
    return torch.tensor(order)


def main() -> None:
    """Trains with the script's own loop and another forward step."""
    from megatron_cp_plugin.integration import launch
    from megatron_cp_plugin.process_exit import one_line_errors

    kind = taken("--mask")
    seen = taken("--seen")
    packs = "--documents" in sys.argv
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--documents"]
    with one_line_errors():
        sys.argv[1:] = launch.prepare(sys.argv[1:], run_file=True)
        from megatron_cp_plugin.harness import pretrain

        serve(pretrain, kind, packs=packs, window=int(seen) if seen else None)
        pretrain.run()


def taken(flag: str) -> str:
    """The word after a flag, which are both taken out of the command line; empty: not there."""
    if flag not in sys.argv:
        return ""
    place = sys.argv.index(flag)
    word = sys.argv[place + 1]
    del sys.argv[place : place + 2]
    return word


def serve(pretrain: Any, kind: str, *, packs: bool, window: int | None) -> None:
    """Lets the program of the plugin have masks."""
    from megatron.core import mpu
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_attr_wrapped_model
    from megatron.training import get_args

    from megatron_cp_plugin.megatron import attention_spans

    angles: Any = RotaryEmbedding.forward
    hooked = pretrain.get_batch_on_this_cp_rank
    pretrain.get_batch_on_this_cp_rank = lambda batch, **_: batch
    count: Counter[int | None] = Counter()

    def forward_step(data_iterator: Any, model: Any) -> Any:
        stage, tokens = get_attr_wrapped_model(model, "vp_stage"), get_args().seq_length
        batch, packed = pretrain.next_batch(data_iterator, stage), None
        number = count[stage]
        bounds = bounds_of(number, tokens) if packs else None
        mask, positions = mask_of(number, tokens, bounds), positions_of(number, tokens)
        own = not packs or number % 2 == 0  # others count through each document
        count[stage] += 1
        if bounds is not None:
            lengths = torch.tensor(bounds, dtype=torch.int32)
            packed = PackedSeqParams("thd", lengths, lengths)
            batch["cu_seqlens"] = lengths[None]
            if not own:
                positions = torch.cat([torch.arange(int(n)) for n in lengths.diff()])
        if kind == "dense":
            packed = None
            batch["attention_mask"] = (dense(mask, tokens, bounds, window) == 0)[None, None]
            RotaryEmbedding.forward = lambda *args, **kwargs: angles(*args, **kwargs)[positions]
        elif kind == "spans" or (kind == "first" and mpu.is_pipeline_first_stage()):
            rows = [[*one[:4], KINDS.index(one[4])] for one in mask]
            batch["attention_spans"] = torch.tensor([[*rows, [0] * 5]])
            if own:
                batch["attention_positions"] = positions[None]
        elif kind == "given":
            packed = attention_spans(mask, positions.tolist() if own else None, packed)
        batch = hooked(batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group())
        output = model(
            batch["tokens"],
            batch["position_ids"],
            batch["attention_mask"],
            labels=batch["labels"],
            loss_mask=batch["loss_mask"],
            packed_seq_params=packed,
        )
        return output, partial(pretrain.sum_of_losses, batch["loss_mask"])

    pretrain.forward_step = forward_step


if __name__ == "__main__":
    main()
