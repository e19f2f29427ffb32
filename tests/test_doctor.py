"""The doctor finds what is right, refuses nothing that runs, and notices a wrong result."""

import json
from contextlib import nullcontext
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace

import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin import doctor, registry
from megatron_cp_plugin.cli import main
from megatron_cp_plugin.core.communication.process_groups import topology_of
from megatron_cp_plugin.core.execution.executor import Executor
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.kernels.torch_flash import CpuFlashAttention
from tests.integration.megatron_job import run_torchrun

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="virtual ranks of one process check the CPU path"
)


def parity_of(findings):
    return {finding.name: finding for finding in findings if finding.topic == "parity"}


def test_all_algorithms_are_right_here():
    findings = doctor.examine()
    assert set(parity_of(findings)) == set(registry.available("softmax"))
    assert not any(finding.failed for finding in findings)
    assert not any(finding.text.startswith("refused") for finding in parity_of(findings).values())
    auto = next(f for f in findings if f.topic == "kernels" and f.name == "auto")
    assert auto.text.startswith("torch_cpu for float32, heads 32:8")


def test_the_last_line_is_a_verdict(monkeypatch, capsys):
    here = "GPU (only the CPU path was tried); ranks (only virtual ones were tried)"
    assert main(["doctor", "--head-dim", "16"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"verdict: ok, 9 results are right; missing: {here}"
    )
    right = doctor.version

    def version(package):
        if package == "megatron-core":
            raise PackageNotFoundError
        return right(package)

    monkeypatch.setattr(doctor, "version", version)
    monkeypatch.setattr(doctor, "find_spec", lambda name: name)  # it can be imported
    assert doctor.verdict(doctor.examine(head_dims=(16,))).endswith(f"missing: {here}")
    monkeypatch.setattr(doctor, "find_spec", lambda name: None if name == "pybind11" else name)
    said = "missing: pybind11 (data helpers of the checkout cannot be compiled: pip install pybin"
    assert said in doctor.verdict(doctor.examine(head_dims=(16,)))
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    said = doctor.verdict(doctor.examine(head_dims=(16,)))
    assert "missing: megatron-core (no training: pip install 'megatron-cp-plugin[meg" in said
    attention = doctor.functional.attention

    def refusing(q, k, v, *, algo, **options):
        if algo == "zigzag":
            raise ContextParallelError("too many ranks")
        return attention(q, k, v, algo=algo, **options)

    monkeypatch.setattr(doctor.functional, "attention", refusing)
    said = doctor.verdict(doctor.examine(head_dims=(16,)))
    assert said.startswith("verdict: ok, 8 results are right;")
    assert said.endswith("; zigzag (refused here)")


def test_the_first_rank_says_what_is_wrong_on_another(monkeypatch):
    mine = [doctor.Finding("kernels", name, "fine", True) for name in ("a", "b")]
    theirs = [mine[0], doctor.Finding("kernels", "b", "error 1.0", False)]

    def gather(own):
        assert own is mine
        return [mine, theirs, theirs]

    monkeypatch.setattr(doctor, "topology_of", lambda group: SimpleNamespace(gather=gather))
    found = doctor._worst(mine)
    assert found == [mine[0], doctor.Finding("kernels", "b", "error 1.0 on rank 1", False)]
    assert doctor.verdict(found).startswith("verdict: WRONG: kernels b: do not train")


class Graph:
    """Stands for a CUDA graph; the test says what a replay does."""

    def replay(self):
        raise NotImplementedError


def test_a_replay_is_compared_with_the_unsplit_sequence(monkeypatch):
    """On one rank, with a model of a graph that computes again, or nothing, when replayed."""
    findings = [f for f in doctor.examine(head_dims=(16,)) if f.topic == "CUDA graphs"]
    assert [f.text for f in findings] == ["not tried: no GPU"]
    attention, made = doctor.functional.attention, []

    def recorded(q, k, v, **options):
        options["transport"] = "group"
        made.append((q, k, v, attention(q, k, v, **options)))
        return made[-1][-1]

    monkeypatch.setattr(doctor.functional, "attention", recorded)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph, **_: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    whole = doctor._whole_inputs(torch.device("cpu"), torch.float64, 16)
    expected = doctor._unsplit(whole)

    def replay(graph):
        q, k, v, out = made[-1]
        with torch.no_grad():
            out.detach().copy_(attention(q, k, v, algo="zigzag", transport="group"))

    def error_of():
        failures = []
        topology = topology_of(None)
        error = doctor._replay_error("group", whole, expected[:1], failures, topology)
        return error, failures

    step = torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args: step(*args) and ())
    monkeypatch.setattr(Graph, "replay", replay)
    error, failures = error_of()
    assert error < 1e-10
    assert not failures
    monkeypatch.setattr(Graph, "replay", lambda graph: None)
    assert error_of()[0] > 0.1  # what was computed with the inputs of the capture
    refusal = ContextParallelError("no room\nat all")
    monkeypatch.setattr(Graph, "replay", lambda graph: (_ for _ in ()).throw(refusal))
    assert error_of() == (float("inf"), ["no room"])


def test_a_wrong_gradient_is_noticed(monkeypatch, capsys):
    right = Executor.differentiate

    def wrong(self, dout, saved):
        dq, dk, dv = right(self, dout, saved)
        return dq, dk * 1.001, dv

    monkeypatch.setattr(Executor, "differentiate", wrong)
    assert main(["doctor", "--head-dim", "16"]) == 1
    printed = capsys.readouterr().out
    assert "WRONG: head dim 16: error 1.0e-03" in printed
    last = printed.splitlines()[-1]
    assert last.startswith("verdict: WRONG: parity allgather, parity attention2d, ")
    assert last.endswith(", parity zigzag: do not train with them here")


def kernels_of(findings):
    return {f.name: f for f in findings if f.topic == "kernels" and f.text.startswith("head dim")}


def test_kernels_are_checked_with_the_model_s_head_dims(monkeypatch, capsys):
    right = CpuFlashAttention.forward

    def wrong(self, call):
        out, lse = right(self, call)
        return (out.roll(1, 3), lse) if call.q.shape[3] == 40 else (out, lse)

    assert set(kernels_of(doctor.examine(head_dims=(16,)))) == {"torch_cpu", "reference"}
    monkeypatch.setattr(CpuFlashAttention, "forward", wrong)
    assert main(["doctor", "--head-dim", "16"]) == 0
    assert main(["doctor", "--head-dim", "16", "40"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "WRONG: head dim 40: error" in printed
    assert "WRONG: head dim 16" not in printed
    assert not kernels_of(doctor.examine(head_dims=(40,)))["reference"].failed
    # What runs on such a kernel is wrong too: the algorithms are not held against itself.
    findings = parity_of(doctor.examine(head_dims=(40,)))
    assert all(finding.failed for finding in findings.values())


@pytest.mark.slow
def test_real_ranks_find_all_algorithms_right(tmp_path):
    """Under torchrun, with a report, as someone with more GPUs would send it."""
    path = tmp_path / "report.json"
    words = ["-m", "megatron_cp_plugin.cli", "doctor", "--head-dim", "16", "--heads", "4:2"]
    job = run_torchrun(tmp_path, *words, "--report", str(path), ranks=2).succeeded()
    (done,) = job.processes
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("│ parity")]
    assert {row[3] for row in rows} == set(registry.available("softmax"))
    assert "2 over gloo, 1 node(s)" in done.stdout
    assert done.stdout.splitlines()[-1].startswith(f"verdict: ok, {len(rows) + 2} results are")
    found = json.loads(path.read_text())
    assert set(found["ms"]) == set(registry.available("softmax"))
    assert all(time > 0 for time in found["ms"].values())
    assert found["machine"]["inside"]
    assert found["version"] == cp.__version__
    right = {name for topic, name, _, right in found["findings"] if topic == "parity" and right}
    assert right == set(registry.available("softmax"))


def test_a_report_that_cannot_be_written(tmp_path, capsys):
    assert main(["doctor", "--report", str(tmp_path)]) == 2
    assert "which is a folder: name a file" in capsys.readouterr().err
