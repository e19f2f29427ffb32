"""Memory, time and errors of a language model's loss: all logits at once, and in chunks.

    python scripts/benchmark_loss.py --tokens 262144 --vocab 62080 --hidden 4096
    python scripts/benchmark_loss.py --targets

One rank's part: its tokens, and its part of the vocabulary. All logits at once are as Megatron's
output layer and `vocab_parallel_cross_entropy` compute them. Both add the gradient of the weight to
a float32 `main_grad`. The errors are those of the losses and gradients against float64.

`--targets` compares with the targets, for losses, log-probabilities, and log-probabilities with
entropies: memory of 128K tokens (vocabulary 152,064, hidden size 4,096), as a share of the inputs,
their gradients and one chunk of logits, and of forward alone without gradients, as a share of the
inputs and one chunk; and the time of forward and backward of 8K tokens, as a share of that with all
logits at once. It ends with exit code 1 if one is missed, and needs torch and Triton only: without
Megatron it leaves out the loss, which is compared with Megatron's.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from timing import join
from torch import Tensor, nn

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.chunked_loss import CHUNK_TOKENS
from megatron_cp_plugin.text_table import text_table
from megatron_cp_plugin.tokens import tokens_of

# Losses or log-probabilities [T], and entropies [T] if it computes them.
Loss = Callable[[Tensor, nn.Parameter, Tensor], Tensor | tuple[Tensor, Tensor]]
TARGETS = {"memory": 1.15, "time": 1.1}
MASKED = 16  # one of so many tokens does not count


@dataclass(frozen=True)
class Problem:
    """hidden [T,H] and weight [V,H] in bfloat16; labels [T]; dlosses [T] in float32.

    Attributes: main_grad: [V,H] in float32, that of the weight.
    """

    hidden: Tensor
    weight: nn.Parameter
    labels: Tensor
    dlosses: Tensor
    main_grad: Tensor

    def forget(self) -> None:
        """Drops the gradients of the last step."""
        self.hidden.grad = self.weight.grad = None
        self.main_grad.zero_()

    @property
    def weight_bytes(self) -> int:
        """Of the weight and its main_grad."""
        return self.weight.numel() * (self.weight.element_size() + 4)


@dataclass(frozen=True)
class Result:
    """What one step gave, and took.

    Attributes: peak_bytes: beside the weight and its main_grad, hidden and its gradient included.
    """

    losses: Tensor
    dhidden: Tensor
    dweight: Tensor
    peak_bytes: int
    forward_ms: float
    step_ms: float


def new_problem(tokens: int, vocab: int, hidden: int, device: torch.device) -> Problem:
    """A random one; its logits are as far apart as those of a trained model."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(rows: int, scale: float) -> Tensor:
        x = torch.empty(rows, hidden, dtype=torch.bfloat16, device=device)
        return x.normal_(0, scale, generator=generator)

    weight = nn.Parameter(normal(vocab, 3 * hidden**-0.5))
    main_grad = torch.zeros_like(weight, dtype=torch.float32)
    weight.main_grad = main_grad  # type: ignore[attr-defined]
    labels = torch.randint(vocab, (tokens,), device=device, generator=generator)
    counts = torch.arange(tokens, device=device) % MASKED != 0
    dlosses = counts.float() / counts.sum()
    return Problem(normal(tokens, 1).requires_grad_(), weight, labels, dlosses, main_grad)


def at_once(hidden: Tensor, weight: nn.Parameter, labels: Tensor) -> Tensor:
    """As Megatron does."""
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    logits = hidden @ weight.t()
    return vocab_parallel_cross_entropy(logits[:, None], labels[:, None], tp_group=dist.group.WORLD)


def log_probs_at_once(
    hidden: Tensor, weight: nn.Parameter, labels: Tensor, *, entropy: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """As a program without kernels of its own does, in float32."""
    every = torch.log_softmax((hidden @ weight.t()).float(), 1)
    log_probs = every.gather(1, labels[:, None])[:, 0]
    return (log_probs, -(every.exp() * every).sum(1)) if entropy else log_probs


def synchronize(device: torch.device) -> None:
    """Waits for a GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def step(problem: Problem, loss: Loss) -> tuple[Tensor, float, float]:
    """The losses, and the time of forward and of both, in ms. Leaves the gradients behind."""
    device = problem.hidden.device
    problem.forget()
    synchronize(device)
    begin = time.perf_counter()
    result = loss(problem.hidden, problem.weight, problem.labels)
    found = [x.flatten() for x in (result if isinstance(result, tuple) else (result,))]
    synchronize(device)
    middle = time.perf_counter()
    torch.autograd.backward(found, [problem.dlosses] * len(found))
    assert problem.weight.grad is not None
    problem.main_grad.add_(problem.weight.grad)
    problem.weight.grad = None
    synchronize(device)
    end = time.perf_counter()
    return found[0].detach(), 1e3 * (middle - begin), 1e3 * (end - begin)


def measure(problem: Problem, loss: Loss, runs: int) -> Result:
    """Two steps to warm up, then the medians of `runs`, and a copy of the gradients."""
    device = problem.hidden.device
    problem.forget()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        others = torch.cuda.memory_allocated() - problem.weight_bytes
        others -= problem.hidden.nbytes + problem.labels.nbytes + problem.dlosses.nbytes
    for _ in range(2):
        step(problem, loss)
    times = [step(problem, loss)[1:] for _ in range(runs)]
    losses, *_ = step(problem, loss)
    peak = 0
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated() - problem.weight_bytes - others
    assert problem.hidden.grad is not None
    forward, both = (statistics.median(column) for column in zip(*times, strict=True))
    dhidden, dweight = (x.to("cpu", copy=True) for x in (problem.hidden.grad, problem.main_grad))
    return Result(losses.cpu(), dhidden, dweight, peak, forward, both)


@torch.no_grad()
def exact(problem: Problem, dweight: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Losses and gradients of hidden, some tokens at a time, in float64.

    Args: dweight: [V,H] in float64, to which their gradients of the weight are added.
    """
    weight = problem.weight.double()
    for at in range(0, len(problem.labels), 1024):
        part = slice(at, at + 1024)
        hidden, labels = problem.hidden[part].double(), problem.labels[part]
        log_probabilities = torch.log_softmax(hidden @ weight.t(), 1)
        losses = -log_probabilities.gather(1, labels[:, None])[:, 0]
        dlogits = log_probabilities.exp_()
        dlogits[torch.arange(len(labels), device=labels.device), labels] -= 1
        dlogits *= problem.dlosses[part, None]
        dweight += dlogits.t() @ hidden
        yield part, losses, dlogits @ weight


def errors(problem: Problem, results: dict[str, Result]) -> dict[str, tuple[float, float, float]]:
    """The largest error of a loss, and |x - exact| / |exact| of both gradients."""
    device = problem.hidden.device
    worst = dict.fromkeys(results, 0.0)
    squares = dict.fromkeys(results, 0.0)
    total, dweight = 0.0, torch.zeros_like(problem.weight, dtype=torch.float64)
    for part, losses, dhidden in exact(problem, dweight):
        total += float(dhidden.square().sum())
        for name, got in results.items():
            worst[name] = max(
                worst[name], float((got.losses[part].to(device) - losses).abs().max())
            )
            squares[name] += float((got.dhidden[part].to(device) - dhidden).square().sum())
    return {
        name: (
            worst[name],
            (squares[name] / total) ** 0.5,
            float((got.dweight.to(device) - dweight).norm() / dweight.norm()),
        )
        for name, got in results.items()
    }


def peak_share(problem: Problem, loss: Loss, chunk_tokens: int, *, backward: bool) -> float:
    """The memory of one call, as a share of its inputs, their gradients and a chunk of logits."""
    problem.forget()
    gc.collect()
    torch.cuda.empty_cache()
    own = problem.hidden.nbytes + problem.weight.nbytes + problem.labels.nbytes
    others = torch.cuda.memory_allocated() - own
    if backward:
        own += problem.hidden.nbytes + problem.dlosses.nbytes + problem.main_grad.nbytes
        others -= problem.dlosses.nbytes + problem.main_grad.nbytes
    own += chunk_tokens * problem.weight.size(0) * problem.weight.element_size()
    torch.cuda.reset_peak_memory_stats()
    if backward:
        step(problem, loss)
    else:
        with torch.no_grad():
            loss(problem.hidden, problem.weight, problem.labels)
    return (torch.cuda.max_memory_allocated() - others) / own


def targets(device: torch.device, runs: int, chunk_tokens: int) -> bool:
    """Prints the table of `--targets`. Returns: whether all are met."""
    given: dict[str, Any] = {"chunk_tokens": chunk_tokens, "into_main_grad": True}
    entropies = partial(cp.chunked_log_probs, entropy=True, **given)
    contenders: dict[str, tuple[Loss, Loss]] = {
        "log-probs": (
            partial(log_probs_at_once, entropy=False),
            partial(cp.chunked_log_probs, **given),
        ),
        "log-probs, entropy": (partial(log_probs_at_once, entropy=True), entropies),
        "the same, temperature 0.7": (
            partial(log_probs_at_once, entropy=True),
            partial(entropies, temperature=0.7),
        ),
    }
    if find_spec("megatron"):
        contenders["loss"] = (at_once, partial(cp.chunked_cross_entropy, **given))
    vocab, hidden = 152064, 4096
    large = new_problem(tokens_of("128K"), vocab, hidden, device)
    step(large, contenders["log-probs"][1])  # compiles, and makes the workspace of cuBLAS
    memory = {
        name: [peak_share(large, chunked, chunk_tokens, backward=b) for b in (False, True)]
        for name, (_, chunked) in contenders.items()
    }
    del large
    small = new_problem(tokens_of("8K"), vocab, hidden, device)
    rows, met = [], True
    for name, (whole, chunked) in contenders.items():
        wanted, got = measure(small, whole, runs), measure(small, chunked, runs)
        share = got.step_ms / wanted.step_ms
        passed = max(memory[name]) <= TARGETS["memory"] and share <= TARGETS["time"]
        met = met and passed
        numbers = (*memory[name], got.step_ms, wanted.step_ms, share)
        cells = (f"{x:.{1 if x > 20 else 3}f}" for x in numbers)
        rows.append((name, *cells, "yes" if passed else "NO"))
    print(f"chunks of {chunk_tokens} tokens, bfloat16, {torch.cuda.get_device_name()}")
    print(f"peak at most {TARGETS['memory']}, time at most {TARGETS['time']}")
    columns = "what", "forward's peak", "peak", "ms", "ms at once", "time", "met"
    print(text_table(columns, rows, right=range(1, 6)))
    return met


def main() -> None:
    """Prints one row a contender."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=tokens_of, default=262144)
    parser.add_argument("--vocab", type=int, default=62080, help="of this rank")
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--chunks", default="1024,2048,4096,8192", help="tokens a chunk")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--device", default="cuda", help="cpu: to try the script")
    parser.add_argument(
        "--targets", action="store_true", help="compare with the targets, at their own sizes"
    )
    args = parser.parse_args()
    device = torch.device(args.device)
    join(device.type)
    if args.targets:
        met = targets(device, args.runs, CHUNK_TOKENS)
        dist.destroy_process_group()
        sys.exit(not met)
    problem = new_problem(args.tokens, args.vocab, args.hidden, device)
    contenders: dict[str, Loss] = {"at once": at_once}
    for tokens in map(tokens_of, args.chunks.split(",")):
        chunked = partial(cp.chunked_cross_entropy, chunk_tokens=tokens, into_main_grad=True)
        contenders[f"chunks of {tokens}"] = chunked
    results: dict[str, Result] = {}
    for name, loss in contenders.items():
        try:
            results[name] = measure(problem, loss, args.runs)
        except torch.OutOfMemoryError:
            print(f"{name}: out of memory")
    problem.forget()
    found = errors(problem, results)
    columns = ("loss", "peak GB", "beside hidden", "forward ms", "both ms", "of at once")
    rows = []
    whole = results.get("at once")
    for name, got in results.items():
        beside = got.peak_bytes - 2 * problem.hidden.nbytes
        cells = (
            name,
            f"{got.peak_bytes / 1e9:.2f}",
            f"{beside / 1e9:.2f}",
            f"{got.forward_ms:.1f}",
            f"{got.step_ms:.1f}",
            f"{got.step_ms / whole.step_ms:.2f}" if whole else "",
            *(f"{error:.1e}" for error in found[name]),
        )
        rows.append(cells)
    where = torch.cuda.get_device_name() if device.type == "cuda" else "cpu"
    print(f"{args.tokens} tokens, {args.vocab} ids, hidden size {args.hidden}, bfloat16, {where}")
    print(text_table((*columns, "loss error", "dhidden error", "dweight error"), rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
