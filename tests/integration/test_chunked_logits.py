"""`install(chunked_loss=...)`: log-probabilities of programs around Megatron, in chunks."""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core.tensor_parallel import ColumnParallelLinear

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.chunked_logits import serve_programs
from megatron_cp_plugin.integration.chunked_loss import serve_loss
from tests.integration.megatron_job import run_warm

JOB = Path(__file__).with_name("chunked_logits_job.py")
BOUNDS = {"log-probs": 2e-5, "entropy": 2e-5, "gradients": 1e-4}


@pytest.mark.parametrize(
    ("tensor", "context"), [(1, 2), (2, 1), pytest.param(2, 2, marks=pytest.mark.slow)]
)
def test_programs(tensor: int, context: int, tmp_path: Path) -> None:
    """What verl, slime, NeMo-RL and SkyRL do with logits gives what all logits give."""
    words = str(tensor), str(context)
    job = run_warm(tmp_path, *words, ranks=tensor * context, script=JOB).succeeded()
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
            "nothing": "chunked_loss must be at least 1, got 0: leave it out for all logits",
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
