"""What the launcher's installer writes into Megatron's settings, and whose groups it serves."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.integration import installer
from megatron_cp_plugin.integration.args import PluginFlags, split_flags
from megatron_cp_plugin.integration.installer import LauncherInstaller


def launcher() -> LauncherInstaller:
    flags, _ = split_flags(["--context-parallel-algo", "ring"])
    return LauncherInstaller(flags, torch.device("cpu"))


@pytest.mark.parametrize(
    ("seq_length", "written"),
    [(64, (64, None)), (68, (None, 68)), (None, (None, None))],
    ids=str,
)
def test_a_length_that_megatron_would_refuse_goes_by_its_other_name(
    seq_length: int | None, written: tuple[int | None, int | None]
) -> None:
    """It demands a multiple of 2P of one of the two."""
    given = SimpleNamespace(seq_length=seq_length, encoder_seq_length=None)
    installer._write_args(ContextParallelConfig("ring", 4), given)
    assert (given.seq_length, given.encoder_seq_length) == written
    assert given.create_attention_mask_in_dataloader is False


@pytest.mark.parametrize("given", [None, "another"])
def test_a_batch_is_split_over_the_group_that_the_caller_names(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or over that of all context-parallel ranks."""
    from megatron.core import parallel_state

    def original(batch: Any, is_hybrid_cp: bool = False, cp_group: Any = None) -> None: ...

    launched = launcher()
    launched._batches = SimpleNamespace(shard=lambda batch, group: (batch, group))  # type: ignore
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: "all")
    assert launched._get_batch(original, {}, cp_group=given) == ({}, given or "all")


def test_what_auto_chose_is_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = list[PluginFlags]()
    monkeypatch.setattr(
        "megatron_cp_plugin.integration.auto.check_same_choice",
        lambda flags: compared.append(flags),
    )
    launched, runtime = launcher(), object()
    launched._runtime = runtime  # type: ignore[assignment]
    assert launched._runtime_of({}) is runtime
    assert compared == []
    monkeypatch.setattr(
        "megatron_cp_plugin.integration.auto.fastest", lambda *given: (launched._flags, None)
    )
    launched._resolved = object()  # type: ignore[assignment]
    given = {"pg_collection": SimpleNamespace(cp=None)}
    assert launched._runtime_of(given) is launched._runtime_of(given) is runtime
    assert compared == [launched._flags]
