"""Checks a kernel on this device: compares a small problem with float64.

A kernel may compile and run with head dims, or on devices, with which it computes wrong results.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_cp_plugin.core.kernel import KernelCall, Packing, Problem, SoftmaxKernel, Statistics
from megatron_cp_plugin.core.linear.kernel import LinearInputs, LinearKernel, LinearProblem
from megatron_cp_plugin.core.linear.states import Decay, Runs
from megatron_cp_plugin.core.partial import accumulation_dtype, delta_of
from megatron_cp_plugin.errors import KernelUnavailableError
from megatron_cp_plugin.kernels.choice import kernels, why_not
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
_RUNS = (Runs.single(100), Runs.single(2048))
# Where documents are packed: in the middle those that meet no other, one of them in segments.
_DOCUMENTS = Runs((((0, 70), (70, 71), (71, 2200), (2200, 2300)),))
_RATES = (1.0, 1 - 1 / 256, 1 - 1 / 16, 0.5)


@dataclass(frozen=True)
class Accuracy:
    """Error of a kernel against float64.

    Attributes:
        error: the greatest relative error; inf for NaN.
        bound: the largest error that counts as right.
        where: such as "dk of a full tile".
    """

    error: float
    bound: float
    where: str

    @property
    def right(self) -> bool:
        """Whether the error is within the bound."""
        return self.error <= self.bound


def check_kernel(kernel: SoftmaxKernel | LinearKernel, problem: Problem | LinearProblem) -> None:
    """Runs a kernel forward and backward on a small problem; those written out have none to pass.

    Raises: KernelUnavailableError, in one line, if its results are wrong, or there are none.
    """
    if isinstance(kernel, Reference | Chunked):
        return
    found = accuracy(kernel, problem)
    if not found.right:
        what = "linear attention" if isinstance(problem, LinearProblem) else "attention"
        raise KernelUnavailableError(
            f"kernel {kernel.name} gives wrong results for {what} here with {problem}: "
            f"{found.where} is off by {found.error:.1e}, at most {found.bound:.0e} is right; use "
            f"kernel {_other(kernel, problem)}"
        )


def accuracy(kernel: SoftmaxKernel | LinearKernel, problem: Problem | LinearProblem) -> Accuracy:
    """The greatest error over causal and full tiles, one in a call and, if the kernel packs,
    several; for linear attention, over runs with a state before and after.

    As many query heads a KV head as the problem has; all outputs and gradients, those of softmax by
    out and by delta.

    Raises: KernelUnavailableError if the kernel fails.
    """
    try:
        if isinstance(kernel, LinearKernel):
            assert isinstance(problem, LinearProblem)
            found = _runs(kernel, problem)
        else:
            assert isinstance(problem, Problem)
            found = _tiles(kernel, problem)
        errors = {
            f"{name} of {part}": distance(got, want)
            for part, results in found
            for name, got, want in results
        }
    except Exception as error:
        reason = next(iter(str(error).splitlines()), "")
        raise KernelUnavailableError(
            f"kernel {kernel.name} fails here with {problem}: use kernel {_other(kernel, problem)} "
            f"({type(error).__name__}: {reason})"
        ) from error
    where = max(errors, key=lambda name: errors[name])
    return Accuracy(errors[where], _BOUNDS.get(problem.dtype, _HALF_BOUND), where)


def _tiles(kernel: SoftmaxKernel, problem: Problem) -> Iterator[tuple[str, Results]]:
    """What the kernel and the reference make of each kind of tile."""
    tile = partial(_tile, kernel, problem)
    few, rectangular = _TOKENS // 3, kernel.rectangular_causal
    yield "a causal tile", tile(_TOKENS, causal=True)
    yield "a full tile", tile(few, causal=False)
    if rectangular:
        yield "a rectangular causal tile", tile(few, causal=True)
    if problem.windows and kernel.windows:
        yield "a window", tile(few, causal=True, window=100)
        yield "the edge of a window", tile(few, causal=False, window=_TOKENS - few + 1)
        yield "packed windows", tile(_RECTANGLES, causal=True, window=30)
    if kernel.packs and (problem.documents or problem.windows):
        yield "documents", tile(_SQUARES, causal=True)
        yield "packed full tiles", tile(_RECTANGLES, causal=False)
        if rectangular:
            yield "packed causal tiles", tile(_RECTANGLES, causal=True)
        for causal in (False, rectangular) if kernel.gaps else ():
            kind = "causal" if causal else "full"
            yield f"packed {kind} tiles with gaps", tile(_APART, causal=causal)


def _tile(
    kernel: SoftmaxKernel, problem: Problem, rows: int | Packing, *, causal: bool, window: int = 0
) -> Results:
    """(name, result, reference) of one tile of `rows` queries and all keys, or of several."""
    packing: Packing | None = None
    if isinstance(rows, int):
        packed_q, packed_kv = [slice(0, rows)], [slice(0, _TOKENS)]
    else:
        packing, packed_q, packed_kv = rows, [*rows.q], [*rows.kv]
    q, k, v, dout = _inputs(problem, packed_q[-1].stop)
    call = KernelCall(q, k, v, problem.head_dim**-0.5, causal, packing, window=window)
    wide = call._replace(q=q.double(), k=k.double(), v=v.double())
    want_out, want_lse = Reference().forward(wide)
    want = Reference().backward(wide, dout.double(), Statistics(want_lse, out=want_out))
    with _as_in_the_run(problem):
        out, lse = kernel.forward(call)
        of_rules = Statistics(lse, out=out), Statistics(lse, delta=delta_of(dout, out))
        found = [kernel.backward(call, dout, statistics) for statistics in of_rules]
        placed = () if packing else _placed_results(kernel, call, dout, out, lse)
    results = [
        ("out", _parts(out, packed_q), _parts(want_out, packed_q)),
        ("lse", _parts(lse.mT, packed_q), _parts(want_lse.mT, packed_q)),
    ]
    names, places = ("dq", "dk", "dv"), (packed_q, packed_kv, packed_kv)
    for rule, gradients in zip(("", " by delta"), found, strict=True):
        results += [
            (f"{name}{rule}", _parts(x, place), _parts(y, place))
            for name, x, y, place in zip(names, gradients, want, places, strict=True)
        ]
    of_all = zip(("out", "lse", *names), placed, (want_out, want_lse, *want), strict=False)
    return results + [(f"{name} in its place", x, y) for name, x, y in of_all if x is not None]


def _placed_results(
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
        heads, dim, value_dim = problem.heads, problem.head_dim, problem.value_dim
        generator = torch.Generator().manual_seed(0)
        # q, k, v, dout, the state before, and the gradient of the one after: q and k are scaled.
        of_tokens = [(tokens, heads, size) for size in (dim, dim, value_dim, value_dim)]
        shapes = [*of_tokens, (heads, dim, value_dim), (heads, dim, value_dim)]
        drawn = [torch.randn(1, *shape, generator=generator) for shape in shapes]
        drawn[:2] = [x * dim**-0.5 for x in drawn[:2]]
        # What the kernel gets, rounded; states are float32.
        wide = accumulation_dtype(problem.dtype)
        inputs = [x.to(problem.device, problem.dtype) for x in drawn[:4]]
        states = [x.to(problem.device, wide) for x in drawn[4:]]
        want = _run(Chunked(), [x.double() for x in (*inputs, *states)], decay, runs)
        with _as_in_the_run(problem):
            got = _run(kernel, [*inputs, *states], decay, runs)
        where = f"{tokens} tokens{' of documents' * (len(runs.documents[0]) > 1)}"
        yield where, list(zip(names, got, want, strict=True))


def _run(
    kernel: LinearKernel, inputs: Sequence[Tensor], decay: Decay, runs: Runs
) -> tuple[Tensor, ...]:
    """out, the last state, dq, dk, dv and the gradient of the first state."""
    q, k, v, dout, before, dafter = inputs
    # What is left of a state behind the run: of one in another document nothing.
    whole = torch.exp(decay.logarithms(q.device) * q.shape[1])
    kept = whole[:, None, None].to(before.dtype) * (len(runs.documents[0]) == 1)
    given = LinearInputs(q, k, v, decay, runs)
    forward = kernel.forward(given)
    last = forward.states[0] + kept * before
    forward.intra()
    out, cache = forward.finish(before.unsqueeze(0))
    backward = kernel.backward(given, dout, cache)
    dbefore = backward.states[0] + kept * dafter
    backward.intra()
    *gradients, _ = backward.finish(dafter.unsqueeze(0))
    return (out, last, *gradients, dbefore)


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


def distance(got: Tensor, want: Tensor) -> float:
    """The relative error in the Euclidean norm; inf for NaN. Args: want: in float64."""
    error = ((got.double() - want).norm() / want.norm()).item()
    return float("inf") if error != error else error


def _other(kernel: SoftmaxKernel | LinearKernel, problem: Problem | LinearProblem) -> str:
    """The next kernel that serves the problem; those that are written out serve all."""
    if isinstance(problem, LinearProblem):
        return Chunked.name
    others = (one for one in kernels() if one.name != kernel.name)
    return next(one.name for one in others if why_not(one, problem) is None)
