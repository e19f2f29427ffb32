"""Peak memory of many ranks, and of linear attention."""

import pytest

from megatron_cp_plugin.core.linear.algorithm import LinearShape
from megatron_cp_plugin.core.shape import Shape
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.document_lengths import random_documents
from megatron_cp_plugin.kernels.choice import kernel_called
from megatron_cp_plugin.planner import peak
from megatron_cp_plugin.planner.call_memory import peak_of
from megatron_cp_plugin.planner.peak import peak_bytes
from megatron_cp_plugin.planner.simulate import pinned
from megatron_cp_plugin.registry import create

GIB = 2**30


@pytest.mark.parametrize(
    ("algo", "options", "kv_heads"),
    [
        ("zigzag", {}, 8),
        ("zigzag", {"route": "double"}, 8),
        ("zigzag", {"backward": "query"}, 32),
        ("distflash", {}, 8),
        ("allgather", {}, 1),
        ("attention2d", {}, 8),
        ("attention2d", {"variant": "overlap", "rows": 4, "cols": 16}, 8),
        ("usp", {"ulysses": 8}, 8),
        ("ulysses", {}, 8),
    ],
)
def test_many_ranks_have_what_few_say(
    algo: str, options: dict[str, object], kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the plan of all 64, followed by the last of them; 32 count as many here."""
    monkeypatch.setattr(peak, "_ALL", 32)
    size = 64
    nodes = tuple(rank // 4 for rank in range(size))
    shape = Shape(1, size * 1024, 32, kv_heads, 64)
    of_all = pinned(algo, options, shape, Mask(), nodes, peer_access=False)
    exact = peak_of(
        lambda topology: create(algo, topology, dict(of_all)),
        size - 1,
        nodes,
        shape,
        Mask(),
        kernel_called("flash4"),
        peer_access=False,
    )
    found = peak_bytes(algo, options, shape, Mask(), nodes, "flash4", peer_access=False)
    assert found == pytest.approx(max(exact.forward, exact.backward), rel=0.02)


def test_a_thousand_ranks_have_a_peak() -> None:
    nodes = tuple(rank // 8 for rank in range(1024))
    shape = Shape(1, 2**20, 32, 8, 128)
    masks = Mask(), Mask(window=4096), Mask(documents=random_documents(2**20, 65536))
    for mask in masks:
        for algo in ("zigzag", "distflash"):
            found = peak_bytes(algo, {}, shape, mask, nodes, "flash4", peer_access=False)
            # Out in bfloat16 and its sum in float32 at least; less than ten times that.
            least = 1024 * 32 * 128 * 6
            assert least < found < 10 * least


@pytest.mark.parametrize(
    ("tokens", "algo", "options", "measured"),
    [
        (2**19, "lasp", {}, 3.57),
        (2**19, "lasp2", {}, 3.57),
        (2**21, "lasp2", {}, 14.07),
        (2**21, "lasp2", {"layout": "zigzag"}, 14.07),
    ],
)
def test_linear_attention_has_what_was_measured(
    tokens: int, algo: str, options: dict[str, object], measured: float
) -> None:
    """On 4 H200 with 16 heads of 128 (docs/benchmarks.md), without decay."""
    shape = LinearShape(1, tokens, 16, 128, 128)
    found = peak_bytes(algo, options, shape, Mask(), (0,) * 4, "flash4", peer_access=False)
    assert found / GIB == pytest.approx(measured, rel=0.01)


def test_gathered_states_grow_with_ranks_and_passed_ones_do_not() -> None:
    def gib(algo: str, size: int) -> float:
        shape, nodes = LinearShape(1, size * 4096, 16, 128, 128), (0,) * size
        return peak_bytes(algo, {}, shape, Mask(), nodes, "fla", peer_access=False) / GIB

    assert gib("lasp", 512) == gib("lasp", 8)
    assert gib("lasp2", 1024) > gib("lasp2", 512) + 512 * 2**20 / GIB  # of 1 MiB each
