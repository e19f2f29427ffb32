"""What multi-token prediction shifts along the sequence, against the unsplit sequence."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_token_prediction as megatron
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.multi_token import process_mtp_loss, roll_tensor
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.spec import with_multi_token
from megatron_cp_plugin.spans import prefix_lm
from tests.integration.cut_batches_job import make_config
from tests.integration.ranks import Place, on_ranks

TOKENS, BATCH = 24, 2
LAYOUTS = {"zigzag": ("zigzag", ()), "contiguous": ("ring", ())}
LAYOUTS["cyclic"] = ("attention2d", (("variant", "no"),))


def with_layout(size: int, layout: str, body: Callable[..., Any]) -> list[Any]:
    """Runs body(group, runtime, cut) on ranks of their own; cut takes a rank's part of [b, N]."""
    algo, options = LAYOUTS[layout]

    def rank(group: dist.ProcessGroup) -> Any:
        runtime = Runtime(ContextParallelConfig(algo, size, options=options))
        mine = runtime.positions(group, TOKENS, torch.device("cpu"))
        return body(group, runtime, lambda whole: whole[:, mine])

    return on_ranks(size, rank)


def roll(tensor: Tensor, group: dist.ProcessGroup, runtime: Runtime) -> tuple[Tensor, Tensor]:
    """As Megatron calls it."""
    rolled, total = roll_tensor(
        megatron.roll_tensor, runtime, tensor, shifts=-1, dims=-1, cp_group=group
    )
    assert rolled is not None
    assert total is not None
    return rolled, total


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("starts", [(), (1, 5, 6, 17)], ids=["one document", "documents"])
def test_nothing_follows_the_end_of_a_document(
    starts: tuple[int, ...], size: int, layout: str
) -> None:
    """As Megatron shifts packed sequences that are not split."""
    ids = torch.randint(1, 100, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    bounds = torch.tensor([0, *starts, TOKENS], dtype=torch.int32)
    want, _ = megatron.roll_tensor(ids, packed_seq_params=PackedSeqParams("thd", bounds, bounds))
    mask = DocumentMask(seq_len=TOKENS, starts=starts) if starts else None

    def body(group: dist.ProcessGroup, runtime: Runtime, cut: Any) -> bool:
        rolled, total = roll_tensor(
            megatron.roll_tensor, runtime, cut(ids), cp_group=group, packed_seq_params=mask
        )
        assert total is not None
        assert total * size == want.sum()
        return torch.equal(rolled, cut(want))

    assert all(with_layout(size, layout, body))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [1, 3, 4])
@pytest.mark.parametrize("counting", [0, 3, 5, TOKENS])
def test_losses_are_parts_of_the_mean_over_the_sequence(
    size: int, layout: str, counting: int
) -> None:
    """Twice shifted, as for the second token; also with fewer tokens that count than ranks."""
    losses = torch.rand(BATCH, TOKENS, dtype=torch.float64)
    mask = torch.zeros(BATCH, TOKENS)
    mask[0, :counting] = 1.0
    shifted = torch.nn.functional.pad(mask[:, 2:], (0, 2))
    want = (losses * shifted).sum() / shifted.sum().clamp(min=1)

    def body(group: dist.ProcessGroup, runtime: Runtime, cut: Any) -> Tensor:
        once, _ = roll(cut(mask), group, runtime)
        twice, tokens = roll(once, group, runtime)
        # As Megatron divides.
        return (twice * cut(losses)).sum() / tokens.clamp(min=1)

    parts = with_layout(size, layout, body)
    torch.testing.assert_close(torch.stack(parts).mean(), want)


@pytest.mark.parametrize(("size", "layout"), [(1, "zigzag"), (3, "cyclic"), (4, "zigzag")])
def test_spans_say_which_samples_go_on(size: int, layout: str) -> None:
    """As documents of the same samples do; padding is in none."""
    ids = torch.randint(1, 100, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0))
    starts = (5, 6, 17, 22)
    spans = [*prefix_lm(2, 5), (5, 6, 5, 6, "full"), (6, 17, 6, 17, "causal")]
    spans.append((17, 22, 17, 22, "causal"))
    masks = DocumentMask(seq_len=TOKENS, starts=(*starts, 23)), DocumentMask(spans=tuple(spans))

    def body(group: dist.ProcessGroup, runtime: Runtime, cut: Any) -> bool:
        by_documents, by_spans = (
            roll_tensor(
                megatron.roll_tensor, runtime, cut(ids), cp_group=group, packed_seq_params=mask
            )
            for mask in masks
        )
        assert by_documents[1] == by_spans[1]
        return torch.equal(by_documents[0], by_spans[0])

    assert all(with_layout(size, layout, body))


def gradient_of_further_tokens(
    hidden: Tensor,
    ids: Tensor,
    loss_mask: Tensor | None,
    group: Any,
    packed: Any,
    *,
    has_labels: bool,
    process: Callable[..., Tensor],
) -> Tensor:
    """Of a weight [V,H] that makes logits of hidden [B,S,H,3], with a loss per token."""
    weight = torch.arange(1.0, 61, dtype=torch.float64).view(10, 6).sin().requires_grad_()

    def losses(labels: Tensor, logits: Tensor) -> Tensor:
        flat = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.T.flatten() % 10, reduction="none"
        )
        return flat.view(logits.shape[:2]).T

    out = process(
        hidden.permute(3, 1, 0, 2).flatten(0, 1),
        ids if has_labels else None,
        loss_mask,
        lambda each, weight, runtime_gather_output: (each @ weight.T, None),
        weight,
        None,
        False,
        losses,
        make_config(1, mtp_num_layers=2, calculate_per_token_loss=True),
        cp_group=group,
        packed_seq_params=packed,
        input_ids=ids,
    )
    torch.autograd.backward(out.sum())
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("has_labels", [True, False])
@pytest.mark.parametrize(
    ("size", "layout", "counting", "starts"),
    [
        (2, "contiguous", range(12, 14), ()),  # rank 0 has targets further on, none of the next
        (3, "zigzag", range(3, 20), (4, 5, 13)),
        (4, "cyclic", range(24), (8,)),
        (4, "zigzag", None, ()),
        (3, "contiguous", range(0), ()),
    ],
)
def test_a_loss_per_token_counts_the_tokens_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    layout: str,
    counting: range | None,
    starts: tuple[int, ...],
    has_labels: bool,
) -> None:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(BATCH, TOKENS, 6, 3, generator=draw, dtype=torch.float64)
    ids = torch.randint(1, 100, (BATCH, TOKENS), generator=draw)
    mask = None
    if counting is not None:
        mask = torch.zeros(BATCH, TOKENS)
        mask[0, list(counting)] = 1
    bounds = torch.tensor([0, *starts, TOKENS], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds) if starts else None
    single = Place(0, 1)
    given: dict[str, Any] = {"has_labels": has_labels}
    want = gradient_of_further_tokens(
        hidden, ids, mask, single, packed, **given, process=megatron.process_mtp_loss
    )
    original = megatron.roll_tensor
    documents = DocumentMask(seq_len=TOKENS, starts=starts) if starts else None

    def body(group: dist.ProcessGroup, runtime: Runtime, cut: Any) -> Tensor:
        # The same layout on all ranks.
        monkeypatch.setattr(megatron, "roll_tensor", partial(roll_tensor, original, runtime))
        return gradient_of_further_tokens(
            cut(hidden),
            cut(ids),
            None if mask is None else cut(mask),
            group,
            documents,
            **given,
            process=partial(process_mtp_loss, megatron.process_mtp_loss),
        )

    torch.testing.assert_close(sum(with_layout(size, layout, body)), want)
    assert want.any() == (counting != range(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shifts": 1}, "got shifts 1 along -1"),
        ({"dims": 0}, "got shifts -1 along 0"),
        ({"packed_seq_params": object()}, "packed sequences"),
    ],
)
def test_what_megatron_never_asks_for_is_refused(arguments: dict[str, Any], message: str) -> None:
    def body(group: dist.ProcessGroup, runtime: Runtime, cut: Any) -> None:
        with pytest.raises(ContextParallelError, match=message):
            roll_tensor(
                megatron.roll_tensor,
                runtime,
                cut(torch.zeros(BATCH, TOKENS)),
                **({"cp_group": group} | arguments),
            )

    with_layout(2, "zigzag", body)


def test_layers_of_another_program() -> None:
    """mcore-bridge's shift angles along the tokens of a rank, in whatever order it has them."""

    class Layer(megatron.MultiTokenPredictionLayer):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return super().forward(*args, **kwargs)

    runtime = Runtime(ContextParallelConfig("zigzag", 1))
    spec = megatron.MultiTokenPredictionBlockSubmodules(layer_specs=[ModuleSpec(module=Layer)])
    with pytest.raises(ContextParallelError, match=r"Layer: leave mtp_num_layers out") as said:
        with_multi_token(spec, make_config(1, mtp_num_layers=1), runtime)
    assert "\n" not in str(said.value)
