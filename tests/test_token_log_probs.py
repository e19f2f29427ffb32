"""Samples of a file, for log-probabilities of their labels; the runs are in test_invariance.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.token_log_probs import read_batch


def test_labels_are_what_follows_unless_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.save({"tokens": tokens}, path)
    (_, found), mask = read_batch(path)
    assert not mask
    assert {name: x.tolist() for name, x in found.items()} == {
        "tokens": [4, 5, 6],
        "labels": [5, 6, 4],
        "loss_mask": [1, 1, 0],
        "position_ids": [0, 1, 2],
    }
    torch.save({"tokens": tokens, "labels": tokens + 1}, path)
    assert read_batch(path)[0][0]["labels"].tolist() == [2, 3, 4]
    assert read_batch(path)[0][0]["loss_mask"].tolist() == [1, 1, 1]
    mask = torch.tensor([[True, False, True]] * 2)
    torch.save({"tokens": tokens, "loss_mask": mask}, path)
    assert read_batch(path)[0][0]["loss_mask"].tolist() == [1, 0, 1]


def test_a_pack_brings_its_spans(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    (pack,) = cp.pack_rollouts([[1, 2, 3], [1, 2, 4]], [[0, 0.5, 0], [0, -2, 3]], multiple=8)
    torch.save(pack.batch(), path)
    (found,), mask = read_batch(path)
    assert found["loss_mask"].tolist() == (pack.weights != 0).tolist()
    assert found["labels"].tolist() == pack.labels.tolist()
    assert mask["attention_spans"] == pack.spans
    assert mask["attention_positions"][0].tolist() == pack.positions.tolist()


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "batch.pt: AttributeError"),
        ({"labels": torch.ones(1, 2)}, "batch.pt: KeyError('tokens')"),
        ({"tokens": torch.ones(2, dtype=torch.int64)}, "batch.pt: AssertionError"),
        ({"tokens": torch.ones(2, 2)}, "batch.pt: AssertionError"),
        ({"tokens": torch.ones(2, 2).long(), "loss_mask": torch.ones(2, 3)}, "AssertionError"),
        ({"tokens": torch.ones(2, 2).long(), "spans": []}, "got spans in"),
    ],
)
def test_other_files_are_refused(content: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    torch.save(content, path)
    with pytest.raises(ConfigError, match=re.escape(said)) as error:
        read_batch(path)
    assert "\n" not in str(error.value)
