"""Multi-latent attention whose ranks send latents; each rank makes K and V where it uses them.

A token's latent, of L numbers for all heads, and its rotated part of the key, of R numbers, take
the place of the K and V of all H heads, which an up-projection makes of them. An algorithm treats
them as K and V of G heads: it moves, slices and sums rows of tokens without looking into them. Its
kernel makes K and V from a call's rows of latents, and turns their gradients into gradients of the
latents and of the projection. So G (D + E) numbers of a token travel, L + R of them rounded up,
each way: with DeepSeek-V3's H = 128, D = 192, E = 128, L = 512, R = 64 they are 640 in place of
40,960.

B batch, S queries, T keys, D head dim of q and k, E that of v.

Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1.
"""

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.algorithm import Algorithm, Compiled
from megatron_cp_plugin.core.autograd.function import (
    Attention,
    aligned,
    cast_inputs,
    compiled_call,
    differentiable_once,
    differentiate,
    dtypes_as_given,
)
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.record import PHASE, holding
from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.partial import accumulation_dtype, add_product
from megatron_cp_plugin.core.placement import HeadPlacement
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError


@dataclass(frozen=True)
class Wire:
    """Sizes of latents, and of the tensors that stand for K and V in an algorithm.

    Attributes:
        heads: H, of q, K and V.
        latent_dim: L.
        rotary_dim: R, the last of each head's D dimensions, shared by all heads.
    """

    heads: int
    latent_dim: int
    rotary_dim: int
    head_dim: int
    value_dim: int

    @cached_property
    def kv_heads(self) -> int:
        """G: the fewest heads of K and V that hold a latent, and divide H."""
        least = -(-(self.latent_dim + self.rotary_dim) // (self.head_dim + self.value_dim))
        fitting = [count for count in range(least, self.heads + 1) if self.heads % count == 0]
        if not fitting:
            raise ConfigError(
                f"latents of {self.latent_dim} + {self.rotary_dim} numbers need fewer than K and V "
                f"have, got {self.heads} heads of {self.head_dim} + {self.value_dim}: send K and V"
            )
        return fitting[0]

    def packed(self, latent: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,L+R] -> the tensors that stand for K [B,T,G,D] and V [B,T,G,E]."""
        of_k, count = self.kv_heads * self.head_dim, self.kv_heads
        room = count * (self.head_dim + self.value_dim) - latent.size(-1)
        whole = torch.nn.functional.pad(latent, (0, room))
        k, v = whole.split([of_k, whole.size(-1) - of_k], dim=-1)
        return k.unflatten(-1, (count, -1)), v.unflatten(-1, (count, -1))

    def unpacked(self, k: Tensor, v: Tensor) -> Tensor:
        """The inverse of `packed`."""
        whole = torch.cat((k.flatten(2), v.flatten(2)), dim=-1)
        return whole[..., : self.latent_dim + self.rotary_dim]

    def expanded(self, latent: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """[B,T,L+R] -> K [B,T,H,D] and V [B,T,H,E]. Args: weight: see `attend_latents`."""
        low, rotary = latent.split([self.latent_dim, self.rotary_dim], dim=-1)
        made = (low @ weight.T).unflatten(-1, (self.heads, -1))
        plain, v = made.split([self.head_dim - self.rotary_dim, self.value_dim], dim=-1)
        rotary = rotary.unsqueeze(2).expand(-1, -1, self.heads, -1)
        return torch.cat((plain, rotary), dim=-1), v.contiguous()

    def gradient(self, dk: Tensor, dv: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of latents [B,T,L+R], and of their up-projection [B*T,H*(D-R+E)]."""
        plain, rotary = dk.split([self.head_dim - self.rotary_dim, self.rotary_dim], dim=-1)
        made = torch.cat((plain, dv), dim=-1).flatten(2)
        dtype = accumulation_dtype(dk.dtype)
        of_rotary = rotary.sum(2, dtype=dtype).to(dk.dtype)
        return torch.cat((made @ weight, of_rotary), dim=-1), made.flatten(0, 1)


class _Projection(NamedTuple):
    """The up-projection of the running call, and, in a backward, the sum of its gradients."""

    weight: Tensor
    gradient: Tensor | None = None


_projection: ContextVar[_Projection] = ContextVar("projection")


class LatentKernel(SoftmaxKernel):
    """A kernel of H heads that is given latents in place of K and V.

    It takes no `gaps` between sequences: undefined gradients there would enter the gradient of the
    projection.
    """

    def __init__(self, inner: SoftmaxKernel, wire: Wire) -> None:
        self._inner, self._wire = inner, wire
        self.name, self.deterministic = inner.name, inner.deterministic
        self.rectangular_causal, self.windows = inner.rectangular_causal, inner.windows
        self.packs, self.places_outputs = inner.packs, inner.places_outputs

    def unsupported(self, problem: Problem) -> str | None:
        return self._inner.unsupported(replace(problem, kv_heads=problem.heads))

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        latent = self._wire.unpacked(call.k, call.v)
        k, v = self._wire.expanded(latent, _projection.get().weight)
        return self._inner.forward(call._replace(k=k, v=v))

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        projection, wire = _projection.get(), self._wire
        latent = wire.unpacked(call.k, call.v)
        k, v = wire.expanded(latent, projection.weight)
        dq, dk, dv = self._inner.backward(call._replace(k=k, v=v), dout, statistics)
        dlatent, made = wire.gradient(dk, dv, projection.weight)
        assert projection.gradient is not None
        add_product(projection.gradient, made, latent[..., : wire.latent_dim].flatten(0, 1))
        return dq, *wire.packed(dlatent)

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """K and V, and in a backward also their gradients."""
        wire, tokens = self._wire, call.k.shape[0] * call.k.shape[1]
        numbers = tokens * wire.heads * (wire.head_dim + wire.value_dim)
        times = 1 if statistics is None else 3
        return times * numbers * call.k.element_size() + self._inner.workspace(call, statistics)


@lru_cache(maxsize=64)  # one object for a choice: calls are known by it
def _latent_kernels(
    kernel_for: Callable[[Problem], SoftmaxKernel], wire: Wire
) -> Callable[[Problem], SoftmaxKernel]:
    """Turns a choice of kernels for K and V into a choice of kernels for latents."""
    return lambda problem: LatentKernel(kernel_for(replace(problem, kv_heads=problem.heads)), wire)


class _LatentAttention(torch.autograd.Function):
    """Attention of packed latents, and of the projection that makes K and V of them."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        weight: Tensor,
        sink: Tensor | None,
        compiled: Compiled,
        recompute_key: Hashable | None,
    ) -> Tensor:
        ctx.weight = weight
        with holding(_projection, _Projection(weight)):
            return Attention.forward(ctx, q, k, v, sink, compiled, recompute_key)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        weight, dweight = ctx.weight, None
        of_q, *others = ctx.needs_input_grad[:4]
        sums = torch.zeros_like(weight, dtype=accumulation_dtype(weight.dtype))
        projecting = holding(_projection, _Projection(weight, sums))
        wanted = of_q, *[any(others)] * 2
        with holding(PHASE, "backward"), projecting, dtypes_as_given(dout.device):
            *gradients, dsink = differentiate(ctx, *aligned(dout), wanted=wanted)
        if others[2]:
            dweight = sums.to(weight.dtype)
        return *gradients, dweight, dsink, None, None


def attend_latents(
    q: Tensor,
    latent: Tensor,
    weight: Tensor,
    *,
    algorithm: Algorithm,
    value_dim: int,
    seq_len: int,
    kernel_for: Callable[[Problem], SoftmaxKernel],
    mask: Mask,
    scale: float | None = None,
    sink: Tensor | None = None,
    recompute_key: Hashable | None = None,
) -> Tensor:
    """Multi-latent attention of the local queries over the keys of all ranks; differentiable.

    Args:
        q: [B,S,H,D], the last R of D rotated.
        latent: [B,S,L+R], the latent and the rotated part of the key.
        weight: [H*(D-R+E),L], the up-projection from a latent to the rest of the key, and the
            value, head by head. Its gradient is the sum of all ranks' gradients.
        algorithm: One that exchanges no heads, and whose option `chunks`, if it has one, is 1.
        value_dim: E.
        seq_len, kernel_for, mask, scale, sink, recompute_key: As of `attend`.

    Returns:
        out [B,S,H,E] in q's dtype.

    Raises:
        ConfigError: The algorithm exchanges heads, or takes them one group after another.
        ContextParallelError: Dtypes or numbers of tokens do not fit.
    """
    q, latent, weight = cast_inputs(q, latent, weight)
    heads, dim = q.shape[2:]
    rotary = dim - (weight.shape[0] // heads - value_dim)
    wire = Wire(heads, weight.shape[1], rotary, dim, value_dim)
    k, v = wire.packed(latent)
    check_latents(algorithm, Shape.of(q, k, v, seq_len), mask)
    kernels = _latent_kernels(kernel_for, wire)
    compiled = compiled_call(algorithm, q, k, v, sink, seq_len, mask, scale, kernels)
    result: Tensor = _LatentAttention.apply(q, k, v, weight, sink, compiled, recompute_key)
    return result


def check_latents(algorithm: Algorithm, shape: Shape, mask: Mask) -> None:
    """Raises: ConfigError if an algorithm cannot send latents, as `attend_latents` says."""
    if isinstance(algorithm.placement(shape, mask, "forward"), HeadPlacement):
        raise ConfigError(
            f"{algorithm.name} exchanges heads, of which latents have none: use ring, zigzag, "
            "distflash, allgather or attention2d, or send K and V"
        )
    chunks = getattr(algorithm.options, "chunks", 1)
    if chunks != 1:
        raise ConfigError(
            f"latents of all heads travel together, got {algorithm.name} with chunks={chunks}: "
            "use chunks=1, or send K and V"
        )
