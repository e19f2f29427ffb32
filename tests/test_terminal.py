"""Folders that cannot be written to are found before anything is computed for them."""

from pathlib import Path

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.terminal import check_file, check_folder


def test_folders_that_are_there_or_can_be_made(tmp_path: Path) -> None:
    check_folder("--save", tmp_path)
    check_folder("--save", tmp_path / "a" / "b")
    check_file("--output", tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "a", "a/b"])
def test_folders_that_cannot(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--save got \S+/file\S*, where nothing can be written"):
        check_folder("--save", tmp_path / "file" / below)
    with pytest.raises(ConfigError, match=r"\((No such file|Permission).* in /proc\)"):
        check_folder("--save", "/proc/checkpoints")  # nobody's, root's included
    with pytest.raises(ConfigError, match="is a folder: name a file"):
        check_file("--output", tmp_path)
