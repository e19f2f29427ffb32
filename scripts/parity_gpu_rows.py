"""What `parity_gpus.py` trains: models, and a table of rows of runs that are compared.

A row is a model with some features, and the algorithms that it is trained with; `graphs` makes rows
of the same runs in CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from convergence_runs import Run
from parity_combinations import (
    BF16_BOUND,
    DOCUMENTS,
    EP2,
    FAMILIES,
    INTERLEAVED,
    MEGATRON_FSDP,
    MOE,
    MTP,
    PP2,
    RECOMPUTE,
    SOFTMAX,
    SP,
    TORCH_FSDP,
    Combination,
    thd,
)
from parity_pages import CapturedRow

from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.harness.parity import Tolerances

EXACT = Tolerances(0.0, 0.0, 0.0, 0.0)

# Heads of the size that kernels are made for; otherwise small, for most time is spent on starting.
MODEL: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 4096,
    "max_position_embeddings": 4096,
    "vocab_size": prepare_data.VOCAB_SIZE,
    "global_batch_size": 2,
    # Queries and keys of about unit size, as with the weights of the small models.
    "init_method_std": 0.05,
    "lr": 1e-5,
    "min_lr": 1e-6,
    "num_workers": 0,
    "transformer_impl": "transformer_engine",
    # Needs apex.
    "gradient_accumulation_fusion": False,
}
BF16: dict[str, object] = {"bf16": True}
RECOMPUTE_CORE: dict[str, object] = {
    "recompute_granularity": "selective",
    "recompute_modules": "core_attn",
}
FP8: dict[str, object] = BF16 | {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"}
NO_ROPE_FUSION: dict[str, object] = {"apply_rope_fusion": False}
MLA: dict[str, object] = NO_ROPE_FUSION | {
    "multi_latent_attention": True,
    "group_query_attention": False,
    "q_lora_rank": 256,
    "kv_lora_rank": 128,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
    "rope_type": "rope",
}
SINKS: dict[str, object] = {"softmax_type": "learnable"}
GATED_DELTA_NET: dict[str, object] = {
    # Before it makes weights Megatron draws numbers for each token of a rank; with more tokens the
    # generator that the convolution's weights come from would stand elsewhere at CP 2 than at 1.
    "seq_length": 512,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 2,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "attention_output_gate": True,
    "qk_layernorm": True,
    "rotary_percent": 0.5,
}
# The mask of packed documents that the reference needs is taken by Megatron's own modules alone.
LOCAL: dict[str, object] = NO_ROPE_FUSION | {
    "transformer_impl": "local",
    "masked_softmax_fusion": False,
    "no_persist_layer_norm": True,
}
UNTIED: dict[str, object] = {"untie_embeddings_and_output_weights": True}
TRANSNORMER = "lasp2,lasp,linear_ulysses"
LINEAR: dict[str, object] = {"group_query_attention": False, "position_embedding_type": "none"}
WINDOWS: dict[str, object] = {"window_size": "1023,0", "window_attn_skip_freq": 2}
# Between the iterations whose gradients are recorded.
EVALUATION: dict[str, object] = {"split": "90,10,0", "eval_interval": 3, "eval_iters": 2}
GRAPHED = "zigzag,ulysses,attention2d,allgather,distflash"
# What captured runs and those that they are to be equal to have in common.
BEFORE_GRAPHS: dict[str, object] = {
    # Megatron sets it for captured runs. Other weights would come of other numbers.
    "te_rng_tracker": True,
    # Megatron cannot do it in a captured iteration.
    "check_for_nan_in_loss_and_grad": False,
}
# Of the runs that are compared; not of what they are compared with.
FUSION: dict[str, object] = {"gradient_accumulation_fusion": True}
# Who captures: see docs/graphs.md.
GRAPHS: dict[str, dict[str, object]] = {
    "local": {"cuda_graph_impl": "local"},
    "te": {"cuda_graph_impl": "transformer_engine"},
    "full": {"cuda_graph_impl": "full_iteration"},
}
# Transformer Engine's own split; p2p is Megatron's default.
P2P = Run(None, 2, 2)


@dataclass(frozen=True)
class GpuCombination(Combination):
    """A row of the table.

    Attributes:
        yardstick: None if runs are held to the tolerances.
        eager: The row with the same runs without CUDA graphs, which those of this row must equal
            to the bit; empty: they are not captured.
        alone: Whether nothing is judged but what is equal to it.
        iterations: None: as many as of most rows.
        unmodified: Whether the runs are started with Megatron-LM's own pretrain_gpt.py.
    """

    yardstick: Run | None = P2P
    eager: str = ""
    alone: bool = False
    iterations: int | None = None
    unmodified: bool = False


def row(
    key: str,
    about: str,
    algos: str,
    *flags: Mapping[str, object],
    plugin: Mapping[str, object] | None = None,
    cp: int = 2,
    **values: Any,
) -> GpuCombination:
    """A row of two context-parallel ranks. Args: plugin: settings of the plugin."""
    section = {"platform": "cuda", **(plugin or {})}
    megatron = dict(MODEL)
    for some in flags:
        megatron |= some
    return GpuCombination(
        key, about, megatron, cp=cp, algos=algos, context_parallel=section, **values
    )


def graphs(
    eager: GpuCombination, **captured: tuple[str, Mapping[str, object]]
) -> tuple[GpuCombination, ...]:
    """A row in deterministic mode, and rows of the same runs in CUDA graphs.

    Args:
        captured: Algorithms and flags, by who captures (`GRAPHS`).
    """
    own: dict[str, object] = {"deterministic_mode": True}
    found = [replace(eager, megatron=eager.megatron | BEFORE_GRAPHS, own=own)]
    for who, (algos, flags) in captured.items():
        found.append(
            replace(
                found[0],
                key=f"{eager.key}-{who}",
                about=f"{eager.about}, {GRAPHS[who]['cuda_graph_impl']}",
                algos=algos,
                own=own | GRAPHS[who] | dict(flags),
                eager=eager.key,
                yardstick=None,
                tolerances=EXACT,
            )
        )
    return tuple(found)


_BOTH = "zigzag,attention2d"
_SOME = "zigzag,distflash,ulysses"
_ALL = f"{SOFTMAX},attention2d:variant=no,attention2d:variant=overlap"

ROWS = (
    row(
        "bf16",
        "bfloat16",
        _ALL,
        BF16,
    ),
    row("fp32", "float32", SOFTMAX, yardstick=None),
    row("fp8", "FP8 layers, one scale a tensor", FAMILIES, FP8),
    row("moe-ep", "bfloat16, EP 2 over CP 2", FAMILIES, BF16, MOE, EP2, reference_dp=2),
    row("moe-ep-fp32", "EP 2 over CP 2", FAMILIES, MOE, EP2, reference_dp=2, yardstick=None),
    row("recompute", "bfloat16, full recompute", FAMILIES, BF16, RECOMPUTE),
    row(
        "linear",
        "bfloat16, TransNormerLLM",
        TRANSNORMER,
        BF16,
        LINEAR,
        plugin={"linear_model": "transnormer"},
        yardstick=None,
        tolerances=BF16_BOUND,
    ),
    row(
        "linear-fp32",
        "float32, TransNormerLLM, kernel chunked",
        TRANSNORMER,
        LINEAR,
        plugin={"linear_model": "transnormer", "kernel": "chunked"},
        yardstick=None,
    ),
    row("mla", "bfloat16, multi-latent attention", "zigzag,ulysses", BF16, MLA),
    row("delta-net", "bfloat16, gated delta net", "zigzag,allgather", BF16, GATED_DELTA_NET),
    row(
        "delta-net-fp32",
        "float32, gated delta net, deterministic",
        "zigzag,allgather",
        GATED_DELTA_NET,
        # Computes gated delta net in torch: the kernels do not take float32.
        {"deterministic_mode": True},
        yardstick=None,
    ),
    row(
        "documents",
        "float32, packed documents, Megatron's own modules",
        "zigzag,zigzag:layout=documents,distflash",
        LOCAL,
        DOCUMENTS | {"null_tokenizer_eod_id": prepare_data.END_OF_DOCUMENT},
        yardstick=None,
    ),
    row(
        "thd",
        "float32, padded documents, cut by zigzag inside each, Megatron's own modules",
        thd("zigzag,distflash,ulysses"),
        LOCAL,
        DOCUMENTS,
        yardstick=None,
    ),
    row("fsdp", "bfloat16, torch's FSDP2", FAMILIES, BF16, UNTIED, own=TORCH_FSDP),
    row("fsdp-fp32", "float32, torch's FSDP2", FAMILIES, UNTIED, own=TORCH_FSDP, yardstick=None),
    row(
        "fsdp-linear-fp32",
        "float32, TransNormerLLM, kernel chunked, torch's FSDP2",
        "lasp2",
        LINEAR,
        UNTIED,
        own=TORCH_FSDP,
        plugin={"linear_model": "transnormer", "kernel": "chunked"},
        yardstick=None,
    ),
    *(
        row(
            f"megatron-fsdp-{number}-fp32",
            f"float32, Megatron-FSDP, {sharding} sharded",
            FAMILIES if number == 3 else "zigzag",
            UNTIED,
            own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": sharding},
            yardstick=None,
        )
        for number, sharding in enumerate(("optim", "optim_grads", "optim_grads_params"), 1)
    ),
    row(
        "megatron-fsdp",
        "bfloat16, Megatron-FSDP, optim_grads_params sharded",
        "zigzag",
        BF16,
        UNTIED,
        own=MEGATRON_FSDP | {"data_parallel_sharding_strategy": "optim_grads_params"},
    ),
    row(
        "chunked",
        "bfloat16, loss in chunks",
        "zigzag",
        BF16,
        UNTIED,
        plugin={"chunked_loss": 512},
    ),
    row(
        "chunked-fp32",
        "float32, loss in chunks",
        "zigzag",
        UNTIED,
        plugin={"chunked_loss": 512},
        yardstick=None,
    ),
    row(
        "script",
        "bfloat16, pretrain_gpt.py of Megatron-LM, 30 iterations",
        FAMILIES,
        BF16,
        unmodified=True,
        iterations=30,
    ),
    row(
        "script-fp32",
        "float32, pretrain_gpt.py of Megatron-LM, 30 iterations",
        FAMILIES,
        yardstick=None,
        unmodified=True,
        iterations=30,
    ),
    row("fusion", "bfloat16, weight gradients summed by apex", "zigzag", BF16, own=FUSION),
    *(
        row(
            f"fusion-cp{cp}-fp32",
            f"float32, weight gradients summed by apex, Megatron's own modules, CP {cp}",
            "zigzag",
            LOCAL,
            own=FUSION,
            cp=cp,
            yardstick=None,
        )
        for cp in (1, 2)
    ),
    *graphs(
        row("graphs", "bfloat16", f"{_ALL},zigzag:transport=group", BF16),
        local=(f"{_ALL},zigzag:transport=group", {}),
        te=(GRAPHED, {}),
        full=(GRAPHED, {}),
    ),
    *graphs(
        row("graphs-long", "100 iterations", "zigzag", BF16, iterations=100),
        local=("zigzag", {}),
    ),
    *graphs(
        row("graphs-moe", "EP 2 over CP 2", "zigzag", BF16, MOE, EP2, alone=True),
        te=("zigzag", {"cuda_graph_modules": ["attn", "moe_router"]}),
    ),
    *graphs(
        row("graphs-fp8", "FP8 layers", "zigzag", FP8, alone=True),
        local=("zigzag", {}),
        te=("zigzag", {}),
    ),
    *graphs(
        row("graphs-recompute", "attention recomputed", _BOTH, BF16, RECOMPUTE_CORE, alone=True),
        te=(_BOTH, {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-recompute-all", "full recompute", "zigzag", BF16, RECOMPUTE, alone=True),
        full=("zigzag", {}),
    ),
    *graphs(
        row(
            "graphs-linear",
            "TransNormerLLM",
            TRANSNORMER,
            BF16,
            LINEAR,
            plugin={"linear_model": "transnormer"},
            alone=True,
        ),
        local=(TRANSNORMER, {}),
    ),
    *graphs(
        row("graphs-mla", "multi-latent attention", "zigzag", BF16, MLA, alone=True),
        local=("zigzag", {}),
    ),
    *graphs(
        row("graphs-window", "sliding windows", GRAPHED, BF16, WINDOWS, alone=True),
        local=(GRAPHED, {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-sinks", "attention sinks", _SOME, BF16, SINKS, alone=True),
        local=(_SOME, {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-mtp", "multi-token prediction", _SOME, BF16, MTP, alone=True),
        local=(_SOME, {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-eval", "evaluation between iterations", _SOME, BF16, EVALUATION, alone=True),
        local=(_SOME, {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row(
            "graphs-twice",
            "attention recomputed, and run twice",
            "zigzag",
            BF16,
            RECOMPUTE_CORE,
            plugin={"recompute_attention": True},
            alone=True,
        ),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row(
            "graphs-documents",
            "packed documents, MLPs captured",
            "zigzag,distflash",
            BF16,
            DOCUMENTS | {"null_tokenizer_eod_id": prepare_data.END_OF_DOCUMENT},
            alone=True,
        ),
        te=("zigzag,distflash", {"cuda_graph_modules": ["mlp"]}),
    ),
    # Of four GPUs.
    *graphs(
        row("graphs-tp", "TP 2, sequence-parallel", "zigzag", BF16, SP, alone=True),
        local=("zigzag", {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-pp", "PP 2", "zigzag", BF16, PP2, alone=True),
        local=("zigzag", {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
    *graphs(
        row("graphs-vpp", "PP 2, interleaved", "zigzag", BF16, INTERLEAVED, alone=True),
        local=("zigzag", {}),
        te=("zigzag", {}),
        full=("zigzag", {}),
    ),
)


def captured_models() -> list[CapturedRow]:
    """Whose runs in CUDA graphs are compared with those without."""
    keys = {one.eager for one in ROWS if one.eager}
    captors = {str(flags["cuda_graph_impl"]): who for who, flags in GRAPHS.items()}
    return [
        CapturedRow(
            one.key,
            one.about,
            one.variants,
            {name: f"{one.key}-{who}" for name, who in captors.items()},
        )
        for one in ROWS
        if one.key in keys
    ]
