"""The loop over slots of memory, as copy engines use them, and over process groups."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp_plugin.algorithms.distflash import DistFlash, HelpedPlacement
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape, head_groups
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.placement import Place
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.over_slots import CASES, compare
from tests.pairwise import pairwise
from tests.peer_world import VirtualPeerCommunicator, run_virtual


@pytest.mark.parametrize(
    ("case", "size", "mask"),
    pairwise(CASES, (1, 2, 3, 4, 5), (Mask(), Mask(False), Mask(window=7), Mask(documents=(3, 7)))),
    ids=str,
)
def test_copy_engines_find_what_they_need(
    case: tuple[str, dict[str, object]], size: int, mask: Mask
) -> None:
    """Blocks of unequal lengths: all ranks have slots of one size, used in the same turns.

    With documents some ranks pass sums on to which they add nothing.
    """
    algo, options = case
    if size == 1:
        mask = replace(mask, documents=())
    by_rank = compare(algo, options, size, mask, 5 * size + size // 2)
    assert bool(by_rank[0]) == (size > 1)
    for name in by_rank[0]:
        channels = [channels[name] for channels in by_rank]
        assert len({(channel._turn, channel.held_bytes) for channel in channels}) == 1


@pytest.mark.parametrize("mask", [Mask(window=7), Mask(documents=(3, 7))], ids=str)
@pytest.mark.parametrize("size", [3, 4, 5])
@pytest.mark.parametrize("options", [{}, {"chunks": 2}, {"last_step": "owner"}], ids=str)
def test_helpers_by_work_exchange_with_several_ranks_over_peer_memory(
    options: dict[str, object], size: int, mask: Mask
) -> None:
    for channels in compare("distflash", options, size, mask, 5 * size + size // 2):
        assert all(channel._turn > 0 for channel in channels.values())
        assert channels


def test_helpers_may_send_results_while_their_owner_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has computed some rows of rank 1 when that has computed the others."""
    done: dict[str, list[str]] = {"rank 0": [], "rank 1": []}

    def note(what: str) -> None:
        done[current_thread().name].append(what)

    def offer(self: SlottedCommunicator, slot: int, sources: Collection[int]) -> None:
        if sources:
            note(f"offers {self.channel}")

    def forward(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        note("computes")
        return attend(*args, **settings)

    attend = Reference.forward
    monkeypatch.setattr(VirtualPeerCommunicator, "_offer", offer)
    monkeypatch.setattr(Reference, "forward", forward)
    compare("distflash", {}, 2, Mask(), 8)
    for rank, offers in (("rank 0", []), ("rank 1", ["offers returns"])):
        forward = done[rank][: 3 + len(offers)]
        assert forward == ["offers fetches", "computes", *offers, "computes"]


@dataclass(frozen=True)
class _Late(HelpedPlacement):
    """Rank 2 of 3 is helped in step 1 and in step 3; in between nothing comes for any rank."""

    cyclic = False

    def place(self, query: int, key: int) -> Iterator[Place]:
        helpers = {(2, 0): Place(0, 1), (2, 1): Place(1, 3)}
        yield helpers.get((query, key), Place(query, (query - key) % self.size))


def test_results_that_wait_to_be_merged_are_not_overwritten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By those that are expected next, in the same slot."""

    def placement(self: DistFlash, shape: Shape, mask: Mask, phase: Phase) -> _Late:
        groups = head_groups(shape.heads, shape.kv_heads, 1, share_kv=False)
        return _Late(self.layout, self.topology.size, groups)

    monkeypatch.setattr(DistFlash, "placement", placement)
    compare("distflash", {}, 3, Mask(), 12)


@pytest.mark.parametrize("gradients", ["float32", "model"])
def test_sums_that_a_rank_passes_on_as_they_came(gradients: str) -> None:
    """Rank 4 has nothing to add to the gradients of rank 1's keys, and ranks around it have."""
    options: dict[str, object] = {"backward": "kv", "gradients": gradients, "chunks": 1}
    options["route"] = "ring"
    (channels, *_) = compare("zigzag", options, 5, Mask(documents=(2, 8, 9)), 15)
    assert channels["sums", 1]._turn > 0


class _Written(TorchDispatchMode):
    """Notes the memory that operations write to."""

    def __init__(self, memory: set[int]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        each = found if isinstance(found, tuple | list) else [found]
        for x, how in zip(each, func._schema.returns, strict=False):
            if isinstance(x, Tensor) and (how.alias_info is None or how.alias_info.is_write):
                self._memory.add(x.untyped_storage().data_ptr())
        return found


@pytest.mark.parametrize(
    ("algo", "options", "size", "mask"),
    [
        ("zigzag", {"layout": "documents"}, 8, Mask(documents=(20, 71))),
        ("zigzag", {"layout": "documents", "backward": "query"}, 8, Mask(documents=(20, 71))),
        ("zigzag", {"layout": "documents", "chunks": 2}, 8, Mask(documents=(20, 71))),
        ("usp", {"ulysses": 2, "route": "straight"}, 16, Mask(window=150)),
        ("distflash", {"helpers": "none"}, 8, Mask(window=70)),
    ],
    ids=str,
)
def test_copies_that_wait_for_no_step_find_what_they_copy(
    algo: str, options: dict[str, object], size: int, mask: Mask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is packed, gathered or computed for a message is so before the mark, on every rank."""
    written: dict[int, set[int]] = {}  # after the last mark, by rank
    early: list[bool] = []
    channel, exchange = VirtualPeerCommunicator, VirtualPeerCommunicator._exchange_beside

    def noted(self, sends, receives, beside, **how):
        if how["early"]:
            early.extend(
                x.untyped_storage().data_ptr() not in written[self.global_rank] for x, _ in sends
            )
        return exchange(self, sends, receives, beside, **how)

    monkeypatch.setattr(channel, "mark", lambda self: written[self.global_rank].clear())
    monkeypatch.setattr(channel, "_exchange_beside", noted)

    def body(topology: Topology) -> None:
        rank, tokens = topology.rank, 12
        written[rank] = set()
        algorithm = create(algo, topology, options).for_documents(mask.resolved)
        q, k, v, dout = (torch.randn(1, tokens, 4, 8, dtype=torch.float64) for _ in range(4))
        call = Call(Shape.of(q, k, v, tokens * size), mask, 8**-0.5, Reference())
        compiled = Compiled(algorithm, call)
        with torch.no_grad(), _Written(written[rank]):
            saved = compiled.forward.attend(q, k, v)[2]
            compiled.backward().differentiate(dout, saved)

    run_virtual(size, body, peer_access=True)
    assert early
    assert all(early)
