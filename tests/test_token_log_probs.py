"""Samples of a file, for log-probabilities of their labels; the runs are in test_invariance.py."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness.token_log_probs import read_batch


def test_labels_are_what_follows_unless_they_are_given(tmp_path: Path) -> None:
    path = tmp_path / "batch.pt"
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    torch.save({"tokens": tokens}, path)
    _, found = read_batch(path)
    assert {name: x.tolist() for name, x in found.items()} == {
        "tokens": [4, 5, 6],
        "labels": [5, 6, 4],
        "loss_mask": [1, 1, 0],
        "position_ids": [0, 1, 2],
    }
    torch.save({"tokens": tokens, "labels": tokens + 1}, path)
    assert read_batch(path)[0]["labels"].tolist() == [2, 3, 4]
    assert read_batch(path)[0]["loss_mask"].tolist() == [1, 1, 1]
    mask = torch.tensor([[True, False, True]] * 2)
    torch.save({"tokens": tokens, "loss_mask": mask}, path)
    assert read_batch(path)[0]["loss_mask"].tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "batch.pt: TypeError"),
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
