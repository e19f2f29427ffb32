"""Our kernel `fla` on CPUs: stand-ins for fla's kernels, chunks and segments of few tokens."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from unittest.mock import patch

import torch
from torch import Tensor

from megatron_cp_plugin.core.linear.states import Interval
from megatron_cp_plugin.kernels import fla, fla_gated
from megatron_cp_plugin.kernels.linear import resolve_linear
from tests.linear_oracle import passed_along
from tests.stand_ins.fla.ops.common import chunk_h, chunk_o, fused_chunk, sequences

CHUNK, SHORTEST_SEGMENT, SEQUENCES = 4, 8, 64


@contextmanager
def fla_on_cpu() -> Iterator[None]:
    """Serves any dtype, in float64 as exactly as others."""
    modules = {
        "fla.ops.common.chunk_h": chunk_h,
        "fla.ops.common.chunk_o": chunk_o,
        "fla.ops.common.fused_chunk": fused_chunk,
        "megatron_cp_plugin.kernels.decayed": SimpleNamespace(
            add_decayed_=_add_decayed, passed_along=passed_along
        ),
    }
    with (
        patch.dict("sys.modules", modules),
        patch.multiple(
            fla,
            CHUNK=CHUNK,
            _SHORTEST_SEGMENT=SHORTEST_SEGMENT,
            _SEQUENCES=SEQUENCES,
            measured_blocks=lambda *tensors: nullcontext(),
        ),
        patch.object(fla_gated.FlaLinear, "unsupported", lambda *args: None),
    ):
        _forget()
        try:
            yield
        finally:
            _forget()


def launches() -> list[tuple[str, dict[str, object]]]:
    """Names and arguments, of tensors their shapes, of all launches since this was asked for."""
    found = list(sequences.LAUNCHES)
    sequences.LAUNCHES.clear()
    return found


def _forget() -> None:
    """What was made for chunks of other lengths, and which kernels serve what."""
    resolve_linear.cache_clear()
    sequences.LAUNCHES.clear()


def _add_decayed(
    out: Tensor, x: Tensor, states: Tensor, log2_rates: Tensor, intervals: Sequence[Interval]
) -> None:
    """As kernels/decayed.py."""
    sequences.launched("add_decayed_", {"out": out, "x": x, "log2_rates": log2_rates})
    for (start, stop), state in zip(intervals, states, strict=True):
        powers = sequences.powers(log2_rates, torch.arange(1, stop - start + 1))
        added = torch.einsum("bthd,bhde->bthe", x[:, start:stop], state)
        out[:, start:stop] += powers * added
