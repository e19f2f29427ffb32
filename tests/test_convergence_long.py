"""Long runs in parts: the curve is that of one run, whatever was interrupted."""

import json
from dataclasses import asdict
from pathlib import Path

import convergence_long as script
import convergence_runs as runs
import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.harness import prepare_data
from megatron_cp_plugin.harness.parity import Iteration
from tests import forked_launch

ROOT = Path(__file__).parents[1]


def test_what_is_trained_again_counts_once(tmp_path: Path) -> None:
    """The first part died after its checkpoint, the second is still to end."""
    training = script.Training(runs.Run(runs.Variant("lasp2"), 2, 2), tmp_path)
    assert (training.done, training.steps()) == (0, ([], []))
    for name, losses in (("from-000000", [6.0, 5.0, 4.5]), ("from-000002", [4.0])):
        (tmp_path / name / "recording").mkdir(parents=True)
        lines = [
            json.dumps(asdict(Iteration(number, {"lm loss": loss}, 2.0, False, loss / 100)))
            for number, loss in enumerate(losses, 1)
        ]
        (tmp_path / name / "recording" / "rank00000.jsonl").write_text("\n".join(lines) + "\n")
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    for done, losses in ((2, [6.0, 5.0]), (3, [6.0, 5.0, 4.0])):
        (checkpoints / "latest_checkpointed_iteration.txt").write_text(str(done))
        assert training.done == done
        assert training.steps() == (losses, pytest.approx([10 * loss for loss in losses]))


def test_a_report_is_drawn_again(tmp_path: Path) -> None:
    losses = [5.0 - step / 200 for step in range(300)]
    runs = [
        {"algorithm": "lasp2", "context_parallel_size": cp, "ms_per_iteration": 9.0, "losses": own}
        for cp, own in ((1, losses), (2, losses[:100]), (4, []))
    ]
    path = tmp_path / "report.json"
    path.write_text(json.dumps({"config": "tnl.yaml", "iterations": 400, "runs": runs}))
    assert script.main(["--draw", str(path)]) == 0
    assert (tmp_path / "loss.png").stat().st_size > 10_000


def test_parts_make_up_the_whole() -> None:
    words = ["--config", str(ROOT / "configs/tiny_transnormer.yaml"), "--iters", "10"]
    with pytest.raises(ConfigError, match="--iters must be a multiple of --part, got 10 and 3"):
        script.main([*words, "--part", "3"])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_calls_train_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "launch", forked_launch.launch)
    data = tmp_path / "text"
    assert prepare_data.main([str(ROOT / "README.md"), "--output", str(data)]) == 0
    words = ["--config", str(ROOT / "configs/tiny_transnormer.yaml"), "--algos", "lasp2"]
    flags = "-- --num-workers 0 --seq-length 64 --hidden-size 32 --ffn-hidden-size 64".split()
    flags += f"--num-attention-heads 4 --split 100,0,0 --data-path {data}".split()
    flags += ["--data-cache-path", str(tmp_path / "cache")]

    def losses(name: str, *more: str) -> list[list[float]]:
        output = tmp_path / name
        assert script.main([*words, *more, "--output", str(output), *flags]) == 0
        report = json.loads((output / "report.json").read_text())
        return [run["losses"] for run in report["runs"]]

    unsplit, split = losses("whole", "--iters", "4", "--cp", "2")
    (first,) = losses("parts", "--iters", "4", "--cp", "1", "--part", "2")
    (both,) = losses("parts", "--iters", "4", "--cp", "1", "--part", "2")
    assert len(set(unsplit)) == 4
    assert first == unsplit[:2]
    assert both == pytest.approx(unsplit, rel=1e-6)
    assert split == pytest.approx(unsplit, rel=1e-5)
