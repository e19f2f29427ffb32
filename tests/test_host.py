"""What the host does for a call beside the kernels: no operator without use, counted on one rank.

At short lengths a step is bound by the host, for which each operator is a microsecond or more.
"""

import sys
from collections import Counter
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape
from megatron_cp_plugin.core.kernel import SoftmaxKernel
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.planner.dry_run import DryRunGroup
from megatron_cp_plugin.registry import create
from tests.operators import Operators

VIEWS = {"alias", "slice", "view", "permute", "transpose", "split_with_sizes"}


def _place(x: Tensor) -> tuple[object, ...]:
    return x.shape, x.stride(), x.storage_offset(), x.dtype


class Idle(SoftmaxKernel):
    """Makes results and computes nothing."""

    def unsupported(self, problem) -> None:
        return None

    def forward(self, call):
        q = call.q
        batch, tokens, heads, _ = q.shape
        return q.new_empty(q.shape), q.new_empty((batch, heads, tokens), dtype=torch.float32)

    def backward(self, call, dout, statistics):
        return tuple(x.new_empty(x.shape) for x in call[:3])


def useless(algo: str, size: int, *, peer_access: bool, **options) -> list[str]:
    """Operators that gave the very view that they were given, in the second forward and backward of
    the last rank, whose messages go nowhere.
    """
    algorithm = create(algo, DryRunGroup(size - 1, (0,) * size, peer_access=peer_access), options)
    q, k, v = (torch.empty(1, 24, 4, 8, device="meta") for _ in range(3))
    compiled = Compiled(algorithm, Call(Shape.of(q, k, v, 24 * size), Mask(), 1.0, Idle()))

    def step() -> None:
        out, _, saved = compiled.forward.attend(q, k, v)
        compiled.backward().differentiate(out, saved)

    def see(name: str, args, results: list[Tensor]) -> None:
        if name in VIEWS and all(_place(x) == _place(args[0]) for x in results):
            found.append(name)

    found: list[str] = []
    step()
    with Operators(see):
        step()
    return found


@pytest.mark.parametrize("peer_access", [False, True])
@pytest.mark.parametrize("size", [2, 3, 4, 5])
@pytest.mark.parametrize("algo", cp.available("softmax"))
def test_no_view_is_of_all_of_a_tensor(algo: str, size: int, peer_access: bool) -> None:
    assert not useless(algo, size, peer_access=peer_access)


# Calls of this package's Python functions in an eager forward and backward of `attention` between
# two ranks, once it is known, without those of channels. Where a change makes fewer, lower these.
PYTHON_CALLS = {
    "allgather": 153,
    "attention2d": 214,
    "distflash": 180,
    "ring": 126,
    "ulysses": 176,
    "usp": 186,
    "zigzag": 148,
}


@pytest.mark.parametrize("algo", PYTHON_CALLS)
def test_how_many_python_calls_there_are(algo: str) -> None:
    """What could be known per plan or per call is not computed again in every layer."""
    topology = DryRunGroup(1, (0, 0), peer_access=False)
    q, k, v, dout = (torch.ones(1, 24, 4, 8) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    for _ in range(3):
        cp.attention(*leaves, algo=algo, group=topology).backward(dout)
    package = str(Path(cp.__file__).parent)
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if event == "call" and file.startswith(package) and not file.endswith("dry_run.py"):
            found[f"{file.removeprefix(package)} {frame.f_code.co_qualname}"] += 1

    sys.setprofile(count)
    try:
        cp.attention(*leaves, algo=algo, group=topology).backward(dout)
    finally:
        sys.setprofile(None)
    assert found.total() <= PYTHON_CALLS[algo], found.most_common(60)
