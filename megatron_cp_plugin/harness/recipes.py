"""Reads recipes of Megatron, Megatron-Bridge, verl, slime and ms-swift as settings of Megatron.

Nothing of a recipe is run, and none of the programs needs to be installed but Megatron, whose
parser knows its flags. What a program has of its own is a table here; a setting that neither it nor
Megatron has is kept by name.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.models import PublicModel, model_named
from megatron_cp_plugin.harness.shell import UNKNOWN, Command, Word, script_commands
from megatron_cp_plugin.integration.args import (
    OneLineParser,
    PluginFlags,
    add_arguments,
    split_flags,
)
from megatron_cp_plugin.integration.contract import SETTINGS
from megatron_cp_plugin.integration.yaml_config import yaml_to_argv

type Program = Literal["Megatron", "Megatron-Bridge", "verl", "slime", "ms-swift"]

_READ = {setting.name for setting in SETTINGS}
# The plugin reads them for the planner's memory alone.
_OF_MEMORY = {"moe_layer_freq", "vocab_size", "ffn_hidden_size", "rampup_batch_size"}

# Settings of a program alone.
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
    """The settings of a recipe.

    Attributes:
        settings: Megatron's, by name.
        places: Where they were written.
        model: That it names, if it is known.
        flags: Of the plugin, on Megatron's command line; None: its batches are cut by a program.
        layout: By which that program cuts them.
        gpus: How many it starts on; None: it does not say.
        tokens: Of a micro-batch, on all context-parallel ranks.
        beyond: Why the plugin has no part in it; empty: it may have.
        unknown: Settings that are not understood, one line each.
        notes: Further remarks.
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
    every, problems = script_commands(path)
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
    lines = "\n".join(word.text.lstrip("+~") for word in command)
    programs = (name for name, about in _PROGRAMS.items() if re.search(about["known_by"], lines))
    program: Any = next(programs, None)
    if program is None:
        raise ConfigError(
            f"{command[0].text if command else 'nothing'} is neither flags of Megatron nor "
            "settings such as model.context_parallel_size=2: see megatron-cp check --help"
        )
    recipe = _READERS[program](command) if program in _READERS else _of_flags(program, command)
    if model is not None:
        recipe.model = model_named(model)
        if recipe.model is None:
            raise ConfigError(f"--model got {model}, which is not known: leave it out")
    if recipe.model is not None:
        recipe.settings = dict(recipe.model.settings) | recipe.settings
    elif program in _READERS:
        recipe.unknown.append("the model: name one that is known with --model")
    recipe.settings |= {"moe_layer_freq": _frequency(recipe.settings)}
    return recipe


def _frequency(settings: Mapping[str, Any]) -> object:
    dense, layers = settings.get("first_dense_layers"), settings.get("num_layers")
    if dense and layers:
        return [0] * dense + [1] * (layers - dense)
    return settings.get("moe_layer_freq")


def _of_flags(program: Program, command: Command) -> Recipe:
    """Of Megatron's command line, or slime's."""
    is_slime = program == "slime"
    scripts = [at for at, word in enumerate(command) if word.text.endswith(".py")]
    before, command = (
        (command[: scripts[0]], command[scripts[0] + 1 :]) if scripts else ([], command)
    )
    recipe = Recipe(program)
    parser = add_megatron_arguments(OneLineParser(allow_abbrev=False))
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


def _pairs(command: Command) -> Iterator[tuple[str, Word]]:
    """KEY=VALUE as Hydra takes them: keys, and words of the values."""
    for word in command:
        key, equals, text = word.text.lstrip("+").partition("=")
        if equals and not key.startswith("-"):
            yield key, replace(word, text=text)


_FIELDS = {one.name for one in fields(MLATransformerConfig)}  # of a model's configuration
_FIELDS_OF_ARGS = {"num_moe_experts": "num_experts"}


def _of_pairs(
    program: Program, pairs: Iterable[tuple[str, Word]], form: str = "{}={}"
) -> tuple[Recipe, dict[str, Any]]:
    """The settings and the model among keys with their values, and all values by key.

    Args: form: of a key and its value in messages.
    """
    about = _PROGRAMS[program]
    recipe, values = Recipe(program, dict(about["sets"])), dict[str, Any]()
    for key, word in pairs:
        said = form.format(key, word.text)
        values[key] = value = _value(word)
        if re.fullmatch(about["model"], key):
            recipe.model = recipe.model or model_named(word.text)
        found = re.fullmatch(about["settings"], key)
        given = found[found.lastindex or 0] if found else ""
        name = given.removeprefix("override_transformer_config.")
        name = _FIELDS_OF_ARGS.get(name, name)
        if name in _FIELDS or name in _READ:
            if not word.known and name in _READ - _OF_MEMORY - {"seq_length"}:
                recipe.unknown.append(f"{said}: its value ({word.place})")
            else:
                recipe.settings[name], recipe.places[name] = value, word.place
        elif found and found.lastindex == 1 and not _is_ignored(program, given):
            recipe.unknown.append(f"{said} ({word.place})")
        if value and (found := re.fullmatch(about.get("of_npus", ""), key)):
            recipe.beyond = (
                f"{word.place}: {found[1]} is a flag of MindSpeed, for NPUs, got it: leave it out "
                "on GPUs"
            )
    return recipe, values


def _value(word: Word) -> Any:
    """None: it is not known."""
    try:
        return yaml.safe_load(word.text) if word.known else None
    except yaml.YAMLError:
        return word.text


def _last_value(values: Mapping[str, Any], pattern: str) -> Any:
    """The value of the last key that matches a pattern; None: no key does."""
    found = [value for key, value in values.items() if re.search(pattern, key)]
    return found[-1] if found else None


def _of_verl(command: Command) -> Recipe:
    recipe, values = _of_pairs("verl", _pairs(command))
    engine = _last_value(values, r"^(model_engine|actor_rollout_ref\.actor\.strategy)$")
    if engine not in (None, "megatron"):
        recipe.beyond = (
            f"{engine} builds no GPTModel of Megatron, got it as the engine: use megatron"
        )
    trains = _last_value(values, r"\bmodel\.mtp\.enable_train$")
    if _last_value(values, r"\bmodel\.mtp\.enable$") and trains in (None, True):
        recipe.settings["mtp_num_layers"] = 1
    nodes, each = values.get("trainer.nnodes"), values.get("trainer.n_gpus_per_node")
    if isinstance(nodes, int) and isinstance(each, int):
        recipe.gpus = nodes * each
    tokens = _last_value(values, r"actor\.ppo_max_token_len_per_gpu$|^data\.max_token_len_per_gpu$")
    if isinstance(tokens, int):
        recipe.tokens = tokens * recipe.size
    return recipe


def _of_bridge(command: Command) -> Recipe:
    named = [("recipe", name) for flag, name in pairwise(command) if flag.text == "--recipe"]
    recipe, values = _of_pairs("Megatron-Bridge", [*named, *_pairs(command)])
    if any(value and re.search(_PACKED, key) for key, value in values.items()):
        recipe.settings["sft"] = True
    if values.get("dist.use_decentralized_pg"):
        recipe.unknown.append("dist.use_decentralized_pg: groups without Megatron's parallel state")
    tokens = _last_value(values, r"^(model|dataset)\.seq_length$")
    if isinstance(tokens, int):
        recipe.tokens = tokens * (recipe.settings["micro_batch_size"] or 1)
    return recipe


_PACKED = r"packed_sequence_size|enable_(offline|in_batch)_packing|packed_sequence_specs"


def _of_swift(command: Command) -> Recipe:
    """`megatron sft --key value` and the like, or keys of such a YAML file."""
    flags = [
        (flag.text.lstrip("-"), values[0] if values else Word("true", flag.place))
        for flag, values in _flags(command)
        if flag.text.startswith("--")
    ]
    recipe, own = _of_pairs("ms-swift", flags or _pairs(command), "--{} {}" if flags else "{}={}")
    started = (re.fullmatch(r"NPROC_PER_NODE=(\d+)", word.text) for word in command)
    recipe.gpus = next((int(found[1]) for found in started if found), None)
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


_READERS = {"ms-swift": _of_swift, "verl": _of_verl, "Megatron-Bridge": _of_bridge}


def _of_yaml(path: Path) -> Command:
    """A file of settings as KEY=VALUE, and a run file of ours as flags."""
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ConfigError(f"{path.name} is no YAML: {str(error).splitlines()[0]}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path.name} has no settings: write a mapping")
    if isinstance(content.get("megatron"), dict):
        parser = add_arguments(add_megatron_arguments(OneLineParser(allow_abbrev=False)))
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
    """The assignments of a function of Bridge to `cfg`, as KEY=VALUE."""
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
    file: str,
) -> Iterator[Word]:
    arguments = zip(function.args.args[::-1], function.args.defaults[::-1], strict=False)
    names = {**outer, **{argument.arg: default for argument, default in arguments}}
    for node in ast.walk(function):
        match node:
            case ast.Call(ast.Attribute(attr="from_hf_pretrained"), [path, *_]):
                yield Word(f"hf_path={_constant(path, names)}", f"{file}:{node.lineno}")
            case ast.Assign([ast.Name(name)], value):
                names[name] = value
                if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
                    base = functions.get(value.func.id)
                    if base is not None:
                        yield from _assigned(base, functions, outer, file)
                        yield Word(f"recipe={base.name}", file)
            case ast.Assign([target], value):
                key = ast.unparse(target).removeprefix("cfg.").replace("model_cfg.", "model.")
                if "." not in key and not key.startswith("dataset"):
                    continue  # a provider, of which the model's name was taken
                found, written, place = _constant(value, names), ast.unparse(value), node.lineno
                if key.startswith("dataset") and "packing" in written:
                    yield Word("dataset.enable_offline_packing=true", f"{file}:{place}")
                text = "null" if found is None else written if found is ... else found
                yield Word(f"{key}={text}", f"{file}:{place}", found is not ...)


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
