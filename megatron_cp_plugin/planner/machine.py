"""A machine for the simulator: links by class, kernels by tile, memory, the host.

A machine is a YAML file: `configs/machines/NAME.yaml`, or one that `megatron-cp calibrate` wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from math import inf, log
from pathlib import Path
from typing import Any, Self, get_args

from megatron_cp_plugin.core.communication.record import Operation, Phase
from megatron_cp_plugin.errors import ConfigError, nearest
from megatron_cp_plugin.packages import need

OPERATIONS: tuple[Operation, ...] = get_args(Operation)
_FOLDER = Path(__file__).parent.parent / "configs" / "machines"


@dataclass(frozen=True)
class Rate:
    """The time of a message: alpha + bytes / beta.

    Attributes:
        seconds: alpha, of a message of any size.
        bytes_per_second: beta.
    """

    seconds: float
    bytes_per_second: float

    def time(self, size_bytes: float) -> float:
        """Seconds of a message of this many bytes."""
        return self.seconds + size_bytes / self.bytes_per_second


@dataclass(frozen=True)
class Links:
    """Operations of a process group over links of one class.

    Attributes:
        exchange: of two ranks, both ways at a time; bytes that a rank sends.
        collective: by operation and number of ranks that take part; of other numbers the nearest
            one serves.
    """

    exchange: Rate
    collective: Mapping[Operation, Mapping[int, Rate]] = field(default_factory=dict)

    def rate(self, operation: Operation, ranks: int) -> Rate:
        """The rate of an operation; where it is not known, of exchanges."""
        known = self.collective.get(operation)
        if not known:
            return self.exchange
        return known[min(known, key=lambda count: (abs(log(count / ranks)), count))]


@dataclass(frozen=True)
class KernelSpeed:
    """How fast an attention kernel is: seconds + flop / flops * (1 + rows / r + columns / c).

    Attributes:
        flops: a second, of long tiles, counting only pairs that the mask allows.
        rows, columns: of a tile at which it is half as fast.
        packed: added to `rows` if the call has several sequences.
        seconds: of a call of any size.
    """

    flops: float
    rows: float = 0.0
    columns: float = 0.0
    seconds: float = 0.0
    packed: float = 0.0

    def time(self, flop: float, rows: float, columns: float, *, packed: bool = False) -> float:
        """Seconds of a tile with a number of operations, or of tiles in one call (`packed`)."""
        by_row = self.rows + self.packed * packed
        return self.seconds + flop / self.flops * (1 + by_row / rows + self.columns / columns)


@dataclass(frozen=True)
class Kernels:
    """Speeds of one attention kernel at head dim 128.

    Attributes:
        by_pass: by "forward causal", "forward full", "backward causal", "backward full".
        dims: factors of these speeds, by pass and "D" or "D:E"; 1 for others.
    """

    by_pass: Mapping[str, KernelSpeed]
    dims: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Host:
    """Seconds of the host, which launches the GPUs' operations.

    Attributes:
        operation: a kernel of torch.
        kernel, kernel_backward: an attention kernel.
        peer: an exchange by copy engines.
        group: an operation of a process group.
        call, call_backward: of a pass of attention, beside all these.
        fused: a kernel of ours in Triton, which merges or adds partial results.
    """

    operation: float = 0.0
    kernel: float = 0.0
    kernel_backward: float = 0.0
    peer: float = 0.0
    group: float = 0.0
    call: float = 0.0
    call_backward: float = 0.0
    fused: float = 0.0


@dataclass(frozen=True)
class Machine:
    """GPUs of one or several nodes.

    Attributes:
        gpus_per_node: ranks, if several share a GPU.
        ranks_per_gpu: which share its time.
        memory_gib: of a GPU.
        memory_bytes_per_second: of operations bound by memory, reads and writes together.
        operation_seconds: such an operation takes at least.
        matmul_flops: of a model's matrix products.
        peak_flops: of the data sheet, dense in bfloat16, for MFU; None: not known.
        kernels: by kernel's name.
        linear_flops: of a kernel of linear attention, by pass.
        copy: by copy engines over peer memory, inside a node; None: there are none.
        inside, between: over the process group, inside a node; between nodes, of one network card.
        cards_per_node: network cards, each of as many GPUs as another.
        between_total: bytes a second that all nodes together can send, where they share something;
            None: nothing.
        group_share: of a kernel's speed that is left while the process group moves data.
    """

    name: str
    source: str
    gpus_per_node: int
    memory_gib: float
    memory_bytes_per_second: float
    matmul_flops: float
    kernels: Mapping[str, Kernels]
    inside: Links
    between: Links
    copy: Rate | None = None
    linear_flops: Mapping[str, float] = field(default_factory=dict)
    operation_seconds: float = 3e-6
    cards_per_node: int = 1
    between_total: float | None = None
    ranks_per_gpu: int = 1
    peak_flops: float | None = None
    group_share: float = 1.0
    host: Host = Host()

    def __hash__(self) -> int:
        return hash(self.name)  # mappings have none

    def nodes(self, size: int) -> tuple[int, ...]:
        """The node of each rank; nodes are filled one after another."""
        return tuple(rank // self.gpus_per_node for rank in range(size))

    def collective_seconds(
        self, operation: Operation, ranks: int, stride: int, sent: float
    ) -> float:
        """Of a collective operation of all GPUs, in as many groups as stand side by side.

        Args:
            ranks: that take part.
            stride: how far apart they stand.
            sent: bytes of a rank, to anywhere.
        """
        if ranks * stride <= self.gpus_per_node:
            return self.inside.rate(operation, ranks).time(sent)
        local = max(1, self.gpus_per_node // stride)
        a_card = self.gpus_per_node / self.cards_per_node
        return self.crossing_seconds(operation, ranks, local, sent, a_card)[0]

    def crossing_seconds(
        self, operation: Operation, ranks: int, local: int, sent: float, a_card: float
    ) -> tuple[float, float]:
        """Of a collective operation of ranks on several nodes, and the bytes that cross each card.

        Args:
            local: ranks on each node.
            sent: bytes of a rank, to anywhere.
            a_card: ranks whose bytes cross the same network card.
        """
        # A ring leaves a node by one of its ranks.
        between, inside = sent / local, sent
        if operation == "all_to_all":
            between = sent * (ranks - local) / (ranks - 1)
            inside -= between
        seconds = self.between.rate(operation, ranks).time(between * a_card)
        if local > 1:
            seconds = max(seconds, self.inside.rate(operation, local).time(inside))
        return seconds, between * a_card

    def linear_speed(self, phase: Phase) -> float:
        """FLOP a second of linear attention. Raises: ConfigError if they are not known."""
        if phase not in self.linear_flops:
            raise ConfigError(
                f"machine {self.name} has no linear_flops of a {phase}: add them, or use a machine "
                "that megatron-cp calibrate has measured"
            )
        return self.linear_flops[phase]

    def kernel(self, name: str) -> Kernels:
        """Raises: ConfigError if this machine knows no such kernel."""
        if name not in self.kernels:
            raise ConfigError(
                f"machine {self.name} has no kernel {name!r}{nearest(name, self.kernels)}: use one "
                f"of {', '.join(self.kernels)}"
            )
        return self.kernels[name]

    def values(self) -> dict[str, Any]:
        """All values as in YAML, as `of` reads them."""
        return dict(_plain_value(asdict(self)))

    def save(self, path: str | Path) -> None:
        """Writes the machine as YAML."""
        need("a machine's file", "yaml")
        import yaml

        text = yaml.safe_dump(self.values(), sort_keys=False, width=100, default_flow_style=None)
        Path(path).write_text(text)

    @classmethod
    def load(cls, name: str | Path) -> Self:
        """Reads a machine. Args: name: of a file in configs/machines, or a path.

        Raises: ConfigError if there is none, or something in it is missing or unknown.
        """
        need("a machine's file", "yaml")
        import yaml

        path = Path(name) if str(name).endswith((".yaml", ".yml")) else _FOLDER / f"{name}.yaml"
        if not path.is_file():
            shipped = machines()
            raise ConfigError(
                f"there is no machine {str(name)!r}{nearest(str(name), shipped)}: use one of "
                f"{', '.join(shipped)}, or a file that megatron-cp calibrate wrote"
            )
        try:
            return cls.of(yaml.safe_load(path.read_text()))
        except (yaml.YAMLError, TypeError, ValueError, AttributeError, KeyError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(f"machine file {path} cannot be read: {reason}") from None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Reads `values`. Raises: KeyError, TypeError or ValueError for values that do not fit."""
        known = {one.name for one in fields(cls)}
        if unknown := set(values) - known:
            found = min(unknown)
            raise ValueError(f"unknown key {found!r}{nearest(found, known)}")
        copy = values.get("copy")
        machine = cls(
            **{
                **values,
                "kernels": {name: _kernels(value) for name, value in values["kernels"].items()},
                "inside": _links(values["inside"]),
                "between": _links(values["between"]),
                "copy": None if copy is None else Rate(**copy),
                "host": Host(**values.get("host", {})),
            }
        )
        if not machine.kernels:
            raise ValueError("kernels must name one at least, got none")
        _check_numbers("", asdict(machine))
        return machine


def machines() -> tuple[str, ...]:
    """Names of the machines that are shipped."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))


def _plain_value(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain_value(one) for key, one in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


# Values that may be 0: times, and rows and columns of tiles that are no slower.
_FROM_ZERO = frozenset(("seconds", "operation_seconds", "rows", "columns", "packed"))
_COUNTS = frozenset(("gpus_per_node", "cards_per_node", "ranks_per_gpu"))
_SPEEDS = tuple(f"{one} {shape}" for one in get_args(Phase) for shape in ("causal", "full"))


def _check_numbers(where: str, value: Mapping[Any, Any]) -> None:
    """Raises: ValueError for numbers that a machine cannot have, or that are none."""
    for key, one in value.items():
        name = f"{where}{key}"
        if isinstance(one, Mapping):
            if key == "by_pass" and (missing := set(_SPEEDS) - set(one)):
                raise ValueError(f"{name} must have {', '.join(_SPEEDS)}, got no {min(missing)}")
            _check_numbers(f"{name}.", one)
        elif key not in ("name", "source") and one is not None:
            if isinstance(one, bool) or not isinstance(one, int | float):
                raise ValueError(f"{name} must be a number, such as 4.0e+10, got {one!r}")
            of_host = where == "host."
            least = "at least 0" if of_host or key in _FROM_ZERO else "more than 0"
            if not 0 <= one < inf or (least == "more than 0" and not one):
                raise ValueError(f"{name} must be {least}, got {one}")
            if key in _COUNTS and one != int(one):
                raise ValueError(f"{name} must be a whole number, got {one}")
            if key == "group_share" and one > 1:
                raise ValueError(f"{name} must be at most 1, got {one}")


def _links(value: Mapping[str, Any]) -> Links:
    collective = {
        operation: {int(count): Rate(**rate) for count, rate in rates.items()}
        for operation, rates in value.get("collective", {}).items()
    }
    if unknown := set(collective) - set(OPERATIONS):
        raise ValueError(f"unknown operation {min(unknown)!r}: use one of {', '.join(OPERATIONS)}")
    return Links(Rate(**value["exchange"]), collective)


def _kernels(value: Mapping[str, Any]) -> Kernels:
    speeds = {
        name: KernelSpeed(**{key: float(number) for key, number in speed.items()})
        for name, speed in value["by_pass"].items()
    }
    return Kernels(speeds, value.get("dims", {}))
