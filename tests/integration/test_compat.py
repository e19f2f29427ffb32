"""Versions of Megatron, and programs that have imported its names before."""

import sys
from types import ModuleType

import megatron.core
import pytest
import torch
from megatron.core.models.gpt import GPTModel

from megatron_cp_plugin.integration import compat, contract
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.contract import VERSIONS
from megatron_cp_plugin.integration.installer import LauncherInstaller
from tests.integration.test_contract import check, refusal


@pytest.mark.parametrize("version", ["0.15.3", "0.21.0", "0.22.0rc1", "1.0.0"])
def test_versions_that_nobody_ran(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    assert refusal(lambda: check("algorithm")) == (
        f"Megatron {version} was never tested with this plugin: use {', '.join(VERSIONS[:-1])} "
        f"or {VERSIONS[-1]}, or add --cp-allow-untested-megatron to run it if it has everything "
        "that the plugin relies on"
    )


def test_an_untested_version_that_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held against the table all the same."""
    monkeypatch.setattr(megatron.core, "__version__", "0.21.0")
    flags, rest = split_flags(["--context-parallel-algo", "ring", "--cp-allow-untested-megatron"])
    assert flags.allow_untested_megatron
    assert rest == []
    compat.check_megatron("algorithm", allow_untested=True)
    monkeypatch.delattr(megatron.core.utils, "get_batch_on_this_cp_rank")
    constructor = GPTModel.__init__
    said = refusal(
        lambda: LauncherInstaller(flags, torch.device("cpu")).install(allow_untested=True)
    )
    assert ": megatron.core.utils.get_batch_on_this_cp_rank is missing" in said
    assert GPTModel.__init__ is constructor  # nothing was replaced


@pytest.mark.parametrize("version", [*VERSIONS, "0.19.7", "0.20.0+d98e8a64d", "0.20.0rc1"])
def test_versions_that_are_served(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", version)
    monkeypatch.setattr(compat, "problems", lambda *parts: [])
    check("algorithm")


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ("record", "--cp-record needs Megatron 0.18 or later, got 0.17.1: leave it out"),
        ("script", "this script needs Megatron 0.19 or later, got 0.17.1: start the pretrain_gpt"),
    ],
)
def test_what_a_version_cannot_have(
    part: contract.Part, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.17.1")
    assert refusal(lambda: check(part)).startswith(said)


def test_a_program_that_has_imported_a_name_before_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mcore-bridge, whose `roll_tensor` would go on to know Megatron's layout only."""
    from megatron.core.transformer import multi_token_prediction

    framework = ModuleType("a_framework")
    framework.rolled = own = multi_token_prediction.roll_tensor
    monkeypatch.setitem(sys.modules, framework.__name__, framework)
    (replacement,) = compat.replace({"roll_tensor": lambda original, x: -x}, "algorithm")
    assert framework.rolled(3) == multi_token_prediction.roll_tensor(3) == -3
    compat.Replacement.undo([replacement])
    assert framework.rolled is multi_token_prediction.roll_tensor is own
