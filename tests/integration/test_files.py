"""Data that are missing, before Megatron looks for them."""

import argparse
import struct
from pathlib import Path

import pytest
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration import files
from megatron_cp_plugin.integration.files import check_files


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--data-path data/x",
         "--data-path got data/x, and there is no data/x.bin and no data/x.idx: write the run "
         "files' data with megatron-cp prepare-data --output data/x, or add --mock-data"),
        ("--data-path 0.5 there 0.5 half", "and there is no half.idx: "),
        ("--data-path half --dataloader-inter-document-masking",
         "prepare-data --output half --document-bytes 200"),
        ("--valid-data-path there absent", "--valid-data-path got absent, and"),
        ("--data-path absent --sft", "--data-path got absent, and there is no such file"),
        ("--save there.bin/x", "--save got there.bin/x, where nothing can be written"),
        ("--tensorboard-dir there.bin --mock-data", "--tensorboard-dir got there.bin"),
        ("--data-path broken", "broken.idx is no index that Megatron can read"),
        ("--data-path few --split 98,2,0",
         "--split 98,2,0 leaves none of the 24 document(s) of few for validation: add documents, "
         "or use --split 100,0,0"),
        ("--data-path few", "--split 969,30,1 leaves none of the 24 document(s) of few for"),
        ("--data-path few --split 90,10 --eval-iters 0 --seq-length 20",
         "--split 90,10 leaves 20 tokens of few for validation, and a sample has 21: add"),
        ("--data-path few --split 90,10 --eval-iters 0 --seq-length 19", None),
        ("--data-path few --split 90,10 --eval-iters 1 --seq-length 20", None),
        ("--data-path few --split 100,0,0", None),
        ("--data-path few --split 90,10", None),
        ("--data-path there", None),
        ("--data-path 1 there 2.5 there --save new", None),
        ("--data-path absent --mock-data", None),
        ("--sft --mock-data",
         "--sft trains on conversations, which Megatron makes no mock data of, got --mock-data: "),
        ("--data-path msc://bucket/x --save s3://bucket/y", None),
        ("--data-path there.bin --sft", None),
        ("--data-path there.bin --sft --eval-iters 0",
         "--sft with --eval-iters 0 needs all conversations for training, got --split 969,30,1: "
         "use --split 100,0,0, or --eval-iters 1"),
        ("--data-path there.bin --sft --eval-iters 0 --split 100,0,0", None),
        ("--valid-data-path there.bin --sft --eval-iters 0", None),
        ("", None),
    ],
)  # fmt: skip
def test_data_and_folders(
    flags: str,
    said: str | None,
    parser: argparse.ArgumentParser,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "find_spec", lambda name: name)
    for name in ("there.bin", "half.bin", "broken.bin", "broken.idx"):
        Path(name).touch()
    for name, count in (("there", 1000), ("few", 24)):
        Path(f"{name}.bin").touch()
        head = struct.pack("<9sQBQQ", b"MMIDIDX", 1, 8, count, count + 1)
        Path(f"{name}.idx").write_bytes(head + struct.pack(f"<{count}i", *[10] * count))
    args = parser.parse_args(flags.split())
    if said is None:
        check_files(args)
        return
    with pytest.raises(ConfigError) as error:
        check_files(args)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_conversations_need_a_package(
    parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--sft needs the package datasets, got none: pip insta"):
        check_files(parser.parse_args(["--sft", "--data-path", "x"]))
