"""The stress test for GPUs, on threads."""

import json

from tests import stress_transport
from tests.peer_world import VirtualPeerCommunicator


def test_stress_finds_nothing_and_a_planted_fault(tmp_path, monkeypatch, capsys):
    """The stress test for GPUs, on threads; the fault is one wrong number in one message."""
    words = ["--virtual", "2", "--rounds", "6", "--minutes", "1", "--json", str(tmp_path / "x")]
    assert stress_transport.main(words) == 0
    found = json.loads((tmp_path / "x").read_text())
    assert found["passed"]
    assert found["cases"] >= 6
    assert found["wrong_elements"] == 0
    original = VirtualPeerCommunicator._post

    def faulty(self, slot, writes, receives, *, early):
        pending = original(self, slot, writes, receives, early=early)
        if self._turn == 5 and receives and self.rank == 1:
            return pending.then(lambda _: receives[0][0].view(-1)[0].mul_(3))
        return pending

    monkeypatch.setattr(VirtualPeerCommunicator, "_post", faulty)
    assert stress_transport.main(words) == 1
    found = json.loads((tmp_path / "x").read_text())
    assert not found["passed"]
    assert found["wrong_elements"] > 0
    assert found["failures"]
    assert "wrong elements" in capsys.readouterr().out.splitlines()[-1]
