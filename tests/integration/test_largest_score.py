"""The largest scores, against all scores written out."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.integration import largest_score
from megatron_cp_plugin.integration.documents import DocumentMask, mask_of_layer
from megatron_cp_plugin.integration.largest_score import largest_scores
from megatron_cp_plugin.spans import prefix_lm
from tests.integration.ranks import on_ranks
from tests.integration.test_multi_token import LAYOUTS
from tests.span_masks import dense

TOKENS, HEADS, KV_HEADS = 24, 6, 2
CAUSAL = [(0, TOKENS, 0, TOKENS, "causal")]
SPANS = [*prefix_lm(5, 10), (10, 24, 3, 12, "full"), (12, 24, 14, 24, "inverse_causal")]
STARTS = (1, 5, 17)
# What a model is told, its window, and who sees whom.
CASES: dict[str, tuple[DocumentMask | None, int | None, Tensor]] = {
    "causal": (None, None, dense(CAUSAL, TOKENS)),
    "window": (None, 5, dense(CAUSAL, TOKENS, window=5)),
    "documents": (
        DocumentMask(seq_len=TOKENS, starts=STARTS),
        None,
        dense(CAUSAL, TOKENS, (0, *STARTS, TOKENS)),
    ),
    "padded": (
        DocumentMask(seq_len=TOKENS, starts=STARTS, padding=((3, 5), (22, 24))),
        4,
        dense([(a, b, a, b, "causal") for a, b in ((0, 1), (1, 3), (5, 17), (17, 22))], TOKENS)
        * dense(CAUSAL, TOKENS, window=4),
    ),
    "spans": (DocumentMask(spans=tuple(SPANS)), None, dense(SPANS, TOKENS)),
}


def scores_of(q: Tensor, k: Tensor, seen: Tensor) -> Tensor:
    """[H] of [B,N,H,D] and [B,N,G,D], by the definition."""
    wide = k.double().repeat_interleave(HEADS // KV_HEADS, dim=2)
    scores = torch.einsum("bihd,bjhd->hbij", q.double(), wide) * 0.3
    return scores.masked_fill(seen == 0, -torch.inf).amax((1, 2, 3))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (3, "cyclic"), (4, "zigzag")])
def test_largest_scores(size: int, layout: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(largest_score, "_SCORES", 300)  # a few rows at a time
    packed, window, seen = CASES[case]
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, TOKENS, HEADS, 8, generator=draw, dtype=torch.float64)
    k = torch.randn(2, TOKENS, KV_HEADS, 8, generator=draw, dtype=torch.float64)
    q[:, :, 4] = -k[:, :, 1] / 2  # what a query sees beside itself need not be above 0
    mask = mask_of_layer(packed, TOKENS, causal=True, window=window)
    mask = mask if packed is None else packed.without_padding(mask)
    algo, options = LAYOUTS[layout]
    split = ContextParallelConfig(algo, size, options=options).layout

    def rank(group: dist.ProcessGroup) -> Tensor:
        mine = positions(split, group.rank(), size, TOKENS)
        given: dict[str, Any] = {"scale": 0.3, "mask": mask, "layout": split, "group": group}
        return largest_scores(q[:, mine], k[:, mine], **given)

    found = torch.stack(on_ranks(size, rank)).amax(0)
    # Of all pairs by the definition, masked by a matrix: nothing of it is the code that is tested.
    torch.testing.assert_close(found, scores_of(q, k, seen), rtol=1e-12, atol=0)


def test_keys_that_nobody_sees() -> None:
    q = k = torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)
    mask = Mask.of(Slices.of([(2, 4, 0, 4, "causal")], 4))
    layout = ContextParallelConfig("ring", 2).layout

    def rank(group: dist.ProcessGroup) -> Tensor:
        mine = positions(layout, group.rank(), 2, 4)
        given: dict[str, Any] = {"scale": 1.0, "mask": mask, "layout": layout, "group": group}
        return largest_scores(q[:, mine], k[:, mine], **given)

    first, second = on_ranks(2, rank)
    assert first.tolist() == [-torch.inf] * 2
    assert second.tolist() == [8.0] * 2
    assert second.dtype == torch.float32
