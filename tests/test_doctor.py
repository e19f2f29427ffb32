"""The doctor finds what is right, refuses nothing that runs, and notices a wrong result."""

import pytest
import torch

from megatron_cp_plugin import doctor, registry
from megatron_cp_plugin.algorithms.ring import ZigzagRing
from megatron_cp_plugin.cli import main

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


def test_a_wrong_gradient_is_noticed(monkeypatch, capsys):
    right = ZigzagRing.backward

    def wrong(self, dout, saved, call):
        dq, dk, dv = right(self, dout, saved, call)
        return dq, dk * 1.001, dv

    monkeypatch.setattr(ZigzagRing, "backward", wrong)
    assert main(["doctor"]) == 1
    assert "WRONG: error 1.0e-03" in capsys.readouterr().out
