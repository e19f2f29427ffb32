"""The table of supported combinations, derived from the code that decides at start-up.

`markdown()` is docs/capabilities.md; a test holds the two together, and tests run every cell of
the table of algorithms.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.kernels.choice import kernels
from megatron_cp_plugin.kernels.linear import linear_kernels
from megatron_cp_plugin.layers import layout_choices

RANKS = 8  # of the questions below
_PAGE = Path(__file__).with_suffix(".md").read_text()


@dataclass(frozen=True)
class Capability:
    """One algorithm with its default options.

    Attributes:
        layouts: all that it can have, the default first.
        full: serves attention without a mask.
        window: serves sliding windows.
        few_heads: serves fewer query heads than ranks.
        few_kv_heads: serves fewer KV heads than ranks.
    """

    name: str
    kind: registry.Kind
    layouts: tuple[str, ...]
    full: bool
    window: bool
    few_heads: bool
    few_kv_heads: bool


def capabilities() -> tuple[Capability, ...]:
    """One entry for each registered algorithm, softmax attention first."""
    names = (*registry.available("softmax"), *registry.available("linear"))
    return tuple(_capability(name) for name in names)


def _capability(name: str) -> Capability:
    cls = registry.algorithm_class(name)
    default = registry.layout_of(name, {}).name
    layouts = tuple(dict.fromkeys((default, *(layout for layout, *_ in layout_choices(name)))))
    if not issubclass(cls, Algorithm):
        few = _asked(lambda: cls.check(cls.Options(), size=RANKS, heads=RANKS // 2))
        return Capability(name, "linear", layouts, True, False, few, False)
    return Capability(
        name,
        "softmax",
        layouts,
        full=_serves(cls, heads=2 * RANKS, kv_heads=2 * RANKS, causal=False),
        window=cls.windows,
        few_heads=_serves(cls, heads=RANKS // 2, kv_heads=RANKS // 2),
        few_kv_heads=_serves(cls, heads=2 * RANKS, kv_heads=RANKS // 4),
    )


def _serves(cls: type[Algorithm], *, heads: int, kv_heads: int, causal: bool = True) -> bool:
    return _asked(
        lambda: cls.check(cls.Options(), size=RANKS, heads=heads, kv_heads=kv_heads, causal=causal)
    )


def _asked(check: Callable[[], None]) -> bool:
    try:
        check()
    except ConfigError:
        return False
    return True


def markdown() -> str:
    """The tables of algorithms, of kernels and of refused Megatron features."""
    from megatron_cp_plugin.integration.features import FEATURES

    algorithms = []
    for row in capabilities():
        few_kv = "-" if row.kind == "linear" else _yes_or_no(row.few_kv_heads)
        cells = [
            _yes_or_no(True),
            _yes_or_no(row.full),
            _yes_or_no(row.window),
            _yes_or_no(row.few_heads),
            few_kv,
        ]
        layouts = ", ".join(row.layouts)
        algorithms.append(f"| `{row.name}` | {row.kind} | {layouts} | {' | '.join(cells)} |")
    softmax = [
        f"| `{k.name}` | softmax | {_yes_or_no(k.deterministic)} | {_yes_or_no(k.packs)} |"
        for k in kernels()
    ]
    linear = [
        f"| `{k.name}` | linear | {_yes_or_no(k.deterministic)} | no |" for k in linear_kernels()
    ]
    features = [f"| {f.name} | `{f.flag}` | {f.reason} | {f.instead} |" for f in FEATURES]
    return _PAGE.format(
        algorithms="\n".join(algorithms),
        kernels="\n".join([*softmax, *linear]),
        features="\n".join(features),
    )


def _yes_or_no(value: bool) -> Literal["yes", "no"]:
    return "yes" if value else "no"
