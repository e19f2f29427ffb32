"""The script that compares algorithms on packed documents by their plans."""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_cp_plugin.planner.simulate import simulate
from scripts import packed_documents
from scripts.specs import algo_of


def test_layout_documents_is_balanced_and_sends_least_of_the_balanced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "points.json"
    words = f"--lengths lognormal:256:1.2 --tokens 512 --sizes 4,8 --packs 2 --output {output}"
    packed_documents.main(words.split())
    points = {(p["label"], p["size"]): p for p in json.loads(output.read_text())}
    labels = {*packed_documents.ALGOS.split(",")}
    assert {label for label, _ in points} == labels | {"dynamic sizes, zigzag"}
    for size in (4, 8):
        balanced, straight, plain, ulysses = (
            points[label, size]
            for label in (
                "zigzag:layout=documents:route=ring",
                "zigzag:layout=documents:route=straight",
                "zigzag:route=ring",
                "ulysses",
            )
        )
        # Pairs alone: keys of other ranks are work too, which counts in short blocks.
        assert balanced["work"] < 1.1 < plain["work"]
        assert ulysses["work"] == pytest.approx(1)
        assert straight["mean_mib"] < min(plain["mean_mib"], ulysses["mean_mib"])
    said = capsys.readouterr().out
    assert "P = 4" in said
    assert f"{points['zigzag:route=ring', 8]['work']:.2f}; " in said


def test_an_algorithm_that_cannot_be_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--machine h200_nvlink --lengths 256 --tokens 512 --packs 1 --sizes 3 --heads 8:8"
    packed_documents.main([*words.split(), "--algos", "zigzg,zigzag:chunks=x,ulysses,distflash"])
    said = capsys.readouterr()
    assert "zigzg, 3 ranks: unknown" in said.err
    assert "zigzag:chunks=x, 3 ranks: " in said.err
    assert "│ distflash" in said.out
    assert "zigz" not in said.out
    for words in ("--machine nope", "--lengths nope"):
        with pytest.raises(SystemExit):
            packed_documents.main(words.split())
        assert "error: " in (error := capsys.readouterr().err.splitlines()[-1])
        assert "got 'nope'" in error or "no machine 'nope'" in error


@pytest.mark.parametrize(
    ("size", "label"), [(4, "distflash"), (4, "zigzag:layout=documents"), (16, "usp:ulysses=8")]
)
def test_ranks_together(size: int, label: str) -> None:
    words = f"--machine h100_400g --lengths 4K --tokens 4K --heads 32:8 --sizes {size} --packs 2"
    args = packed_documents.parse(words.split())
    found = packed_documents.simulated(label, "4K", size, args)
    name, options = algo_of(label)
    masks = packed_documents.packs_of("4K", size, args)
    for mask, (ms, kernels, limit) in zip(masks, found.packs, strict=True):
        shape = packed_documents.shape_of(size, args)
        nodes = tuple(rank // 8 for rank in range(size))
        time = simulate(name, options, shape, mask, args.machine, nodes).seconds
        assert ms == pytest.approx(1e3 * time)
        pairs = sum(n * (n + 1) / 2 for n in np.diff([0, *mask.documents, shape.seq_len]))
        least = 14 * pairs * 32 * 128 / size / 720e12  # seven products, at the kernel's top speed
        assert least < kernels * time < 2 * least
        free = replace(args.machine, group_share=1.0)  # exchanges slow no kernels
        on_free = argparse.Namespace(**{**vars(args), "machine": free})
        ms_alone, mean_alone, busiest = packed_documents.together(label, size, mask, on_free)
        assert busiest >= mean_alone * (1 - 1e-9)
        slowed = limit * ms - busiest * ms_alone
        if size == 16:  # two nodes
            assert 0 < slowed < ms
        else:  # copy engines
            assert slowed == pytest.approx(0, abs=1e-9)
