"""Machines by name, and those that cannot be."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.detected_machine import machine_named
from megatron_cp_plugin.planner.machine import Machine
from megatron_cp_plugin.planner.model import MODELS
from megatron_cp_plugin.planner.simulate import simulate


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        ("memory_gib", -1, "memory_gib must be more than 0, got -1"),
        ("memory_gib", float("nan"), "memory_gib must be more than 0, got nan"),
        ("inside exchange bytes_per_second", 0, "inside.exchange.bytes_per_second must be more"),
        ("between exchange bytes_per_second", "1e11", "must be a number, such as 4.0e+10, got '1e"),
        ("between exchange seconds", -1e-6, "between.exchange.seconds must be at least 0, got"),
        ("gpus_per_node", 0, "gpus_per_node must be more than 0, got 0"),
        ("gpus_per_node", 2.5, "gpus_per_node must be a whole number, got 2.5"),
        ("group_share", 1.5, "group_share must be at most 1, got 1.5"),
        ("kernels", {}, "kernels must name one at least, got none"),
        ("kernels flash4 by_pass", {}, "got no backward causal"),
        ("host call", True, "host.call must be a number"),
    ],
)
def test_machines_that_cannot_be(tmp_path: Path, keys: str, value: object, message: str) -> None:
    values = Machine.load("h100_400g").values()
    *path, last = keys.split()
    inner = values
    for key in path:
        inner = inner[key]
    inner[last] = value
    file = tmp_path / "machine.yaml"
    file.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        Machine.load(file)
    assert str(error.value).startswith(f"machine file {file} cannot be read: ")
    assert "\n" not in str(error.value)


def test_linear_attention_on_a_machine_that_does_not_know_it() -> None:
    machine = replace(machine_named("h100"), linear_flops={})
    with pytest.raises(ConfigError, match="has no linear_flops of a forward: add them, or use"):
        simulate("lasp2", {}, MODELS["tnl-1b"].shape(8192), Mask(), machine, (0, 0))
