"""flash-attn 4 (flash_attn.cute), compiled for the device at first use of a shape."""

from collections.abc import Callable, Sequence
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from megatron_cp_plugin.core.kernel import (
    Gradients,
    KernelCall,
    KernelSum,
    Lengths,
    Problem,
    Statistics,
)
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
_SUMMING = ("4.0.0b36",)  # versions whose backward was tried with `_Buffers`


class Flash4(PackingKernel):
    """flash_attn.cute.interface (Hopper and newer)."""

    name = "flash4"
    deterministic = True
    rectangular_causal = windows = True
    gaps = True
    places_outputs = places_gradients = sums = True

    def unsupported(self, problem: Problem) -> str | None:
        if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
            return "needs the package flash-attn-4, which is not installed"
        reason = gpu_reason(problem, range(8, 257, 8), (9, 0)) or wide_heads_reason(problem)
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
        given = _given(q, dout, statistics, dim, value_dim)
        keys = _filled(k, dim), _filled(v, value_dim)
        dq, dk, dv, *_ = _flash_attn_bwd(k=keys[0], v=keys[1], **given, **settings)
        found = _cut(dq, q.shape[-1]), _cut(dk, k.shape[-1]), _cut(dv, v.shape[-1])
        return call.placed(found)

    def query_sum(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> KernelSum | None:
        return _QuerySum(call, dout, statistics) if _can_sum(call.q.device) else None

    def key_sum(self, call: KernelCall) -> KernelSum | None:
        return _KeySum(call) if _can_sum(call.q.device) else None

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """See SoftmaxKernel.workspace: float32 dQ, delta and lse, with GQA dK and dV, on Hopper.

        Source: flash_attn.cute.interface, _flash_attn_bwd and _tile_size_bwd_sm90 (4.0.0b36).
        """
        if statistics is None:
            return 0
        sequences = 1 if call.packing is None else len(call.packing)
        (batch, rows), cols = call.q.shape[:2], call.k.shape[1]
        tile, key_tile, _ = _tile_sizes(call)
        if sequences > 1:  # each is padded by itself, in the end of its place
            rows, cols = batch * rows, batch * cols
            rows += (batch * sequences + 1) * tile - 1
            cols += (batch * sequences + 1) * key_tile - 1
            batch, rows, cols = 1, rows // tile * tile, cols // key_tile * key_tile
        found = self._query_bytes(call, batch, rows) + _made_bytes(statistics)
        if call.q.shape[2] > call.k.shape[2]:
            found += self._key_bytes(call, batch, cols)
        return found

    def sum_bytes(self, call: KernelCall, statistics: Statistics | None) -> int:
        """See SoftmaxKernel.sum_bytes: float32 dQ, delta and lse; or float32 dK and dV."""
        (batch, rows), cols = call.q.shape[:2], call.k.shape[1]
        if statistics is None:
            return self._key_bytes(call, batch, cols)
        return self._query_bytes(call, batch, rows) + _made_bytes(statistics)

    def _query_bytes(self, call: KernelCall, batch: int, rows: int) -> int:
        """Bytes of dQ, delta and lse in float32, of `rows` queries."""
        tile, _, multiple = _tile_sizes(call)
        heads, dim = call.q.shape[2:]
        return 4 * batch * heads * rounded(rows, tile) * (rounded(dim, multiple) + 2)

    def _key_bytes(self, call: KernelCall, batch: int, cols: int) -> int:
        """Bytes of dK and dV in float32, of `cols` keys."""
        _, tile, multiple = _tile_sizes(call)
        widths = rounded(call.k.shape[3], multiple) + rounded(call.v.shape[3], multiple)
        return 4 * batch * call.k.shape[2] * rounded(cols, tile) * widths


class _Buffers:
    """float32 tensors that the package's backward makes in a first call, and has again in others.

    It sums dQ, and dK and dV of shared heads, in such tensors, and converts each behind its kernel.
    Here they are converted in the end.
    """

    def __init__(self, make: Callable[..., Tensor], convert: Callable[..., None]) -> None:
        """Args:
        make: torch's function that makes these tensors, and no others of float32.
        convert: the package's function.
        """
        self._make, self._convert = make, convert
        self._kept: list[Tensor] = []
        self._used = 0  # by the running call
        self._settings: dict[int, tuple[tuple[Any, ...], dict[str, Any]]] = {}

    @property
    def first(self) -> bool:
        """Whether no call has ended yet."""
        return not self._settings

    def begin(self) -> None:
        """Begins a call."""
        self._used = 0

    def made(self, *shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """In place of torch's function. Of fewer keys than in the first call: the first ones."""
        if dtype != torch.float32:
            return self._make(*shape, dtype=dtype, device=device)
        if self._used == len(self._kept):
            self._kept.append(self._make(*shape, dtype=dtype, device=device))
        self._used += 1
        return self._kept[self._used - 1][..., : shape[-1]]

    def later(self, wide: Tensor, out: Tensor, *args: Any, **options: Any) -> None:
        """In place of the function that converts."""
        for index, kept in enumerate(self._kept):
            if wide.data_ptr() == kept.data_ptr():
                self._settings[index] = args, options
                return
        self._convert(wide, out, *args, **options)

    def converted(
        self,
        shapes: Sequence[tuple[torch.Size, int]],
        like: Tensor,
        into: tuple[Tensor, ...] | None,
    ) -> tuple[Tensor, ...]:
        """The first tensors in the dtype of `like`.

        Args:
            shapes: with head dims as the kernel has them, and the head dims that are wanted.
            into: memory for them, which may be strided.
        """
        found = []
        for index, (shape, dim) in enumerate(shapes):
            fits = into is not None and shape[-1] == dim
            out = into[index] if into is not None and fits else like.new_empty(shape)
            args, options = self._settings[index]
            self._convert(self._kept[index], out, *args, **options)
            cut = _cut(out, dim)
            found.append(cut if into is None or fits else into[index].copy_(cut))
        return tuple(found)


class _QuerySum(KernelSum):
    """The package's backward with the dQ, delta and lse of its first call."""

    def __init__(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> None:
        from flash_attn.cute import interface

        self._dim, self._dims = call.q.shape[-1], _served_dims(call.q, call.k, call.v)
        self._given = _given(call.q, dout, statistics, *self._dims)
        self._given["dq"] = self._given["q"]  # is not written to
        buffers = _Buffers(torch.empty, interface._bwd_postprocess_convert)
        fill = interface._bwd_preprocess

        def first_fill(*args: Any, **options: Any) -> None:
            if buffers.first:
                fill(*args, **options)

        self._buffers = buffers
        self._run = _backward_with(buffers, "empty", _bwd_preprocess=first_fill)

    def add(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> tuple[Tensor, ...]:
        k, v = call.k, call.v
        keys = {"k": _filled(k, self._dims[0]), "v": _filled(v, self._dims[1])}
        self._buffers.begin()
        _, dk, dv = self._run(**keys, **self._given, **_settings(call, None))
        return call.placed((_cut(dk, k.shape[-1]), _cut(dv, v.shape[-1])))

    def total(self, into: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        q: Tensor = self._given["q"]
        return self._buffers.converted(((q.shape, self._dim),), q, into)


class _KeySum(KernelSum):
    """The package's backward with the dK and dV of its first call, which has all keys."""

    def __init__(self, call: KernelCall) -> None:
        from flash_attn.cute import interface

        self._like = call.k, call.v
        self._dims = _served_dims(call.q, call.k, call.v)
        self._buffers = _Buffers(torch.zeros, interface._bwd_postprocess_convert)
        self._run = _backward_with(self._buffers, "zeros")

    def add(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> tuple[Tensor, ...]:
        keys = {"k": _filled(call.k, self._dims[0]), "v": _filled(call.v, self._dims[1])}
        results = {"dk": keys["k"], "dv": keys["v"]}  # are not written to
        given = _given(call.q, dout, statistics, *self._dims)
        if call.into is not None and self._dims[0] == call.q.shape[-1]:
            given["dq"] = call.into[0]
        self._buffers.begin()
        dq, *_ = self._run(**keys, **results, **given, **_settings(call, None))
        return call.placed((_cut(dq, call.q.shape[-1]),))

    def total(self, into: tuple[Tensor, ...] | None = None) -> tuple[Tensor, ...]:
        shapes = [
            (torch.Size((*x.shape[:-1], dim)), x.shape[-1])
            for x, dim in zip(self._like, self._dims, strict=True)
        ]
        return self._buffers.converted(shapes, self._like[0], into)


def _backward_with(
    buffers: _Buffers, maker: str, **functions: Callable[..., None]
) -> Callable[..., tuple[Tensor, ...]]:
    """The package's backward with other functions in the place of some that it calls.

    Args: maker: name of torch's function that `buffers` stand for.
    """
    from flash_attn.cute import interface

    whole = interface._flash_attn_bwd
    functions |= {"_bwd_postprocess_convert": buffers.later}
    names = {**vars(interface), **functions, "torch": _Torch(maker, buffers.made)}
    return FunctionType(whole.__code__, names, argdefs=whole.__defaults__)


class _Torch:
    """torch with another function of a name."""

    def __init__(self, name: str, function: Callable[..., Tensor]) -> None:
        setattr(self, name, function)

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@cache
def _package_version() -> str:
    return version("flash-attn-4")


def _can_sum(device: torch.device) -> bool:
    """Whether sums were tried with the package's version, on such a device."""
    return _package_version() in _SUMMING and torch.cuda.get_device_capability(device)[0] == 9


def _given(
    q: Tensor, dout: Tensor, statistics: Statistics, dim: int, value_dim: int
) -> dict[str, Any]:
    """Arguments of the package's backward, but for the keys and the mask.

    Args: dim, value_dim: as of `_served_dims`.
    """
    out, dlse = statistics.out, None
    if out is None:
        # The kernel takes delta - dlse for delta, with delta = rowsum(dout * out) = 0 here: one
        # row of zeros, which it reads again and again.
        assert statistics.delta is not None
        out = dout.new_zeros(dout.shape[-1]).expand_as(dout)
        dlse = statistics.delta.neg().contiguous()
    wide = {"out": _filled(out, value_dim), "dout": _filled(dout, value_dim)}
    deterministic = torch.are_deterministic_algorithms_enabled()
    lse = statistics.lse.contiguous()
    return wide | {"q": _filled(q, dim), "lse": lse, "dlse": dlse, "deterministic": deterministic}


def _tile_sizes(call: KernelCall) -> tuple[int, int, int]:
    """Queries and keys of a tile of the backward, and the multiple that head dims are filled up to,
    on Hopper.
    """
    dim = call.q.shape[3]
    full = not call.causal and not call.window
    tile = 128 if dim <= 64 else 80 if 96 < dim <= 128 and full else 64
    return (tile, 128, 32) if dim <= 128 else (tile, 96 if dim <= 192 else 48, 64)


def _made_bytes(statistics: Statistics) -> int:
    made = statistics.copied_bytes(dout_bytes=0)
    if statistics.delta is not None and statistics.out is None:
        made += statistics.delta.numel() * 4
    return made


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
    on_hopper = torch.cuda.get_device_capability(q.device)[0] == 9
    return next(
        (dim, value_dim)
        for dim, value_dim in (_HOPPER if on_hopper else _ELSEWHERE)
        if dim >= q.shape[-1] and value_dim >= v.shape[-1] and not (shared and dim != value_dim)
    )


def _filled(x: Tensor, dim: int) -> Tensor:
    """x with zeros behind each row, up to `dim`."""
    return x if x.shape[-1] == dim else pad(x, (0, dim - x.shape[-1]))


def _cut(x: Tensor, dim: int) -> Tensor:
    """The first `dim` of each row."""
    return x if x.shape[-1] == dim else x[..., :dim].contiguous()
