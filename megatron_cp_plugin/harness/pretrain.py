"""A GPT pretraining program on `megatron.training`, as a script of Megatron-LM would have it.

It knows nothing of context-parallel algorithms: the launcher installs the chosen one before
this module is imported, as it does for any other training script.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.core.utils import (
    flatten_batch_for_packed_sequences,
    get_attr_wrapped_model,
    get_batch_on_this_cp_rank,
    get_batch_on_this_tp_rank,
)
from megatron.training import get_args, get_timers, pretrain
from megatron.training.argument_utils import (
    gpt_config_from_args,
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.rules import check
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.process_exit import refusals_in_one_line
from megatron_cp_plugin.terminal import flag_of

_OF_DOCUMENTS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")
_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids", *_OF_DOCUMENTS)
# Flags of Megatron that mean something to its own pretrain_gpt.py and nothing to this program.
_NOT_HERE = (
    "fim_data",
    "logits_load_dir",
    "overlap_moe_expert_parallel_comm",
    "hybrid_context_parallel",
)


def run(step: Callable[..., Any] | None = None, datasets: Callable[..., Any] | None = None) -> None:
    """Trains a GPT as the command line says.

    Args: step, datasets: in the place of `forward_step` and `build_datasets`.

    Raises: ConfigError: A flag asks for something that this program does not do.
    """
    with refusals_in_one_line():
        args = parse_and_validate_args(args_defaults={"tokenizer_type": "GPT2BPETokenizer"})
    check("training", Settings(args))
    for name in _NOT_HERE:
        if getattr(args, name, None):
            raise ConfigError(
                f"this script does not support {flag_of(name)}: leave it out, or start Megatron's "
                "own script with python -m megatron_cp_plugin.launch"
            )
    if args.mtp_num_layers and args.pipeline_model_parallel_size > 1:
        raise ConfigError(
            "this script does not support --mtp-num-layers in a pipeline: start Megatron's own "
            "script with python -m megatron_cp_plugin.launch"
        )
    model = hybrid_config_from_args if args.hybrid_layer_pattern else gpt_config_from_args
    with refusals_in_one_line():
        config = pretrain_cfg_container_from_args(args, model(args))
    provider: Any = datasets or build_datasets
    provider.is_distributed = True
    pretrain(config, provider, ModelType.encoder_or_decoder, step or forward_step)


def forward_step(data_iterator: Iterator[Any], model: Any) -> tuple[Tensor, Any]:
    """Runs the model on one micro-batch.

    Returns: The losses of this rank's tokens [b, s] (the hidden states where the pipeline goes on),
    and the function that makes the loss of them.
    """
    timers = get_timers()
    timers("batch-generator", log_level=2).start()
    batch = next_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    timers("batch-generator").stop()
    return output_of(model, batch), partial(sum_of_losses, batch["loss_mask"])


def output_of(model: Any, batch: dict[str, Any]) -> Tensor:
    """The losses of this rank's tokens [b, s]; the hidden states where the pipeline goes on."""
    output: Tensor = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
        packed_seq_params=_packed_params(batch),
    )
    return output


def _packed_params(batch: dict[str, Any]) -> PackedSeqParams | None:
    """Arguments of Megatron's models that describe the documents of a batch."""
    if batch["cu_seqlens"] is None:
        return None
    bounds, longest = batch["cu_seqlens"].squeeze(0), int(batch["max_seqlen"])
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def sum_of_losses(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Adds up the losses of this rank's tokens; Megatron adds up over the ranks.

    Args:
        loss_mask: [b, s], 0 where a token does not count.
        losses: [b, s].

    Returns: The sum, the number of tokens that count, and both for the log.
    """
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(losses.reshape(-1).float() * mask)
    tokens = mask.sum().detach().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        for bad in (torch.isnan, torch.isinf):
            get_rerun_state_machine().validate_result(
                result=loss,
                rejection_func=bad,
                message=f"loss of this rank: {bad.__name__}",
                tolerance=0.0,
                fatal=True,
            )
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def build_datasets(num_samples: list[int], vp_stage: int | None = None) -> Any:
    """Builds the training, validation and test sets."""
    args = get_args()
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=build_tokenizer(args),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        inter_document_masking=args.dataloader_inter_document_masking,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        context_parallel_size=args.context_parallel_size,
        data_parallel_size=args.data_parallel_size,
    )

    def needed() -> bool:
        first_tensor_rank = mpu.get_tensor_model_parallel_rank() == 0
        used = is_first_or_last_pipeline_stage(vp_stage) or _has_documents()
        return first_tensor_rank and used

    kind: type = MockGPTDataset if args.mock_data else GPTDataset
    if args.sft:
        kind = SFTDataset
    return BlendedMegatronDatasetBuilder(kind, num_samples, needed, config).build()


def _has_documents() -> bool:
    args = get_args()
    return bool(args.sft or args.dataloader_inter_document_masking)


def next_batch(
    data_iterator: Iterator[Any],
    vp_stage: int | None,
    add: Callable[[dict[str, Any]], None] = lambda _: None,
) -> dict[str, Any]:
    """Returns this rank's part of the next micro-batch; inside the pipeline its documents only.

    Args: add: adds to the whole micro-batch, before it is split.
    """
    nothing: dict[str, Any] = dict.fromkeys(_KEYS)
    args = get_args()
    has_documents = _has_documents()
    cp_group = mpu.get_context_parallel_group()
    if not is_first_or_last_pipeline_stage(vp_stage) and not has_documents:
        return nothing
    tensor_rank = mpu.get_tensor_model_parallel_rank()
    batch = dict(nothing)
    if tensor_rank == 0:
        sample = next(data_iterator)
        for key in _KEYS:
            if sample.get(key) is not None:
                batch[key] = sample[key].cuda(non_blocking=True)
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=has_documents,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch = flatten_batch_for_packed_sequences(batch)
    add(batch)
    return nothing | get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
