"""The training program's own part: flags that it refuses, what models are told, and the loss."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_cp_plugin.errors import ConfigError

pretrain = pytest.importorskip("megatron_cp_plugin.harness.pretrain")


@pytest.mark.parametrize(
    ("given", "flag"),
    [
        ({"logits_load_dir": "there"}, "--logits-load-dir"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        (
            {"mtp_num_layers": 1, "pipeline_model_parallel_size": 2},
            "--mtp-num-layers in a pipeline",
        ),
    ],
)
def test_flags_of_megatrons_own_script_are_refused(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], flag: str
) -> None:
    args = Namespace(**{"mtp_num_layers": None, "pipeline_model_parallel_size": 1, **given})
    monkeypatch.setattr(pretrain, "parse_and_validate_args", lambda args_defaults: args)
    monkeypatch.setattr(pretrain, "check", lambda rules, settings: None)
    with pytest.raises(ConfigError, match=f"this script does not support {flag}") as refused:
        pretrain.run()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("packed", [False, True])
def test_models_are_told_the_documents_of_a_batch(packed: bool) -> None:
    told: dict[str, Any] = {}

    def model(tokens: Tensor, *_: object, **named: Any) -> Tensor:
        told.update(named)
        return tokens

    batch = dict.fromkeys(("tokens", "position_ids", "attention_mask", "labels", "loss_mask"))
    batch |= {"cu_seqlens": None, "max_seqlen": None}
    if packed:
        batch |= {"cu_seqlens": torch.tensor([[0, 3, 8]]), "max_seqlen": torch.tensor([5])}
    pretrain.output_of(model, batch)
    documents = told["packed_seq_params"]
    if not packed:
        assert documents is None
        return
    assert documents.qkv_format == "thd"
    assert documents.cu_seqlens_q.tolist() == documents.cu_seqlens_kv.tolist() == [0, 3, 8]
    assert documents.max_seqlen_q == documents.max_seqlen_kv == 5


@pytest.mark.parametrize("checked", [False, True])
def test_the_loss_is_the_sum_over_tokens_that_count(
    monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    seen: list[dict[str, Any]] = []
    machine = Namespace(validate_result=lambda **named: seen.append(named))
    monkeypatch.setattr(
        pretrain, "get_args", lambda: Namespace(check_for_nan_in_loss_and_grad=checked)
    )
    monkeypatch.setattr(pretrain, "get_rerun_state_machine", lambda: machine)
    losses, mask = torch.tensor([[0.5, 2.0], [4.0, 8.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]])
    loss, tokens, logged = pretrain.sum_of_losses(mask, losses.requires_grad_())
    loss.backward()
    assert (loss.item(), tokens.item()) == (12.5, 3)
    assert torch.equal(losses.grad, mask)
    assert logged["lm loss"].tolist() == [12.5, 3.0]
    assert [one["rejection_func"] for one in seen] == [torch.isnan, torch.isinf] * checked
    assert all(one["result"] is loss and one["fatal"] for one in seen)
