"""Whatever an error advises is accepted by the check that gave the advice."""

import argparse
import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration import rules
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.checks import check_arguments
from megatron_cp_plugin.integration.features import FEATURES, Rule
from megatron_cp_plugin.integration.settings import Settings
from tests.integration.test_rules import ASKING, BESIDE

CPU = torch.device("cpu")
MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 8 --seq-length 5040 "
    "--context-parallel-size 4 --attention-dropout 0 --position-embedding-type rope "
    "--no-rope-fusion --context-parallel-algo zigzag"
).split()


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


# What a command line has, of how many processes, and the advice that follows, one by one, in
# the words of the message and in those of a command line. The last word of a flag counts.
COMMANDS: tuple[tuple[str, int, dict[str, str]], ...] = (
    ("--seq-length 5044", 4, {
        "use 5040": "--seq-length 5040",
        "or 5048": "--seq-length 5048",
        "or --context-parallel-algo ring": "--context-parallel-algo ring",
    }),
    ("--context-parallel-size 6 --context-parallel-algo usp --cp-options ulysses=4", 6, {
        "use one of 1": "--cp-options ulysses=1",
        ", 2": "--cp-options ulysses=2",
        "or 0": "--cp-options ulysses=0",
    }),
    ("--context-parallel-size 6 --context-parallel-algo attention2d --cp-options rows=4", 6, {
        "use one of 1": "--cp-options rows=1",
        ", 2": "--cp-options rows=2",
        ", 6": "--cp-options rows=6",
        "or 0": "--cp-options rows=0",
    }),
    ("--context-parallel-algo attention2d --cp-options variant=overlap chunks=2", 4, {
        "variant zigzag": "--cp-options variant=zigzag",
        "or no": "--cp-options variant=no",
    }),
    ("--context-parallel-size 3", 4, {
        "use context_parallel_size 1": "--context-parallel-size 1",
        "or 2": "--context-parallel-size 2",
        "or 4": "--context-parallel-size 4",
    }),
    ("--tensor-model-parallel-size 3 --context-parallel-size 2", 6, {
        "use tensor_model_parallel_size 1": "--tensor-model-parallel-size 1",
    }),
    ("--tensor-model-parallel-size 4 --group-query-attention --num-query-groups 6 "
     "--num-attention-heads 12 --context-parallel-size 1", 4, {
        "use one of 1": "--num-query-groups 1",
        ", 12": "--num-query-groups 12",
    }),
    ("--tensor-model-parallel-size 2 --sequence-parallel --seq-length 5036 "
     "--context-parallel-algo ring", 8, {
        "use 5032": "--seq-length 5032",
        "or 5040": "--seq-length 5040",
    }),
    ("--window-size 100", 4, {"use --window-size 99,0": "--window-size 99,0"}),
    ("--window-size 100,1", 4, {"use --window-size 100,0": "--window-size 100,0"}),
    ("--window-size=-5,0", 4, {"use --window-size -1,0": "--window-size=-1,0"}),
    ("--context-parallel-algo lasp", 4, {
        "choose --cp-linear-model transnormer":
            "--cp-linear-model transnormer --position-embedding-type none",
        "or linear_transformer":
            "--cp-linear-model linear_transformer --position-embedding-type none",
    }),
    ("--cp-linear-model transnormer --position-embedding-type none", 4, {
        "add --context-parallel-algo lasp2": "--context-parallel-algo lasp2",
    }),
    ("--logits-load-dir folder --context-parallel-algo ulysses", 4, {
        "use --context-parallel-algo zigzag": "--context-parallel-algo zigzag",
    }),
    ("--cp-layers ring,zigzag --context-parallel-algo ring", 4, {
        "in place of ring use allgather":
            "--cp-layers allgather,zigzag --context-parallel-algo allgather",
        "or attention2d": "--cp-layers attention2d,zigzag --context-parallel-algo zigzag",
        "or ulysses": "--cp-layers ulysses,zigzag --context-parallel-algo zigzag",
        "or usp": "--cp-layers usp,zigzag --context-parallel-algo zigzag",
        "or zigzag": "--cp-layers zigzag --context-parallel-algo zigzag",
        "or add --cp-options layout=contiguous": "--cp-options layout=contiguous",
    }),
    ("--cp-kernel cudnn", 4, {"use kernel auto": "--cp-kernel auto"}),
)  # fmt: skip


def check(parser: argparse.ArgumentParser, words: list[str], processes: int) -> None:
    flags, rest = split_flags(words)
    args = parser.parse_args(rest)
    args.world_size = processes
    flags.check()
    flags.comm_type.check_model(args)
    check_arguments(args, flags.config(args.context_parallel_size), CPU)


@pytest.mark.parametrize(
    ("flags", "processes", "advice"), COMMANDS, ids=[flags for flags, *_ in COMMANDS]
)
def test_flags_that_an_error_proposes(
    flags: str, processes: int, advice: dict[str, str], parser: argparse.ArgumentParser
) -> None:
    words = [*MODEL, *flags.split()]
    with pytest.raises(ContextParallelError) as error:
        check(parser, words, processes)
    proposed, place = str(error.value), 0
    for text, instead in advice.items():
        place = proposed.find(text, place)
        assert place >= 0, (text, proposed)
        kept = _without(words, instead.split())
        check(parser, [*kept, *instead.split()], processes)


def _without(words: list[str], instead: list[str]) -> list[str]:
    """A command line without what another choice of the algorithm, or of its options, replaces."""
    names = {word.partition("=")[0] for word in instead if word.startswith("--")}
    if "--context-parallel-algo" in names:
        names.add("--cp-options")
    elif any(word.startswith("variant=") for word in instead):
        names.remove("--cp-options")  # the others stay
    kept: list[str] = []
    dropping = False
    for word in words:
        if word.startswith("--"):
            dropping = word.partition("=")[0] in names
        if not dropping:
            kept.append(word)
    return kept


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.setting)
def test_what_a_refused_feature_proposes(feature: Rule, parser: argparse.ArgumentParser) -> None:
    args = parser.parse_args(split_flags(MODEL)[1])
    args.world_size = 4
    value = ASKING.get(feature.setting, True)
    vars(args).update({feature.setting: value} | BESIDE.get(feature.name, {}))
    config = split_flags(MODEL)[0].config(4)
    stage = feature.stages[-1]  # that of models has less to say of other things
    with pytest.raises(ContextParallelError, match=re.escape(feature.instead)):
        rules.check(stage, Settings(args, config))
    changes = list(_changes(feature, parser))
    assert changes
    for change in changes:
        changed = copy.copy(args)
        change(changed)
        rules.check(stage, Settings(changed, config))


def _changes(
    feature: Rule, parser: argparse.ArgumentParser
) -> Iterator[Callable[[argparse.Namespace], Any]]:
    """What each choice of an advice does to Megatron's arguments."""
    defaults = vars(parser.parse_args(split_flags(MODEL)[1]))
    options = parser._option_string_actions
    flag, value = r"--[\w-]+", r"[^-\s]\S*"
    for choice in re.split(r", or ", feature.instead):
        leave = re.fullmatch(r"leave (.+) out(?:, and choose a kernel with --cp-kernel)?", choice)
        add = re.fullmatch(rf"(?:add|use) ({flag}(?: {value})?(?: {flag}(?: {value})+)?)", choice)
        words = re.fullmatch(r"use (.+)", choice)
        if choice == "use scripts/pretrain_gpt.py --config":
            yield lambda args: setattr(args, "yaml_cfg", None)
        elif leave and leave[1] == "mlp":
            yield lambda args: setattr(args, "recompute_modules", ["core_attn"])
        elif leave:
            names = [feature.setting] if feature.flag in leave[1] else []
            names += [options[f].dest for f in re.findall(flag, leave[1]) if f in options]
            yield lambda args, names=names: vars(args).update(
                {name: defaults.get(name) for name in names}
            )
        elif choice == "use --hybrid-layer-pattern":
            taken = {"hybrid_override_pattern": None, "hybrid_layer_pattern": "*-"}
            yield lambda args, taken=taken: vars(args).update(taken)
        elif add:
            given = vars(parser.parse_args([*split_flags(MODEL)[1], *add[1].split()]))
            dests = [options[f].dest for f in re.findall(flag, add[1])]
            taken = {dest: given[dest] for dest in dests}
            if feature.setting not in taken and "add" not in choice:
                taken[feature.setting] = defaults.get(feature.setting)
            yield lambda args, taken=taken: vars(args).update(taken)
        elif words and feature.setting == "hybrid_layer_pattern":
            pattern = "".join(re.split(r", | and ", words[1]))
            yield lambda args, pattern=pattern: setattr(args, "hybrid_layer_pattern", pattern)
        elif words:
            for value in re.split(r", | or ", words[1]):
                yield lambda args, value=value: setattr(args, feature.setting, value)
        else:
            raise AssertionError(choice)


@pytest.mark.parametrize(("count", "group"), [(1, None), (3, None), (2, 1), (4, 3)])
def test_micro_batches_that_an_error_proposes(
    count: int, group: int | None, parser: argparse.ArgumentParser
) -> None:
    args = parser.parse_args(split_flags(MODEL)[1])
    args.pipeline_model_parallel_size = args.virtual_pipeline_model_parallel_size = 2
    args.micro_batch_size = args.data_parallel_size = 2
    args.global_batch_size = 4 * count
    args.microbatch_group_size_per_vp_stage = group
    with pytest.raises(ContextParallelError, match=r"use --\S+ \d+$") as error:
        rules.check("validated", Settings(args))
    flag, number = str(error.value).split()[-2:]
    dest = parser._option_string_actions[flag].dest
    setattr(args, dest, int(number))
    rules.check("validated", Settings(args))
