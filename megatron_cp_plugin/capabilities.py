"""The table of supported combinations, derived from the code that decides at start-up.

`markdown()` is docs/capabilities.md; a test holds the two together, and tests run every cell of
the table of algorithms.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megatron_cp_plugin import registry
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.choice import kernels
from megatron_cp_plugin.kernels.linear import linear_kernels
from megatron_cp_plugin.layers import layout_choices

RANKS = 8  # of the questions below
# What an algorithm is asked for beside causal attention of twice as many heads as ranks.
PROBLEMS: Mapping[str, Mapping[str, Any]] = {
    "causal": {},
    "full": {"causal": False},
    "few heads": {"heads": RANKS // 2, "kv_heads": RANKS // 2},
    "few KV heads": {"kv_heads": RANKS // 4},
}
_PAGE = Path(__file__).with_suffix(".md").read_text()


class Capability(NamedTuple):
    """One algorithm with its default options.

    Attributes:
        layouts: all that it can have, the default first.
        serves: whether it serves each of `PROBLEMS`, of those that its kind of attention has.
        windows: whether it serves sliding windows.
    """

    name: str
    kind: registry.Kind
    layouts: tuple[str, ...]
    serves: Mapping[str, bool]
    windows: bool


def capabilities() -> Iterator[Capability]:
    """One entry for each registered algorithm, softmax attention first."""
    for name in (*registry.available("softmax"), *registry.available("linear")):
        kind = registry.kind_of(name)
        layouts = (
            registry.layout_of(name, {}).name,
            *(layout for layout, *_ in layout_choices(name)),
        )
        # Linear attention has as many KV heads as query heads.
        asked = [one for one in PROBLEMS if kind == "softmax" or one != "few KV heads"]
        serves = {one: _serves(name, **PROBLEMS[one]) for one in asked}
        windows = getattr(registry.algorithm_class(name), "windows", False)
        yield Capability(name, kind, tuple(dict.fromkeys(layouts)), serves, windows)


def _serves(name: str, **problem: Any) -> bool:
    cls = registry.algorithm_class(name)
    asked = {"heads": 2 * RANKS, "kv_heads": 2 * RANKS, "causal": True} | problem
    try:
        cls.check(cls.Options(), size=RANKS, **asked)
    except ConfigError:
        return False
    return True


def markdown() -> str:
    """The tables of algorithms, of kernels and of refused Megatron features."""
    from megatron_cp_plugin.integration.features import FEATURES

    algorithms = []
    for row in capabilities():
        causal, full, *heads = (_word(row.serves.get(problem)) for problem in PROBLEMS)
        cells = row.kind, ", ".join(row.layouts), causal, full, _word(row.windows), *heads
        algorithms.append(f"| `{row.name}` | {' | '.join(cells)} |")
    every = [(k.name, "softmax", k.deterministic, k.packs) for k in kernels()]
    every += [(k.name, "linear", k.deterministic, False) for k in linear_kernels()]
    lines = [f"| `{name}` | {kind} | {_word(a)} | {_word(b)} |" for name, kind, a, b in every]
    features = [f"| {f.name} | `{f.flag}` | {f.reason} | {f.instead} |" for f in FEATURES]
    return _PAGE.format(
        algorithms="\n".join(algorithms), kernels="\n".join(lines), features="\n".join(features)
    )


def _word(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "no"
