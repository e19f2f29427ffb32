"""What is refused: one table of rules, and the one function that walks it.

The start-up checks and the documentation both come from the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import get_args

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.lasp2 import Lasp2
from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.document_layout import Balanced, PaddedDocuments
from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.errors import ConfigError, near_multiples
from megatron_cp_plugin.integration.comm_type import TYPES
from megatron_cp_plugin.integration.compat import running_version
from megatron_cp_plugin.integration.contract import Version
from megatron_cp_plugin.integration.features import FEATURES, UNTESTED, Rule, Stage, on
from megatron_cp_plugin.integration.settings import GATED, SIZES, Settings
from megatron_cp_plugin.layers import layout_choices
from megatron_cp_plugin.terminal import check_folder, flag_of


def refusals(stage: Stage, settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Everything that the table does not let through at a stage, with what `check` says of it."""
    elsewhere = settings.runs_elsewhere
    rules = (rule for rule in RULES if stage in rule.stages and not (rule.here and elsewhere))
    return ((rule, said) for rule in rules if (said := rule.refusal(settings)))


def check(stage: Stage, settings: Settings) -> None:
    """Refuses what the table does not let through at a stage.

    Raises: ConfigError: One line that says what is wrong, and what to do.
    """
    for _, said in refusals(stage, settings):
        raise ConfigError(said)


def _both(
    one: Callable[[Settings], object], other: Callable[[Settings], object]
) -> Callable[[Settings], object]:
    return lambda s: one(s) and other(s)


def _below_one(setting: str) -> Callable[[Settings], bool]:
    return lambda s: bool(getattr(s, setting) < 1)


def _before(
    first: Version,
    asked: Callable[[Settings], object],
    text: str,
    stages: tuple[Stage, ...] = ("arguments", "model"),
) -> Rule:
    """What earlier versions of Megatron do not have, or have in another form."""

    def when(s: Settings) -> Mapping[str, object] | None:
        version, words = running_version()
        return {"version": words} if version < first and asked(s) else None

    return Rule(
        when, f"Megatron {{version}} {text}: use Megatron {first[0]}.{first[1]} or later", stages
    )


# Rules that compute the words of their texts.


def _processes(s: Settings) -> Mapping[str, object] | None:
    sizes = {name: getattr(s, name) for name in SIZES}
    product = prod(sizes.values())
    if s.world_size % product == 0:
        return None
    large = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    factors = " * ".join(large) + (f" = {product}" if len(large) > 1 else "")
    others = product // s.ranks
    usable = [str(n) for n in range(1, s.world_size + 1) if s.world_size % (n * others) == 0]
    fitting = f", or use context_parallel_size {' or '.join(usable)}" if usable else ""
    return {"factors": factors, "product": product, "fitting": fitting}


def _processes_of_experts(s: Settings) -> Mapping[str, object] | None:
    has_some, product = (s.expert_model_parallel_size or 1) > 1, s.expert_ranks * s.stages
    return {"product": product} if has_some and s.world_size % product else None


def _order_of_ranks(s: Settings) -> Mapping[str, object] | None:
    """Megatron has no such order of the ranks where those of experts are grouped otherwise."""
    dense = s.tensor * s.ranks
    differs = s.use_tp_pp_dp_mapping and s.stages > 1 and s.expert_ranks != dense
    return {"dense": dense, "experts": s.expert_ranks} if differs else None


def _split_heads(s: Settings) -> Mapping[str, object] | None:
    heads = s.num_attention_heads
    if heads is None or heads % s.tensor == 0:
        return None
    ranks = s.world_size // s.ranks // s.stages
    usable = [str(n) for n in range(1, heads + 1) if heads % n == 0 and ranks % n == 0]
    return {"usable": " or ".join(usable)}


def _groups_of_heads(s: Settings) -> Mapping[str, object] | None:
    heads = s.num_attention_heads
    if heads is None or heads % s.kv_heads == 0:
        return None
    return {"usable": ", ".join(str(n) for n in range(1, heads + 1) if heads % n == 0)}


def _split_groups(s: Settings) -> Mapping[str, object] | None:
    """With fewer groups than ranks, Megatron gives each group to several ranks."""
    heads, tensor = s.num_attention_heads, s.tensor

    def fits(groups: int) -> bool:
        return groups % tensor == 0 or tensor % groups == 0

    if heads is None or fits(s.kv_heads):
        return None
    usable = [str(n) for n in range(1, heads + 1) if heads % n == 0 and fits(n)]
    return {"usable": ", ".join(usable)}


def _tokens_of_a_rank(s: Settings) -> Mapping[str, object] | None:
    if s.tokens is None or not s.sequence_parallel:
        return None
    local = s.tokens // s.cp.size
    if local % s.tensor == 0:
        return None
    step = s.cp.layout.multiple(s.cp.size) * s.tensor
    return {"local": local, "usable": near_multiples(s.tokens, step)}


def _without_windows(s: Settings) -> Mapping[str, object] | None:
    if s.window is None or s.cp.algo == registry.AUTO:
        return None
    names = registry.available("softmax")
    serving = [name for name in names if getattr(registry.algorithm_class(name), "windows", False)]
    lacking = [name for name in s.cp.algorithms if name in names and name not in serving]
    return {"lacking": lacking[0], "serving": " or ".join(serving)} if lacking else None


def _exchanges_heads(algo: str) -> bool:
    known = algo in registry.available("softmax")
    return known and not issubclass(registry.algorithm_class(algo), PointToPoint)


def _layout_without_states(s: Settings) -> Mapping[str, object] | None:
    layout, passed = s.cp.layout.name, get_args(registry.option_types(Lasp2.Options)["layout"])
    if not s.is_recurrent or s.cp.size == 1 or layout in passed:
        return None
    choices = " or ".join(_options_for(s, passed) or ["another algorithm"])
    layers = "gated delta net" if s.is_gated else "Mamba"
    return {"layers": layers, "layout": layout, "choices": choices}


def _options_for(s: Settings, layouts: Sequence[str]) -> list[str]:
    """Flags that give the algorithm one of some layouts."""
    return [
        f"--cp-options {option}={choice}"
        for found, option, choice in layout_choices(s.cp.algo)
        if found in layouts
    ]


def _heads_of_gated(name: str, divisor: str) -> Callable[[Settings], object]:
    def asked(s: Settings) -> Mapping[str, object] | None:
        if not s.is_gated:
            return None
        heads, step = getattr(s, name), getattr(s, divisor)
        return {"usable": near_multiples(heads, step)} if heads % step else None

    return asked


def _gated_by_a_list(s: Settings) -> Mapping[str, object] | None:
    pattern = s.linear_attention_freq
    if not s.is_gated or not isinstance(pattern, list) or len(pattern) == s.num_layers:
        return None
    return {"entries": len(pattern)}


def _without_fla(s: Settings) -> bool:
    if not s.is_gated:
        return False
    from megatron.core.ssm import gated_delta_net

    return not gated_delta_net.HAVE_FLA


def _without_transformer_engine(s: Settings) -> bool:
    """The layers of all of Megatron's own stacks of hybrid models are Transformer Engine's."""
    spec = (s.spec or ("megatron.core.models.hybrid",))[0]
    own = bool(s.hybrid_layer_pattern) and spec.startswith("megatron.core.models.")
    return own and find_spec("transformer_engine") is None


def _cannot_write(s: Settings) -> None:
    """Megatron finds out at the first checkpoint, and never of logs.

    Raises: ConfigError: One of the folders cannot be written to.
    """
    for name in ("save", "tensorboard_dir"):
        path = getattr(s, name)
        if path is not None and not _is_remote(path):
            check_folder(flag_of(name), path)


def _prefixes(s: Settings) -> Iterator[str]:
    """Of --data-path on this machine, which may have a weight before each."""
    for word in () if s.mock_data or s.sft else map(str, s.data_path or ()):
        if not re.fullmatch(r"[-+.\de]+", word) and not _is_remote(word):
            yield word


def _missing_data(s: Settings) -> Mapping[str, object] | None:
    for prefix in _prefixes(s):
        names = [f"{prefix}{suffix}" for suffix in (".bin", ".idx")]
        if missing := [name for name in names if not Path(name).exists()]:
            pieces = " --document-bytes 200" if s.packing else ""
            return {"prefix": prefix, "missing": " and no ".join(missing), "pieces": pieces}
    return None


def _damaged_data(s: Settings) -> Mapping[str, object] | None:
    """Megatron ends in a traceback where it reads them, at a step that no number tells."""
    from megatron.core.datasets.indexed_dataset import _IndexReader

    for prefix in _prefixes(s):
        try:
            found = _IndexReader(f"{prefix}.idx", multimodal=False)
            last = found.sequence_pointers[-1] + found.dtype_size * found.sequence_lengths[-1]
        except Exception as error:  # it fails in many ways
            return {"file": f"{prefix}.idx", "why": error}
        if (size := Path(f"{prefix}.bin").stat().st_size) < last:
            return {"file": f"{prefix}.bin", "why": f"{size} of {last} bytes"}
    return None


def _is_remote(path: object) -> bool:
    return "://" in str(path)


def _micro_batches(s: Settings) -> Mapping[str, object] | None:
    """Too few for an interleaved pipeline, or left over; Megatron says so in the first step."""
    if not s.virtual_pipeline_model_parallel_size or s.rampup_batch_size:
        return None
    stages, group = s.stages, s.microbatch_group_size_per_vp_stage or s.stages
    samples = s.samples * s.data_parallel_size
    count = s.global_batch_size // samples
    if stages <= group <= count and not 0 < count % group < stages:
        return None
    if group < stages:
        usable = f"--microbatch-group-size-per-virtual-pipeline-stage {stages}"
    else:
        usable = f"--global-batch-size {-(-count // group) * group * samples}"
    return {"group": group, "count": count, "usable": usable}


def _without_steps(s: Settings) -> Mapping[str, object] | None:
    given = {"--train-iters": s.train_iters, "--train-samples": s.train_samples}
    if s.skip_train or any((count or 0) >= 1 for count in given.values()):
        return None
    words = [f"{flag} {count}" for flag, count in given.items() if count is not None]
    return {"given": " ".join(words) or "neither"}


def _comm_types(s: Settings) -> set[str]:
    """What a model's configuration says of how it is split, by layer."""
    given = s.cp_comm_type
    return {given} if isinstance(given, str) else set(given or ())


def _other_communication(s: Settings) -> bool:
    """Neither a name of Transformer Engine's nor the plugin's own for the algorithm in use."""
    served = {*TYPES, comm_type(s.cp.algo)}
    if s.cp.by_auto:
        served.add(comm_type(registry.AUTO))
    return not served.issuperset(_comm_types(s))


def _replaced_communication(s: Settings) -> Mapping[str, object] | None:
    """Names of Transformer Engine's, but for its default, and what the layers of DSA ask for."""
    given = _comm_types(s) & (TYPES.keys() - {"p2p"})
    if s.is_sparse or all(TYPES[name] == s.cp.algo for name in given):
        return None
    return {"given": " ".join(sorted(given))}


def _other_layout_than_sparse(s: Settings) -> Mapping[str, object] | None:
    layout = s.cp.layout.name
    if not s.is_sparse or s.cp.size == 1 or layout in (Zigzag.name, PaddedDocuments.name):
        return None
    every = registry.available("softmax")
    default = [name for name in every if registry.layout_of(name, {}).name == Zigzag.name]
    choices = _options_for(s, [Zigzag.name])
    choices.append(f"--context-parallel-algo {' or '.join(default)}")
    return {"layout": layout, "choices": ", or ".join(choices)}


def comm_type(algo: str) -> str:
    """What model configurations say that the plugin serves.

    Transformer Engine refuses it, so that its own context parallelism never takes the place of ours
    where such a configuration reaches a process without the plugin installed.
    """
    return f"megatron_cp_plugin.{algo}"


_LINEAR = "--cp-linear-model {s.cp.linear_model}"
_GATED = "gated delta net layers need"
_VARIANT = "--experimental-attention-variant {s.experimental_attention_variant}"
_GRAPHS = "--cuda-graph-impl {s.graphs}"
_KEPT = ("logits_save_dir", "logits_load_dir")
_LOGITS = (
    "stores log-probabilities in the order of a rank's tokens, which needs to be Megatron's zigzag "
    "layout in all runs"
)
_ALL_LOGITS = "it needs all logits", "leave --cp-chunked-loss out"
_LOSS = {
    "cross_entropy_loss_fusion": ("it computes the loss in another way", "keep one of the two"),
    "defer_embedding_wgrad_compute": ("it keeps the gradients of all logits", "leave it out"),
    "use_mup": ("it scales the logits", "leave --cp-chunked-loss out"),
    "logits_save_dir": _ALL_LOGITS,
    "logits_load_dir": _ALL_LOGITS,
    "perform_rl_step": ("its log-probabilities need all logits", "leave --cp-chunked-loss out"),
}
_ALL_KEYS = "no rank has keys to look at", "leave one of the two out"
SPLIT_LATENTS = (
    "multi-latent attention needs its projection to latents whole on each tensor-parallel rank "
    "(where it is split, Megatron loses gradients of the keys' rotated part)"
)
_WHOLE_WEIGHT = "its weights are whole in the forward pass of their own module only"

# A table is read by rows.
# fmt: off
# Beside latents: when, what it is called, why, and what to do.
_LATENTS: tuple[tuple[Callable[[Settings], object], str, str, str], ...] = (
    (on("qk_clip"), "--qk-clip", *_ALL_KEYS),
    (on("log_max_attention_logit"), "--log-max-attention-logit", *_ALL_KEYS),
    (lambda s: s.recomputes == "selective", "--recompute-modules core_attn",
     "Megatron would recompute attention of K and V", "leave core_attn out"),
    (lambda s: "mla_up_proj" in (s.recompute_modules or ()), "--recompute-modules mla_up_proj",
     "K and V are made anew in the backward pass as it is", "leave mla_up_proj out"),
    (lambda s: s.captures_attention, "attention in CUDA graphs", UNTESTED, "leave one out"),
    (on("use_torch_fsdp2"), "--use-torch-fsdp2", _WHOLE_WEIGHT, "leave one of the two out"),
    (on("use_megatron_fsdp"), "--use-megatron-fsdp", _WHOLE_WEIGHT, "leave one of the two out"),
    (lambda s: any(map(_exchanges_heads, s.cp.algorithms)), "algorithms that exchange heads",
     "of which latents have none", "use zigzag, ring, distflash, allgather or attention2d"),
    (lambda s: s.cp.algo == registry.AUTO or s.cp.by_auto, "auto",
     "the planner does not know of it", "name an algorithm, such as zigzag"),
)

RULES: tuple[Rule, ...] = (
    # Numbers of ranks and of heads.
    *(Rule(_below_one(name),
           f"{name} must be at least 1, got {{s.{name}}}: use 1 or more", ("sizes",))
      for name in SIZES),
    Rule(_processes, "{factors} must divide the number of processes, got {s.world_size}: start a "
         "multiple of {product} processes{fitting}", ("sizes",)),
    Rule(_processes_of_experts, "expert parallel * expert tensor parallel * pipeline parallel = "
         "{product} needs that many processes, or a multiple, got {s.world_size}: start {product}, "
         "or use a smaller --expert-model-parallel-size", ("sizes",)),
    Rule(_order_of_ranks, "--use-tp-pp-dp-mapping in a pipeline needs expert tensor parallel * "
         "expert parallel = tensor parallel * context parallel = {dense}, got {experts}: leave it "
         "out", ("sizes",)),
    Rule(_split_heads, "num_attention_heads must be divisible by tensor_model_parallel_size "
         "{s.tensor}, got {s.num_attention_heads}: use tensor_model_parallel_size {usable}",
         ("sizes",)),
    Rule(_groups_of_heads, "num_attention_heads {s.num_attention_heads} must be divisible by "
         "num_query_groups, got {s.kv_heads}: use {usable}", ("sizes",)),
    Rule(_split_groups, "num_query_groups (GQA) must be divisible by tensor_model_parallel_size "
         "{s.tensor} or divide it, got {s.kv_heads}: use one of {usable} or another "
         "tensor_model_parallel_size", ("sizes",)),
    # Layers of linear attention. Those of a model may have configurations of their own.
    Rule(lambda s: s.has_linear and s.kv_heads % s.tensor,
         f"{_LINEAR} needs num_query_groups divisible by tensor_model_parallel_size = "
         "{s.tensor}, got {s.kv_heads}: use more groups or fewer ranks",
         ("arguments", "linear layer")),
    *(Rule(_both(lambda s: s.has_linear, on(name)),
           f"{_LINEAR} does not support {flag_of(name)}: leave it out",
           ("arguments", "linear layer"))
      for name in ("qk_layernorm", "qk_l2_norm", "attention_output_gate")),
    Rule(lambda s: s.is_all_linear and s.softmax_type not in (None, "vanilla"),
         f"{_LINEAR} has no softmax, got --softmax-type {{s.softmax_type}}: leave it out"),
    Rule(lambda s: s.is_all_linear and s.position_embedding_type in ("rope", "yarn"),
         f"{_LINEAR} has no rotary embeddings, got --position-embedding-type "
         "{s.position_embedding_type}: use none or learned_absolute"),
    Rule(lambda s: len(s.cp.algorithms) > 1 and s.hybrid_layer_pattern,
         "all attention layers of a hybrid model need the same algorithm, got --cp-layers "
         "{s.layers} and --hybrid-layer-pattern {s.hybrid_layer_pattern}: leave one of the two "
         "out"),
    *FEATURES,
    *(Rule(_both(lambda s: s.cp.chunked_loss is not None, on(name)),
           f"--cp-chunked-loss does not work with {flag_of(name)} ({reason}): "
           f"{instead}") for name, (reason, instead) in _LOSS.items()),
    Rule(lambda s: s.has_linear and s.is_latent,
         f"{_LINEAR} cannot be combined with multi-latent attention, got --multi-latent-attention: "
         "leave it out, or use softmax attention in all layers"),
    # Latents in place of K and V.
    Rule(lambda s: s.cp.send_latents and s.multi_latent_attention is False and not s.is_latent,
         "--cp-send-latents needs layers of multi-latent attention, got none: leave it out, or add "
         "--multi-latent-attention"),
    *(Rule(_both(lambda s: s.cp.send_latents, when),
           f"--cp-send-latents does not work with {what} ({reason}): {fix}")
      for when, what, reason, fix in _LATENTS),
    # Megatron's gated delta net layers, whose states pass from rank to rank.
    Rule(lambda s: s.is_recurrent and s.has_linear,
         f"Megatron's recurrent layers need softmax attention beside them, got {_LINEAR}: leave it "
         "or --experimental-attention-variant, or M in --hybrid-layer-pattern, out",
         ("arguments", "recurrent layer")),
    Rule(_layout_without_states, "{layers} layers need a layout of consecutive tokens, got the "
         "{layout} layout of {s.cp.algo}: use {choices}", ("arguments", "recurrent layer")),
    *(Rule(_heads_of_gated(name, "tensor"),
           f"{_GATED} {name} divisible by tensor_model_parallel_size = {{s.tensor}}, got "
           f"{{s.{name}}}: use {{usable}}, or fewer ranks", ("arguments",))
      for name in ("linear_num_key_heads", "linear_num_value_heads")),
    # DSA layers, which keep Megatron's own all-gather in its zigzag order.
    Rule(_other_layout_than_sparse,
         "Megatron splits DSA layers by its own zigzag layout, got the {layout} layout of "
         "{s.cp.algo}: use {choices}, or layout=thd of install"),
    _before((0, 19), lambda s: s.is_sparse and s.cp.size > 1,
            "cannot split DSA layers, got context_parallel_size {s.cp.size}"),
    Rule(_heads_of_gated("linear_num_value_heads", "linear_num_key_heads"),
         f"{_GATED} linear_num_value_heads divisible by linear_num_key_heads "
         "{s.linear_num_key_heads}, got {s.linear_num_value_heads}: use {usable}", ("arguments",)),
    Rule(lambda s: s.experimental_attention_variant in GATED and s.linear_attention_freq is None,
         f"{_VARIANT} needs --linear-attention-freq, got none: add --linear-attention-freq 4 for "
         "softmax attention in every fourth layer", ("arguments",)),
    Rule(_gated_by_a_list, "--linear-attention-freq as a list needs an entry for each of the "
         "{s.num_layers} layers, got {entries}: use a number, or a list of {s.num_layers}",
         ("arguments",)),
    Rule(lambda s: s.is_gated and s.transformer_impl == "local" and s.spec is None,
         f"Megatron builds the layers of {_VARIANT} from Transformer Engine's modules, got "
         "--transformer-impl local: use transformer_engine, or pass layers of your own by --spec",
         ("arguments",)),
    # Megatron's issue 1699, which `rope.use_layout` finds in models, and its pull request 6839.
    Rule(lambda s: s.is_latent and s.transformer_impl == "local" and s.tensor > 1
         and s.spec is None,
         f"{SPLIT_LATENTS}, got --transformer-impl local and tensor_model_parallel_size "
         "{s.tensor}: use --transformer-impl transformer_engine, or --tensor-model-parallel-size 1",
         ("arguments",)),
    Rule(lambda s: s.is_latent and s.tensor > 1 and not s.sequence_parallel,
         "multi-latent attention needs --sequence-parallel, without which Megatron does not sum "
         "the gradients of the keys' rotated part over the tensor-parallel ranks, got "
         "tensor_model_parallel_size {s.tensor}: add --sequence-parallel"),
    Rule(lambda s: s.is_gated and s.tensor > 1 and not s.sequence_parallel,
         f"{_VARIANT} needs --sequence-parallel, without which Megatron does not sum the gradients "
         "of the layers' output norms over the tensor-parallel ranks, got "
         "tensor_model_parallel_size {s.tensor}: add --sequence-parallel", ("arguments",)),
    Rule(lambda s: s.is_gated and s.mtp_num_layers,
         "Megatron's scripts build no multi-token prediction beside gated delta net layers, got "
         "--mtp-num-layers {s.mtp_num_layers}: leave it out, or build the model in a program of "
         "your own", ("arguments",)),
    # 0.18 does split them, but its layers hand them an argument that they do not take.
    _before((0, 19), lambda s: s.is_gated and s.cp.size > 1, "cannot split gated delta net layers, "
            "got context_parallel_size {s.cp.size}", ("arguments",)),
    _before((0, 19), lambda s: s.is_mamba and s.cp.size > 1, "has other Mamba layers, got "
            "--hybrid-layer-pattern {s.hybrid_layer_pattern} with context_parallel_size "
            "{s.cp.size}"),
    _before((0, 17), lambda s: s.mtp_num_layers and s.calculate_per_token_loss and s.ranks > 1,
            "weights the losses of --mtp-num-layers by the tokens of one rank, got "
            "--calculate-per-token-loss with context_parallel_size {s.ranks}"),
    Rule(_without_fla, f"{_GATED} flash-linear-attention, got none: "
         "pip install flash-linear-attention", ("arguments",), here=True),
    # What depends on the order of tokens, and on how many a rank has.
    _before((0, 19), lambda s: s.packing is not None,
            "splits packed documents by its own layout, got {s.packing}"),
    *(Rule(_both(on(name), lambda s: s.cp.size > 1 and s.packing is not None),
           f"{flag_of(name)} {_LOGITS} without packed documents, got {{s.packing}}: leave one "
           "of the two out") for name in _KEPT),
    *(Rule(_both(on(name), lambda s: s.cp.size > 1 and not isinstance(s.cp.layout, Zigzag)),
           f"{flag_of(name)} {_LOGITS}, got {{s.cp.algo}} with the {{s.cp.layout.name}} layout: "
           "use --context-parallel-algo zigzag") for name in _KEPT),
    Rule(lambda s: s.has_linear and s.use_megatron_fsdp and s.tensor > 1,
         f"{_LINEAR} with tensor parallelism does not work with --use-megatron-fsdp (which "
         "recognizes split parameters by the names of Megatron's own classes), got "
         "tensor_model_parallel_size {s.tensor}: use --use-torch-fsdp2"),
    Rule(lambda s: s.use_megatron_fsdp and find_spec("einops") is None,
         "--use-megatron-fsdp needs the package einops, got none: pip install einops, or use "
         "--use-torch-fsdp2", here=True),
    Rule(_tokens_of_a_rank, "--sequence-parallel needs the {local} tokens of a context-parallel "
         "rank divisible by tensor_model_parallel_size {s.tensor}, got seq_length {s.tokens}: "
         "use {usable}", ("arguments",)),
    Rule(lambda s: s.is_all_linear and s.window is not None,
         "{s.cp.algo} computes linear attention, which has no sliding window, got --window-size "
         "{s.window_words}: leave it out"),
    Rule(_without_windows, "{lacking} does not support sliding windows, got --window-size "
         "{s.window_words}: leave it out, or use --context-parallel-algo {serving}"),
    # CUDA graphs.
    _before((0, 19), lambda s: s.graphs != "none", f"cannot capture these layers, got {_GRAPHS}",
            ("arguments", "validated")),
    Rule(lambda s: s.graphs != "none" and s.device.type != "cuda",
         f"{_GRAPHS} needs GPUs, got the {{s.device.type}} platform: leave it out",
         ("arguments", "validated")),
    # A length of None: Megatron has yet to read it from another flag.
    Rule(lambda s: s.graphs == "transformer_engine" and (s.seq_length or 0) % s.cp.size,
         f"{_GRAPHS} needs equally many tokens on all ranks, got seq_length {{s.seq_length}} on "
         "{s.cp.size}: use a multiple of {s.cp.size}, or --cuda-graph-impl local",
         ("arguments", "validated")),
    Rule(lambda s: s.graphs != "none" and isinstance(s.cp.layout, Balanced),
         f"{_GRAPHS} needs the same layout for all batches, got one that follows documents: leave "
         "the option layout=documents or --cuda-graph-impl out", ("arguments", "validated")),
    # Whether batches have spans only a script knows.
    Rule(lambda s: isinstance(s.cp.layout, Balanced),
         "the option layout=documents follows the documents or attention_spans of each batch, got "
         "one without: add --dataloader-inter-document-masking or --sft, or leave the option out",
         ("batch",)),
    # Before and after Megatron's own checks.
    Rule(_without_transformer_engine, "Megatron's hybrid models have layers of Transformer Engine, "
         "which is not installed, got --hybrid-layer-pattern {s.hybrid_layer_pattern}: install it, "
         "or name a stack of other layers with --spec", ("start",), here=True),
    Rule(_cannot_write, "", ("start", "files"), here=True),
    Rule(_missing_data, "--data-path got {prefix}, and there is no {missing}: write the run files' "
         "data with megatron-cp prepare-data --output {prefix}{pieces}, or add --mock-data",
         ("start", "files"), here=True),
    Rule(_damaged_data, "--data-path needs whole files, got {file}, which is cut off ({why}): copy "
         "or write it again", ("start", "files"), here=True),
    Rule(_micro_batches, "an interleaved pipeline of {s.stages} stages needs micro-batches "
         "divisible by its group size {group}, and a group size of at least {s.stages}, got "
         "{count} micro-batches: use {usable}", ("validated",)),
    Rule(_without_steps, "training needs --train-iters or --train-samples of 1 or more, got "
         "{given}: add --train-iters 1, or --skip-train to evaluate only", ("training",)),
    # Models that programs build.
    Rule(_other_communication, "cp_comm_type {s.cp_comm_type} is none of Transformer Engine's, nor "
         "megatron_cp_plugin.{s.cp.algo}: leave it out", ("model",)),
)

# What is served although the plugin takes its place: what to say of it, once.
REPLACED: tuple[Rule, ...] = (
    Rule(_replaced_communication, "cp_comm_type {given} is replaced: attention is computed by "
         "{s.cp.algo}, which was named", ("model",)),
    Rule(lambda s: getattr(s.attention_backend, "name", s.attention_backend) == "fused",
         "attention_backend fused is replaced: the kernels of the plugin are "
         "chosen by its own setting, kernel {s.cp.kernel}"),
    Rule(lambda s: s.is_sparse and s.cp.size > 1, "DSA layers keep Megatron's own all-gather"),
    Rule(on("cuts_fused_rotary"), "apply_rope_fusion is switched off: in multi-latent attention "
         "the fused kernel cuts positions by Megatron's own layout"),
)
# fmt: on


def replaced(stage: Stage, settings: Settings) -> list[str]:
    """What settings ask for and the plugin takes the place of, one line each."""
    lines = (rule.refusal(settings) for rule in REPLACED if stage in rule.stages)
    return [line for line in lines if line]
