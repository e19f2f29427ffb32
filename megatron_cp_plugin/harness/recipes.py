"""Reads recipes of Megatron, Megatron-Bridge, verl, slime and ms-swift as settings of Megatron.

Nothing of a recipe is run, and none of the programs needs to be installed but Megatron, whose
parser knows its flags. What a program has of its own is a table here; a setting that neither it nor
Megatron has is kept by name.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.models import PublicModel, model_named
from megatron_cp_plugin.harness.shell import UNKNOWN, Command, Word, commands
from megatron_cp_plugin.integration.args import (
    PluginFlags,
    add_arguments,
    speak_in_one_line,
    split_flags,
)
from megatron_cp_plugin.integration.contract import SETTINGS
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

type Program = Literal["Megatron", "Megatron-Bridge", "verl", "slime", "ms-swift"]

_READ = {setting.name for setting in SETTINGS}
# The plugin reads them for the planner's memory alone.
_OF_MEMORY = {"moe_layer_freq", "vocab_size", "ffn_hidden_size", "rampup_batch_size"}

# What a program has of its own.
_PROGRAMS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("programs.yaml").read_text()
)
# All layers are sparse attention of the program's own.
OWN_SPARSE = "own_sparse_layers"


def _is_ignored(program: Program, name: str) -> bool:
    """Whether a setting says nothing about how a model is split or built."""
    about = _PROGRAMS[program]
    return bool(re.fullmatch(f"({'|'.join(about['ignored'].split())}){about['then']}", name))


@dataclass
class Recipe:
    """What a recipe says.

    Attributes:
        settings: Megatron's, by name.
        places: Where they were written.
        model: That it names, if it is known.
        flags: Of the plugin, on Megatron's command line; None: its batches are cut by a program.
        layout: By which that program cuts them.
        gpus: How many it starts on; None: it does not say.
        tokens: Of a micro-batch, on all context-parallel ranks.
        beyond: Why the plugin has no part in it; empty: it may have.
        unknown: What is not understood, one line each.
        notes: What else to say.
    """

    program: Program
    settings: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    model: PublicModel | None = None
    flags: PluginFlags | None = None
    layout: str = "thd"
    gpus: int | None = None
    tokens: int | None = None
    beyond: str = ""
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Context-parallel ranks."""
        return int(self.settings.get("context_parallel_size") or 1)


def read_recipe(words: Sequence[str], model: str | None = None) -> Recipe:
    """Reads a recipe.

    Args:
        words: A file, or `recipe.py:function`, and words that its command line would have besides;
            or only such words.
        model: The name of its model, where it says none that is known.

    Raises:
        ConfigError: There is no such file, or no recipe in it.
    """
    first, _, function = words[0].partition(":")
    path, rest = Path(first), [Word(word, "command line") for word in words[1:]]
    if not path.is_file():
        if path.suffix in (".sh", ".yaml", ".yml", ".py"):
            raise ConfigError(f"there is no recipe at {first}: name a file, or give flags after --")
        return _of_words([Word(word, "command line") for word in words], model)
    if path.suffix in (".yaml", ".yml"):
        return _of_words([*_of_yaml(path), *rest], model)
    if path.suffix == ".py":
        if not function:
            raise ConfigError(f"{path.name} may have many recipes: name one as {first}:FUNCTION")
        return _of_words([*_of_python(path, function), *rest], model)
    every, problems = commands(path)
    chosen = max(every, key=_parallel, default=[])
    if not _parallel(chosen):
        raise ConfigError(
            f"{path.name} has no command that says how a model is split: give its flags after --"
        )
    recipe = _of_words([*chosen, *rest], model)
    recipe.unknown += problems
    return recipe


def _parallel(command: Command) -> int:
    return sum("parallel" in word.text for word in command)


def _of_words(command: Command, model: str | None) -> Recipe:
    """Args: command: flags, or KEY=VALUE."""
    keys = [word.text.lstrip("+~") for word in command]
    if _is_swift(keys):
        recipe = _of_swift(command)
    elif any(key.startswith(("actor_rollout_ref.", "engine.", "model_engine=")) for key in keys):
        recipe = _of_verl(command)
    elif any(key.startswith(("model.", "recipe=", "--recipe")) for key in keys):
        recipe = _of_bridge(command)
    elif any(key.startswith("--") for key in keys):
        recipe = _of_flags(command)
    else:
        raise ConfigError(
            f"{command[0].text if command else 'nothing'} is neither flags of Megatron nor "
            "settings such as model.context_parallel_size=2: see megatron-cp check --help"
        )
    if model is not None:
        recipe.model = model_named(model)
        if recipe.model is None:
            raise ConfigError(f"--model got {model}, which is not known: leave it out")
    if recipe.model is not None:
        recipe.settings = dict(recipe.model.settings) | recipe.settings
    elif recipe.program in ("Megatron-Bridge", "verl", "ms-swift"):
        recipe.unknown.append("the model: name one that is known with --model")
    recipe.settings |= {"moe_layer_freq": _frequency(recipe.settings)}
    return recipe


def _frequency(settings: Mapping[str, Any]) -> object:
    dense, layers = settings.get("first_dense_layers"), settings.get("num_layers")
    if dense and layers:
        return [0] * dense + [1] * (layers - dense)
    return settings.get("moe_layer_freq")


def _of_flags(command: Command) -> Recipe:
    """Of Megatron's command line, or slime's."""
    scripts = [at for at, word in enumerate(command) if word.text.endswith(".py")]
    before, command = (
        (command[: scripts[0]], command[scripts[0] + 1 :]) if scripts else ([], command)
    )
    is_slime = any(word.text in ("--hf-checkpoint", "--ref-load") for word in command)
    recipe = Recipe("slime" if is_slime else "Megatron")
    parser = _parser()
    actions = parser._option_string_actions
    kept: list[Word] = []
    for flag, values in _flags(command):
        action = actions.get(flag.text)
        # After a single value it may be anything, flags too; after several it is one more of them.
        stray = [value for value in values[1:2] if value.text == UNKNOWN and not value.known]
        recipe.unknown += [f"{value.text}: what it stands for ({value.place})" for value in stray]
        values = [value for value in values if value not in stray]
        if action is None or all(value.known for value in values):
            kept += [flag, *values]
            continue
        name = action.dest
        if action.type in (None, str):
            kept += [flag, *values]
        elif name in _READ - _OF_MEMORY:
            recipe.unknown.append(f"{flag.text}: its value ({flag.place})")
        else:
            recipe.notes.append(f"the value of {flag.text} is not known ({flag.place})")
    recipe.places = {actions[word.text].dest: word.place for word in kept if word.text in actions}
    flags, words = split_flags([word.text for word in kept])
    recipe.flags = None if is_slime else flags
    if not is_slime:
        flags.check()
    args, others = parser.parse_known_args(words)
    recipe.settings = vars(args)
    places = {word.text: word.place for word in command}
    own = vars(args) | _number_of_processes(before)
    for flag, values in _flags([Word(text, places.get(text, "")) for text in others]):
        value = values[0].text if values else None
        if is_slime and _is_ignored("slime", flag.text.lstrip("-")):
            own[flag.text] = value or True
        else:
            recipe.unknown.append(
                f"{' '.join([flag.text, *(w.text for w in values)])} ({flag.place})"
            )
    if is_slime:
        _as_in_slime(recipe, own)
    else:
        recipe.tokens = args.seq_length or args.encoder_seq_length
        recipe.gpus = own.get("processes")
    return recipe


def _parser() -> argparse.ArgumentParser:
    """Megatron's."""
    return speak_in_one_line(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


def _as_in_slime(recipe: Recipe, own: Mapping[str, Any]) -> None:
    settings = recipe.settings
    names = ("--actor-num-nodes", "--actor-num-gpus-per-node", "--max-tokens-per-gpu")
    nodes, each, tokens = (str(own.get(name)) for name in names)
    if nodes.isdecimal() and each.isdecimal():
        recipe.gpus = int(nodes) * int(each)
    if tokens.isdecimal():
        recipe.tokens = int(tokens) * recipe.size
    recipe.layout = "contiguous" if own.get("--allgather-cp") else "thd"
    settings |= _PROGRAMS["slime"]["sets"] | {"bf16": not settings["fp16"]}
    if not settings.get("micro_batch_size"):
        settings["micro_batch_size"] = 1
    name = (settings.get("spec") or ("",))[0].removeprefix("slime_plugins.models.")
    if not settings.get("spec"):
        return
    layers = _PROGRAMS["slime"]["layers"]
    if name not in layers:
        recipe.unknown.append(f"--spec {name}: its layers ({recipe.places.get('spec')})")
    settings |= layers.get(name, {})
    if name in _PROGRAMS["slime"]["gathered"]:
        recipe.notes.append(
            "slime computes its gated delta nets of whole documents on all ranks: the plugin "
            "serves the other layers"
        )
        if recipe.layout != "thd":
            recipe.unknown.append("--allgather-cp: slime gathers by another layout")


def _number_of_processes(words: Command) -> dict[str, int]:
    text = " ".join(word.text for word in words)
    counts = [
        re.search(rf"--{name}[= ](\d+)", text) for name in (r"nproc[-_]per[-_]node", "nnodes")
    ]
    if counts[0] is None:
        return {}
    return {"processes": int(counts[0][1]) * (int(counts[1][1]) if counts[1] else 1)}


def _flags(words: Sequence[Word]) -> Iterator[tuple[Word, list[Word]]]:
    """Each flag with its values; words that belong to none by themselves."""
    found: list[tuple[Word, list[Word]]] = []
    for word in words:
        if word.text.startswith("--") and "=" in word.text:
            flag, _, value = word.text.partition("=")
            found.append((Word(flag, word.place), [Word(value, word.place, word.known)]))
        elif word.text.startswith("--") or not found:
            found.append((word, []))
        else:
            found[-1][1].append(word)
    yield from found


def _pairs(command: Command) -> Iterator[tuple[str, Any, Word]]:
    """KEY=VALUE as Hydra takes them."""
    for word in command:
        key, equals, text = word.text.lstrip("+").partition("=")
        if not equals or key.startswith("-"):
            continue
        try:
            yield key, yaml.safe_load(text) if word.known else None, word
        except yaml.YAMLError:
            yield key, text, word


_FIELDS = {one.name for one in fields(MLATransformerConfig)}  # of a model's configuration
_FIELDS_OF_ARGS = {"num_moe_experts": "num_experts"}


def _set(recipe: Recipe, name: str, value: Any, word: Word) -> None:
    name = _FIELDS_OF_ARGS.get(name, name)
    if not word.known and name in _READ - _OF_MEMORY - {"seq_length"}:
        recipe.unknown.append(f"{word.text}: its value ({word.place})")
        return
    recipe.settings[name] = value
    recipe.places[name] = word.place


def _of_verl(command: Command) -> Recipe:
    recipe = Recipe("verl", dict(_PROGRAMS["verl"]["sets"]))
    per_gpu, counts, mtp = None, {}, {}
    for key, value, word in _pairs(command):
        own = re.fullmatch(r"(?:actor_rollout_ref\.actor\.megatron|engine)\.(.+)", key)
        if own:
            name = own[1].removeprefix("override_transformer_config.")
            inner = name != own[1]
            if name == "dynamic_context_parallel":
                continue  # its engine has a loop of its own, whose micro-batches say their ranks
            if name in _PROGRAMS["verl"]["of_npus"] and value:
                recipe.beyond = (
                    f"{word.place}: {name} is a flag of MindSpeed, for NPUs, got it: leave it out "
                    "on GPUs"
                )
            elif name in _FIELDS or name == "use_megatron_fsdp":
                _set(recipe, name, value, word)
            elif inner or not _is_ignored("verl", name):
                recipe.unknown.append(f"{word.text} ({word.place})")
        elif key.endswith("model.path") and "ref" in key.split(".")[0] + "ref":
            recipe.model = recipe.model or model_named(str(word.text.partition("=")[2]))
        elif key in ("model_engine", "actor_rollout_ref.actor.strategy") and value != "megatron":
            recipe.beyond = (
                f"{value} builds no GPTModel of Megatron, got it as the engine: use megatron"
            )
        elif re.search(r"actor\.ppo_max_token_len_per_gpu$|^data\.max_token_len_per_gpu$", key):
            per_gpu = value
        elif re.fullmatch(r"trainer\.(nnodes|n_gpus_per_node)", key):
            counts[key] = value
        elif ".model.mtp." in f".{key}":
            mtp[key.rpartition(".")[2]] = value
    if mtp.get("enable") and mtp.get("enable_train", True):
        recipe.settings["mtp_num_layers"] = 1
    if len(counts) == 2 and all(isinstance(count, int) for count in counts.values()):
        nodes, each = counts.values()
        recipe.gpus = nodes * each
    if isinstance(per_gpu, int):
        recipe.tokens = per_gpu * recipe.size
    return recipe


def _of_bridge(command: Command) -> Recipe:
    recipe = Recipe("Megatron-Bridge", dict(_PROGRAMS["Megatron-Bridge"]["sets"]))
    words = [word.text for word in command]
    names = [after for word, after in pairwise(words) if word == "--recipe"]
    for key, value, word in _pairs(command):
        section, _, name = key.partition(".")
        if key in ("recipe", "--recipe", "hf_path") or key.endswith("tokenizer_model"):
            names.append(str(value))
        elif section == "model":
            if name in _FIELDS or name in _READ:
                _set(recipe, name, value, word)
            elif not _is_ignored("Megatron-Bridge", name):
                recipe.unknown.append(f"{word.text} ({word.place})")
        elif section in ("train", "ddp", "comm_overlap") and name in _READ:
            _set(recipe, name, value, word)
        elif value and re.search(_PROGRAMS["Megatron-Bridge"]["packed"], key):
            recipe.settings["sft"] = True
        elif key == "dist.use_decentralized_pg" and value:
            recipe.unknown.append(f"{word.text}: groups without Megatron's parallel state")
        if key in ("model.seq_length", "dataset.seq_length") and isinstance(value, int):
            recipe.tokens = value
    recipe.model = next(filter(None, map(model_named, names)), None)
    if recipe.tokens is not None:
        recipe.tokens *= recipe.settings["micro_batch_size"] or 1
    return recipe


def _is_swift(keys: Sequence[str]) -> bool:
    """Whether words are `megatron sft --key value` and the like, or keys of such a YAML file."""
    commands = {"sft", "pt", "rlhf", "export"}
    started = any(a == "megatron" and b in commands for a, b in pairwise(keys))
    return started or any(key.startswith("tensor_model_parallel_size=") for key in keys)


def _of_swift(command: Command) -> Recipe:
    recipe = Recipe("ms-swift", dict(_PROGRAMS["ms-swift"]["sets"]))
    own: dict[str, Any] = {}
    pairs = [
        (flag.text.lstrip("-"), flag, values[0].text if values else "true", values)
        for flag, values in _flags(command)
        if flag.text.startswith("--")
    ] or [(key, word, str(value), []) for key, value, word in _pairs(command)]
    for name, flag, text, values in pairs:
        value = yaml.safe_load(text)
        if name in _FIELDS or name in _READ:
            written = Word(f"{flag.text} {text}", flag.place, all(each.known for each in values))
            _set(recipe, name, value, written)
        elif _is_ignored("ms-swift", name):
            own[name] = value
        else:
            recipe.unknown.append(f"{flag.text} {text} ({flag.place})")
    recipe.model = model_named(str(own.get("model", "")))
    recipe.gpus = next(
        (int(word.text[15:]) for word in command if re.match(r"NPROC_PER_NODE=\d+$", word.text)),
        None,
    )
    packed = own.get("packing") or own.get("padding_free", True)
    recipe.settings["sft"] = bool(packed)
    if recipe.settings["mtp_num_layers"]:
        recipe.beyond = (
            "mcore-bridge shifts rotary angles of multi-token prediction in the order that a rank "
            "has its tokens in, got mtp_num_layers: leave it out"
        )
    if isinstance(own.get("max_length"), int):
        samples = 1 if own.get("packing") else recipe.settings["micro_batch_size"]
        recipe.tokens = own["max_length"] * (samples if packed else 1)
        recipe.settings["micro_batch_size"] = 1 if packed else samples
    return recipe


def _of_yaml(path: Path) -> Command:
    """A file of settings as KEY=VALUE, and a run file of ours as flags."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} has no settings: write a mapping")
    if isinstance(content.get("megatron"), dict):
        parser = add_arguments(_parser())
        return [Word(word, path.name) for word in yaml_to_argv(str(path), parser, [])]
    return [
        Word(f"{key}={yaml.safe_dump(value, default_flow_style=True).split(chr(10))[0]}", path.name)
        for key, value in _leaves(content)
    ]


def _leaves(content: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _of_python(path: Path, function: str) -> Command:
    """What a function of Bridge assigns to `cfg`, as KEY=VALUE."""
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if function not in functions:
        raise ConfigError(f"{path.name} has no function {function}: name one of its recipes")
    names = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    found = list(_assigned(functions[function], functions, names, path.name))
    return [*found, Word(f"recipe={function}", path.name)]


def _assigned(
    function: ast.FunctionDef,
    functions: Mapping[str, ast.FunctionDef],
    outer: Mapping[str, ast.expr],
    place: str,
) -> Iterator[Word]:
    names = dict(outer)
    arguments = function.args.args
    names |= {
        argument.arg: default
        for argument, default in zip(
            arguments[len(arguments) - len(function.args.defaults) :],
            function.args.defaults,
            strict=True,
        )
    }
    for node in ast.walk(function):
        called = node.func if isinstance(node, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr == "from_hf_pretrained":
            assert isinstance(node, ast.Call)
            for argument in node.args[:1]:
                yield Word(f"hf_path={_constant(argument, names)}", f"{place}:{node.lineno}")
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target, value = node.targets[0], node.value
        if isinstance(target, ast.Name):
            names[target.id] = value
            base = value.func if isinstance(value, ast.Call) else None
            if isinstance(base, ast.Name) and base.id in functions:
                yield from _assigned(functions[base.id], functions, outer, place)
                yield Word(f"recipe={base.id}", place)
            continue
        key = ast.unparse(target).removeprefix("cfg.").replace("model_cfg.", "model.")
        if "." not in key and not key.startswith("dataset"):
            continue  # a provider, of which the model's name was taken
        found = _constant(value, names)
        known = found is not ...
        text = str(found) if known else ast.unparse(value)
        if key.startswith("dataset") and "packing" in ast.unparse(value):
            yield Word("dataset.enable_offline_packing=true", f"{place}:{node.lineno}")
        yield Word(f"{key}={'null' if found is None else text}", f"{place}:{node.lineno}", known)


def _constant(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """The value of a literal, a name of one or a product; ...: it is something else."""
    if isinstance(node, ast.Name) and node.id in names:
        return _constant(names[node.id], {k: v for k, v in names.items() if k != node.id})
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        left, right = _constant(node.left, names), _constant(node.right, names)
        return left * right if isinstance(left, int) and isinstance(right, int) else ...
    if isinstance(node, ast.Attribute):
        return ast.unparse(node)
    try:
        return ast.literal_eval(node)
    except ValueError:
        return ...
