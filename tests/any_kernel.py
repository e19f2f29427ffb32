"""Kernels with any of the abilities that those of GPUs have, which insist on what they can do."""

from torch import Tensor

from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.kernels.reference import Reference

ABILITIES = (
    *("rectangular_causal", "packs", "gaps", "places_outputs", "places_gradients"),
    "windows",
)


class AnyKernel(Reference):
    """The reference with some abilities, by the bits of a number; the last bit: it takes out, not
    delta.
    """

    def __init__(self, number: int) -> None:
        self.name = f"any{number}"
        for bit, ability in enumerate(ABILITIES):
            setattr(self, ability, bool(number >> bit & 1))
        self.windows &= self.rectangular_causal
        self._takes_out = bool(number >> len(ABILITIES) & 1)

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        assert call.into is None or self.places_outputs
        self._check(call)
        return super().forward(call)

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        assert call.into is None or self.places_gradients
        self._check(call)
        if call.packing is None:
            assert statistics.lse.isfinite().all()
        if self._takes_out:
            delta = delta_of(dout, statistics.out_for(dout))
            statistics = Statistics(statistics.lse, delta=delta)
        return super().backward(call, dout, statistics)

    def _check(self, call: KernelCall) -> None:
        q, k, packing = call.q, call.k, call.packing
        assert self.windows or not call.window
        if packing is None:
            rows, cols = q.shape[1], k.shape[1]
            assert rows > 0
            assert cols > 0
            assert not call.causal or rows == cols or (self.rectangular_causal and rows < cols)
            return
        assert self.packs
        assert self.gaps or not packing.gaps
        for slices, x in ((packing.q, q), (packing.kv, k)):
            assert min(part.start for part in slices) == 0
            assert max(part.stop for part in slices) == x.shape[1]
