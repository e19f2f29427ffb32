"""flash-attn 4 (flash_attn.cute), compiled for the device at first use of a shape."""

from functools import lru_cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Lengths, Problem, Statistics
from megatron_cp_plugin.kernels.base import (
    PackingKernel,
    by_name,
    gpu_reason,
    rounded,
    wide_heads_reason,
)

# Head dims of keys and values with right results on an H200, and those tried elsewhere. Others are
# filled up with zeros to one of these: with 40, 72 and 80 the kernels give wrong results without
# a word, 112 they do not compile (4.0.0b36).
_HOPPER = ((64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256))
_ELSEWHERE = ((64, 64), (128, 128))


class Flash4(PackingKernel):
    """flash_attn.cute.interface (Hopper and newer)."""

    name = "flash4"
    deterministic = True
    rectangular_causal = windows = True
    gaps = True
    places_outputs = places_gradients = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "needs the package flash-attn-4, which is not installed"
        reason = gpu_reason(problem, (9, 0)) or wide_heads_reason(problem)
        if reason is not None or not problem.deterministic:
            return reason
        blackwell_12 = torch.cuda.get_device_capability(problem.device)[0] == 12
        return "has no deterministic backward on compute capability 12" if blackwell_12 else None

    def attend(self, call: KernelCall, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        from flash_attn.cute.interface import _flash_attn_fwd

        q, k, v = call.q, call.k, call.v
        settings = _settings(call, lengths)
        dim, value_dim = _served_dims(q, k, v)
        if call.into is not None and (dim, value_dim) == (q.shape[-1], v.shape[-1]):
            settings |= zip(("out", "lse"), call.into, strict=True)
        wide = _filled(q, dim), _filled(k, dim), _filled(v, value_dim)
        out, lse, *_ = _flash_attn_fwd(*wide, return_lse=True, **settings)
        return call.placed((_cut(out, v.shape[-1]), lse))

    def differentiate(
        self, call: KernelCall, dout: Tensor, statistics: Statistics, lengths: Lengths | None
    ) -> Gradients:
        from flash_attn.cute.interface import _flash_attn_bwd

        q, k, v = call.q, call.k, call.v
        settings = _settings(call, lengths)
        dim, value_dim = _served_dims(q, k, v)
        if call.into is not None and (dim, value_dim) == (q.shape[-1], v.shape[-1]):
            settings |= zip(("dq", "dk", "dv"), call.into, strict=True)
        out, dlse = statistics.out, None
        if out is None:
            # The kernel takes delta - dlse for delta, with delta = rowsum(dout * out) = 0 here: one
            # row of zeros, which it reads again and again.
            assert statistics.delta is not None
            out = dout.new_zeros(dout.shape[-1]).expand_as(dout)
            dlse = statistics.delta.neg().contiguous()
        dq, dk, dv, *_ = _flash_attn_bwd(
            *(_filled(q, dim), _filled(k, dim), _filled(v, value_dim)),
            *(_filled(out, value_dim), _filled(dout, value_dim), statistics.lse.contiguous()),
            dlse=dlse,
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **settings,
        )
        found = _cut(dq, q.shape[-1]), _cut(dk, k.shape[-1]), _cut(dv, v.shape[-1])
        return call.placed(found)

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """See SoftmaxKernel.workspace: float32 dQ, delta and lse, with GQA dK and dV, on Hopper.

        Source: flash_attn.cute.interface, _flash_attn_bwd and _tile_size_bwd_sm90 (4.0.0b36).
        """
        if statistics is None:
            return 0
        sequences = 1 if call.packing is None else len(call.packing)
        (batch, rows, heads, dim), (_, cols, kv_heads, value_dim) = call.q.shape, call.v.shape
        full = not call.causal and not call.window
        # Queries and keys of a tile, and the multiple that head dims are filled up to.
        tile = 128 if dim <= 64 else 80 if 96 < dim <= 128 and full else 64
        key_tile, multiple = (128, 32) if dim <= 128 else (96 if dim <= 192 else 48, 64)
        if sequences > 1:  # each is padded by itself, in the end of its place
            rows, cols = batch * rows, batch * cols
            rows += (batch * sequences + 1) * tile - 1
            cols += (batch * sequences + 1) * key_tile - 1
            batch, rows, cols = 1, rows // tile * tile, cols // key_tile * key_tile
        wide = rounded(dim, multiple)
        elements = batch * heads * rounded(rows, tile) * (wide + 2)
        if heads > kv_heads:
            widths = wide + rounded(value_dim, multiple)
            elements += batch * kv_heads * rounded(cols, key_tile) * widths
        if statistics.delta is not None and statistics.out is None:
            elements += statistics.delta.numel()
        return 4 * elements + statistics.copied_bytes(dout_bytes=0)


def _settings(call: KernelCall, lengths: Lengths | None) -> dict[str, Any]:
    settings: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
    if call.window:  # causal is then an edge on the right
        settings |= {"causal": False, "window_size_left": call.window - 1}
        settings["window_size_right"] = 0 if call.causal else None
    if lengths is None:
        return settings
    settings |= by_name(lengths)
    if lengths.used_q is not None and lengths.used_k is not None:
        settings |= {"seqused_q": lengths.used_q, "seqused_k": lengths.used_k}
    return settings


def _served_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, int]:
    """The head dims of keys and values that the kernels are called with."""
    shared = q.shape[-2] != k.shape[-2]  # backward then takes values as wide as keys
    return next(
        (dim, value_dim)
        for dim, value_dim in _dims_on(q.device.index)
        if dim >= q.shape[-1] and value_dim >= v.shape[-1] and not (shared and dim != value_dim)
    )


@lru_cache  # torch takes several microseconds to tell the capability
def _dims_on(gpu: int | None) -> tuple[tuple[int, int], ...]:
    return _HOPPER if torch.cuda.get_device_capability(gpu)[0] == 9 else _ELSEWHERE


def _filled(x: Tensor, dim: int) -> Tensor:
    """x with zeros behind each row, up to `dim`."""
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


def _cut(x: Tensor, dim: int) -> Tensor:
    """The first `dim` of each row."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()
