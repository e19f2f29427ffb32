"""The autograd Function of all softmax algorithms, and helpers of all autograd Functions: dtypes
under autocast, refusal of second derivatives.
"""

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_cp_plugin.core.algorithm import Algorithm, Compiled
from megatron_cp_plugin.core.autograd.recompute import computed_once
from megatron_cp_plugin.core.communication.record import PHASE
from megatron_cp_plugin.core.kernel import Problem, SoftmaxKernel
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ContextParallelError

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


_AS_IT_IS = nullcontext()
_CAUSAL = Mask()


def cast_inputs(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Casts tensors of one device to autocast's dtype if autocast is on there; float64 stays."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x if x.dtype == torch.float64 else x.to(dtype) for x in tensors)


def dtypes_as_given(device: torch.device) -> AbstractContextManager[object]:
    """Within this context operations compute in the dtypes that they are given.

    Sums and statistics are float32 for a reason, and backward may run under autocast too.
    """
    if not torch.is_autocast_enabled(device.type):
        return _AS_IT_IS
    return torch.autocast(device.type, enabled=False)


def differentiable_once[R](backward: Callable[..., R]) -> Callable[..., R]:
    """torch's `once_differentiable`, for a backward whose results depend on saved tensors too.

    torch's decorator refuses a second derivative only if the incoming gradient requires one.
    Otherwise, as for the gradient of a plain sum, the second derivative would silently be zero.

    Limit of both: the refusal hangs on the gradients, which do not lead back to the inputs.
    `loss.backward()` meets it; `torch.autograd.grad(loss, inputs)` does not if something else
    connects the two, and leaves this part of the second derivative out.
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def call(ctx: Any, *gradients: Tensor | None) -> R:
        if torch.is_grad_enabled():  # create_graph=True
            gradients = tuple(
                x.detach().requires_grad_() if x is not None and x.is_floating_point() else x
                for x in gradients
            )
        return once(ctx, *gradients)

    return call


class Attention(torch.autograd.Function):
    """Attention as of `attend`, with the call that `compiled_call` returned."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        compiled: Compiled,
        recompute_key: Hashable | None,
    ) -> Tensor:
        """Args: as of `attend`; compiled: as `compiled_call` returns it."""
        q, k, v = aligned(q, k, v)

        def compute() -> tuple[Tensor, ...]:
            out, lse, saved = compiled.forward.attend(q, k, v)
            return (out, *saved) if sink is None else (out, *saved, _let_sink(out, lse, sink))

        token = PHASE.set("forward")
        try:
            with dtypes_as_given(q.device):
                if recompute_key is None:
                    out, *saved = compute()
                else:
                    inputs = (q, k, v) if sink is None else (q, k, v, sink)
                    out, *saved = computed_once(recompute_key, inputs, compute)
        finally:
            PHASE.reset(token)
        ctx.compiled, ctx.sink_dtype = compiled, None
        if sink is not None:
            ctx.sink_dtype = sink.dtype
            saved.append(out)
        ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        """See `torch.autograd.Function`."""
        token = PHASE.set("backward")
        try:
            with dtypes_as_given(dout.device):
                wanted = ctx.needs_input_grad[:3]
                return (*differentiate(ctx, *aligned(dout), wanted=wanted), None, None)
        finally:
            PHASE.reset(token)


def aligned(*tensors: Tensor) -> list[Tensor]:
    """Makes tensors contiguous and aligned to 16 bytes, which GPU kernels load at a time."""
    found = [x.contiguous() for x in tensors]
    return [x.clone() if x.storage_offset() * x.element_size() % 16 else x for x in found]


def differentiate(
    ctx: Any, dout: Tensor, *, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dq, dk, dv, dsink from the tensors that `Attention.forward` saved; None if not wanted."""
    # Hooks on saved tensors may change their strides, which kernels for CPUs do not support.
    saved = [x if x.dim() == 0 or x.stride(-1) == 1 else x.contiguous() for x in ctx.saved_tensors]
    dsink = None
    if ctx.sink_dtype is not None:
        *saved, margin, out = saved
        dsink = -(torch.sigmoid(-margin) * delta_of(dout, out)).sum((0, 2)).to(ctx.sink_dtype)
        dout = (dout * _sink_weights(margin)).to(dout.dtype)
    of_q, of_k, of_v = wanted
    if not any(wanted):
        return None, None, None, dsink
    of_kv = of_k or of_v
    known = ctx.compiled.backwards.get((of_q, of_kv))
    executor = known or ctx.compiled.backward(dq=of_q, dkv=of_kv)
    gradients = executor.differentiate(dout, tuple(saved))
    return (*[x if want else None for x, want in zip(gradients, wanted, strict=True)], dsink)


def _let_sink(out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Gives a key without a value (a sink) its share of the softmax; changes out in place.

    With the share 1 - w of that key, w = sigmoid(lse - sink), the output is w out. The gradient of
    its scores is w p (dp - rowsum(dout w out)). A backward that is given w dout for dout, and w out
    for out, computes it as p (w dp - rowsum(w dout w out)); lse stays.

    Args:
        out: [B,S,H,E], the very tensor that an algorithm has saved.
        lse: [B,H,S].
        sink: [H].

    Returns: lse - sink [B,H,S].
    """
    sink = sink.to(lse.dtype)[:, None]
    margin = torch.where(lse == sink, 0, lse - sink)  # also where both are -inf: out is 0
    out.mul_(_sink_weights(margin))
    return margin


def _sink_weights(margin: Tensor) -> Tensor:
    """lse - sink [B,H,S] -> the share of the keys that have values [B,S,H,1]."""
    return torch.sigmoid(margin).transpose(1, 2).unsqueeze(-1)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    algorithm: Algorithm,
    seq_len: int,
    kernel_for: Callable[[Problem], SoftmaxKernel],
    mask: Mask = _CAUSAL,
    scale: float | None = None,
    sink: Tensor | None = None,
    recompute_key: Hashable | None = None,
) -> Tensor:
    """Attention of the local queries over the keys of all ranks; differentiable.

    Args:
        q: [B,S,H,D]; k: [B,S,G,D]; v: [B,S,G,E], with G dividing H: this rank's shards, in the
            order of algorithm.layout, which `check_shapes` has passed.
        seq_len: global N.
        kernel_for: the choice of a kernel, such as `kernels.resolver("auto")`.
        mask: which keys a query sees.
        scale: of the scores, default D**-0.5.
        sink: [H], for each head the score of a key without a value that every query sees; its
            gradient covers this rank's queries.
        recompute_key: as in `computed_once`.

    Under autocast q, k and v are taken in its dtype. Gradients of q, or of k and v, that are not
    wanted are not sent if the algorithm can do without them (`Compiled.backward`); so all ranks
    must want the same gradients.

    Returns: out [B,S,H,E] in q's dtype. Raises: ContextParallelError if dtypes or numbers of tokens
    do not fit; KernelUnavailableError if the kernel cannot serve them.
    """
    q, k, v = cast_inputs(q, k, v)
    compiled = compiled_call(algorithm, q, k, v, sink, seq_len, mask, scale, kernel_for)
    result: Tensor = Attention.apply(q, k, v, sink, compiled, recompute_key)
    return result


def compiled_call(
    algorithm: Algorithm, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *setting: Any
) -> Compiled:
    """The compiled call for `Attention`, of q, k, v in autocast's dtype. Raises: as of `attend`.

    Args: setting: seq_len, mask, scale, kernel_for, as of `attend`.
    """
    dtype = q.dtype
    if not dtype == k.dtype == v.dtype or dtype not in _DTYPES:
        check_dtypes(q, k, v)
    if sink is not None:
        if sink.shape != (q.shape[2],):
            raise ContextParallelError(
                f"a sink is one number for each of the {q.shape[2]} query heads, got "
                f"{tuple(sink.shape)}"
            )
        _check_dtype("a sink needs", sink, "cast it")
        if sink.device != q.device:
            raise ContextParallelError(
                f"a sink needs the device of q, {q.device}, got {sink.device}"
            )
    deterministic = torch.are_deterministic_algorithms_enabled()
    of_tensors = q.shape, k.shape, v.shape, dtype, q.device, deterministic
    return algorithm.compiled(*of_tensors, *setting)


def check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises: ContextParallelError for shapes that no attention has, for several devices, or for
    another GPU than the current one.
    """
    check_devices("q, k, v", q, k, v)
    of_q, of_k, of_v = q.shape, k.shape, v.shape
    if len(of_q) != 4 or len(of_k) != 4 or len(of_v) != 4 or of_k[:3] != of_v[:3]:
        wrong = "attention needs q [B,S,H,D], k [B,S,G,D] and v [B,S,G,E]"
    elif of_q[:2] != of_k[:2] or of_q[3] != of_k[3]:
        wrong = "q and k need equal batch, tokens and head dim"
    elif min(of_q[2], of_q[3], of_k[2], of_v[3]) < 1:
        wrong = "attention needs heads, each of one element or more"
    elif of_q[2] % of_k[2]:
        wrong = "query heads must be a multiple of KV heads"
    else:
        return
    raise ContextParallelError(f"{wrong}, got q {tuple(of_q)}, k {tuple(of_k)}, v {tuple(of_v)}")


def check_devices(names: str, *tensors: Tensor) -> None:
    """Raises: ContextParallelError unless all tensors are on one device; a GPU must be the current
    one, because kernels and messages are queued on its streams. Args: names: of the tensors, for
    errors.
    """
    device = tensors[0].device
    if len({x.device for x in tensors}) > 1:
        got = ", ".join(str(x.device) for x in tensors)
        raise ContextParallelError(f"{names} need one device, got {got}: move them first")
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ContextParallelError(
            f"needs tensors on the current GPU cuda:{torch.cuda.current_device()}, got {device}: "
            f"call torch.cuda.set_device({device.index}) before"
        )


def check_dtypes(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises: ContextParallelError if no kernel takes them."""
    if not q.dtype == k.dtype == v.dtype:
        raise ContextParallelError(
            f"q, k, v need one dtype, got {q.dtype}, {k.dtype}, {v.dtype}: cast them first"
        )
    _check_dtype("q, k, v need", q, "cast them first")


def _check_dtype(need: str, x: Tensor, advice: str) -> None:
    if x.dtype not in _DTYPES:
        allowed = ", ".join(map(str, _DTYPES))
        raise ContextParallelError(f"{need} one of {allowed}, got {x.dtype}: {advice}")
