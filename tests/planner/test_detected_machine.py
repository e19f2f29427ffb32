"""The machine of a GPU, and the documents that stand for those of a call."""

from itertools import accumulate
from typing import Any

import pytest

from megatron_cp_plugin.core.layout import Contiguous, document_starts
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.planner import detected_machine
from megatron_cp_plugin.planner.detected_machine import example_of, machine_here
from megatron_cp_plugin.planner.machine import Machine


def test_machines_by_their_gpu() -> None:
    assert machine_here(None, "NVIDIA A100-SXM4-80GB")[0] == Machine.load("a100_8x200g")
    assert machine_here(None, "NVIDIA H100 80GB HBM3")[0] == Machine.load("h100_400g")
    assert machine_here(None, "NVIDIA A800-SXM4-80GB")[0] == Machine.load("a800_4x200g")
    found, how = machine_here(None, "NVIDIA T4")
    assert found == Machine.load("h200_nvlink")
    assert how == "by default, for no machine is known for NVIDIA T4: name yours"
    assert machine_here("h100", "NVIDIA T4") == (Machine.load("h100_400g"), "as it was named")


@pytest.mark.parametrize("lengths", [[1024] * 16, [8192, *[128] * 64], [16384]])
def test_documents_stand_for_others_like_them(lengths: list[int]) -> None:
    """With about as many pairs of a query and a key, however unequal the lengths are."""
    total = sum(lengths)
    mask = Mask(documents=document_starts((0, *accumulate(lengths)), total))
    example = example_of(mask, total, Contiguous(), 4)
    pairs = [one.bands.area(total) for one in (mask, example.mask)]
    assert 0.5 < pairs[1] / pairs[0] < 2
    moved = Mask(documents=document_starts((0, *accumulate(reversed(lengths))), total))
    assert example_of(moved, total, Contiguous(), 4) == example
    longer = Mask(documents=mask.documents[::4])
    if len(lengths) > 1:
        assert example_of(longer, total, Contiguous(), 4) != example
        assert "as in this call" in example.words


def test_unequal_documents_cross_the_bounds_of_ranks() -> None:
    """Equal ones that end where ranks do would make every algorithm look as if it sent nothing."""
    total, size = 16384, 4
    for seed in range(8):
        documents = random_documents(total, 2048, seed=seed)
        like = example_of(Mask(documents=documents), total, Contiguous(), size).mask.documents
        assert not set(range(0, total, total // size)) <= {0, *like}
    equal = tuple(range(2048, total, 2048))
    assert example_of(Mask(documents=equal), total, Contiguous(), size).mask.documents == equal


def test_documents_are_drawn_once_for_others_like_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every micro-batch has new ones: a draw takes the host up to milliseconds each time."""
    drawn = []

    def counted(*given: Any, **named: Any) -> tuple[int, ...]:
        drawn.append(given)
        return random_documents(*given, **named)

    monkeypatch.setattr(detected_machine, "random_documents", counted)
    total, numbers = 12288, []
    for length in (1000, 1010, 1020):
        mask = Mask(documents=tuple(range(length, total, length)))
        example_of(mask, total, Contiguous(), 4)
        numbers.append(len(drawn))
    assert numbers[0] > 0
    assert numbers == numbers[:1] * 3
