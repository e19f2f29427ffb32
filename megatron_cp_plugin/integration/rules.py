"""What is refused: one table of rules, `rules.toml`, and the one function that walks it.

The start-up checks and the documentation both come from the table.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from math import gcd, prod  # noqa: F401  (the table's)
from pathlib import Path
from string import Template
from typing import Any, get_args

from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.algorithms.lasp2 import Lasp2
from megatron_cp_plugin.config import LINEAR_MODELS  # noqa: F401  (the table's)
from megatron_cp_plugin.core.algorithm import PointToPoint
from megatron_cp_plugin.core.chunked_loss import CHUNK_TOKENS  # noqa: F401  (the table's)
from megatron_cp_plugin.core.layout import Zigzag
from megatron_cp_plugin.errors import ConfigError, near_multiples  # noqa: F401  (the table's)
from megatron_cp_plugin.integration.comm_type import TYPES
from megatron_cp_plugin.integration.compat import running_version  # noqa: F401  (the table's)
from megatron_cp_plugin.integration.settings import Settings
from megatron_cp_plugin.layers import layout_choices
from megatron_cp_plugin.paths import check_folder

# Where settings come in, by names of the table: "sizes": what does not depend on the algorithm;
# "arguments": Megatron's as parsed; "start" and "files": whether a script can start with them, with
# and without an algorithm; "validated"; "training": of a script that trains; "model": the
# configuration of a model, "serve": of one for `serve`, "linear layer" and "recurrent layer": of
# such a layer; "batch": one that says of no documents; and those of [[checks]].
type Door = str
type Words = dict[str, object] | None


@dataclass(frozen=True)
class Rule:
    """One thing that is refused.

    Attributes:
        when: Whether settings ask for it, or, if so, numbers and words for the text: an expression,
            see `rules.toml`.
        text: What to say in one line: what, got, and what to do; of an f-string.
        doors: Where it is checked.
        name: As a user would call it, of a feature of Megatron that no algorithm supports.
        setting: That asks for it, named like its flag, if it is one.
        reason: Of a feature: why it is refused.
        instead: Of a feature: what to do.
        here: Whether it asks what is installed on this machine.
    """

    when: str
    text: str
    doors: tuple[Door, ...] = ("arguments", "model")
    name: str = ""
    setting: str = ""
    reason: str = ""
    instead: str = ""
    here: bool = False

    @property
    def flag(self) -> str:
        """The command-line flag of the setting."""
        return _flag(self.setting)

    def refusal(self, settings: Any, **given: object) -> str | None:
        """Returns what to say to settings; None: they do not ask for it.

        Args: given: what else expressions know.
        """
        names = globals() | given | {"s": settings}
        found = eval(_compiled(f"({self.when})"), names)
        if not found:
            return None
        words = found if isinstance(found, dict) else {}
        return str(eval(_compiled(f"f'''{self.text}'''"), names | words))


@cache
def _compiled(expression: str) -> Any:
    return compile(expression, "rules.toml", "eval")


def _read(table: Mapping[str, Any], name: str) -> Iterator[Rule]:
    """The rules of a list of `rules.toml`."""
    for row in table[name]:
        given = table["words"] | table["kinds"].get(row.get("kind"), {}) | row
        for setting in row.get("settings", [row.get("setting", "")]):
            words = given | {"setting": setting, "flag": _flag(setting)}
            filled = {field: _filled(words[field], words) for field in _FIELDS if field in words}
            yield Rule(**filled)


_FIELDS = Rule.__dataclass_fields__


def _filled(value: Any, words: Mapping[str, str]) -> Any:
    """A text of a row with its words, which may have words too; lists as tuples."""
    if isinstance(value, list):
        return tuple(value)
    while isinstance(value, str) and "$" in value:
        value = Template(value).substitute(words)
    return value


def refusals(door: Door, settings: Settings) -> Iterator[tuple[Rule, str]]:
    """Everything that the table does not let through a door, with what `check` says of it."""
    rules = (rule for rule in RULES if door in rule.doors)
    return ((rule, said) for rule in rules if (said := rule.refusal(settings)))


def check(door: Door, settings: Any, **given: object) -> None:
    """Refuses what the table does not let through a door.

    Args: given: as `Rule.refusal` takes them.

    Raises:
        ConfigError: One line that says what is wrong, and what to do.
    """
    for rule in _OF_DOOR[door]:
        if said := rule.refusal(settings, **given):
            raise ConfigError(said)


def replaced(door: Door, settings: Settings) -> list[str]:
    """What to say of settings that are served, one line each."""
    lines = (rule.refusal(settings) for rule in REPLACED if door in rule.doors)
    return [line for line in lines if line]


def _flag(setting: str) -> str:
    return "--" + setting.replace("_", "-")


# What expressions of the table call.


def plain(value: Any) -> Any:
    """A setting as on the command line, of an enumeration its name."""
    return getattr(value, "name", value)


def _processes(s: Settings) -> Words:
    names = "context_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"
    sizes = {name: getattr(s, name) for name in names}
    product = prod(sizes.values())
    if s.world_size % product == 0:
        return None
    large = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    factors = " * ".join(large) + (f" = {product}" if len(large) > 1 else "")
    others = product // s.ranks
    usable = [str(n) for n in range(1, s.world_size + 1) if s.world_size % (n * others) == 0]
    fitting = f", or use context_parallel_size {' or '.join(usable)}" if usable else ""
    return {"factors": factors, "product": product, "fitting": fitting}


def _divisors(number: int) -> list[str]:
    return [str(n) for n in range(1, number + 1) if number % n == 0]


def _groups(s: Settings) -> str:
    """Numbers of groups that fit. With fewer than ranks, Megatron gives each to several ranks."""
    every = map(int, _divisors(s.num_attention_heads))
    return ", ".join(str(n) for n in every if n % s.tensor == 0 or s.tensor % n == 0)


def _without_windows(s: Settings) -> Words:
    if s.window is None or s.cp.algo == registry.AUTO:
        return None
    names = registry.available("softmax")
    serving = [name for name in names if getattr(registry.algorithm_class(name), "windows", False)]
    lacking = [name for name in s.cp.algorithms if name in names and name not in serving]
    return {"lacking": lacking[0], "serving": " or ".join(serving)} if lacking else None


def _exchanges_heads(algo: str) -> bool:
    known = algo in registry.available("softmax")
    return known and not issubclass(registry.algorithm_class(algo), PointToPoint)


def _layout_without_states(s: Settings) -> Words:
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


def _zigzag_choices(s: Settings) -> str:
    """How to have Megatron's own layout."""
    every = registry.available("softmax")
    default = [name for name in every if registry.layout_of(name, {}).name == Zigzag.name]
    choices = _options_for(s, [Zigzag.name])
    choices.append(f"--context-parallel-algo {' or '.join(default)}")
    return ", or ".join(choices)


def _kept_mib(s: Settings) -> float:
    """Of attention of a layer and micro-batch: out [B,S,H,E], and lse [B,H,S] in float32."""
    heads, _ = s.split_heads
    tokens = s.samples * s.seq_length // s.cp.size
    return float(tokens * heads * (s.head_dims[1] * s.dtype.itemsize + 4) / 2**20)


def _differ(other: Tensor | None, lengths: Tensor | None) -> bool:
    if other is None or other is lengths:
        return False
    return lengths is None or not lengths.equal(other)


def _padded(real: Sequence[int], bounds: Sequence[int]) -> bool:
    """Whether documents of cumulative lengths are as many with padding, and none is shorter."""
    both = zip(pairwise(real), pairwise(bounds), strict=False)
    return len(real) == len(bounds) and all(b - a <= d - c for (a, b), (c, d) in both)


def _name(kind: Any) -> str:
    return getattr(kind, "__name__", repr(kind))


def _count(spans: Sequence[object] | None) -> str:
    return "no spans" if spans is None else f"{len(spans)} spans"


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

    Raises:
        ConfigError: One of the folders cannot be written to.
    """
    for name in ("save", "tensorboard_dir"):
        path = getattr(s, name)
        if path is not None and not _is_remote(path):
            check_folder(_flag(name), path)


def _missing_data(s: Settings) -> Words:
    """Of the paths of --data-path on this machine, which may have a weight before each."""
    for word in () if s.mock_data or s.sft else map(str, s.data_path or ()):
        if re.fullmatch(r"[-+.\de]+", word) or _is_remote(word):
            continue
        names = [f"{word}{suffix}" for suffix in (".bin", ".idx")]
        if missing := [name for name in names if not Path(name).exists()]:
            pieces = " --document-bytes 200" if s.packing else ""
            return {"prefix": word, "missing": " and no ".join(missing), "pieces": pieces}
    return None


def _is_remote(path: object) -> bool:
    return "://" in str(path)


def _micro_batches(s: Settings) -> Words:
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


def _without_steps(s: Settings) -> Words:
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


def _replaced_communication(s: Settings) -> Words:
    """Names of Transformer Engine's, but for its default, and what the layers of DSA ask for."""
    given = _comm_types(s) & (TYPES.keys() - {"p2p"})
    if s.is_sparse or all(TYPES[name] == s.cp.algo for name in given):
        return None
    return {"given": " ".join(sorted(given))}


def comm_type(algo: str) -> str:
    """What model configurations say that the plugin serves.

    Transformer Engine refuses it, so that its own context parallelism never takes the place of ours
    where such a configuration reaches a process without the plugin installed.
    """
    return f"megatron_cp_plugin.{algo}"


_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
RULES = tuple(_read(_TABLE, "rules"))
CHECKS = tuple(_read(_TABLE, "checks"))
_OF_DOOR: dict[Door, list[Rule]] = {}
for _rule in (*RULES, *CHECKS):
    for _door in _rule.doors:
        _OF_DOOR.setdefault(_door, []).append(_rule)
FEATURES = tuple(rule for rule in RULES if rule.name)
REPLACED = tuple(_read(_TABLE, "replaced"))
