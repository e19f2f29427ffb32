"""Kernels with any of the abilities that those of GPUs have, which insist on what they can do."""

from torch import Tensor

from megatron_cp_plugin.core.kernel import Packing, Statistics
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.kernels.reference import Reference

ABILITIES = ("rectangular_causal", "packs", "gaps", "places_outputs", "places_gradients")


class AnyKernel(Reference):
    """The reference with some abilities, by the bits of a number; the last bit: it takes out, not
    delta.
    """

    def __init__(self, number: int) -> None:
        self.name = f"any{number}"
        for bit, ability in enumerate(ABILITIES):
            setattr(self, ability, bool(number >> bit & 1))
        self._takes_out = bool(number >> len(ABILITIES) & 1)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        self._check(q, k, causal)
        return super().forward(q, k, v, scale=scale, causal=causal)

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check(q, k, causal)
        assert statistics.lse.isfinite().all()
        if self._takes_out:
            delta = delta_of(dout, statistics.out_for(dout))
            statistics = Statistics(statistics.lse, delta=delta)
        return super().backward(dout, q, k, v, statistics, scale=scale, causal=causal)

    def forward_to(self, results: tuple[Tensor, Tensor], *inputs: Tensor, **settings: bool) -> None:
        assert self.places_outputs
        super().forward_to(results, *inputs, **settings)

    def backward_to(
        self, gradients: tuple[Tensor, Tensor, Tensor], *inputs: Tensor, **settings: bool
    ) -> None:
        assert self.places_gradients
        super().backward_to(gradients, *inputs, **settings)

    def forward_packed(
        self, q: Tensor, k: Tensor, v: Tensor, packing: Packing, *, scale: float, causal: bool
    ) -> tuple[Tensor, Tensor]:
        self._check_packed(q, k, packing)
        return super().forward_packed(q, k, v, packing, scale=scale, causal=causal)

    def backward_packed(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        statistics: Statistics,
        packing: Packing,
        *,
        scale: float,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._check_packed(q, k, packing)
        return super().backward_packed(
            dout, q, k, v, statistics, packing, scale=scale, causal=causal
        )

    def _check(self, q: Tensor, k: Tensor, causal: bool) -> None:
        rows, cols = q.shape[1], k.shape[1]
        assert rows > 0
        assert cols > 0
        assert not causal or rows == cols or (self.rectangular_causal and rows < cols)

    def _check_packed(self, q: Tensor, k: Tensor, packing: Packing) -> None:
        assert self.gaps or not packing.gaps
        for slices, x in ((packing.q, q), (packing.kv, k)):
            assert min(part.start for part in slices) == 0
            assert max(part.stop for part in slices) == x.shape[1]
