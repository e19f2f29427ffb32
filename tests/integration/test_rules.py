"""The table of what is refused: each row refuses what it says, and what is nearly so is served."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.ssm import gated_delta_net as megatron
from megatron.core.transformer.enums import AttnBackend
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin import registry
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration import rules
from megatron_cp_plugin.integration.features import FEATURES, Rule
from megatron_cp_plugin.integration.rules import RULES, check, replaced
from megatron_cp_plugin.integration.settings import Settings

# A value for each setting that asks for the refused feature.
ASKING: dict[str, Any] = {
    "moe_router_load_balancing_type": "sinkhorn",
    "attention_dropout": 0.1,
    "experimental_attention_variant": "dsv4_hybrid",
    "hybrid_layer_pattern": "D*",
    "attention_backend": AttnBackend.local,
    "flash_attention_version": 3,
    "position_embedding_type": "relative",
    "cuda_graph_impl": "local",
    "yaml_cfg": "file.yaml",
    "recompute_modules": ["core_attn", "mlp"],
    "micro_batch_size": 2,
    "recompute_granularity": "full",
    "cuda_graph_warmup_steps": 0,
    "mtp_num_layers": 1,
    "tensor_parallel_num_weight_shards": 2,
    "expert_tensor_parallel_num_weight_shards": 2,
    "save": "checkpoints",
    "load": "checkpoints",
}
# What is refused only beside another setting, or by another value than `ASKING` has, by the
# feature's name.
DOCUMENTS = {"dataloader_inter_document_masking": True}
EXPERTS = {"num_experts": 4}
GATED = {"experimental_attention_variant": "gated_delta_net"}
SPARSE = {"experimental_attention_variant": "dsa"}
LATENT = {"multi_latent_attention": True, "apply_rope_fusion": False}
BESIDE: dict[str, dict[str, Any]] = {
    "attention sinks split by tensor parallelism in Megatron-FSDP": {
        "softmax_type": "learnable",
        "tensor_model_parallel_size": 2,
        "world_size": 8,
    },
    "Megatron-FSDP in a pipeline": {"pipeline_model_parallel_size": 2, "world_size": 8},
    "documents of several samples in a pipeline": {
        **DOCUMENTS,
        "pipeline_model_parallel_size": 2,
        "world_size": 8,
    },
    "a mixture of experts in CUDA graphs of whole layers or iterations": EXPERTS,
    "packed documents in CUDA graphs": DOCUMENTS,
    "packed documents in CUDA graphs with a mixture of experts": DOCUMENTS | EXPERTS,
    "documents of several samples in CUDA graphs": {
        **DOCUMENTS,
        "cuda_graph_impl": "transformer_engine",
        "cuda_graph_modules": ["mlp"],
    },
    "recurrent layers in CUDA graphs": GATED,
    "multi-token prediction with gated delta net layers": GATED,
    "QK clipping of attention in CUDA graphs": {"cuda_graph_impl": "local"},
    "logging the largest attention logit in CUDA graphs": {"cuda_graph_impl": "local"},
    "optimizer states in checkpoints of FSDP": {"use_torch_fsdp2": True},
    "loading optimizer states with FSDP": {"use_torch_fsdp2": True},
    "Megatron-FSDP in CUDA graphs": {"cuda_graph_impl": "local"},
    "FSDP in CUDA graphs": {"cuda_graph_impl": "transformer_engine"},
    "full recompute in CUDA graphs of layers": {"cuda_graph_impl": "local"},
    "recomputed attention in local CUDA graphs": {"recompute_granularity": "selective"},
    "a whole iteration in a CUDA graph from the first one on": {
        "cuda_graph_impl": "full_iteration"
    },
    "packed documents with DSA layers": SPARSE | {"context_parallel_size": 4},
    "packed conversations with DSA layers": SPARSE | {"context_parallel_size": 4},
    "packed documents with gated delta net layers": GATED,
    "packed conversations with gated delta net layers": GATED,
    "position embeddings of the model besides those of multi-latent attention": {
        **LATENT,
        "position_embedding_type": "yarn",
    },
}

ZIGZAG = ContextParallelConfig("zigzag", 4)
RING = replace(ZIGZAG, algo="ring")
ALONE = replace(ZIGZAG, size=1)
CYCLIC = replace(ZIGZAG, algo="attention2d", options=(("variant", "no"),))
LASP = replace(ZIGZAG, algo="lasp", linear_model="transnormer")
MIXED = replace(RING, layers=("lasp", "ring"), linear_model="transnormer")
CHUNKED = replace(ZIGZAG, chunked_loss=512)
LATENTS = replace(ZIGZAG, send_latents=True)
MAMBA = {"experimental_attention_variant": None, "hybrid_layer_pattern": "M*-"}
FOLLOWING = replace(ZIGZAG, options=(("layout", "documents"),))


@dataclass(frozen=True)
class Case:
    """Settings that one rule refuses, and near ones that it does not.

    Attributes: asks: without any of them nothing is refused. beside: other settings that the rule
        reads. near: changes to them, and configurations, each of which is served. also: changes of
        which each is refused too.
    """

    asks: dict[str, Any]
    beside: dict[str, Any] | None = None
    config: ContextParallelConfig = ZIGZAG
    near: tuple[dict[str, Any] | ContextParallelConfig, ...] = ()
    device: str = "cuda"
    also: tuple[dict[str, Any], ...] = ()

    def settings(
        self, change: dict[str, Any] | ContextParallelConfig | None = None, device: str = ""
    ) -> Settings:
        source = (self.beside or {}) | self.asks | (change if isinstance(change, dict) else {})
        config = change if isinstance(change, ContextParallelConfig) else self.config
        return Settings(SimpleNamespace(**source), config, torch.device(device or self.device))


# Of features, by name: what else is refused, and what is near.
OF_LAYERS = {"cuda_graph_impl": "transformer_engine"}
ALSO: dict[str, tuple[dict[str, Any], ...]] = {
    "recurrent layers in CUDA graphs": (MAMBA,),
    "a mixture of experts in CUDA graphs of whole layers or iterations": (
        {"cuda_graph_modules": ["attn", "moe_router"]},
        {"cuda_graph_impl": "full_iteration"},
        OF_LAYERS,
        OF_LAYERS | {"cuda_graph_modules": ["full"]},
    ),
    "packed documents in CUDA graphs": (
        {"cuda_graph_modules": ["mlp"]},
        {"cuda_graph_impl": "full_iteration"},
        OF_LAYERS | {"cuda_graph_modules": ["attn", "mlp"]},
        OF_LAYERS | {"cuda_graph_modules": ["full"]},
    ),
    "recomputed attention in local CUDA graphs": (
        {"cuda_graph_modules": ["attn"], "recompute_modules": None},
        {"cuda_graph_modules": ["mlp"], "recompute_modules": ["core_attn"]},
    ),
}
BY_DOCUMENTS = replace(ZIGZAG, options=(("layout", "thd"),))
NEAR: dict[str, tuple[dict[str, Any] | ContextParallelConfig, ...]] = {
    "documents of several samples in a pipeline": (
        {"micro_batch_size": 1},
        {"pipeline_model_parallel_size": 1},
    ),
    "position embeddings of the model besides those of multi-latent attention": (
        {"position_embedding_type": "rope"},
    ),
    "experimental attention variants other than gated delta net and DSA": (
        {"experimental_attention_variant": "gdn"},
        {"experimental_attention_variant": "dsa"},
    ),
    "packed documents with DSA layers": ({"context_parallel_size": 1}, BY_DOCUMENTS),
    "packed conversations with DSA layers": ({"context_parallel_size": 1}, BY_DOCUMENTS),
    "layers other than attention, Mamba, MLP and MoE in a hybrid model": (
        {"hybrid_layer_pattern": "*-+EM|*/M"},
    ),
    "choice of Megatron's attention kernel": (
        {"attention_backend": "flash"},
        {"attention_backend": "fused"},
    ),
    "position embeddings of this type": (
        {"position_embedding_type": "yarn"},
        {"position_embedding_type": "mrope"},
    ),
    "Sinkhorn routing": ({"moe_router_load_balancing_type": "aux_loss"},),
    "attention sinks split by tensor parallelism in Megatron-FSDP": (
        {"softmax_type": "off-by-one"},
        {"tensor_model_parallel_size": 1},
    ),
    "Megatron-FSDP in a pipeline": ({"pipeline_model_parallel_size": 1},),
    "optimizer states in checkpoints of FSDP": (
        {"ckpt_format": "torch_dist", "no_save_optim": True},
    ),
    "loading optimizer states with FSDP": (
        {"ckpt_format": "torch_dist", "no_load_optim": True},
        {"ckpt_format": "torch_dist", "finetune": True},
    ),
    "a mixture of experts in CUDA graphs of whole layers or iterations": (
        {"num_experts": 1},
        OF_LAYERS | {"cuda_graph_modules": ["attn", "moe_router"]},
        {"cuda_graph_modules": ["moe_router"]},
        {"sft": True},  # which another rule refuses
    ),
    "packed documents in CUDA graphs": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]},
        {"num_experts": 8},  # which the next rule refuses
    ),
    "packed documents in CUDA graphs with a mixture of experts": (
        {"cuda_graph_modules": ["moe_router"]},
    ),
    "documents of several samples in CUDA graphs": ({"cuda_graph_impl": "none"},),
    **dict.fromkeys(
        (
            "QK clipping of attention in CUDA graphs",
            "logging the largest attention logit in CUDA graphs",
        ),
        (
            {"cuda_graph_impl": "none"},
            {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["mlp"]},
        ),
    ),
    "full recompute in CUDA graphs of layers": (
        {"cuda_graph_impl": "full_iteration"},
        {"recompute_granularity": "selective"},
    ),
    "recomputed attention in local CUDA graphs": (
        {"cuda_graph_impl": "transformer_engine"},
        {"cuda_graph_impl": "full_iteration"},
        {"recompute_modules": ["mlp"]},
        {"recompute_modules": ["layernorm"]},
        {"cuda_graph_modules": ["moe_router"]},
    ),
    "a whole iteration in a CUDA graph from the first one on": (
        {"cuda_graph_impl": "local"},
        {"cuda_graph_warmup_steps": 1},
    ),
    "weights split further than by tensor parallelism": ({"tensor_model_parallel_size": 2},),
    "weights of experts split further than by tensor parallelism": (
        {"tensor_model_parallel_size": 2},
        {"expert_tensor_parallel_size": 2},
    ),
    "recomputing the MLP of layers with biases": (
        {"add_bias_linear": False},
        {"recompute_granularity": "full"},
        {"recompute_modules": ["core_attn"]},
    ),
}
# Settings of `BESIDE` that no rule reads.
IDLE = {"world_size", "apply_rope_fusion", "cuda_graph_modules"}


def of_feature(rule: Rule) -> Case:
    asks = {rule.setting: ASKING.get(rule.setting, True)} | BESIDE.get(rule.name, {})
    beside = {name: value for name, value in asks.items() if name in IDLE}
    asks = {name: value for name, value in asks.items() if name not in beside}
    return Case(asks, beside, near=NEAR.get(rule.name, ()), also=ALSO.get(rule.name, ()))


GRAPHS = {"cuda_graph_impl": "local"}
GATED_HEADS = {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
FSDP = {"use_megatron_fsdp": True}
RANKS = {
    "world_size": 4,
    "context_parallel_size": 1,
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "num_attention_heads": 8,
}
VALIDATED = {
    "virtual_pipeline_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "micro_batch_size": 2,
    "data_parallel_size": 2,
    "global_batch_size": 12,
}
# Of the other rules, by words that only one has.
CASES: dict[str, Case] = {
    **{
        f"{name} must be at least 1": Case({}, RANKS | {name: 0}, near=({name: 1},))
        for name in (
            "context_parallel_size",
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
        )
    },
    "must divide the number of processes": Case(
        {},
        RANKS | {"context_parallel_size": 4, "tensor_model_parallel_size": 2},
        near=({"context_parallel_size": 2}, {"tensor_model_parallel_size": 1}, {"world_size": 8}),
    ),
    "--use-tp-pp-dp-mapping in a pipeline": Case(
        {"use_tp_pp_dp_mapping": True, "pipeline_model_parallel_size": 2},
        {"context_parallel_size": 2},
        near=({"expert_model_parallel_size": 2}, {"context_parallel_size": 1}),
    ),
    "num_attention_heads must be divisible by tensor": Case(
        {"tensor_model_parallel_size": 3},
        RANKS | {"world_size": 3},
        near=({"num_attention_heads": 6},),
    ),
    "must be divisible by num_query_groups": Case(
        {"num_query_groups": 3},
        RANKS | {"group_query_attention": True},
        near=({"num_query_groups": 4}, {"group_query_attention": False}),
    ),
    "num_query_groups (GQA) must be": Case(
        {"num_query_groups": 6, "tensor_model_parallel_size": 4},
        RANKS | {"num_attention_heads": 12},
        near=(
            *({"num_query_groups": groups} for groups in (1, 2, 4, 12)),
            {"group_query_attention": False},
        ),
    ),
    "needs num_query_groups divisible by tensor": Case(
        {"num_query_groups": 2, "tensor_model_parallel_size": 4},
        RANKS,
        LASP,
        near=({"num_query_groups": 4}, {"group_query_attention": False}, ZIGZAG),
    ),
    **{
        f"does not support --{name}": Case(
            {name.replace("-", "_"): True}, config=MIXED, near=(ZIGZAG,)
        )
        for name in ("qk-layernorm", "qk-l2-norm", "attention-output-gate")
    },
    "has no softmax": Case(
        {"softmax_type": "learnable"},
        config=LASP,
        near=({"softmax_type": "vanilla"}, MIXED, ZIGZAG),
    ),
    "has no rotary embeddings": Case(
        {"position_embedding_type": "rope"},
        config=LASP,
        near=({"position_embedding_type": "none"}, MIXED, ZIGZAG),
    ),
    "needs layers of multi-latent attention": Case(
        {},
        {"multi_latent_attention": False},
        LATENTS,
        near=({"multi_latent_attention": True}, {"multi_latent_attention": None}, ZIGZAG),
    ),
    **{
        f"does not work with {words}": Case(asks, config=LATENTS, near=(*near, ZIGZAG))
        for words, asks, near in (
            ("--qk-clip", {"qk_clip": True}, ()),
            ("--log-max", {"log_max_attention_logit": True}, ()),
            (
                "--recompute-modules core_attn",
                {"recompute_granularity": "selective"},
                ({"recompute_granularity": "full"}, {"recompute_modules": ["mlp"]}),
            ),
            ("--recompute-modules mla", {"recompute_modules": ["mla_up_proj"]}, ()),
            ("attention in CUDA graphs", {"cuda_graph_impl": "local"}, ()),
            ("--use-torch-fsdp2 (its", {"use_torch_fsdp2": True}, ()),
            ("--use-megatron-fsdp (its", {"use_megatron_fsdp": True}, ()),
        )
    },
    "does not work with algorithms that exchange heads": Case(
        {}, config=replace(LATENTS, algo="usp"), near=(LATENTS, RING)
    ),
    "does not work with auto": Case({}, config=replace(LATENTS, algo="auto"), near=(LATENTS,)),
    "cannot be combined with multi-latent attention": Case(
        {"multi_latent_attention": True}, config=MIXED, near=(ZIGZAG,)
    ),
    "which has no sliding window": Case(
        {"window_size": (127, 0)}, config=LASP, near=({"window_size": (-1, 0)}, MIXED, ZIGZAG)
    ),
    "does not support sliding windows": Case(
        {"window_size": (127, 0)},
        config=replace(ZIGZAG, algo="usp"),
        near=({"window_size": (-1, 0)}, ZIGZAG, LASP, replace(ZIGZAG, algo="auto")),
    ),
    "with tensor parallelism does not work with --use-megatron-fsdp": Case(
        FSDP | {"tensor_model_parallel_size": 2},
        config=LASP,
        near=({"tensor_model_parallel_size": 1}, ZIGZAG),
    ),
    "all attention layers of a hybrid model": Case(
        {"hybrid_layer_pattern": "*-"}, config=MIXED, near=(LASP, ZIGZAG)
    ),
    **{
        f"--cp-chunked-loss does not work with --{name}": Case(
            {name.replace("-", "_"): True}, config=CHUNKED, near=(ZIGZAG,)
        )
        for name in (
            "cross-entropy-loss-fusion",
            "defer-embedding-wgrad-compute",
            "use-mup",
            "logits-save-dir",
            "logits-load-dir",
            "perform-rl-step",
        )
    },
    "softmax attention beside them": Case(GATED, config=MIXED, near=(ZIGZAG,), also=(MAMBA,)),
    "need a layout of consecutive tokens": Case(
        GATED, config=CYCLIC, near=(ZIGZAG, RING, replace(CYCLIC, size=1))
    ),
    "linear_num_key_heads divisible by tensor": Case(
        GATED,
        GATED_HEADS | {"linear_num_key_heads": 2, "tensor_model_parallel_size": 4},
        near=({"linear_num_key_heads": 4}, {"tensor_model_parallel_size": 2}),
    ),
    "linear_num_value_heads divisible by tensor": Case(
        GATED,
        GATED_HEADS | {"linear_num_value_heads": 6, "tensor_model_parallel_size": 4},
        near=({"linear_num_value_heads": 8}, {"tensor_model_parallel_size": 2}),
    ),
    "linear_num_value_heads divisible by linear": Case(
        GATED, GATED_HEADS | {"linear_num_value_heads": 6}, near=({"linear_num_key_heads": 3},)
    ),
    "needs --linear-attention-freq": Case(GATED, near=({"linear_attention_freq": 4},)),
    "--linear-attention-freq as a list": Case(
        GATED | {"linear_attention_freq": [1, 0]},
        {"num_layers": 4},
        near=({"linear_attention_freq": 2}, {"num_layers": 2}),
    ),
    "from Transformer Engine's modules": Case(
        GATED | {"transformer_impl": "local"}, near=({"spec": ("mine", "spec")},)
    ),
    "needs its projection to latents whole": Case(
        {
            "multi_latent_attention": True,
            "transformer_impl": "local",
            "tensor_model_parallel_size": 2,
        },
        near=(
            {"transformer_impl": "transformer_engine"},
            {"tensor_model_parallel_size": 1},
            {"spec": ("mine", "spec")},
        ),
    ),
    "of the keys' rotated part over": Case(
        {"multi_latent_attention": True, "tensor_model_parallel_size": 2},
        near=(
            {"multi_latent_attention": False},
            {"tensor_model_parallel_size": 1},
            {"sequence_parallel": True},
        ),
    ),
    "output norms": Case(
        GATED | {"tensor_model_parallel_size": 2},
        near=({"sequence_parallel": True}, {"tensor_model_parallel_size": 1}),
    ),
    "build no multi-token prediction beside gated": Case(
        GATED | {"mtp_num_layers": 1}, near=({"mtp_num_layers": None},)
    ),
    "cannot split gated delta net layers": Case(GATED, near=(ALONE,)),
    "has other Mamba layers": Case(
        {"hybrid_layer_pattern": "M*"}, near=(ALONE, {"hybrid_layer_pattern": "*-"})
    ),
    "flash-linear-attention": Case(GATED),
    "splits packed documents by its own layout": Case({"sft": True}),
    **{
        f"--{name} stores log-probabilities{kind}": Case(
            {name.replace("-", "_"): "folder"} | asks,
            config=config,
            near=(*near, replace(config, size=1)),
        )
        for name in ("logits-save-dir", "logits-load-dir")
        for kind, asks, config, near in (
            (" packed", {"sft": True}, ZIGZAG, ()),
            ("", {}, RING, (ZIGZAG,)),
        )
    },
    "--sequence-parallel needs the": Case(
        {"sequence_parallel": True, "tensor_model_parallel_size": 2},
        {"seq_length": 68},
        near=({"seq_length": 64}, {"seq_length": None}, {"tensor_model_parallel_size": 1}),
    ),
    "needs the package einops": Case(FSDP),
    "cannot capture these layers": Case(GRAPHS),
    "weights the losses of --mtp-num-layers": Case(
        {"mtp_num_layers": 1, "calculate_per_token_loss": True, "context_parallel_size": 2},
        near=({"context_parallel_size": 1},),
    ),
    "needs GPUs": Case(GRAPHS, device="cpu"),
    "needs equally many tokens": Case(
        {"cuda_graph_impl": "transformer_engine", "seq_length": 62},
        config=RING,
        near=({"seq_length": 64}, GRAPHS, replace(RING, size=2)),
    ),
    "needs the same layout for all batches": Case(GRAPHS, config=FOLLOWING, near=(ZIGZAG,)),
    "follows the documents or": Case({}, config=FOLLOWING, near=(ZIGZAG, BY_DOCUMENTS)),
    "which is not installed": Case(
        {"hybrid_layer_pattern": "*-"}, near=({"spec": ("mine", "spec")},)
    ),
    "needs micro-batches": Case(
        {"virtual_pipeline_model_parallel_size": 2},
        VALIDATED,
        near=(
            {"rampup_batch_size": [2, 2, 8]},
            {"global_batch_size": 16},
            {"global_batch_size": 8},  # one group
            {"global_batch_size": 24, "microbatch_group_size_per_vp_stage": 4},  # 4, and 2 more
        ),
    ),
    "training needs": Case(
        {},
        {"train_iters": 0},
        near=({"train_iters": 1}, {"train_samples": 1}, {"skip_train": True}),
    ),
    "none of Transformer Engine's": Case(
        {"cp_comm_type": "magi"},
        near=(
            {"cp_comm_type": "p2p"},
            {"cp_comm_type": ["p2p", "a2a", "all_gather", "a2a+p2p"]},
            {"cp_comm_type": "megatron_cp_plugin.zigzag"},
        ),
    ),
}
CASES |= {
    "needs that many processes": Case(
        {"expert_model_parallel_size": 8},
        {"world_size": 4, "expert_tensor_parallel_size": 1},
        near=({"world_size": 8}, {"expert_model_parallel_size": 4}),
    ),
    "splits DSA layers by its own": Case(SPARSE, config=RING, near=(ZIGZAG, BY_DOCUMENTS, ALONE)),
    "cannot split DSA layers": Case(SPARSE, near=(ALONE,)),
}
# Those that read files are tried below, with files.
OF_FILES = ("--data-path ", "")


def key_of(rule: Rule) -> str:
    packed = " packed" if "without packed" in rule.text else ""
    if "stores log-probabilities" in rule.text:
        return f"{rule.text.split()[0]} stores log-probabilities{packed}"
    found = [key for key in CASES if key in rule.text]
    assert len(found) == 1, (rule.text, found)
    return found[0]


def cases() -> Iterator[Any]:
    keys = set()
    for rule in RULES:
        if rule.name:
            yield pytest.param(rule, of_feature(rule), id=f"{rule.name}-{rule.setting}")
        elif not rule.text or rule.text.startswith(OF_FILES[:1]):
            continue
        else:
            keys.add(key_of(rule))
            yield pytest.param(rule, CASES[key_of(rule)], id=key_of(rule))
    assert keys == CASES.keys()


@pytest.fixture
def lacking(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is installed lacks whatever rules ask it for."""
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    monkeypatch.setattr(rules, "running_version", lambda: ((0, 16), "0.16.1"))
    monkeypatch.setattr(megatron, "HAVE_FLA", False)
    monkeypatch.setattr(registry.algorithm_class("usp"), "windows", False)


@pytest.mark.usefixtures("lacking")
@pytest.mark.parametrize(("rule", "case"), list(cases()))
def test_a_rule_refuses_what_it_says_and_serves_what_is_near(rule: Rule, case: Case) -> None:
    said = rule.refusal(case.settings())
    assert said is not None
    assert "\n" not in said
    assert "{" not in said
    assert ": " in said
    if rule.name:
        value = getattr(case.settings(), rule.setting)
        got = f"got {rule.flag} {getattr(value, 'name', value)}"
        assert f"zigzag does not support {rule.name}, {got}" in said
        assert said.endswith(rule.instead)
    for name in case.asks:
        assert rule.refusal(case.settings({name: None})) is None, name
    for change in case.also:
        assert rule.refusal(case.settings(change)) is not None, change
    for change in case.near:
        assert rule.refusal(case.settings(change)) is None, change
    if case.device == "cpu":
        assert rule.refusal(case.settings(device="cuda")) is None


def test_what_is_installed_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rules that ask what is installed serve those who have it."""
    monkeypatch.setattr(rules, "find_spec", lambda name: name)
    monkeypatch.setattr(rules, "running_version", lambda: ((0, 19), "0.19.2"))
    monkeypatch.setattr(megatron, "HAVE_FLA", True)
    keys = (
        "cannot split DSA",
        "cannot capture",
        "einops",
        "not installed",
        "flash-linear",
        "splits packed",
        "cannot split gated",
        "other Mamba layers",
        "weights the losses",
    )
    for key in keys:
        (case,) = (CASES[name] for name in CASES if key in name)
        (rule,) = (rule for rule in RULES if not rule.name and key in rule.text)
        assert rule.refusal(case.settings()) is None, key


REPLACED_BY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "cp_comm_type a2a is replaced: attention is computed by zigzag": (
        {"cp_comm_type": "a2a"},
        {"cp_comm_type": "p2p"},
    ),
    "attention_backend fused is replaced": (
        {"attention_backend": "fused"},
        {"attention_backend": "flash"},
    ),
    "DSA layers keep Megatron's own all-gather": (
        SPARSE | {"cp_comm_type": "allgather"},
        {"experimental_attention_variant": "gdn"},
    ),
    "apply_rope_fusion is switched off": (
        {"multi_latent_attention": True, "apply_rope_fusion": True, "context_parallel_size": 4},
        {"multi_latent_attention": True, "apply_rope_fusion": True, "context_parallel_size": 1},
    ),
}


@pytest.mark.parametrize("said", REPLACED_BY)
def test_what_is_replaced_is_said_and_served(said: str) -> None:
    asked, near = REPLACED_BY[said]
    check("model", settings := Case(asked).settings())
    (line,) = replaced("model", settings)
    assert line.startswith(said)
    assert "\n" not in line
    assert not replaced("model", Case(near).settings())


def test_a_feature_is_refused_at_both_doors() -> None:
    """On the command line, and in models that a program builds by itself."""
    # Programs that call models by themselves may choose the ranks of each micro-batch.
    launched = {"hybrid_context_parallel", "dynamic_context_parallel"}
    for rule in FEATURES:
        stages = {"arguments"} if rule.setting in launched else {"arguments", "model"}
        assert set(rule.stages) == stages, rule.setting
    asked = Settings(SimpleNamespace(attention_dropout=0.1), ZIGZAG, torch.device("cpu"))
    for stage in ("arguments", "model"):
        with pytest.raises(ConfigError, match=r"add --attention-dropout 0$"):
            check(stage, asked)
    check("start", asked)


def test_auto_is_asked_for_what_no_algorithm_serves() -> None:
    """Before it has chosen: with multi-latent attention it is no algorithm of linear attention."""
    auto = replace(ZIGZAG, algo="auto")
    latent = SimpleNamespace(multi_latent_attention=True, window_size=(127, 0))
    check("model", Settings(latent, auto))
    with pytest.raises(ConfigError, match="auto does not support attention dropout"):
        check("model", Settings(SimpleNamespace(attention_dropout=0.1), auto))


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data-path data/x",
         "--data-path got data/x, and there is no data/x.bin and no data/x.idx: write the run "
         "files' data with megatron-cp prepare-data --output data/x, or add --mock-data"),
        ("--data-path 0.5 there 0.5 half", "and there is no half.idx: "),
        ("--data-path half --dataloader-inter-document-masking",
         "prepare-data --output half --document-bytes 200"),
        ("--data-path short", "needs whole files, got short.bin, which is cut off (6 of 12 by"),
        ("--data-path empty", "got empty.bin, which is cut off (0 of 12 bytes): copy or write"),
        ("--data-path cut", "got cut.idx, which is cut off ("),
        ("--save there.bin/x", "--save got there.bin/x, where nothing can be written"),
        ("--tensorboard-dir there.bin --mock-data", "--tensorboard-dir got there.bin"),
        ("--data-path there", None),
        ("--data-path 1 there 2.5 there --save new", None),
        ("--data-path absent --mock-data", None),
        ("--data-path absent.jsonl --sft", None),
        ("--data-path msc://bucket/x --save s3://bucket/y", None),
        ("", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stage", ["start", "files"])
def test_data_and_folders(
    stage: rules.Stage,
    flags: str,
    said: str | None,
    parser: argparse.ArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    # The last is what a bucket's path would begin with, if it was a folder's.
    for name in ("half.bin", "s3:"):
        Path(name).touch()
    for name in ("there", "short", "empty", "cut"):
        builder = IndexedDatasetBuilder(f"{name}.bin", dtype=np.int32)
        builder.add_document(np.arange(3), [3])
        builder.finalize(f"{name}.idx")
    for name in ("short.bin", "empty.bin", "cut.idx"):
        size = 0 if name == "empty.bin" else Path(name).stat().st_size // 2
        Path(name).write_bytes(Path(name).read_bytes()[:size])
    settings = Settings(parser.parse_args(flags.split()), ZIGZAG)
    if said is None:
        check(stage, settings)
        return
    with pytest.raises(ConfigError) as error:
        check(stage, settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
