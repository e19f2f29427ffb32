"""Which kernel serves a problem, and what is said where none does."""

import pytest
import torch

from megatron_cp_plugin.core.kernel import Problem
from megatron_cp_plugin.core.linear.kernel import LinearProblem
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels import resolve
from megatron_cp_plugin.kernels.linear import resolve_linear
from tests.kernels.test_kernels import CPU


def test_auto_on_cpu_takes_the_flash_kernel():
    assert resolve("auto", Problem(CPU, torch.float32, 4, 2, 16)).name == "torch_cpu"


def test_an_unknown_kernel_is_named_with_the_nearest_one():
    with pytest.raises(KernelUnavailableError, match=r"'cudn' \(did you mean 'cudnn'\?\)"):
        resolve("cudn", Problem(CPU, torch.float32, 4, 2, 16))


def test_cudnn_does_not_take_documents():
    shape = torch.device("cuda", 0), torch.bfloat16, 4, 2, 64
    with pytest.raises(KernelUnavailableError, match="kernel cudnn: builds a plan for every new"):
        resolve("cudnn", Problem(*shape, documents=True))


def test_a_kernel_that_cannot_serve_says_why():
    with pytest.raises(KernelUnavailableError, match="kernel cudnn: runs on cuda, got tensors on"):
        resolve("cudnn", Problem(CPU, torch.float32, 4, 2, 16))


def test_deterministic_mode_takes_deterministic_kernels_only():
    problem = Problem(CPU, torch.float32, 4, 2, 16, deterministic=True)
    assert resolve("auto", problem).deterministic
    with pytest.raises(KernelUnavailableError, match=r"cudnn: its results differ .* use kernel"):
        resolve("cudnn", problem)
    linear = LinearProblem(CPU, torch.bfloat16, 4, 16, 16, deterministic=True)
    assert resolve_linear("auto", linear).name == "chunked"
    with pytest.raises(KernelUnavailableError, match="fla: its results differ"):
        resolve_linear("fla", linear)
