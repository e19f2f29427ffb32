"""The rows of the parity matrix: which flags of Megatron are combined with which algorithms."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from convergence_runs import Run, Settings, Variant, parse_variants
from omegaconf import DictConfig, OmegaConf

from megatron_cp_plugin.harness.parity import Tolerances

SOFTMAX = "zigzag,ring,distflash,attention2d,allgather,ulysses,usp"
# One of each family, for what takes many processes.
FAMILIES = "zigzag,distflash,attention2d,ulysses"
# As in the papers: algorithms.published.
PUBLISHED = "burst,attention2d-no,attention2d-o,distflash-paper,distflash-unbalanced"
HEADS_SPLIT = f"{FAMILIES},usp:ulysses=4"
LINEAR = "lasp,lasp2,lasp2:layout=zigzag,linear_ulysses"

# Samples are filled up with this token; where --null-tokenizer-pad-id says so, it has no loss.
PAD = 125
SEQ_LENGTH = 96  # divisible by 2 * 3 and 2 * 8

# The weights are large enough for attention to be sharp: with Megatron's default of 0.02 it is
# nearly uniform in a model this small, and the losses of a wrong one are the same to six digits.
MODEL: dict[str, object] = {
    "num_layers": 2,
    "hidden_size": 64,
    "ffn_hidden_size": 96,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 4,
    "seq_length": SEQ_LENGTH,
    "max_position_embeddings": SEQ_LENGTH,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "init_method_std": 0.2,
    "split": "100,0,0",
    "tokenizer_type": "NullTokenizer",
    "vocab_size": 127,
    "micro_batch_size": 1,
    "global_batch_size": 4,
    # Adam turns the rounding of a gradient that is all but zero into a whole step, the wrong way in
    # one run of two: with steps of 1e-3 gradients of the third iteration are off by up to 1.4e-4.
    "lr": 1e-4,
    "min_lr": 1e-5,
    "lr_decay_style": "constant",
    "eval_interval": 1000,
    "eval_iters": 0,
    "log_interval": 1,
    "seed": 1234,
}
GPT2: dict[str, object] = {
    "group_query_attention": False,
    "position_embedding_type": "learned_absolute",
    "normalization": "LayerNorm",
    "swiglu": False,
    "disable_bias_linear": False,
    "untie_embeddings_and_output_weights": False,
}
# With --eod-mask-loss, for without it Megatron's data set keeps the mask of the first sample that a
# rank reads, padding included, and puts it on all others.
PADDED: dict[str, object] = {"null_tokenizer_pad_id": PAD, "eod_mask_loss": True}
PER_TOKEN: dict[str, object] = {"calculate_per_token_loss": True}
OVERLAP: dict[str, object] = {
    "use_distributed_optimizer": True,
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
}
INTERLEAVED: dict[str, object] = {
    "num_layers": 4,
    "pipeline_model_parallel_size": 2,
    "num_layers_per_virtual_pipeline_stage": 1,
}
TP2: dict[str, object] = {"tensor_model_parallel_size": 2}
SP: dict[str, object] = TP2 | {"sequence_parallel": True}
PP2: dict[str, object] = {"pipeline_model_parallel_size": 2}
MOE: dict[str, object] = {
    "num_experts": 4,
    "moe_router_topk": 2,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_aux_loss_coeff": 0.1,
}
EP2: dict[str, object] = {
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
RESET: dict[str, object] = {"reset_position_ids": True, "null_tokenizer_eod_id": 7}
# Ends the documents of the data set that has some.
END_OF_DOCUMENT = 124
DOCUMENTS: dict[str, object] = {
    "dataloader_inter_document_masking": True,
    "null_tokenizer_eod_id": END_OF_DOCUMENT,
}
MTP: dict[str, object] = {"mtp_num_layers": 2, "mtp_loss_scaling_factor": 0.5}
# Parameters sharded over data and context parallelism.
TORCH_FSDP: dict[str, object] = {"use_torch_fsdp2": True, "ckpt_format": "torch_dist"}
MEGATRON_FSDP: dict[str, object] = {
    "use_megatron_fsdp": True,
    "use_distributed_optimizer": True,
    "ckpt_format": "fsdp_dtensor",
}
SINKS: dict[str, object] = {
    "softmax_type": "learnable",
    "window_size": "8,0",
    "window_attn_skip_freq": 2,
}
# Heads of dim 12 in q and k, of which 4 are rotated, and 8 in v.
MLA: dict[str, object] = {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "rope_type": "rope",
}
YARN: dict[str, object] = {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "mscale_all_dim": 0.5,
    "q_lora_rank": 24,
    "qk_layernorm": True,
}
# Settings of the plugin.
CHUNKED: dict[str, object] = {"chunked_loss": 7}
LATENTS: dict[str, object] = {"send_latents": True}
RECOMPUTE: dict[str, object] = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


@dataclass(frozen=True)
class Combination:
    """A row of the table.

    Attributes:
        key: Names it on the command line.
        about: Names it in the table.
        megatron: Flags of Megatron that differ from `MODEL`.
        cp: Context-parallel size.
        algos: As for --algos of the harness.
        dp: Data-parallel size. reference_dp: that of the reference.
        context_parallel: Settings of the plugin; linear_model: the layers are linear attention.
        tolerances: What counts as equal.
        own: Flags of Megatron that only the runs of the plugin have.
    """

    key: str
    about: str
    megatron: dict[str, object] = field(default_factory=dict)
    cp: int = 4
    algos: str = SOFTMAX
    dp: int = 1
    reference_dp: int = 1
    context_parallel: dict[str, object] = field(default_factory=dict)
    tolerances: Tolerances = field(default_factory=Tolerances)
    own: dict[str, object] = field(default_factory=dict)

    @property
    def config(self) -> DictConfig:
        """The run file that the runs have in common, without `own`."""
        return OmegaConf.create(
            {
                "megatron": MODEL | self.megatron,
                "context_parallel": {"platform": "cpu"} | self.context_parallel,
            }
        )

    @property
    def data(self) -> str:
        """Which data set: samples that are more or less padded, or short documents."""
        if not self.has_documents:
            return "samples"
        return "padded_documents" if "layout=thd" in self.algos else "documents"

    @property
    def has_documents(self) -> bool:
        """Whether documents are packed."""
        return DOCUMENTS.items() <= self.megatron.items()

    @property
    def shards(self) -> int:
        """Tensor times pipeline parallel ranks."""
        settings = Settings(self.config, self.key, [])
        tensor = settings.number("tensor_model_parallel_size", 1)
        return tensor * settings.number("pipeline_model_parallel_size", 1)

    @property
    def variants(self) -> list[Variant]:
        """The algorithms."""
        return parse_variants(self.algos)

    @property
    def reference(self) -> Run:
        """The run to be equal to: Megatron's own, or the first algorithm's at CP 1.

        Megatron has no linear attention, and without packed documents its multi-token prediction
        knows nothing of their ends.
        """
        further = self.has_documents and "mtp_num_layers" in self.megatron
        own_model = "linear_model" in self.context_parallel or further
        variant = self.variants[0] if own_model else None
        return Run(variant, 1, self.shards * self.reference_dp, is_reference=True)

    def config_of(self, run: Run) -> DictConfig:
        """The run file of one run: with `own`, but for the reference and Megatron's own split."""
        config = self.config
        if run.variant is not None and not run.is_reference:
            config.megatron.update(self.own)
        return config

    def run(self, variant: Variant) -> Run:
        """A cell's run."""
        return Run(variant, self.cp, self.shards * self.dp * self.cp)


def heads(queries: int, kv: int) -> dict[str, object]:
    """So many heads of dim 8; hidden_size need not be a multiple of them."""
    return {"num_attention_heads": queries, "num_query_groups": kv, "kv_channels": 8}


def thd(algos: str) -> str:
    """The same algorithms with the layout of batches that other programs cut."""
    return ",".join(f"{algo}:layout=thd" for algo in algos.split(","))


def rounded(unit: float) -> Tolerances:
    """What counts as equal in a dtype: 1, 5 and 20 roundings for losses, norms and gradients.

    40 for gradients of later iterations: weights that differ by a hair are rounded apart too.
    """
    return Tolerances(unit, 5 * unit, 20 * unit, 40 * unit)


def linear(
    key: str, about: str, megatron: dict[str, object], model: str = "transnormer", **values: Any
) -> Combination:
    """A combination for linear attention; it has no grouped queries and rotates nothing."""
    flags: dict[str, object] = {"group_query_attention": False, "position_embedding_type": "none"}
    section: dict[str, object] = {"linear_model": model}
    return Combination(
        key, about, flags | megatron, algos=LINEAR, context_parallel=section, **values
    )


def hybrid(key: str, about: str, layers: str, algo: str, **flags: object) -> Combination:
    """A combination for a stack of 3 linear layers and one of softmax attention with RoPE."""
    return Combination(
        key,
        about,
        {"group_query_attention": False, "num_layers": 4, **flags},
        cp=2 if flags else 4,
        algos=algo,
        context_parallel={"linear_model": "transnormer", "layers": layers},
    )


def chosen(
    key: str, about: str, megatron: dict[str, object], cp: int = 4, **section: object
) -> Combination:
    """A combination whose algorithm the planner chooses."""
    settings = {"algo": "auto", "machine": "h200_nvlink"} | section
    return Combination(key, about, megatron, cp=cp, algos="auto", context_parallel=settings)


# For the same reason smaller steps still where rounding is coarser.
SMALL_STEPS: dict[str, object] = {"lr": 1e-5, "min_lr": 1e-6}
BF16: dict[str, object] = SMALL_STEPS | {"bf16": True}
BF16_BOUND = rounded(2**-9)
FP16_BOUND = rounded(2**-11)

COMBINATIONS = (
    # The model and the size.
    Combination("rope-gqa", "RoPE, GQA 8:4, untied embeddings"),
    Combination("gpt2", "learned positions, MHA, biases, tied embeddings", GPT2),
    Combination("published", "the papers' settings", algos=PUBLISHED),
    Combination(
        "no-positions",
        "no positions, MQA, QK norm",
        {"position_embedding_type": "none", "num_query_groups": 1, "qk_layernorm": True},
    ),
    Combination(
        "reset-positions", "positions from 0 in each document", GPT2 | RESET, algos=FAMILIES
    ),
    Combination("sinks", "learnable sinks, window of 9 tokens in every other layer", SINKS),
    Combination(
        "sinks-tp",
        "sinks, TP 2, full recompute",
        SINKS | TP2 | RECOMPUTE,
        cp=2,
        algos=FAMILIES,
    ),
    Combination("cp3", "3 ranks", cp=3),
    Combination("heads-33", "33 heads", heads(33, 33), algos=f"{SOFTMAX}:ulysses=4"),
    Combination("heads-33-11", "33 heads, GQA 33:11", heads(33, 11), algos=HEADS_SPLIT),
    Combination("heads-2", "2 heads on 8 ranks", heads(2, 2), cp=8, algos=f"{FAMILIES},usp"),
    Combination("heads-7-1", "7 heads, MQA", heads(7, 1), algos=HEADS_SPLIT),
    Combination("cp8", "8 ranks", cp=8, algos=FAMILIES + ",usp"),
    Combination("bf16", "bfloat16", BF16, tolerances=BF16_BOUND),
    Combination(
        "bf16-cp1",
        "bfloat16, nothing split: rounding alone",
        BF16,
        cp=1,
        algos="zigzag",
        tolerances=BF16_BOUND,
    ),
    Combination(
        "fp16",
        "float16, loss scale 128",
        SMALL_STEPS | {"fp16": True, "loss_scale": 128},
        algos=FAMILIES,
        tolerances=FP16_BOUND,
    ),
    Combination("recompute", "full recompute", RECOMPUTE, cp=2, algos=FAMILIES),
    # Multi-latent attention.
    Combination("mla", "multi-latent attention with RoPE", MLA),
    Combination("mla-yarn", "multi-latent attention with YaRN, QK norm", MLA | YARN),
    Combination(
        "mla-sinks",
        "multi-latent attention, learnable sinks, window of 9 tokens in every other layer",
        MLA | SINKS,
        algos=FAMILIES,
    ),
    Combination(
        "mla-tp",
        "multi-latent attention with YaRN, TP 2, sequence parallel, full recompute",
        MLA | YARN | SP | RECOMPUTE,
        cp=2,
        algos=FAMILIES,
    ),
    Combination(
        "mla-pp",
        "multi-latent attention, PP 2, interleaved, up-projections recomputed",
        MLA
        | INTERLEAVED
        | {"recompute_granularity": "selective", "recompute_modules": "mla_up_proj"},
        cp=2,
        algos=FAMILIES,
    ),
    Combination(
        "mla-moe-mtp",
        "multi-latent attention with YaRN, mixture of experts, 2 more tokens predicted",
        MLA | YARN | MOE | MTP,
        algos=FAMILIES,
    ),
    Combination("mla-documents", "multi-latent attention, packed documents", MLA | DOCUMENTS),
    Combination(
        "mla-documents-tp",
        "multi-latent attention with YaRN, packed documents, TP 2, sequence parallel, full "
        "recompute",
        MLA | YARN | DOCUMENTS | SP | RECOMPUTE,
        cp=2,
        algos=FAMILIES,
    ),
    Combination(
        "mla-latents",
        "multi-latent attention with YaRN, latents sent",
        MLA | YARN,
        algos="zigzag,ring,distflash,attention2d,allgather",
        context_parallel=LATENTS,
    ),
    Combination(
        "mla-latents-cp3",
        "the same, 3 ranks, packed documents, full recompute",
        MLA | YARN | DOCUMENTS | RECOMPUTE,
        cp=3,
        algos="zigzag,distflash",
        context_parallel=LATENTS,
    ),
    Combination(
        "mla-latents-tp",
        "the same, TP 2, sequence parallel, 2 more tokens predicted",
        MLA | YARN | SP | MTP,
        cp=2,
        algos="zigzag,allgather",
        context_parallel=LATENTS,
    ),
    # The loss.
    Combination("padded", "padding: ranks and whole samples without a token that counts", PADDED),
    Combination("padded-per-token", "padding, loss per token", PADDED | PER_TOKEN),
    Combination(
        "padded-batch",
        "padding, micro-batches of 2",
        PADDED | {"micro_batch_size": 2},
        algos=FAMILIES,
    ),
    Combination(
        "eod-mask",
        "no loss at ends of documents, which fill samples up",
        {"null_tokenizer_eod_id": PAD, "eod_mask_loss": True},
        algos=FAMILIES,
    ),
    # Packed documents; the reference has a mask of all pairs, which Megatron gives neither to
    # layers with a window nor to virtual stages between the first and the last one.
    Combination("documents", "packed documents of 1 to 90 tokens", DOCUMENTS),
    Combination(
        "documents-layout",
        "packed documents, a layout that follows them",
        DOCUMENTS,
        algos="zigzag:layout=documents",
    ),
    Combination(
        "documents-cp3",
        "packed documents, 3 ranks, micro-batches of 2, loss per token",
        DOCUMENTS | PER_TOKEN | {"micro_batch_size": 2},
        cp=3,
        algos="zigzag,distflash",
    ),
    Combination(
        "documents-sp",
        "packed documents, TP 2 with sequence parallelism, full recompute",
        DOCUMENTS | SP | RECOMPUTE,
        cp=2,
        algos=FAMILIES,
    ),
    Combination("documents-pp", "packed documents, PP 2", DOCUMENTS | PP2, cp=2, algos=FAMILIES),
    Combination(
        "documents-sinks",
        "packed documents, learnable sinks",
        DOCUMENTS | {"softmax_type": "learnable"},
        algos=FAMILIES,
    ),
    Combination(
        "documents-moe",
        "packed documents, mixture of experts",
        DOCUMENTS | MOE,
        algos=FAMILIES,
    ),
    Combination(
        "documents-dp",
        "packed documents, DP 2, distributed optimizer, overlap",
        DOCUMENTS | OVERLAP,
        cp=2,
        dp=2,
        algos=FAMILIES,
    ),
    Combination(
        "documents-mtp",
        "packed documents, 2 more tokens predicted; reference: the first algorithm",
        DOCUMENTS | MTP,
        algos=FAMILIES,
    ),
    Combination(
        "documents-mtp-cp3",
        "packed documents, 2 more tokens predicted, loss per token, 3 ranks; reference: the first "
        "algorithm",
        DOCUMENTS | MTP | PER_TOKEN,
        cp=3,
        algos="zigzag,distflash",
    ),
    # Each document padded and cut by itself, as other programs around Megatron do.
    Combination(
        "thd", "padded documents, cut by zigzag inside each", DOCUMENTS, algos=thd(SOFTMAX)
    ),
    Combination(
        "thd-tp",
        "the same, TP 2, sequence parallel, full recompute",
        DOCUMENTS | SP | RECOMPUTE,
        cp=2,
        algos=thd(FAMILIES),
    ),
    Combination("thd-pp", "the same, PP 2", DOCUMENTS | PP2, cp=2, algos=thd(FAMILIES)),
    Combination(
        "thd-mtp",
        "the same, 2 more tokens predicted, TP 2, sequence parallel; reference: the first "
        "algorithm",
        DOCUMENTS | MTP | SP,
        cp=2,
        algos=thd(FAMILIES),
    ),
    Combination(
        "thd-mla",
        "the same, multi-latent attention",
        DOCUMENTS | MLA,
        algos=thd(FAMILIES),
    ),
    Combination(
        "thd-mla-pp",
        "the same, multi-latent attention with YaRN, PP 2, full recompute",
        DOCUMENTS | MLA | YARN | PP2 | RECOMPUTE,
        cp=2,
        algos=thd(FAMILIES),
    ),
    # Multi-token prediction: the harness compares its losses too.
    Combination("mtp", "2 more tokens predicted, padding", MTP | PADDED),
    Combination(
        "mtp-per-token",
        "2 more tokens predicted, padding, loss per token",
        MTP | PADDED | PER_TOKEN,
    ),
    Combination(
        "mtp-cp3",
        "2 more tokens predicted, 3 ranks, full recompute",
        MTP | RECOMPUTE,
        cp=3,
        algos="zigzag,distflash",
    ),
    Combination(
        "mtp-tp",
        "2 more tokens predicted, TP 2, sequence parallel, distributed optimizer",
        MTP | SP | OVERLAP,
        cp=2,
        algos=FAMILIES,
    ),
    # The loss in chunks of tokens, fewer than a rank has.
    Combination(
        "chunked", "loss in chunks, padding", PADDED, cp=2, algos=FAMILIES, context_parallel=CHUNKED
    ),
    Combination(
        "chunked-tp",
        "loss in chunks, TP 2, padding, loss per token",
        TP2 | PADDED | PER_TOKEN,
        cp=2,
        algos="zigzag,distflash",
        context_parallel=CHUNKED,
    ),
    Combination(
        "chunked-sp",
        "loss in chunks, TP 2, sequence parallel, distributed optimizer, overlap",
        SP | OVERLAP,
        cp=2,
        algos="zigzag,distflash",
        context_parallel=CHUNKED,
    ),
    Combination(
        "chunked-pp",
        "loss in chunks, PP 2, tied embeddings",
        GPT2 | PP2,
        cp=2,
        algos="zigzag,distflash",
        context_parallel=CHUNKED,
    ),
    Combination(
        "chunked-mtp",
        "loss in chunks, 2 more tokens predicted, TP 2, sequence parallel, padding",
        MTP | SP | PADDED,
        cp=2,
        algos="zigzag,distflash",
        context_parallel=CHUNKED,
    ),
    Combination(
        "chunked-documents",
        "loss in chunks, packed documents, TP 2",
        DOCUMENTS | TP2,
        cp=2,
        algos="zigzag,distflash",
        context_parallel=CHUNKED,
    ),
    # Sharded parameters; the reference has Megatron's own data parallelism.
    Combination(
        "fsdp",
        "DP 2, torch's FSDP2",
        cp=2,
        dp=2,
        reference_dp=2,
        algos=FAMILIES,
        own=TORCH_FSDP,
    ),
    Combination(
        "fsdp-recompute",
        "DP 2, torch's FSDP2, full recompute, padding, loss in chunks",
        PADDED | RECOMPUTE,
        cp=2,
        dp=2,
        reference_dp=2,
        algos=FAMILIES,
        own=TORCH_FSDP,
        context_parallel=CHUNKED,
    ),
    *(
        Combination(
            f"megatron-fsdp-{key}",
            f"DP 2, Megatron-FSDP, {sharding} sharded",
            cp=2,
            dp=2,
            reference_dp=2,
            algos=FAMILIES,
            own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": sharding},
        )
        for key, sharding in (
            ("1", "optim"),
            ("2", "optim_grads"),
            ("3", "optim_grads_params"),
        )
    ),
    Combination(
        "fsdp-tp",
        "TP 2, sequence parallel, torch's FSDP2",
        SP,
        cp=2,
        algos=FAMILIES,
        own=TORCH_FSDP,
    ),
    Combination(
        "megatron-fsdp-tp",
        "TP 2, sequence parallel, Megatron-FSDP, optim_grads_params sharded",
        SP,
        cp=2,
        algos=FAMILIES,
        own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    Combination(
        "fsdp-moe",
        "4 experts, auxiliary loss, torch's FSDP2",
        MOE,
        cp=2,
        algos=FAMILIES,
        own=TORCH_FSDP,
    ),
    Combination(
        "megatron-fsdp-moe",
        "4 experts, auxiliary loss, Megatron-FSDP, optim_grads_params sharded",
        MOE,
        cp=2,
        algos=FAMILIES,
        own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    Combination(
        "megatron-fsdp-moe-ep",
        "EP 2 over DP 2, Megatron-FSDP, optim_grads_params sharded",
        MOE | EP2,
        cp=2,
        dp=2,
        reference_dp=2,
        algos=FAMILIES,
        own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    # Other parallelism.
    Combination("tp", "TP 2", TP2, cp=2, algos=FAMILIES),
    Combination(
        "tp-mqa",
        "TP 2 with one KV head for both, QK norm",
        TP2 | {"num_query_groups": 1, "qk_layernorm": True},
        cp=2,
        algos=FAMILIES,
    ),
    Combination("tp-sp", "TP 2, sequence parallel", SP, cp=2, algos=FAMILIES),
    Combination("pp", "PP 2, 1F1B, tied embeddings", GPT2 | PP2, cp=2, algos=FAMILIES),
    Combination("pp-interleaved", "PP 2, interleaved", INTERLEAVED, cp=2, algos=FAMILIES),
    Combination("dp", "DP 2, padding", PADDED, cp=2, dp=2, reference_dp=2, algos=FAMILIES),
    Combination(
        "cp-for-dp", "CP 2 against DP 2, padding", PADDED, cp=2, reference_dp=2, algos=FAMILIES
    ),
    Combination(
        "dp-overlap",
        "DP 2, distributed optimizer, overlapped reductions and gathers",
        OVERLAP,
        cp=2,
        dp=2,
        reference_dp=2,
        algos=FAMILIES,
    ),
    Combination(
        "tp-pp",
        "TP 2, sequence parallel, PP 2, distributed optimizer, overlapped, padding",
        SP | PP2 | OVERLAP | PADDED,
        cp=2,
        algos=FAMILIES,
    ),
    Combination(
        "tp-pp-per-token",
        "the same, loss per token",
        SP | PP2 | OVERLAP | PADDED | PER_TOKEN,
        cp=2,
        algos="zigzag,distflash",
    ),
    # Mixture of experts.
    Combination("moe", "4 experts, auxiliary loss", MOE, algos=FAMILIES),
    Combination(
        "moe-ep",
        "EP 2 over DP 2, auxiliary loss",
        MOE | EP2,
        cp=2,
        dp=2,
        reference_dp=2,
        algos=FAMILIES,
    ),
    Combination(
        "moe-ep-cp",
        "EP 2 over CP 2, auxiliary and z-loss, padding",
        MOE | EP2 | PADDED | {"moe_z_loss_coeff": 0.01},
        cp=2,
        reference_dp=2,
        algos=FAMILIES,
    ),
    Combination(
        "moe-ep-per-token",
        "EP 2 over CP 2, auxiliary loss per sequence, z-loss, padding, loss per token",
        MOE
        | EP2
        | PADDED
        | PER_TOKEN
        | {"moe_router_load_balancing_type": "seq_aux_loss", "moe_z_loss_coeff": 0.01},
        cp=2,
        reference_dp=2,
        algos="zigzag,distflash",
    ),
    Combination(
        "moe-global",
        "4 experts, global auxiliary loss",
        MOE | {"moe_router_load_balancing_type": "global_aux_loss"},
        algos="zigzag,distflash",
    ),
    Combination(
        "moe-bias",
        "4 experts, sigmoid router balanced by a bias, micro-batches of 2",
        MOE
        | {
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "micro_batch_size": 2,
        },
        algos="zigzag,distflash",
    ),
    Combination(
        "moe-tp",
        "EP 2 over TP 2, sequence parallel, auxiliary loss",
        MOE | EP2 | SP | {"expert_tensor_parallel_size": 1},
        cp=2,
        algos="zigzag,distflash",
    ),
    Combination(
        "moe-drop",
        "experts that drop tokens",
        MOE | {"moe_expert_capacity_factor": 1.0},
        algos="zigzag",
    ),
    # Linear attention.
    linear("transnormer", "TransNormerLLM", {}),
    linear("linear-transformer", "Linear Transformer", GPT2, model="linear_transformer"),
    linear("transnormer-bf16", "TransNormerLLM, bfloat16", BF16, tolerances=BF16_BOUND),
    linear("transnormer-padded", "TransNormerLLM, padding", PADDED),
    linear(
        "transnormer-33h", "TransNormerLLM, 33 heads", {"num_attention_heads": 33, "kv_channels": 8}
    ),
    linear("transnormer-tp", "TransNormerLLM, TP 2, sequence parallel", SP, cp=2),
    linear("transnormer-pp", "TransNormerLLM, PP 2, interleaved", INTERLEAVED, cp=2),
    linear("transnormer-moe", "TransNormerLLM, 4 experts, auxiliary loss", MOE),
    linear(
        "transnormer-fsdp",
        "TransNormerLLM, DP 2, torch's FSDP2",
        {},
        cp=2,
        dp=2,
        reference_dp=2,
        own=TORCH_FSDP,
    ),
    linear(
        "transnormer-megatron-fsdp",
        "TransNormerLLM, DP 2, Megatron-FSDP, optim_grads_params sharded",
        {},
        cp=2,
        dp=2,
        reference_dp=2,
        own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    linear("transnormer-mtp", "TransNormerLLM, 2 more tokens predicted, padding", MTP | PADDED),
    # Stacks of both kinds, on each layout.
    hybrid("hybrid", "lasp2*3, attention2d", "lasp2*3, attention2d", "lasp2:layout=zigzag"),
    hybrid("hybrid-contiguous", "lasp*3, distflash", "lasp*3, distflash", "lasp"),
    hybrid(
        "hybrid-pp",
        "lasp2*3, zigzag, PP 2, distributed optimizer, overlapped",
        "lasp2*3, zigzag",
        "lasp2:layout=zigzag",
        **PP2 | OVERLAP,
    ),
    hybrid(
        "hybrid-ulysses",
        "linear_ulysses*3, ring, TP 2, sequence parallel",
        "linear_ulysses*3, ring",
        "linear_ulysses",
        **SP,
    ),
    # What the planner chooses, which differs.
    chosen("auto", "auto: RoPE, GQA 8:4", {}),
    chosen(
        "auto-windows",
        "auto: windows of 9 tokens in every other layer, 1 KV head",
        SINKS | {"num_query_groups": 1},
    ),
    chosen("auto-documents", "auto: packed documents", DOCUMENTS, mean_document=16),
    chosen(
        "auto-hybrid",
        "auto: 3 linear layers, one of softmax attention",
        {"group_query_attention": False, "num_layers": 4},
        layers="linear*3, softmax",
        linear_model="transnormer",
    ),
)
