"""Evaluation and log-probs: under no_grad nothing stays that only a backward would need."""

import weakref
from threading import Barrier

import pytest
import torch
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.virtual import run_virtual
from megatron_cp_plugin.core.layout import shard
from megatron_cp_plugin.registry import layout_of
from tests.operators import Operators

SIZE, TOKENS, HEADS, DIM = 4, 64, 4, 16


class Weighed(Operators):
    """Storages that were made while the mode is on, by address, in bytes."""

    def __init__(self, known: Tensor) -> None:
        super().__init__(self._weigh)
        self._living: dict[int, int] = {}
        self._known = known.untyped_storage()._cdata

    def _weigh(self, _name: str, _args: object, results: list[Tensor]) -> None:
        for x in results:
            storage = x.untyped_storage()
            if storage._cdata != self._known and storage._cdata not in self._living:
                self._living[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self._living.pop, storage._cdata)

    def living_bytes(self) -> int:
        return sum(self._living.values())


def kept_bytes(algo: str, *, grad: bool) -> list[int]:
    """What lives beside inputs and result after a second call, on each rank."""
    whole = torch.randn(1, TOKENS, HEADS, DIM)
    together = Barrier(SIZE)

    def attend(x: Tensor, topology: Topology) -> Tensor:
        q = x.clone().requires_grad_(grad)
        if algo in cp.available("linear"):
            return cp.linear_attention(q, x, x, algo=algo, decay=0.9, group=topology)
        return cp.attention(q, x, x, algo=algo, group=topology)

    def body(topology: Topology) -> int:
        mine = shard(whole, 1, layout_of(algo, {}), topology.rank, topology.size)
        with torch.set_grad_enabled(grad):
            attend(mine, topology)
            with Weighed(known=mine) as weighed:
                out = attend(mine, topology)
                together.wait()  # nobody has messages under way
                return weighed.living_bytes() - out.untyped_storage().nbytes()

    return run_virtual(SIZE, body)


@pytest.mark.parametrize("algo", sorted({*cp.available("softmax"), *cp.available("linear")}))
def test_nothing_is_kept(algo: str) -> None:
    # Of linear attention numbers for each head may stay, for the next call.
    few = 8 * HEADS * SIZE if algo in cp.available("linear") else 0
    if few:
        # And which tokens of a chunk see which, with their numbers, which all layers share.
        chunk = TOKENS if algo == "linear_ulysses" else TOKENS // SIZE
        few += chunk * chunk + 12 * chunk
    if algo == "lasp":
        few += 4 * HEADS * DIM * DIM  # and the state that is sent, which the next call waits for
    assert max(kept_bytes(algo, grad=False)) <= few
    # At least a copy of the query, which a backward needs.
    assert min(kept_bytes(algo, grad=True)) >= TOKENS // SIZE * HEADS * DIM * 4
