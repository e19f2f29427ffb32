"""The candidates for an attention layer: algorithms with their options, from the registry.

Nothing is computed or sent; refused candidates are left out, with the reason.
"""

from dataclasses import Field, dataclass, fields
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple, get_args

from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Algorithm
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.document_layout import PaddedDocuments
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.placement import Placement
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.layers import Options
from megatron_cp_plugin.planner.layer import AnyShape, checked


@dataclass(frozen=True)
class Candidate:
    """An algorithm with options.

    Attributes:
        options: options that differ from their defaults.
        placements: placements of forward and backward; candidates with equal placements do the
            same. Empty: linear attention's.
    """

    algo: str
    options: Options
    layout: Layout
    placements: tuple[Placement, ...]


class Refusal(NamedTuple):
    """A refused candidate, and the reason."""

    name: str
    reason: str


def label(algo: str, options: Options) -> str:
    """An algorithm with its options in words."""
    return " ".join((algo, *(f"{name}={value}" for name, value in options)))


def candidates(
    shape: AnyShape, mask: Mask, topology: Topology, layouts: tuple[str, ...] | None = None
) -> tuple[list[Candidate], list[Refusal]]:
    """All candidates for a layer, each once, in a fixed order.

    Of candidates that do the same, the one with the fewest options is taken. The first refusal of
    each algorithm is reported; contradictory combinations of options are not.

    Args: layouts: names of the layouts that tokens may have; None: all layouts that need no change
        in the code that cuts batches.
    """

    def is_open(layout: Layout) -> bool:
        if layouts is not None:
            return layout.name in layouts
        cut_by_callers = layout.name == PaddedDocuments.name
        return not cut_by_callers and (not layout.follows_documents or bool(mask.resolved))

    found: dict[object, Candidate] = {}
    refused: dict[str, Refusal] = {}
    for algo in registry.available("linear" if isinstance(shape, LinearShape) else "softmax"):
        cls = registry.algorithm_class(algo)
        for options, given in _combinations(cls, topology.size):
            if not is_open(cls.layout_for(options)):
                continue
            placements: tuple[Placement, ...] = ()  # linear attention has none
            try:
                algorithm = checked(cls(topology, options), shape, mask)
                if isinstance(algorithm, Algorithm):
                    assert isinstance(shape, Shape)
                    placements = tuple(algorithm.placement(shape, mask, phase) for phase in PHASES)
            except ContextParallelError as error:
                if len(given) < 2:
                    refused.setdefault(algo, Refusal(label(algo, given), str(error)))
                continue
            one = Candidate(algo, given, algorithm.layout, placements)
            found.setdefault(placements or (algo, given), one)
    return list(found.values()), list(refused.values())


@lru_cache(maxsize=128)  # many questions are of as many ranks
def _combinations(
    cls: registry.AnyClass, size: int
) -> tuple[tuple[Algorithm.Options, Options], ...]:
    """All combinations of options, with the fewest options first; and which options are given."""
    hints, options = registry.option_types(cls.Options), fields(cls.Options)
    names = [option.name for option in options]
    values = [_values(option, hints[option.name], size) for option in options]
    defaults = vars(cls.Options())
    found = []
    for chosen in product(*values):
        every = dict(zip(names, chosen, strict=True))
        given = tuple((name, value) for name, value in every.items() if value != defaults[name])
        found.append((cls.Options(**every), given))
    return tuple(sorted(found, key=lambda one: len(one[1])))


def _values(option: Field[Any], kind: object, size: int) -> list[object]:
    """Values of an option that are tried: all layouts, and those that its declaration names. All
    other options stay as they are by default, by which an algorithm decides itself.
    """
    if option.name == "layout":
        return list(get_args(kind))
    worth_trying = option.metadata.get("worth_trying")
    return [option.default] if worth_trying is None else list(worth_trying(size))
