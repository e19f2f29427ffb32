"""Checks a kernel on this device: compares a small problem with float64.

A kernel may compile and run with head dims, or on devices, for which it computes something else.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import (
    KernelCall,
    Packing,
    Problem,
    SoftmaxKernel,
    Statistics,
    run_backward,
    run_forward,
)
from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import LinearKernel, LinearProblem
from megatron_cp_plugin.core.linear.runs import Runs
from megatron_cp_plugin.core.partial import delta_of
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels.choice import kernel_names, resolve
from megatron_cp_plugin.kernels.chunked import Chunked
from megatron_cp_plugin.kernels.reference import Reference

# Relative errors of outputs and gradients, in the norm: of rounding, with some room.
_BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6}
_HALF_BOUND = 1e-2
_TOKENS = 192  # a block of keys of the kernels for GPUs, and a part of one
Results = list[tuple[str, Tensor, Tensor]]  # name, what the kernel made, what is right
# What one call computes, when the problem has documents or windows: ends of the queries and of the
# keys of each sequence. Squares are for kernels whose causal tiles are no others.
_SQUARES = Packing.adjacent((0, 1, 130, 131, _TOKENS), (0, 1, 130, 131, _TOKENS))
_RECTANGLES = Packing.adjacent((0, 1, 40, 41, _TOKENS // 2), (0, 50, 130, 131, _TOKENS))
_APART = Packing.of(
    (slice(0, 3), slice(20, 60), slice(60, _TOKENS // 2)),
    (slice(0, 50), slice(51, 120), slice(130, _TOKENS)),
)
# Of linear attention: a chunk and a part of one, and a run long enough to be cut into segments.
_RUNS = (Runs.equal(100), Runs.equal(2048))
# Where documents are packed: in the middle those that meet no other, one of them in segments.
_DOCUMENTS = Runs((((0, 70), (70, 71), (71, 2200), (2200, 2300)),))
_RATES = (1.0, 1 - 1 / 256, 1 - 1 / 16, 0.5)


@dataclass(frozen=True)
class Accuracy:
    """How far a kernel is from the same in float64.

    Attributes: error: the greatest relative one; inf for NaN. bound: what is right. where: such as
        "dk of a full tile".
    """

    error: float
    bound: float
    where: str

    @property
    def right(self) -> bool:
        """Whether the kernel computes what it should."""
        return self.error <= self.bound


def check_kernel(kernel: SoftmaxKernel, problem: Problem) -> None:
    """Runs a kernel forward and backward on a small problem; the reference has none to pass.

    Raises: KernelUnavailableError, in one line, if its results are wrong, or there are none.
    """
    if isinstance(kernel, Reference):
        return
    found = accuracy(kernel, problem)
    if not found.right:
        raise _wrong(kernel, "attention", problem, found, _other(kernel, problem))


def check_linear_kernel(kernel: LinearKernel, problem: LinearProblem) -> None:
    """Runs a kernel of linear attention forward and backward; `chunked` has none to pass.

    Raises: KernelUnavailableError, in one line, if its results are wrong, or there are none.
    """
    if isinstance(kernel, Chunked):
        return
    found = linear_accuracy(kernel, problem)
    if not found.right:
        raise _wrong(kernel, "linear attention", problem, found, Chunked.name)


def _wrong(
    kernel: SoftmaxKernel | LinearKernel,
    what: str,
    problem: Problem | LinearProblem,
    found: Accuracy,
    other: str,
) -> KernelUnavailableError:
    return KernelUnavailableError(
        f"kernel {kernel.name} gives wrong results for {what} here with {problem}: "
        f"{found.where} is off by {found.error:.1e}, at most {found.bound:.0e} is right; use "
        f"kernel {other}"
    )


def accuracy(kernel: SoftmaxKernel, problem: Problem) -> Accuracy:
    """The greatest error over causal and full tiles, one in a call and, if so used, several.

    As many query heads a KV head as the problem has; outputs, lse, and gradients by out and by
    delta.

    Raises: KernelUnavailableError if the kernel fails.
    """
    with _failing(kernel, problem, lambda: _other(kernel, problem)):
        return _worst(_results(kernel, problem), problem)


def linear_accuracy(kernel: LinearKernel, problem: LinearProblem) -> Accuracy:
    """The greatest error of outputs, states and all gradients, with a state before and after.

    Raises: KernelUnavailableError if the kernel fails.
    """
    with _failing(kernel, problem, lambda: Chunked.name):
        return _worst(_runs(kernel, problem), problem)


@contextmanager
def _failing(
    kernel: SoftmaxKernel | LinearKernel,
    problem: Problem | LinearProblem,
    other: Callable[[], str],
) -> Iterator[None]:
    """Says in one line which kernel failed, and what to use instead."""
    try:
        yield
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise KernelUnavailableError(
            f"kernel {kernel.name} fails here with {problem}: use kernel {other()} "
            f"({type(error).__name__}: {reason})"
        ) from error


def _worst(found: Iterable[tuple[str, Results]], problem: Problem | LinearProblem) -> Accuracy:
    errors = {
        f"{name} of {part}": _distance(got, want)
        for part, results in found
        for name, got, want in results
    }
    where = max(errors, key=lambda name: errors[name])
    return Accuracy(errors[where], _BOUNDS.get(problem.dtype, _HALF_BOUND), where)


def _results(kernel: SoftmaxKernel, problem: Problem) -> Iterator[tuple[str, Results]]:
    """What the kernel and the reference make of each kind of tile."""
    yield "a causal tile", _tile(kernel, problem, _TOKENS, causal=True)
    yield "a full tile", _tile(kernel, problem, _TOKENS // 3, causal=False)
    if kernel.rectangular_causal:
        yield "a rectangular causal tile", _tile(kernel, problem, _TOKENS // 3, causal=True)
    if problem.windows and kernel.windows:
        rows, packing = _TOKENS // 3, _RECTANGLES
        yield "a window", _tile(kernel, problem, rows, causal=True, window=100)
        edge = _tile(kernel, problem, rows, causal=False, window=_TOKENS - rows + 1)
        yield "the edge of a window", edge
        found = _tile(kernel, problem, causal=True, packing=packing, window=30)
        yield "packed windows", found
    if problem.documents or (problem.windows and kernel.packs):
        yield "documents", _tile(kernel, problem, causal=True, packing=_SQUARES)
        yield "packed full tiles", _tile(kernel, problem, causal=False, packing=_RECTANGLES)
        rectangular = kernel.rectangular_causal
        if rectangular:
            found = _tile(kernel, problem, causal=True, packing=_RECTANGLES)
            yield "packed causal tiles", found
        for causal in (False, rectangular) if kernel.gaps else ():
            kind = "causal" if causal else "full"
            found = _tile(kernel, problem, causal=causal, packing=_APART)
            yield f"packed {kind} tiles with gaps", found


def _tile(
    kernel: SoftmaxKernel,
    problem: Problem,
    rows: int = 0,
    *,
    causal: bool,
    packing: Packing | None = None,
    window: int = 0,
) -> Results:
    """(name, result, reference) of one tile of `rows` queries and all keys, or of several."""
    packed_q, packed_kv = [slice(0, rows)], [slice(0, _TOKENS)]
    if packing is not None:
        packed_q, packed_kv, rows = [*packing.q], [*packing.kv], packing.q[-1].stop
    q, k, v, dout = _inputs(problem, rows)
    call = KernelCall(q, k, v, problem.head_dim**-0.5, causal, packing, window=window)
    wide = call._replace(q=q.double(), k=k.double(), v=v.double())
    want_out, want_lse = Reference().forward(wide)
    want = Reference().backward(wide, dout.double(), Statistics(want_lse, out=want_out))
    with _as_in_the_run(problem):
        out, lse = run_forward(kernel, call)
    results = [
        ("out", _parts(out, packed_q), _parts(want_out, packed_q)),
        ("lse", _parts(lse.mT, packed_q), _parts(want_lse.mT, packed_q)),
    ]
    for statistics in (Statistics(lse, out=out), Statistics(lse, delta=delta_of(dout, out))):
        with _as_in_the_run(problem):
            got = run_backward(kernel, call, dout, statistics)
        rule = "" if statistics.delta is None else " by delta"
        places = packed_q, packed_kv, packed_kv
        results += [
            (f"{name}{rule}", _parts(x, place), _parts(y, place))
            for name, x, y, place in zip(("dq", "dk", "dv"), got, want, places, strict=True)
        ]
    if packing is None:
        names, wanted = ("out", "lse", "dq", "dk", "dv"), (want_out, want_lse, *want)
        with _as_in_the_run(problem):
            found = _in_place(kernel, call, dout, out, lse)
        results += [
            (f"{name} in its place", x, y)
            for name, x, y in zip(names, found, wanted, strict=True)
            if x is not None
        ]
    return results


def _in_place(
    kernel: SoftmaxKernel, call: KernelCall, dout: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor | None, ...]:
    """out, lse, dq, dk, dv as some heads of wider tensors; None where the kernel places none."""
    found: tuple[Tensor | None, ...] = (None, None)
    if kernel.places_outputs:
        results = _some_heads(out, 2), _some_heads(lse, 1)
        kernel.forward(call._replace(into=results))
        found = results
    if not kernel.places_gradients:
        return (*found, None, None, None)
    gradients = _some_heads(call.q, 2), _some_heads(call.k, 2), _some_heads(call.v, 2)
    kernel.backward(call._replace(into=gradients), dout, Statistics(lse, out=out))
    return (*found, *gradients)


def _some_heads(like: Tensor, dim: int) -> Tensor:
    """The second half of the heads of a tensor that is NaN. Args: dim: of the heads."""
    count = like.shape[dim]
    shape = (*like.shape[:dim], 2 * count, *like.shape[dim + 1 :])
    return like.new_full(shape, torch.nan).narrow(dim, count, count)


def _runs(kernel: LinearKernel, problem: LinearProblem) -> Iterator[tuple[str, Results]]:
    """What the kernel and `chunked` in float64 make of each of `_RUNS`, and of `_DOCUMENTS`."""
    names = "out", "the last state", "dq", "dk", "dv", "the gradient of the first state"
    decay = Decay(tuple(_RATES[head % len(_RATES)] for head in range(problem.heads)))
    for runs in (*_RUNS, _DOCUMENTS) if problem.documents else _RUNS:
        tokens = runs.lasts[-1][1]
        generator = torch.Generator().manual_seed(0)
        like = problem.heads, problem.head_dim, problem.value_dim
        drawn = _linear_inputs(generator, tokens, *like)
        # What the kernel gets, rounded; states are float32.
        inputs = [x.to(problem.device, problem.dtype) for x in drawn[:4]]
        states = [x.to(problem.device, torch.float32) for x in drawn[4:]]
        if problem.dtype == torch.float64:
            states = [x.double() for x in states]
        want = _run(Chunked(), [x.double() for x in (*inputs, *states)], decay, runs)
        with _as_in_the_run(problem):
            got = _run(kernel, [*inputs, *states], decay, runs)
        where = f"{tokens} tokens" if runs.length else f"{tokens} tokens of documents"
        yield where, list(zip(names, got, want, strict=True))


def _linear_inputs(
    generator: torch.Generator, tokens: int, heads: int, dim: int, value_dim: int
) -> list[Tensor]:
    """q, k, v, dout, the state before, and the gradient of the one after."""
    of_tokens = [(tokens, heads, size) for size in (dim, dim, value_dim, value_dim)]
    shapes = [*of_tokens, (heads, dim, value_dim), (heads, dim, value_dim)]
    q, k, *others = (torch.randn(1, *shape, generator=generator) for shape in shapes)
    return [q * dim**-0.5, k * dim**-0.5, *others]


def _run(
    kernel: LinearKernel, inputs: Sequence[Tensor], decay: Decay, runs: Runs
) -> tuple[Tensor, ...]:
    """out, the last state, dq, dk, dv and the gradient of the first state."""
    q, k, v, dout, before, dafter = inputs
    tokens = torch.tensor([q.shape[1]], device=q.device)
    # What is left of a state behind the run: of one in another document nothing.
    kept = decay.powers(tokens)[0][:, None, None].to(before.dtype) * bool(runs.length)
    forward = kernel.forward(q, k, v, decay, runs)
    last = forward.states[0] + kept * before
    forward.intra()
    out, cache = forward.finish(before.unsqueeze(0))
    backward = kernel.backward(dout, q, k, v, decay, runs, cache)
    dbefore = backward.dstates[0] + kept * dafter
    backward.intra()
    return (out, last, *backward.finish(dafter.unsqueeze(0)), dbefore)


def _parts(x: Tensor, places: Sequence[slice]) -> Tensor:
    """What counts of [B,S,...], one after the other."""
    return torch.cat([x[:, place] for place in places], 1)


@contextmanager
def _as_in_the_run(problem: Problem | LinearProblem) -> Iterator[None]:
    """Kernels have another backward where every run must give the same bits."""
    before = torch.get_deterministic_debug_mode()
    if problem.deterministic:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)


def _inputs(problem: Problem, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v and dout; nothing is drawn from the generators of the training run."""
    generator = torch.Generator().manual_seed(0)
    kv_heads = min(2, problem.kv_heads)
    heads = kv_heads * problem.heads // problem.kv_heads
    dim, value_dim = problem.head_dim, problem.value_dim

    def random(tokens: int, heads: int, dim: int) -> Tensor:
        x = torch.randn((1, tokens, heads, dim), generator=generator, dtype=torch.float64)
        return x.to(problem.device, problem.dtype)

    q, k = random(rows, heads, dim), random(_TOKENS, kv_heads, dim)
    return q, k, random(_TOKENS, kv_heads, value_dim), random(rows, heads, value_dim)


def _distance(got: Tensor, want: Tensor) -> float:
    error = ((got.double() - want).norm() / want.norm()).item()
    return float("inf") if error != error else error


def _other(kernel: SoftmaxKernel, problem: Problem) -> str:
    """The next kernel that serves the problem; the reference serves all."""
    others = (name for name in kernel_names() if name != kernel.name)
    return next(name for name in others if _serves(name, problem))


def _serves(name: str, problem: Problem) -> bool:
    try:
        resolve(name, problem)
    except KernelUnavailableError:
        return False
    return True
