"""verl's own packing code and the plugin: `torchrun --nproc-per-node 2 examples/verl_batches.py`.

Needs verl (pip install verl); no GPU. verl packs and cuts a padded batch for each context-parallel
rank, a tiny model computes it with an algorithm of the plugin, verl unpacks the output. It is
compared with each sequence alone through Megatron's own attention.
"""

import argparse
from copy import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.integration import cpu
from megatron_cp_plugin.integration.launch import whole_program

VOCABULARY = 97
LENGTHS = (13, 1, 27, 6)


def make_model(size: int, groups: Any) -> Any:
    """A tiny GPTModel as a worker builds it."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.enums import AttnBackend
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        init_method_std=0.2,
        context_parallel_size=size,
        attention_backend=AttnBackend.flash,
    )
    return GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=64,
        position_embedding_type="rope",
        pg_collection=groups,
    )


def padded_batch() -> tuple[Tensor, Tensor]:
    """Ids [b,s] with zeros behind each sequence, and which of them count."""
    draw = torch.Generator().manual_seed(0)
    ids = torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long)
    for row, length in zip(ids, LENGTHS, strict=True):
        row[:length] = torch.randint(1, VOCABULARY, (length,), generator=draw)
    return ids, torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]


def main() -> None:
    """Compares logits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--algo", default="zigzag")
    algo = parser.parse_args().algo
    cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from verl.models.mcore.util import postprocess_packed_seqs, preprocess_packed_seqs

    from megatron_cp_plugin import megatron as cp_megatron

    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=size)
    model_parallel_cuda_manual_seed(7)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    single = copy(groups)
    single.cp = [dist.new_group([number]) for number in range(size)][rank]
    alone = make_model(1, single)

    cp_megatron.install(algo, layout="thd")
    model = make_model(size, groups)
    model.load_state_dict(alone.state_dict(), strict=False)

    ids, counts = padded_batch()
    mine, packed = preprocess_packed_seqs(ids, counts)
    with torch.no_grad():
        out = model(mine, torch.zeros_like(mine), None, packed_seq_params=packed)
        logits = postprocess_packed_seqs(out, packed, counts, *ids.shape)
        worst = 0.0
        for row, whole, length in zip(logits, ids, LENGTHS, strict=True):
            sequence = whole[None, :length]
            expected = alone(sequence, torch.arange(length)[None], None)[0]
            worst = max(worst, float((row[:length] - expected).abs().max()))
    if rank == 0:
        print(f"{algo} on {size} ranks: logits are off by {worst:.1e} at most")
    assert worst < 1e-4, worst


if __name__ == "__main__":
    with whole_program():
        main()
