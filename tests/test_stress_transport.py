"""The stress test for GPUs, on threads."""

import re

from tests import stress_transport
from tests.peer_world import VirtualPeerCommunicator


def test_stress_finds_nothing_and_a_planted_fault(monkeypatch, capsys):
    """The fault is one wrong number in one message."""
    words = ["--virtual", "2", "--rounds", "6", "--minutes", "1"]
    assert stress_transport.main(words) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    cases, wrong = re.findall(r"(\d+) (?:cases|wrong elements)", said)
    assert (int(cases) >= 6, wrong) == (True, "0")
    original = VirtualPeerCommunicator._post

    def faulty(self, slot, writes, receives, *, early):
        pending = original(self, slot, writes, receives, early=early)
        if self._turn == 5 and receives and self.rank == 1:
            return pending.then(lambda _: receives[0][0].view(-1)[0].mul_(3))
        return pending

    monkeypatch.setattr(VirtualPeerCommunicator, "_post", faulty)
    assert stress_transport.main(words) == 1
    *before, last = capsys.readouterr().out.splitlines()
    assert any(line.startswith("WRONG rank 1 ") for line in before)
    assert re.search(r": [1-9]\d* wrong elements$", last)
