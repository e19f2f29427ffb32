"""The loop over slots of memory, as copy engines use them, and over process groups."""

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from threading import current_thread
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_cp_plugin.algorithms.distflash import DistFlash, HelpedPlacement
from megatron_cp_plugin.core.algorithm import Compiled
from megatron_cp_plugin.core.call import Call, Shape, head_groups
from megatron_cp_plugin.core.comm import Pieces, Topology
from megatron_cp_plugin.core.communication.peer import SlottedCommunicator
from megatron_cp_plugin.core.communication.record import Phase
from megatron_cp_plugin.core.execution import program as module
from megatron_cp_plugin.core.placement import HeadPlacement, Place
from megatron_cp_plugin.core.plans.compile import plan_of
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.kernels.reference import Reference
from megatron_cp_plugin.registry import create
from tests.pairwise import pairwise
from tests.peer_world import VirtualPeerCommunicator, run_virtual, virtual_world
from tests.test_conformance import Case, assert_conforms

CASES: list[tuple[str, dict[str, object]]] = [
    ("ring", {"backward": "kv"}),
    ("zigzag", {"backward": "query", "chunks": 2}),
    ("zigzag", {"backward": "kv", "chunks": 2}),
    ("zigzag", {"backward": "kv", "gradients": "model"}),
    ("distflash", {"helpers": "distance"}),
    ("distflash", {"helpers": "distance", "chunks": 2}),
    ("distflash", {"helpers": "distance", "last_step": "owner"}),
    ("distflash", {"transport": "peer"}),
]


def compare(algo: str, options: dict[str, object], size: int, mask: Mask, seq_len: int) -> None:
    """With float64, over slots where ranks have peer memory."""
    settings = {"causal": mask.causal, "window": mask.window, "kernel": "reference"}
    documents = [0, *(start for start in mask.documents if start < seq_len), seq_len]
    case = Case(algo, tuple(options.items()))
    assert_conforms(case, size, seq_len=seq_len, cu_seqlens=documents, **settings)


@pytest.mark.parametrize(("algo", "options"), CASES, ids=str)
def test_copy_engines_are_used_where_two_buffers_are_enough(
    algo: str, options: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    posted: Counter[tuple[str, int]] = Counter()
    post = VirtualPeerCommunicator._post

    def counted(self, *args, **how):
        posted[self.channel, self._slots] += 1
        return post(self, *args, **how)

    monkeypatch.setattr(VirtualPeerCommunicator, "_post", counted)
    compare(algo, options, 4, Mask(), 32)
    assert set(posted) == {("fetches", 2), ("returns" if algo == "distflash" else "sums", 1)}
    assert posted["fetches", 2] >= 2 * 4


@pytest.mark.parametrize(
    ("case", "size", "mask"),
    pairwise(CASES, (1, 2, 3, 4, 5), (Mask(), Mask(False), Mask(window=7), Mask(documents=(3, 7)))),
    ids=str,
)
def test_copy_engines_find_what_they_need(
    case: tuple[str, dict[str, object]], size: int, mask: Mask
) -> None:
    """Blocks of unequal lengths; with documents some ranks have nothing to add to sums."""
    compare(*case, size, mask, 5 * size + size // 2)


@pytest.mark.parametrize(
    ("case", "nodes"),
    pairwise(
        [
            ("zigzag", {"layout": "documents", "route": "straight"}),
            ("zigzag", {"route": "straight", "chunks": 2}),
            ("distflash", {"helpers": "work"}),
            ("usp", {"ulysses": 2, "route": "straight", "layout": "documents"}),
        ],
        ((2, 2), (3, 2), (2, 4), (3, 3)),
    ),
    ids=str,
)
def test_copy_engines_send_inside_nodes_and_process_groups_between(
    case: tuple[str, dict[str, object]], nodes: tuple[int, int]
) -> None:
    """In merged steps, whose inputs and results go straight to the ranks that need them."""
    (algo, options), (count, near) = case, nodes
    members = int(str(options.get("ulysses", 1)))
    size, seq_len = count * near * members, 24 * count * near
    documents = [0, 3, seq_len // 2, seq_len // 2 + 5, seq_len]
    _, log = assert_conforms(
        Case(algo, tuple(options.items())),
        size,
        seq_len=seq_len,
        cu_seqlens=documents,
        kernel="reference",
        ranks_per_node=near * members,
    )
    mask = Mask(documents=tuple(documents[1:-1]))
    topology = virtual_world(size, ranks_per_node=near * members).topology(0)
    made = create(algo, topology, options).for_documents(mask.resolved)
    for phase in PHASES:
        placement = made.placement(Shape(2, seq_len, 4, 2, 8), mask, phase)
        blocks = placement.of_teams if isinstance(placement, HeadPlacement) else placement
        plan = plan_of(blocks, seq_len, mask, phase)
        assert plan.once or algo == "distflash"  # which needs some queries in several steps
        planned = Counter[str]()
        for move in plan.moves:
            inside = not plan.once or move.source // near == move.target // near
            name = f"{'returns' if move.result else 'fetches'}{'' if inside else ' between nodes'}"
            planned[name] += members * sum(map(len, move.messages))
        sent = Counter[str]()
        for row in log.rows:
            name = row.channel.split("/")[-1]
            if row.phase == phase and row.direction == "sent" and row.op == "exchange":
                sent[name] += row.messages
        assert sent == planned
        assert len(planned) > 1 or not plan.once


DOCUMENTS = (4, 10, 18, 51, 102)


@pytest.mark.usefixtures("keys_stay")
@pytest.mark.parametrize(
    ("nodes", "starts", "keep"),
    [
        ((1, 8), DOCUMENTS, "local"),
        ((1, 5), (12, 24, 44), "local"),
        ((1, 4), (12, 24, 40), "local"),
        ((2, 8), (*DOCUMENTS, 128, *(128 + start for start in DOCUMENTS)), "local"),
        ((2, 8), (31, 98, 116, 121, 127, 167, 195), "local"),
        ((1, 4), (12, 24, 40), "auto"),
        ((1, 5), (12, 24, 44), "auto"),
        ((2, 4), (16, 40, 64, 90, 110), "auto"),
    ],
)
def test_own_pairs_that_are_computed_last(
    nodes: tuple[int, int], starts: tuple[int, ...], keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count, near = nodes
    monkeypatch.setattr(module, "LARGE", 1)
    found, real = list[bool](), module._own_come_last
    monkeypatch.setattr(
        module, "_own_come_last", lambda *given: found.append(real(*given)) or found[-1]
    )
    module.program.cache_clear()
    options = (("layout", "documents"), ("route", "straight"), ("backward", "kv"), ("keep", keep))
    seq_len = 16 * count * near
    assert_conforms(
        Case("zigzag", options),
        count * near,
        seq_len=seq_len,
        cu_seqlens=[0, *starts, seq_len],
        kernel="reference",
        ranks_per_node=near,
    )
    assert any(found)


def test_helpers_may_send_results_while_their_owner_computes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has computed some rows of rank 1 when that has computed the others. The host offers
    memory behind a kernel, but from before it on.
    """
    done: dict[str, list[str]] = {"rank 0": [], "rank 1": []}

    def note(what: str) -> None:
        done[current_thread().name].append(what)

    def free(self: SlottedCommunicator, slot: int) -> None:
        note(f"frees {self.channel}")

    def offer(self: SlottedCommunicator, slot: int, sources: Collection[int]) -> None:
        note(f"offers {self.channel}")

    def forward(*args: Any, **settings: Any) -> tuple[Tensor, Tensor]:
        note("computes")
        return attend(*args, **settings)

    attend = Reference.forward
    monkeypatch.setattr(VirtualPeerCommunicator, "_free", free)
    monkeypatch.setattr(VirtualPeerCommunicator, "_offer", offer)
    monkeypatch.setattr(Reference, "forward", forward)
    compare("distflash", {}, 2, Mask(), 8)
    first, second = ["frees fetches", "computes", "offers fetches"], ["computes"]
    assert done["rank 0"][:4] == [*first, *second]
    assert done["rank 1"][:6] == [*first, "frees returns", *second, "offers returns"]


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
    options |= {"route": "ring", "transport": "peer"}
    compare("zigzag", options, 5, Mask(documents=(2, 8, 9)), 15)


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


@pytest.mark.usefixtures("keys_stay")
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(
    ("algo", "options", "size", "mask"),
    [
        ("zigzag", {"layout": "documents"}, 8, Mask(documents=(20, 71))),
        ("zigzag", {"layout": "documents", "keep": "local"}, 8, Mask(documents=(20, 71))),
        ("zigzag", {"layout": "documents"}, 4, Mask(documents=(24, 36, 45))),  # rows with a gap
        ("zigzag", {"layout": "documents", "backward": "query"}, 8, Mask(documents=(20, 71))),
        ("zigzag", {"layout": "documents", "chunks": 2}, 8, Mask(documents=(20, 71))),
        ("usp", {"ulysses": 2, "route": "straight"}, 16, Mask(window=150)),
        ("distflash", {"helpers": "none"}, 8, Mask(window=70)),
    ],
    ids=str,
)
def test_copies_that_wait_for_no_step_find_what_they_copy(
    algo: str,
    options: dict[str, object],
    size: int,
    mask: Mask,
    batch: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is packed, gathered or computed for a message is so before the mark, on every rank."""
    written: dict[int, set[int]] = {}  # after the last mark, by rank
    early: list[bool] = []
    channel, exchange = VirtualPeerCommunicator, VirtualPeerCommunicator._exchange_direct

    def noted(self, sends, receives, beside, **how):
        if how["early"]:
            each = [part for x, _ in sends for part in (x.parts if isinstance(x, Pieces) else [x])]
            early.extend(
                x.untyped_storage().data_ptr() not in written[self.global_rank] for x in each
            )
        return exchange(self, sends, receives, beside, **how)

    monkeypatch.setattr(channel, "mark", lambda self: written[self.global_rank].clear())
    monkeypatch.setattr(channel, "_exchange_direct", noted)

    def body(topology: Topology) -> None:
        rank, tokens = topology.rank, 12
        written[rank] = set()
        algorithm = create(algo, topology, options).for_documents(mask.resolved)
        q, k, v, dout = (torch.randn(batch, tokens, 4, 8, dtype=torch.float64) for _ in range(4))
        call = Call(Shape.of(q, k, v, tokens * size), mask, 8**-0.5, Reference())
        compiled = Compiled(algorithm, call)
        with torch.no_grad(), _Written(written[rank]):
            saved = compiled.forward.attend(q, k, v)[2]
            compiled.backward().differentiate(dout, saved)

    run_virtual(size, body, peer_access=True)
    assert early
    assert all(early)
