"""What an algorithm compiles of a call, and what it refuses."""

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.algorithm import Algorithm, Compiled
from megatron_cp_plugin.core.call import Shape, head_groups
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel
from megatron_cp_plugin.core.layout import Contiguous
from megatron_cp_plugin.core.placement import BlockPlacement, Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.span_masks import mask_of

SIZE, TOKENS = 3, 24
QUERIES, KEYS = torch.Size((1, 8, 4, 8)), torch.Size((1, 8, 2, 8))


class Neighbours(BlockPlacement):
    """Queries stay; blocks of keys come from their owners."""

    def place(self, query: int, key: int) -> Iterator[Place]:
        yield Place(query, (query - key) % self.size)


class WithoutWindows(Algorithm):
    """Of a kind that serves plain masks alone."""

    name = "mine"
    layout = Contiguous()

    def placement(self, shape: Shape, mask: Mask, phase: Phase) -> Neighbours:
        groups = head_groups(shape.heads, shape.kv_heads, 1, share_kv=False)
        return Neighbours(self.layout, self.topology.size, groups)


def reference(problem: Problem) -> SoftmaxKernel:
    return Reference()


def compiled(
    made: Algorithm,
    *,
    q: torch.Size = QUERIES,
    window: int | None = None,
    documents: tuple[int, ...] = (),
    kernel: Callable[[Problem], SoftmaxKernel] = reference,
) -> Compiled:
    of_tensors: Any = q, KEYS, KEYS, torch.float32, torch.device("cpu"), False
    return made.compiled(*of_tensors, TOKENS, Mask(True, window, documents), None, kernel)


def made_by(kind: type[Algorithm] | str, **options: object) -> Algorithm:
    topology = VirtualWorld(SIZE).topology(1)
    if isinstance(kind, str):
        return create(kind, topology, options)
    return kind(topology, kind.Options())


def test_calls_that_are_alike_are_compiled_once() -> None:
    zigzag = made_by("zigzag", layout="documents")
    first = compiled(zigzag)
    assert compiled(zigzag) is first
    assert compiled(zigzag, window=3) is not first
    other = compiled(zigzag, documents=(5, 9))
    assert other is not first
    assert compiled(zigzag, documents=(5, 9)) is other
    assert first.forward is first.forward


def test_a_backward_is_made_for_each_set_of_gradients_that_is_wanted() -> None:
    call = compiled(made_by("zigzag"))
    whole, keys = call.backward(), call.backward(dq=False)
    assert whole is not keys
    assert call.backward() is whole
    assert call.backward(dq=False) is keys
    assert set(call.backwards) == {(True, True), (False, True)}


def test_an_algorithm_goes_with_its_last_reference() -> None:
    """What it holds may be process groups, which must not wait for the garbage collector."""
    made = made_by("zigzag", layout="documents")
    compiled(made)
    made.for_documents((5, 9))
    there = weakref.ref(made)
    gc.disable()
    try:
        del made
        assert there() is None
    finally:
        gc.enable()


def test_calls_that_an_algorithm_does_not_serve_are_refused() -> None:
    mine = made_by(WithoutWindows)
    assert compiled(mine).forward
    for mask, words in (
        ({"window": 3}, "sliding windows, got window 3"),
        ({"documents": (5,)}, "documents, got 2 of them"),
    ):
        with pytest.raises(ContextParallelError, match=f"mine does not support {words}: leave it"):
            compiled(mine, **mask)
    assert mask_of([(0, 4, 0, 8, "full")], 8).special == "spans, got 1 of them"
    with pytest.raises(ContextParallelError, match=r"rank 1 of 3 holds 8 of 24 tokens.* got 9"):
        compiled(mine, q=torch.Size((1, 9, 4, 8)))


def test_the_kernel_is_asked_for_what_the_call_has() -> None:
    asked = []

    def choose(problem: Problem) -> SoftmaxKernel:
        asked.append(problem)
        return Reference()

    for mask in ({}, {"window": 3}, {"documents": (5,)}):
        compiled(made_by("zigzag"), kernel=choose, **mask)
    assert [(one.windows, one.documents) for one in asked] == [
        (False, False),
        (True, False),
        (False, True),
    ]
    assert {(one.heads, one.kv_heads, one.head_dim, one.value_dim) for one in asked} == {
        (4, 2, 8, 8)
    }


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_that_kernels_take_for_a_mask_is_refused(scale):
    """torch's kernel for CPUs gives NaN for the first two, and numbers for the third."""
    q = torch.ones(1, 8, 2, 8)
    with pytest.raises(ContextParallelError, match=f"needs a scale above 0, got {scale}: leave"):
        cp.attention(q, q, q, algo="zigzag", scale=scale)
