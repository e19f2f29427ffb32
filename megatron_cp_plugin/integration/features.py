"""The features of Megatron that no algorithm supports, as rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.integration.settings import GATED, SPARSE, Settings
from megatron_cp_plugin.terminal import flag_of

# Where settings come in: what does not depend on the algorithm; Megatron's arguments as parsed;
# whether a script can start with them, with and without an algorithm; validated arguments; those of
# a script that trains; the configuration of a model, of a layer of linear attention, and of a
# recurrent layer; and a batch that says of no documents.
Stage = Literal[
    "sizes",
    "arguments",
    "start",
    "files",
    "validated",
    "training",
    "model",
    "linear layer",
    "recurrent layer",
    "batch",
]


@dataclass(frozen=True)
class Rule:
    """One thing that is refused.

    Attributes:
        when: Whether settings ask for it, or, if so, numbers and words for the text.
        text: What to say in one line: what, got, and what to do. A template: {s} is the `Settings`
            that are checked, {value} that of `setting`, other names are what `when` has found.
        stages: Where it is checked.
        name: As a user would call it, of a feature of Megatron that no algorithm supports.
        setting: Of a feature: the setting that asks for it, named like its flag.
        reason: Of a feature: why it is refused.
        instead: Of a feature: what to do.
        here: Whether it asks what this machine has: packages, data, folders.
    """

    when: Callable[[Settings], object]
    text: str
    stages: tuple[Stage, ...] = ("arguments", "model")
    name: str = ""
    setting: str = ""
    reason: str = ""
    instead: str = ""
    here: bool = False

    @property
    def flag(self) -> str:
        """The command-line flag of the setting."""
        return flag_of(self.setting)

    def refusal(self, settings: Settings) -> str | None:
        """Returns what to say to settings; None: they do not ask for it."""
        found = self.when(settings)
        if not found:
            return None
        words = dict(found) if isinstance(found, Mapping) else {}
        if self.setting:
            value = getattr(settings, self.setting)
            words["value"] = getattr(value, "name", value)
        return self.text.format(s=settings, **words)


def on(setting: str) -> Callable[[Settings], bool]:
    """Whether a switch is given."""
    return lambda s: bool(getattr(s, setting))


def _other_than(setting: str, *allowed: object) -> Callable[[Settings], bool]:
    def asked(s: Settings) -> bool:
        value = getattr(s, setting)
        return value is not None and getattr(value, "name", value) not in allowed

    return asked


def _feature(
    name: str,
    setting: str,
    reason: str,
    instead: str = "",
    when: Callable[[Settings], object] | None = None,
) -> Rule:
    """A feature of Megatron that no algorithm supports; by default its setting is a switch."""
    flag = flag_of(setting)
    instead = instead or f"leave {flag} out"
    what = f"--context-parallel-algo {{s.cp.algo}} does not support {name}"
    text = f"{what}, got {flag} {{value}} ({reason}): {instead}"
    when = when or on(setting)
    return Rule(when, text, name=name, setting=setting, reason=reason, instead=instead)


def _cuts_sparse_otherwise(s: Settings) -> bool:
    return s.is_sparse and s.ranks > 1 and s.cp.layout.name != PaddedDocuments.name


_ZIGZAG = "Megatron splits it by its own zigzag layout"
_PACKED = "its documents are split and padded for Megatron's own layout"
_OTHER_GROUPS = {
    "hybrid": "Megatron's own loop stops in its first step, see its pull request 6816; option "
    "layout=documents balances packs",
    "dynamic": "no release of Megatron has its loop; option layout=documents balances packs",
}
_KERNELS = "the attention kernels here do not compute it"
_BY_RANK = "each rank does it with its own tokens, so the split would change the result"
_NEW_ENGINE = "it needs Transformer Engine 2.19, with which nobody ran the plugin"
UNTESTED = "never tested with the plugin"
_BY_DOCUMENT = "these layers need each document cut by itself, as by the layout thd of install"
_ONE_BATCH = "a graph keeps the documents of the batch that was captured"
_FSDP_CHECKPOINTS = "Megatron's torch_dist does not save them, and its torch_dcp loads nothing"
_FSDP_NAMES = "it recognizes split parameters by the names of Megatron's own classes"
_LARGEST = "a replay does not hand the largest score on"
_CAPTURE = "use --cuda-graph-impl transformer_engine --cuda-graph-modules "
_CAPTURES_MLP = f"{_CAPTURE}mlp, or leave --cuda-graph-impl out"

# A table is read by rows.
# fmt: off
FEATURES: tuple[Rule, ...] = (
    _feature("attention dropout", "attention_dropout", _KERNELS, "add --attention-dropout 0"),
    # What decides which tokens see which.
    _feature("packed sequences (RL)", "rl_use_sequence_packing", _PACKED),
    _feature("resetting the attention mask at document ends", "reset_attention_mask",
             "it builds an N x N mask", "use --dataloader-inter-document-masking"),
    _feature("documents of several samples in a pipeline", "micro_batch_size",
             "Megatron packs them into one sequence, but its stages expect several",
             "use --micro-batch-size 1",
             lambda s: s.packing and s.samples > 1 and s.stages > 1),
    # What looks at the scores.
    _feature("QK clipping of attention in CUDA graphs", "qk_clip", _LARGEST, _CAPTURES_MLP,
             lambda s: s.qk_clip and s.captures_attention),
    _feature("logging the largest attention logit in CUDA graphs", "log_max_attention_logit",
             _LARGEST, _CAPTURES_MLP,
             lambda s: s.log_max_attention_logit and s.captures_attention),
    # Attention of another kind.
    _feature("position embeddings of the model besides those of multi-latent attention",
             "position_embedding_type", "Megatron's layers support only their own",
             "use --position-embedding-type rope --rope-type yarn",
             lambda s: s.is_latent and s.position_embedding_type == "yarn"),
    _feature("a cache of latents", "cache_mla_latents", "it is for inference"),
    _feature("experimental attention variants other than gated delta net and DSA",
             "experimental_attention_variant", UNTESTED,
             when=_other_than("experimental_attention_variant", *GATED, SPARSE)),
    _feature("packed documents with DSA layers", "dataloader_inter_document_masking", _BY_DOCUMENT,
             when=lambda s: s.dataloader_inter_document_masking and _cuts_sparse_otherwise(s)),
    _feature("packed conversations with DSA layers", "sft", _BY_DOCUMENT,
             when=lambda s: s.sft and _cuts_sparse_otherwise(s)),
    # Attention of both kinds, MLP, MoE; ends of stages and of what predicts one more token.
    _feature("layers other than attention, Mamba, MLP and MoE in a hybrid model",
             "hybrid_layer_pattern", UNTESTED, "use *, +, M, - and E",
             lambda s: not set(s.hybrid_layer_pattern or "") <= set("*+M-E|/")),
    _feature("hybrid models selected by their old flag", "hybrid_override_pattern", UNTESTED,
             "use --hybrid-layer-pattern"),
    _feature("FP8 attention", "fp8_dot_product_attention", _KERNELS),
    _feature("FP8 attention", "fp8_multi_head_attention", _KERNELS),
    _feature("Kitchen attention", "use_kitchen_attention", "it is a different core attention"),
    # All kernels here are what frameworks mean by flash.
    _feature("choice of Megatron's attention kernel", "attention_backend",
             "it would be ignored or replace the plugin",
             "leave --attention-backend out, and choose a kernel with --cp-kernel",
             _other_than("attention_backend", "auto", "flash", "fused")),
    _feature("choice of Transformer Engine's attention kernel", "flash_attention_version",
             "it would be ignored"),
    _feature("position embeddings of this type", "position_embedding_type", _ZIGZAG,
             "use rope, mrope, yarn, learned_absolute or none",
             _other_than("position_embedding_type", "rope", "mrope", "yarn", "learned_absolute",
                         "none")),
    # Other kinds of context parallelism.
    # Programs that call models by themselves may: see `documents.group_of`.
    *(replace(_feature(f"{kind} context parallelism", f"{kind}_context_parallel", reason),
              stages=("arguments",)) for kind, reason in _OTHER_GROUPS.items()),
    # What depends on which tokens are together on a rank.
    _feature("dropping tokens of full experts", "moe_expert_capacity_factor", _BY_RANK),
    _feature("Sinkhorn routing", "moe_router_load_balancing_type", _BY_RANK, "use aux_loss",
             lambda s: "sinkhorn" in (s.moe_router_load_balancing_type or ())),
    _feature("attention sinks split by tensor parallelism in Megatron-FSDP", "use_megatron_fsdp",
             _FSDP_NAMES, "use --use-torch-fsdp2",
             lambda s: s.use_megatron_fsdp and s.softmax_type == "learnable" and s.tensor > 1),
    _feature("Megatron-FSDP in a pipeline", "use_megatron_fsdp",
             "it treats all ranks of the job as one pipeline stage",
             "use --use-distributed-optimizer, or leave --pipeline-model-parallel-size out",
             lambda s: s.use_megatron_fsdp and s.stages > 1),
    # Checkpoints that Megatron begins and does not end, or never reads again.
    _feature("optimizer states in checkpoints of FSDP", "save", _FSDP_CHECKPOINTS,
             "add --no-save-optim --ckpt-format torch_dist, or leave --save out",
             lambda s: s.use_torch_fsdp2 and s.save
             and not (s.ckpt_format == "torch_dist" and s.no_save_optim)),
    _feature("loading optimizer states with FSDP", "load", _FSDP_CHECKPOINTS,
             "add --no-load-optim --ckpt-format torch_dist, or leave --load out",
             lambda s: s.use_torch_fsdp2 and s.load
             and not (s.ckpt_format == "torch_dist" and (s.no_load_optim or s.finetune))),
    # Modes of the whole program.
    _feature("a mixture of experts in CUDA graphs of whole layers or iterations", "cuda_graph_impl",
             "the number of tokens per expert varies, which a graph cannot capture",
             f"{_CAPTURE}attn moe_router",
             lambda s: s.graphs != "none" and s.has_experts and not s.captured_modules
             and s.packing is None),
    _feature("packed documents in CUDA graphs", "cuda_graph_impl", _ONE_BATCH,
             _CAPTURES_MLP,
             lambda s: s.captures_attention and s.packing and not s.has_experts),
    _feature("packed documents in CUDA graphs with a mixture of experts", "cuda_graph_impl",
             _ONE_BATCH, f"{_CAPTURE}moe_router, or leave --cuda-graph-impl out",
             lambda s: s.captures_attention and s.packing and s.has_experts),
    _feature("documents of several samples in CUDA graphs", "micro_batch_size",
             "Megatron packs them into one sequence, but captures several",
             "use --micro-batch-size 1",
             lambda s: s.graphs != "none" and s.packing and s.samples > 1),
    _feature("recurrent layers in CUDA graphs", "cuda_graph_impl", UNTESTED,
             when=lambda s: s.graphs != "none" and s.is_recurrent),
    _feature("Megatron-FSDP in CUDA graphs", "use_megatron_fsdp", UNTESTED,
             when=lambda s: s.use_megatron_fsdp and s.graphs != "none"),
    _feature("FSDP in CUDA graphs", "use_torch_fsdp2", UNTESTED,
             when=lambda s: s.use_torch_fsdp2 and s.graphs != "none"),
    _feature("full recompute in CUDA graphs of layers", "recompute_granularity",
             "Megatron captures it only with the whole iteration",
             "use --cuda-graph-impl full_iteration",
             lambda s: s.recompute_granularity == "full"
             and s.graphs in ("local", "transformer_engine")),
    _feature("recomputed attention in local CUDA graphs", "cuda_graph_impl",
             "Megatron's checkpointing refuses the backward pass as it is captured",
             "use --cuda-graph-impl transformer_engine or full_iteration",
             lambda s: s.graphs == "local" and s.captures_attention and s.recomputes),
    _feature("a whole iteration in a CUDA graph from the first one on", "cuda_graph_warmup_steps",
             "in the first iteration ranks compare batches, allocate buffers and build kernels",
             "use --cuda-graph-warmup-steps 3",
             lambda s: s.graphs == "full_iteration" and s.cuda_graph_warmup_steps == 0),
    _feature("overlap of expert-parallel communication", "overlap_moe_expert_parallel_comm",
             "its schedule runs layers without the model's forward pass, where inputs are checked"),
    # A model's configuration always says how many.
    _feature("weights split further than by tensor parallelism",
             "tensor_parallel_num_weight_shards", _NEW_ENGINE,
             when=lambda s: (s.tensor_parallel_num_weight_shards or 1) > s.tensor),
    _feature("weights of experts split further than by tensor parallelism",
             "expert_tensor_parallel_num_weight_shards", _NEW_ENGINE,
             when=lambda s: (s.expert_tensor_parallel_num_weight_shards or 1)
             > (s.expert_tensor_parallel_size or s.tensor)),
    _feature("recomputing the MLP of layers with biases", "recompute_modules",
             "Megatron's backward pass never ends: it recomputes for the bias again and again",
             "add --disable-bias-linear, or leave mlp out",
             lambda s: "mlp" in (s.recompute_modules or ()) and s.add_bias_linear is not False
             and s.recompute_granularity != "full"),
    _feature("a fake process group", "fake_process_group", "ranks send nothing to each other"),
    _feature("batch-invariant mode", "batch_invariant_mode", _KERNELS),
    _feature("quantization with ModelOpt", "restore_modelopt_state", UNTESTED),
    _feature("quantization with ModelOpt", "modelopt_enabled", UNTESTED),
    _feature("Megatron's own YAML configuration", "yaml_cfg",
             "it replaces all command-line flags", "use scripts/pretrain_gpt.py --config"),
)
