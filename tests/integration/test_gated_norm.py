"""gate * x / rms(x) against autograd of its formula, heads whole and split among ranks."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin.integration.gated_norm import gated_norm
from tests.integration.ranks import on_ranks
from tests.oracle import relative_error

TOKENS, BATCH, HEADS, HEAD_DIM, EPSILON = 5, 3, 4, 6, 0.1
BOUNDS = pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 3e-7), (torch.bfloat16, 3e-3)]
)


def inputs(dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x in attention's order, a gate among other projections, and the gradient of the output."""
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, HEADS, HEAD_DIM).to(device, dtype)
    mixed = torch.randn(TOKENS, BATCH, HEADS, 4, HEAD_DIM).to(device, dtype)
    dout = torch.randn(TOKENS, BATCH, HEADS, HEAD_DIM).to(device, dtype)
    return x.transpose(0, 1), mixed[:, :, :, 3], dout


def expected(x: Tensor, gate: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
    """The output and both gradients in float64."""
    x, gate = (y.detach().double().requires_grad_() for y in (x, gate))
    out = gate * x / (x.square().mean((2, 3), keepdim=True) + EPSILON).sqrt()
    return (out, *torch.autograd.grad(out, (x, gate), dout.double()))


def computed(x: Tensor, gate: Tensor, dout: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, ...]:
    x, gate = x.detach().requires_grad_(), gate.detach().requires_grad_()
    out = gated_norm(x, gate, EPSILON, group)
    return (out, *torch.autograd.grad(out, (x, gate), dout))


def test_gradients_by_finite_differences(group: dist.ProcessGroup) -> None:
    x, gate, _ = (y.requires_grad_() for y in inputs(torch.float64))
    assert torch.autograd.gradcheck(lambda x, gate: gated_norm(x, gate, EPSILON, group), (x, gate))


def test_a_second_derivative_is_refused_and_not_zero(group: dist.ProcessGroup) -> None:
    x, gate, _ = (y.requires_grad_() for y in inputs(torch.float64))
    out = gated_norm(x, gate, EPSILON, group)
    (gradient,) = torch.autograd.grad(out.sum(), gate, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.square().sum().backward()


@BOUNDS
@pytest.mark.parametrize("size", [1, 2, 4])
def test_heads_split_among_ranks(size: int, dtype: torch.dtype, bound: float) -> None:
    tensors = inputs(dtype)

    def body(group: dist.ProcessGroup) -> tuple[Tensor, ...]:
        return computed(*(x.chunk(size, dim=2)[group.rank()] for x in tensors), group)

    ranks = on_ranks(size, body)
    for parts, want in zip(zip(*ranks, strict=True), expected(*tensors), strict=True):
        got = torch.cat(parts, dim=2)
        assert got.dtype == dtype
        assert relative_error(got, want) < bound


@pytest.mark.gpu
@BOUNDS
def test_on_a_gpu(group: dist.ProcessGroup, dtype: torch.dtype, bound: float) -> None:
    tensors = inputs(dtype, "cuda")
    for got, want in zip(computed(*tensors, group), expected(*tensors), strict=True):
        assert relative_error(got, want) < bound
