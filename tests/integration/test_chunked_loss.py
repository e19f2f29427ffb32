"""Losses in chunks: a run is the same with them, and programs have their log-probabilities."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from megatron_cp_plugin import launch
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import split_flags
from megatron_cp_plugin.integration.checks import describe
from megatron_cp_plugin.integration.chunked_loss import (
    Head,
    acceptance_counts,
    serve_loss,
    serve_programs,
)
from megatron_cp_plugin.token_losses import CHUNK_TOKENS
from tests.integration.megatron_job import SLOWLY, TINY, run_warm

ALGO = ["--context-parallel-algo", "zigzag"]
ROWS = Path(__file__).with_name("logit_rows_job.py")
LAUNCH = Path(launch.__file__)
PROGRAMS = Path(__file__).with_name("chunked_logits_job.py")
BOUNDS = {"log-probs": 2e-5, "entropy": 2e-5, "gradients": 1e-4}
CHUNKS = ("--cp-chunked-loss", "7")


def words_of(model: Sequence[str], flags: str = "") -> list[str]:
    return [*model, *SLOWLY, "--position-embedding-type", "rope", *ALGO, *flags.split()]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_logits_are_never_there(tmp_path: Path) -> None:
    """64 tokens; the weight, transposed, is of 32 rows."""
    words = words_of(TINY, "--mtp-num-layers 1 --ffn-hidden-size 96")
    rows = []
    for more in ((), CHUNKS):
        job = run_warm(tmp_path / str(len(more)), str(ROWS), *words, *more, script=LAUNCH)
        rows += re.findall(r"at most (\d+) rows", job.succeeded().text)
    assert rows == ["64", "32"]


def test_the_flag() -> None:
    for words, wanted in (
        (ALGO, None),
        ([*ALGO, "--cp-chunked-loss"], CHUNK_TOKENS),
        ([*ALGO, "--cp-chunked-loss", "512"], 512),
    ):
        flags, rest = split_flags([*words, "--bf16"])
        assert (flags.config(4).chunked_loss, rest) == (wanted, ["--bf16"])


def test_the_line_at_start_up() -> None:
    line = describe(ContextParallelConfig("zigzag", 2, chunked_loss=512), None)
    assert line.endswith(", loss in chunks of 512 tokens")


def test_a_wrong_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="chunked_loss must be at least 1, got 0: "):
        split_flags([*ALGO, "--cp-chunked-loss", "0"])[0].check()


class Model(nn.Module):
    """Computes logits, and losses, as models of Megatron do."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=8, num_attention_heads=1, use_cpu_initialization=True
        )
        self.output_layer = ColumnParallelLinear(
            8, 30, config=self.config, init_method=nn.init.normal_, bias=False, tp_group=group
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        shape = labels.shape
        logits = logits.transpose(0, 1).flatten(0, 1)
        return nn.functional.cross_entropy(logits, labels.flatten(), reduction="none").view(shape)

    def forward(
        self, hidden: Tensor, labels: Tensor | None = None, output_processor: Any = None
    ) -> Any:
        logits, _ = self.output_layer(hidden)
        if output_processor is not None:
            return output_processor(logits)
        if labels is None:
            return logits
        return self.compute_language_model_loss(labels, logits)


def test_logits_for_those_who_ask_for_them(group: dist.ProcessGroup) -> None:
    """Inference, reinforcement learning, and multi-token prediction in it."""
    model, hidden = Model(group), torch.randn(6, 2, 8)
    labels = torch.randint(30, (2, 6))
    logits, losses = model(hidden), model(hidden, labels)
    processed = model(hidden, labels, output_processor=torch.exp)
    serve_loss(model, 5)
    torch.testing.assert_close(model(hidden, labels), losses)
    assert torch.equal(model(hidden), logits)
    assert torch.equal(model.compute_language_model_loss(labels, logits), losses)
    torch.testing.assert_close(model(hidden, labels, output_processor=torch.exp), processed)


def test_right_predictions_are_counted_as_megatron_counts_them(group: dist.ProcessGroup) -> None:
    model, hidden = Model(group), torch.randn(6, 2, 8)
    logits = model(hidden)
    labels = logits.argmax(-1).t().clone()
    labels[0, ::2] += 1
    mask = torch.ones(2, 6)
    mask[1, 2:] = 0
    others = (model.output_layer, None, group)
    count = multi_token_prediction._compute_mtp_acceptance_counts
    want = count(logits, labels, mask, *others)
    assert [float(x) for x in want] == [5, 8]
    assert acceptance_counts(count, logits, labels, mask, *others) == want
    model.config.mtp_num_layers = 1
    serve_loss(model, 5)
    pending = Head(model.output_layer, hidden, None)
    model.compute_language_model_loss(labels, pending)
    assert acceptance_counts(count, pending, labels, mask, *others) == want


@pytest.mark.parametrize("kind", ["bias", "gathers"])
def test_another_output_layer_is_refused_by_what_it_does(
    group: dist.ProcessGroup, kind: str
) -> None:
    model = Model(group)
    if kind == "bias":
        model.output_layer.bias = nn.Parameter(torch.zeros(30))
    else:
        model.output_layer.gather_output = True
    with pytest.raises(ContextParallelError, match=f"got one (with a|that) {kind}"):
        serve_loss(model, 5)


def test_another_output_layer_is_refused() -> None:
    model = nn.Module()
    serve_loss(model, 512)  # a stage of a pipeline that has none
    model.output_layer = nn.Linear(2, 2)
    with pytest.raises(ContextParallelError, match="a plain ColumnParallelLinear, got Linear: "):
        serve_loss(model, 512)


@pytest.mark.parametrize(
    ("tensor", "context"),
    [(1, 2), pytest.param(2, 2, marks=pytest.mark.slow)],
)
def test_programs(tensor: int, context: int, tmp_path: Path) -> None:
    """What verl, slime, NeMo-RL and SkyRL do with logits gives what all logits give."""
    words = str(tensor), str(context)
    job = run_warm(tmp_path, *words, ranks=tensor * context, script=PROGRAMS).succeeded()
    said = "megatron_cp_plugin: context parallelism by zigzag layout=thd on {} rank(s), thd layout"
    assert said.format(context) in job.text, job.text
    for process in job.processes:
        found = json.loads(process.stdout.split("FOUND")[-1].splitlines()[0])
        refused = found.pop("refused")
        assert found.pop("sum") < 1e-2
        assert found.pop("losses") < 1e-5
        assert len(found) == 8
        for name, errors in found.items():
            for what, bound in BOUNDS.items():
                assert errors[what] <= bound, f"{name}: {what} is off by {errors[what]:.1e}"
        for name, words_of_it in {
            "max": "got .max: leave chunked_loss out",
            "softmax": "got log_softmax: leave chunked_loss out",
            "an id": "got indexing",
            "bfloat16": "got to(torch.bfloat16)",
            "top-p": "got a mask of the ids that the rollout kept (top-p)",
            "labels": "need labels [1, ",
            "no temperature": "divided by a temperature above 0, got 0: use 1.0",
            "nothing": "chunked_loss must be at least 1, got 0: use for example 4096, or leave",
            "two sizes": "chunked_loss=8) after zigzag (layout=thd, chunked_loss=7): leave one",
        }.items():
            assert words_of_it in refused[name], (name, refused[name])
            assert "\n" not in refused[name]


def test_a_program_without_its_function_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("slime", "slime.utils", "slime.utils.ppo_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    message = "chunked_loss needs slime.utils.ppo_utils.calculate_log_probs_and_entropy, which this"
    with pytest.raises(ContextParallelError, match=message):
        serve_programs()


def test_a_model_that_predicts_more_tokens_is_refused() -> None:
    layer = object.__new__(ColumnParallelLinear)
    vars(layer).update(bias=None, gather_output=False)
    config = SimpleNamespace(mtp_num_layers=2)
    model: Any = SimpleNamespace(output_layer=layer, config=config, mtp_process=True)
    with pytest.raises(ContextParallelError, match="got mtp_num_layers=2: leave one of the two"):
        serve_loss(model, 5, for_programs=True)
