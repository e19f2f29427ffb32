"""`megatron-cp plan --machine` and `--model`: prints the predictions for a machine."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import Options
from megatron_cp_plugin.packages import need
from megatron_cp_plugin.planner.choose import GIB, CallSite, Kind, choose
from megatron_cp_plugin.planner.detected_machine import kernel_on, machine_named
from megatron_cp_plugin.planner.explain import sentence, table
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.splits import STEP_TOKENS, Job, Proposal, proposals
from megatron_cp_plugin.planner.step import dispatch
from megatron_cp_plugin.registry import AUTO
from megatron_cp_plugin.terminal import text_table
from megatron_cp_plugin.token_losses import CHUNK_TOKENS

_PROPOSALS = 10
# Errors of a step, without experts and with them, from docs/predictions.md.
_ERROR, _EXPERTS_ERROR = 0.05, 0.3


def plan_layer(
    title: str, name: str, size: int, shape: Shape, mask: Mask, path: Path | None
) -> None:
    """Prints which algorithm is the fastest for a layer, and why; writes a run file if asked."""
    machine = machine_named(name)
    site = CallSite(
        machine, machine.nodes(size), kernel_on(machine, AUTO), machine.memory_gib * GIB
    )
    print(title)
    choice = choose([Kind("attention", shape, mask)], site)
    print(table(choice))
    _say_what_is_assumed(mask)
    print(sentence(choice))
    if path is not None:
        megatron = {"context_parallel_size": size, "seq_length": shape.seq_len}
        megatron |= _of_documents(mask)
        write_run_file(path, megatron, choice.best.algo, choice.best.options)


def plan_model(
    model: str, tokens: int, gpus: int, name: str, mask: Mask, batch: int | None, path: Path | None
) -> None:
    """Prints how to split a model among GPUs.

    Args: batch: sequences of a step; None: as make some millions of tokens.
    """
    if model not in MODELS:
        raise ConfigError(
            f"there is no model {model!r}: use one of "
            f"{', '.join(MODELS)}, or --size, --seq-len and --heads for its attention alone"
        )
    machine = machine_named(name)
    sequences = batch or max(1, STEP_TOKENS // tokens)
    job = Job(MODELS[model], tokens, gpus, machine, kernel_on(machine, AUTO), mask, sequences)
    found = proposals(job, _PROPOSALS)
    best, flop = found[0], job.model.flop(tokens, mask.bands.area(tokens))
    error = _EXPERTS_ERROR if job.model.experts else _ERROR
    within = sum(one.rate >= best.rate * (1 - error) for one in found)
    print(
        f"{model}, {gpus} GPUs of {machine.name} with {machine.memory_gib:g} GiB each, {sequences} "
        f"sequence{'s' * (sequences > 1)} of {tokens} tokens a step"
    )
    sizes = ["TP", "CP", "PP", "DP", *(["EP"] if job.model.experts else [])]
    figures = "s a step", "tokens/s", "TFLOP/s", "MFU", "GiB"
    rows = [_cells(one, len(sizes), flop / tokens, machine.peak_flops) for one in found]
    right = [*range(len(sizes)), *range(len(sizes) + 1, len(sizes) + 1 + len(figures))]
    print(text_table((*sizes, "with", *figures, "attention by"), rows, right=right))
    print("S: parameters sharded, R: full recompute, C: loss in chunks; tokens/s and TFLOP/s a GPU")
    if within > 1:
        print(
            f"the first {within} are within {error:.0%}, the simulator's error: take the one that "
            "suits you best"
        )
    if job.model.experts:
        name = dispatch(job.model, best.split, tokens, machine).name
        print(f"experts of the first: tokens come by {name}, to all experts equally many")
    parts = ", ".join(f"{key} {seconds:.2f} s" for key, seconds in best.step.parts.items())
    print(f"the first: {parts}")
    memory = ", ".join(f"{key} {gib:.1f}" for key, gib in best.step.memory.items() if gib > 0)
    print(f"GiB of the GPU that needs most: {memory}")
    _say_what_is_assumed(mask)
    if best.split.context > 1:
        print(table(best.choice))
        print(sentence(best.choice))
    if path is not None:
        chosen = best.choice.best
        linear = "transnormer" if job.model.linear else None
        settings = megatron_settings(job, best.split)
        options = chosen.options
        if best.split.chunked_loss:
            options = (*options, ("chunked_loss", CHUNK_TOKENS))
        write_run_file(path, settings, chosen.algo, options, linear_model=linear)


def _cells(one: Proposal, sizes: int, flop: float, peak_flops: float | None) -> tuple[str, ...]:
    """A row of the table. Args: sizes: their number. flop: of a token."""
    split, flops = one.split, one.rate * flop
    ways = split.tensor, split.context, split.pipeline, split.data, split.expert
    used = {"S": split.sharded, "R": split.recompute == "full", "C": split.chunked_loss}
    return (
        *map(str, ways[:sizes]),
        "".join(letter for letter, on in used.items() if on) or "-",
        f"{one.step.seconds:.2f}",
        f"{one.rate:.0f}",
        f"{flops / 1e12:.0f}",
        "-" if peak_flops is None else f"{flops / peak_flops:.0%}",
        f"{one.step.gib:.0f}",
        one.choice.best.name if split.context > 1 else "-",
    )


def _say_what_is_assumed(mask: Mask) -> None:
    if mask.documents:
        print(
            f"documents: {len(mask.documents) + 1}, one random draw of their lengths; with another "
            "one the order may be another where algorithms are close"
        )


def _of_documents(mask: Mask) -> dict[str, bool]:
    """The flag without which Megatron trains packed documents as one."""
    return {"dataloader_inter_document_masking": True} if mask.documents else {}


def megatron_settings(job: Job, split: Split) -> dict[str, object]:
    """Flags of Megatron for a model and its split, without data and tokenizer."""
    model = job.model
    settings: dict[str, object] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "kv_channels": model.head_dim,
        "swiglu": model.gated,
        "disable_bias_linear": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "none" if model.linear else "rope",
        "untie_embeddings_and_output_weights": not model.tied,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": True,
        "seq_length": job.tokens,
        "max_position_embeddings": job.tokens,
        "micro_batch_size": 1,
        "global_batch_size": job.sequences,
        "tensor_model_parallel_size": split.tensor,
        "context_parallel_size": split.context,
        **_of_documents(job.mask),
        "pipeline_model_parallel_size": split.pipeline,
        "use_distributed_optimizer": True,
    }
    if model.kv_heads < model.heads:
        settings |= {"group_query_attention": True, "num_query_groups": model.kv_heads}
    if split.tensor > 1:
        settings["sequence_parallel"] = True
    if model.experts:
        settings |= {"num_experts": model.experts, "moe_router_topk": model.active}
        settings["moe_ffn_hidden_size"] = model.ffn
        settings["moe_grouped_gemm"] = True
        settings["expert_model_parallel_size"] = split.expert
        settings["expert_tensor_parallel_size"] = 1
        found = dispatch(model, split, job.tokens, job.machine)
        settings["moe_token_dispatcher_type"] = found.name
    if model.shared:
        settings["moe_shared_expert_intermediate_size"] = model.shared
    if model.dense:
        settings["ffn_hidden_size"] = model.dense_ffn
        settings["moe_layer_freq"] = f"[0]*{model.dense}+[1]*{model.layers - model.dense}"
    if model.key_rank:
        del settings["kv_channels"]
        settings |= {
            "multi_latent_attention": True,
            "q_lora_rank": model.query_rank,
            "kv_lora_rank": model.key_rank,
            "qk_head_dim": model.head_dim - model.rotary_dim,
            "qk_pos_emb_head_dim": model.rotary_dim,
            "v_head_dim": model.value_dim,
            "apply_rope_fusion": False,  # the fused one cuts positions by Megatron's own layout
        }
    if split.sharded:
        settings |= {
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
            "megatron_fsdp_main_grads_dtype": "fp32",
            "ckpt_format": "fsdp_dtensor",
            "gradient_accumulation_fusion": False,
        }
    if model.layers % split.pipeline:
        settings["decoder_last_pipeline_num_layers"] = split.last_layers(model)
    if split.recompute == "full":
        settings |= {"recompute_granularity": "full", "recompute_method": "uniform"}
        settings["recompute_num_layers"] = 1
    return settings


def write_run_file(
    path: Path,
    megatron: Mapping[str, object],
    algo: str,
    options: Options,
    linear_model: str | None = None,
) -> None:
    """Writes the choice as a run file, and says so."""
    need("--yaml", "yaml")
    import yaml

    chosen: dict[str, object] = {"algo": algo, **dict(options)}
    if linear_model is not None:
        chosen["linear_model"] = linear_model
    sections = {"megatron": dict(megatron), "context_parallel": chosen}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    print(f"wrote {path}")
