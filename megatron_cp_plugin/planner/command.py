"""What `megatron-cp plan` prints of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.extras import need
from megatron_cp_plugin.planner.candidates import Options
from megatron_cp_plugin.planner.choose import GIB, Kind, Place, choose
from megatron_cp_plugin.planner.explain import sentence, table
from megatron_cp_plugin.planner.here import kernel_on, machine_named

_KERNEL = "flash4"


def plan_layer(name: str, size: int, shape: Shape, mask: Mask, path: Path | None) -> None:
    """Prints which algorithm is the fastest for a layer, and why.

    Args: name: of a machine. size: number of ranks. path: of a run file to write.
    """
    machine = machine_named(name)
    place = Place(
        machine, machine.nodes(size), kernel_on(machine, _KERNEL), machine.memory_gib * GIB
    )
    choice = choose([Kind("attention", shape, mask)], place)
    print(table(choice))
    print(sentence(choice))
    if path is not None:
        megatron = {"context_parallel_size": size, "seq_length": shape.seq_len}
        write_run_file(path, megatron, choice.best.algo, choice.best.options)


def write_run_file(
    path: Path,
    megatron: Mapping[str, object],
    algo: str,
    options: Options,
    layers: Sequence[str] = (),
) -> None:
    """Writes what was chosen as a run file, and says so.

    Args: layers: the algorithm of each, where they have several.
    """
    need("megatron", "--yaml", "yaml")
    import yaml

    chosen: dict[str, object] = {"algo": algo, **dict(options)}
    if len(set(layers)) > 1:
        chosen["layers"] = pattern(layers)
    sections = {"megatron": dict(megatron), "context_parallel": chosen}
    path.write_text(yaml.safe_dump(sections, sort_keys=False))
    print(f"wrote {path}")


def pattern(layers: Sequence[str]) -> str:
    """Layers as `layers.parse_layers` reads them."""
    runs = [(name, len(list(same))) for name, same in groupby(layers)]
    return ", ".join(name if count == 1 else f"{name}*{count}" for name, count in runs)
