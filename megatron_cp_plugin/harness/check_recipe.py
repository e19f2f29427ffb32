"""`megatron-cp check`: says offline whether a recipe is served, how, and whether it fits."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import lcm
from types import SimpleNamespace
from typing import Any

import torch

from megatron_cp_plugin import registry
from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.harness.recipes import OWN_SPARSE, Recipe, read_recipe
from megatron_cp_plugin.integration.auto import (
    BatchFacts,
    counted,
    kinds_of_layers,
    kinds_of_model,
    memory_of,
    nodes_of,
    of_several,
    possible_layouts,
)
from megatron_cp_plugin.integration.checks import check_algorithms
from megatron_cp_plugin.integration.comm_type import CommType
from megatron_cp_plugin.integration.contract import SETTINGS
from megatron_cp_plugin.integration.rules import Door, refusals, replaced
from megatron_cp_plugin.integration.settings import SPARSE, Settings
from megatron_cp_plugin.planner.choose import (
    GIB,
    Choice,
    Combination,
    Site,
    choose,
    peak_of_row,
)
from megatron_cp_plugin.planner.detected_machine import kernel_on, machine_named
from megatron_cp_plugin.planner.explain import described

SERVED, REFUSED, NOT_UNDERSTOOD = 0, 1, 2
_WORDS = {SERVED: "served", REFUSED: "refused", NOT_UNDERSTOOD: "not understood"}
_WIDTH, _INDENT = 100, 14
_GPU = "h100_400g"
_SIZES = ("num_layers", "hidden_size", "num_attention_heads")  # of a model's attention


@dataclass
class RecipeFindings:
    """The findings about a recipe.

    Attributes:
        lines: (topic, text) of each.
        refused: Settings that training would refuse.
        unknown: Settings that are not understood.
    """

    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    @property
    def code(self) -> int:
        """The exit code: a refusal is certain, even if other settings are not understood."""
        return REFUSED if self.refused else NOT_UNDERSTOOD if self.unknown else SERVED

    def text(self, name: str) -> str:
        """All of it, in lines of at most 100 columns."""
        rows = [
            *self.lines,
            *(("refused", line) for line in self.refused),
            *(("unknown", line) for line in self.unknown),
        ]
        out = [f"{name}: {_WORDS[self.code]}"]
        for what, said in rows:
            first, rest = f"  {what:<{_INDENT - 2}}", " " * _INDENT
            out.append(textwrap.fill(said, _WIDTH, initial_indent=first, subsequent_indent=rest))
        return "\n".join(out)


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns 0: served, 1: refused, 2: not understood."""
    arguments = parser_of("check").parse_args(argv)
    words = [word for word in arguments.recipe if word != "--"]
    recipe = read_recipe(words, arguments.model)
    recipe.gpus = arguments.gpus or recipe.gpus
    finding = findings_of(recipe, arguments.machine)
    print(finding.text(words[0]))
    return finding.code


def findings_of(recipe: Recipe, machine: str = _GPU) -> RecipeFindings:
    """Returns the findings about a recipe."""
    finding = RecipeFindings(unknown=list(recipe.unknown))
    beyond = recipe.beyond
    if recipe.model is not None and recipe.model.beyond:
        beyond = (
            f"{recipe.model.name} is {recipe.model.beyond}, got a recipe without GPTModel or "
            "HybridModel: only these are served"
        )
    if beyond:
        finding.refused.append(beyond)
        finding.unknown.clear()
        return finding
    _complete(recipe)
    by = "the launcher" if recipe.flags is not None else f'install(..., layout="{recipe.layout}")'
    finding.lines.append(("program", f"{recipe.program}, served through {by}"))
    finding.lines.append(("model", _model_in_words(recipe)))
    finding.lines.append(("ranks", _ranks_in_words(recipe)))
    if recipe.size == 1:
        finding.lines.append(("layout", "context_parallel_size 1: nothing is split"))
    algo, choice, shape = _algorithm_of(recipe, machine)
    config = _config_of_recipe(recipe, algo)
    finding.refused += _refusals(recipe, config)
    settings = _settings_of(recipe.settings, config)
    if recipe.size > 1 and not finding.refused:
        finding.lines.append(("layout", config.layout.name))
        if choice is not None:
            finding.lines.append(("algorithm", _choice_in_words(choice)))
        elif _all_sparse(recipe):
            finding.lines.append(("algorithm", "none: all layers are DSA, which splits itself"))
        elif algo:
            finding.lines.append(("algorithm", f"{config.algo}, as named"))
    if not finding.refused:
        finding.lines.append(("memory", _memory(recipe, settings, shape, machine, choice)))
    door: Door = "model" if recipe.flags is None else "arguments"
    notes = [*replaced(door, settings), *recipe.notes]
    finding.lines += [("note", line) for line in notes]
    return finding


def _complete(recipe: Recipe) -> None:
    """Adds the number of processes, which rules ask for and recipes leave to the job."""
    given, s = recipe.settings, Settings(SimpleNamespace(**recipe.settings))
    given |= {
        "tensor_model_parallel_size": int(s.tensor),
        "context_parallel_size": int(s.ranks),
        "pipeline_model_parallel_size": int(s.stages),
    }
    dense = int(s.tensor) * int(s.ranks) * int(s.stages)
    if recipe.gpus is None:
        recipe.gpus = lcm(dense, s.expert_ranks * s.stages if s.num_experts else 1)
        recipe.notes.append(f"the number of GPUs is not known, at least {recipe.gpus}: see --gpus")
    given["world_size"] = recipe.gpus
    given.setdefault("data_parallel_size", max(1, recipe.gpus // dense))


def _model_in_words(recipe: Recipe) -> str:
    s = recipe.settings
    if not s.get("num_layers") or not s.get("num_attention_heads"):
        pattern = s.get("hybrid_layer_pattern")
        return f"{recipe.model.name if recipe.model else 'not known'}, layers {pattern}"
    words = [f"{s['num_layers']} layers", f"hidden size {s['hidden_size']}"]
    heads = f"{s['num_attention_heads']}"
    if s.get("multi_latent_attention"):
        words.append(f"{heads} heads of multi-latent attention")
    else:
        words.append(f"{heads}:{s.get('num_query_groups') or heads} heads")
    if variant := s.get("experimental_attention_variant"):
        words.append(f"with {variant}")
    if (s.get("num_experts") or 1) > 1:
        words.append(f"{s['num_experts']} experts")
    if s.get("mtp_num_layers"):
        words.append(f"{s['mtp_num_layers']} layer(s) of multi-token prediction")
    return ", ".join([*([recipe.model.name] if recipe.model else []), *words])


def _ranks_in_words(recipe: Recipe) -> str:
    short = {"TP": "tensor_model", "PP": "pipeline_model", "CP": "context", "EP": "expert_model"}
    short |= {"ETP": "expert_tensor"}
    sizes = {name: recipe.settings.get(f"{full}_parallel_size") for name, full in short.items()}
    split = ", ".join(f"{name} {size}" for name, size in sizes.items() if size and size > 1)
    tokens = f"; {recipe.tokens} tokens of a micro-batch" if recipe.tokens else ""
    return f"{recipe.gpus} GPUs: {split or 'no split'}{tokens}"


def _all_sparse(recipe: Recipe) -> bool:
    """Whether no layer has attention of ours."""
    variant = recipe.settings.get("experimental_attention_variant")
    return bool(variant == SPARSE or recipe.settings.get(OWN_SPARSE))


def _config_of_recipe(recipe: Recipe, algo: str | None) -> ContextParallelConfig:
    """The settings that would be in force, with an algorithm."""
    if recipe.flags is not None:
        flags = recipe.flags
        if flags.algo is None or flags.is_auto:
            flags = replace(flags, algo=algo or "zigzag", comm_type=CommType())
        return flags.config(recipe.size)
    options = (("layout", recipe.layout),)
    return ContextParallelConfig(algo or "zigzag", recipe.size, options=options)


def _settings_of(source: dict[str, Any], config: ContextParallelConfig) -> Settings:
    return Settings(SimpleNamespace(**source), config, torch.device("cuda"))


def _refusals(recipe: Recipe, config: ContextParallelConfig) -> list[str]:
    """Everything that training would refuse, with where it was written."""
    settings = _settings_of(recipe.settings, config)
    asked: dict[Door, Settings] = {"sizes": settings}
    if recipe.flags is not None:
        asked |= {"arguments": settings, "validated": settings}
    else:
        asked["model"] = _settings_of(_of_model(recipe, settings), config)
        if settings.is_recurrent:
            asked["recurrent layer"] = asked["model"]
    found: dict[str, None] = {}
    for door, given in asked.items():
        for rule, said in refusals(door, given):
            if rule.here:
                recipe.notes.append(f"on this machine: {said}")
                continue
            place = recipe.places.get(rule.setting, "")
            found[f"{place}: {said}" if place else said] = None
    tokens = recipe.tokens if recipe.flags is not None else None
    tries: list[Callable[[], object]] = [config.check_layers]
    if tokens is not None:
        tries.append(lambda: config.check_sequence(tokens))
    if not found:
        tries.append(lambda: check_algorithms(settings))
    for attempt in tries:
        try:
            attempt()
        except ContextParallelError as error:
            found[str(error)] = None
    return list(found)


def _of_model(recipe: Recipe, settings: Settings) -> dict[str, object]:
    """The part of a program's model that the plugin sees."""
    places = {"config", "latent config", "nowhere for sure"}
    seen = {setting.name for setting in SETTINGS if places.intersection(setting.places)}
    # Of the model itself, which is looked at once it is built.
    seen |= {"position_embedding_type", "hybrid_layer_pattern"}
    if settings.is_recurrent or settings.graphs != "none":
        seen.add("sft")  # packs are looked at in the first step
    return {name: value for name, value in recipe.settings.items() if name in seen}


def _algorithm_of(recipe: Recipe, machine: str) -> tuple[str | None, Choice | None, Shape | None]:
    """The algorithm that is named, or that the planner takes; and the shape of attention."""
    settings = Settings(SimpleNamespace(**recipe.settings))
    flags = recipe.flags
    named = flags.algo if flags is not None and not flags.is_auto else None
    if not all(map(recipe.settings.get, _SIZES)) or not recipe.tokens:
        return named, None, None
    source = SimpleNamespace(**recipe.settings)
    shape = settings.shape(recipe.tokens // settings.samples)
    if named or recipe.size == 1 or _all_sparse(recipe):
        return named, None, shape
    found = machine_named(machine)
    names: tuple[str, ...]
    if flags is None:
        layout = NAMED[recipe.layout]
        batches = BatchFacts(recipe.tokens)
        kinds, names = kinds_of_model(source, batches, layout, recipe.size), (layout.name,)
    else:
        auto = replace(flags, algo=registry.AUTO)
        kinds = counted(kinds_of_layers(auto, settings))
        names = possible_layouts(settings, packed=settings.packing is not None)

    def refusal(combination: Combination) -> str | None:
        if flags is None and (said := of_several(combination)):
            return said
        return next(iter(_refusals(recipe, _of_choice(recipe, combination))), None)

    nodes = nodes_of(settings, found.gpus_per_node)
    site = Site(found, nodes, kernel_on(found, "auto"), found.memory_gib * GIB)
    try:
        choice = choose(kinds, site, layouts=names, refusal=refusal)
    except ConfigError:
        return None, None, shape  # what is refused is said below
    return choice.best.algo, choice, shape


def _of_choice(recipe: Recipe, combination: Combination) -> ContextParallelConfig:
    config = _config_of_recipe(recipe, combination.algo)
    options = dict(combination.options)
    if recipe.flags is None:
        options["layout"] = recipe.layout
    return replace(config, options=tuple(options.items()), by_auto=True)


def _choice_in_words(choice: Choice) -> str:
    others = [one for one in choice.combinations[1:] if one.algo != choice.best.algo]
    machine = choice.site.machine.name
    words = f"{described(choice).replace(' layout=thd', '')}, as plan would take on {machine}"
    if others:
        percent = 100 * (others[0].seconds / choice.best.seconds - 1)
        words += f"; {others[0].algo} is {percent:.0f}% slower in attention"
    return words


def _memory(
    recipe: Recipe, settings: Settings, shape: Shape | None, machine: str, choice: Choice | None
) -> str:
    """Whether it fits."""
    lacks = [name for name in (*_SIZES, "vocab_size") if not recipe.settings.get(name)]
    if not recipe.tokens:
        lacks.append("the tokens of a micro-batch")
    if settings.is_recurrent or _all_sparse(recipe) or settings.hybrid_layer_pattern:
        lacks.append("a count of gated delta net, Mamba or DSA layers")
    if lacks or shape is None:
        return f"not known: the planner lacks {' and '.join(lacks)}"
    parts = memory_of(settings, shape)
    if choice is not None:
        rows = zip(choice.best.rows, choice.tables, strict=True)
        peaks = (peak_of_row(row, table.kind, choice.site) for row, table in rows)
        parts["attention"] = max(peaks) / GIB
    total, gib = sum(parts.values()), machine_named(machine).memory_gib
    verdict = "fits" if total <= gib else "does not fit"
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    words = ", ".join(f"{name} {size:.1f}" for name, size in largest)
    return f"{verdict}: {total:.1f} of {gib:g} GiB by estimate, of it {words}"
