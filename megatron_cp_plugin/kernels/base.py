"""Shared by the softmax attention kernels for GPUs.

B batch, S query tokens, T key tokens, H query heads, G KV heads (G divides H), D head dim.
"""

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_cp_plugin.core.call import head_groups
from megatron_cp_plugin.core.kernel import (
    Gradients,
    KernelCall,
    Lengths,
    Problem,
    SoftmaxKernel,
    Statistics,
)
from megatron_cp_plugin.core.partial import accumulation_dtype
from megatron_cp_plugin.errors import ContextParallelError


def gpu_reason(problem: Problem, capability: tuple[int, int]) -> str | None:
    """Why a half-precision GPU kernel cannot serve a problem; None if it can.

    Args: capability: the least compute capability.
    """
    if problem.device.type != "cuda":
        return f"runs on cuda, got tensors on {problem.device.type}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {problem.dtype}"
    for dim in (problem.head_dim, problem.value_dim):
        if dim not in range(8, 257, 8):
            return f"takes head dims divisible by 8 up to 256, got {dim}"
    if torch.cuda.get_device_capability(problem.device) < capability:
        return f"needs compute capability {'.'.join(map(str, capability))}"
    return None


def wide_heads_reason(problem: Problem) -> str | None:
    """Why wide heads are not known to work with a GPU kernel on this device; None if they do."""
    widest = max(problem.head_dim, problem.value_dim)
    if widest <= 128 or torch.cuda.get_device_capability(problem.device)[0] == 9:
        return None
    return f"was tried with head dims above 128 on Hopper only, got {widest}"


def equal_dims_reason(problem: Problem) -> str | None:
    """Why a kernel for values as wide as keys cannot serve a problem; None if it can."""
    if problem.value_dim == problem.head_dim:
        return None
    return f"takes values as wide as keys, got head dims {problem.head_dim}, {problem.value_dim}"


def rounded(number: int, multiple: int) -> int:
    """Rounds a number up to a multiple."""
    return -(-number // multiple) * multiple


def with_placeholder_out(own_bytes: int, call: KernelCall, statistics: Statistics) -> int:
    """Workspace of a backward that gets `Statistics.out_for`. Args: own_bytes: the kernel's own
    workspace.
    """
    elements = call.q.numel() // call.q.shape[3] * call.v.shape[3]
    return own_bytes + statistics.copied_bytes(elements * call.q.element_size())


def by_name(lengths: Lengths) -> dict[str, Tensor | int]:
    """Lengths, by the argument names of flash-attn's functions."""
    names = "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"
    return dict(zip(names, lengths[:4], strict=True))


class PackingKernel(SoftmaxKernel):
    """A kernel that takes packed sequences."""

    packs = True

    @abstractmethod
    def attend(self, call: KernelCall, lengths: Lengths | None) -> tuple[Tensor, Tensor]:
        """See SoftmaxKernel.forward. Of sequences, with these lengths: q [S,H,D]; k [T,G,D]; v
        [T,G,E] -> out [S,H,E], lse [H,S], with S queries and T keys in all.
        """

    @abstractmethod
    def differentiate(
        self, call: KernelCall, dout: Tensor, statistics: Statistics, lengths: Lengths | None
    ) -> Gradients:
        """dq, dk, dv of `attend`, shaped as q, k, v; dout and statistics are flattened too."""

    def forward(self, call: KernelCall) -> tuple[Tensor, Tensor]:
        if call.packing is None:
            return self.attend(call, None)
        out, lse = self.attend(*_flat(call))
        batch = len(call.q)
        return out.unflatten(0, (batch, -1)), lse.unflatten(1, (batch, -1)).transpose(0, 1)

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        if call.packing is None:
            return self.differentiate(call, dout, statistics, None)
        flat, lengths = _flat(call)
        found = self.differentiate(flat, dout.flatten(0, 1), statistics.flattened(), lengths)
        dq, dk, dv = (x.unflatten(0, (len(call.q), -1)) for x in found)
        return dq, dk, dv


def _flat(call: KernelCall) -> tuple[KernelCall, Lengths]:
    """Flattens a batch: the sequences of all entries, one after the other, and their lengths."""
    assert call.packing is not None
    q, k, v = call.q.flatten(0, 1), call.k.flatten(0, 1), call.v.flatten(0, 1)
    return call._replace(q=q, k=k, v=v), call.packing.lengths(len(call.q), q.device)


MOST_ELEMENTS = 2**31


def by_heads(
    name: str,
    elements: int,
    backward: Callable[[KernelCall, Tensor, Statistics], Gradients],
    call: KernelCall,
    dout: Tensor,
    statistics: Statistics,
) -> Gradients:
    """dq, dk and dv of a kernel with int32 offsets, by calls of some heads at a time.

    Args:
        elements: number of elements of all heads, to be counted by int32.
        backward: makes the gradients of some heads.

    Raises: ContextParallelError if one head has too many elements.
    """
    if elements <= MOST_ELEMENTS:
        return backward(call, dout, statistics)
    q, k, v = call.q, call.k, call.v
    heads, kv_heads = q.shape[2], k.shape[2]
    enough = range(-(-elements // MOST_ELEMENTS), heads + 1)
    groups = next((x for n in enough if len(x := head_groups(heads, kv_heads, n)) == n), None)
    if groups is None:
        raise ContextParallelError(
            f"kernel {name} needs at most {MOST_ELEMENTS} elements a head, got "
            f"{elements // heads}: use kernel flash4, or a larger context_parallel_size"
        )
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    wide = k.dtype if all(x.first and x.last for x in groups) else accumulation_dtype(k.dtype)
    dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (k, v))
    for group in groups:
        of_q, of_keys = group.q, group.kv
        some = call._replace(q=q[:, :, of_q], k=k[:, :, of_keys], v=v[:, :, of_keys], into=None)
        found = backward(some, dout[:, :, of_q], statistics.heads(of_q))
        dq[:, :, of_q] = found[0]
        dk[:, :, of_keys] += found[1]
        dv[:, :, of_keys] += found[2]
    return call.placed((dq, dk.to(k.dtype), dv.to(v.dtype)))


def far_apart(x: Tensor) -> bool:
    """Whether the distance in memory from the first to the last element overflows int32."""
    offsets = ((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return sum(offsets) >= MOST_ELEMENTS


class FlashAttention2(PackingKernel):
    """FlashAttention-2, in torch and as a package.

    Offsets in the float32 dQ of the backward are int32 up to flash-attn 2.8.3, and in torch 2.11:
    with more elements the GPU accesses memory outside the tensor.
    """

    def accumulated(self, q: Tensor, sequences: int = 1) -> int:
        """Elements of the float32 dQ of [B,S,H,D]. Args: sequences: number of packed sequences; 1:
        no packing.

        Source: mha_bwd and mha_varlen_bwd of csrc/flash_attn/flash_api.cpp.
        """
        batch, rows, heads, dim = q.shape
        rows = rounded(rows, 128) if sequences == 1 else rows + 128 * sequences
        return batch * rows * heads * rounded(dim, 32 if dim <= 128 else 64)

    def backward(self, call: KernelCall, dout: Tensor, statistics: Statistics) -> Gradients:
        # Each packed sequence is padded, a single one as well.
        sequences = 1 if call.packing is None else max(2, len(call.packing))
        elements = self.accumulated(call.q, sequences)
        return by_heads(self.name, elements, super().backward, call, dout, statistics)

    def workspace(self, call: KernelCall, statistics: Statistics | None) -> int:
        """See SoftmaxKernel.workspace: float32 dQ and delta; with GQA dK, dV of all query heads.

        Not counted: the further dQ of a deterministic backward, ceil(multiprocessors / (batch *
        heads)) in all (flash_api.cpp, nsplits).
        """
        if statistics is None:
            return 0
        (batch, _, heads, dim), (_, cols, kv_heads, _) = call.q.shape, call.k.shape
        of_keys = batch * 2 * cols * heads * dim if heads > kv_heads else 0
        elements = self.accumulated(call.q, 1 if call.packing is None else len(call.packing))
        wide = elements + elements // rounded(dim, 32 if dim <= 128 else 64)
        return with_placeholder_out(4 * wide + of_keys * call.q.element_size(), call, statistics)
