"""Calls of kernels, with the tensors one by one."""

from torch import Tensor

from megatron_cp_plugin.core.kernel import Gradients, KernelCall, Packing, SoftmaxKernel, Statistics


def forward_of(
    kernel: SoftmaxKernel,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool,
    packing: Packing | None = None,
    into: tuple[Tensor, ...] | None = None,
    window: int = 0,
) -> tuple[Tensor, Tensor]:
    """See SoftmaxKernel.forward and KernelCall."""
    assert kernel.packs or packing is None
    return kernel.forward(KernelCall(q, k, v, scale, causal, packing, into, window))


def backward_of(
    kernel: SoftmaxKernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    statistics: Statistics,
    *,
    scale: float,
    causal: bool,
    packing: Packing | None = None,
    into: tuple[Tensor, ...] | None = None,
    window: int = 0,
) -> Gradients:
    """See SoftmaxKernel.backward and KernelCall."""
    assert kernel.packs or packing is None
    call = KernelCall(q, k, v, scale, causal, packing, into, window)
    return kernel.backward(call, dout, statistics)
