"""A rank's runs of consecutive tokens under one pass of a kernel: as one batch, or document by
document.

B batch, S local tokens, n runs of a rank, C tokens of a run, H heads, D head dim of q and k, E that
of v. States are [n,B,H,D,E].
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Tensor

from megatron_cp_plugin.core.linear.decay import Decay
from megatron_cp_plugin.core.linear.kernel import BackwardPass, ForwardPass, LinearKernel

# By run: the local tokens [start, stop) of each document in it.
Parts = Sequence[Sequence[tuple[int, int]]]
Caches = Sequence[Tensor | None]


class RunsForward(ABC):
    """A forward under way, see `ForwardPass`. Attributes: states: behind the runs."""

    states: Tensor

    @abstractmethod
    def intra(self) -> None:
        """Computes what needs no state of other runs. Call it once."""

    @abstractmethod
    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Caches]:
        """Out [B,S,H,E], and what the backward needs. Args: arrived: before the runs; None: 0."""


class RunsBackward(ABC):
    """A backward under way, see `BackwardPass`. Attributes: dstates: before the runs."""

    dstates: Tensor

    @abstractmethod
    def intra(self) -> None:
        """Computes what needs no gradient of other runs. Call it once."""

    @abstractmethod
    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv. Args: arrived: gradients of the states behind the runs; None: 0."""


def runs_forward(
    kernel: LinearKernel, q: Tensor, k: Tensor, v: Tensor, decay: Decay, parts: Parts
) -> RunsForward:
    """Begins a forward. Args: q, k: [B,S,H,D]; v: [B,S,H,E]."""
    kind = _DocumentsForward if _cut(parts) else _BatchForward
    return kind(kernel, (q, k, v), decay, parts)


def runs_backward(
    kernel: LinearKernel,
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Decay,
    parts: Parts,
    caches: Caches,
) -> RunsBackward:
    """Begins a backward. Args: dout: [B,S,H,E]. caches: of `RunsForward.finish`."""
    kind = _DocumentsBackward if _cut(parts) else _BatchBackward
    return kind(kernel, (dout, q, k, v), decay, parts, caches)


def _cut(parts: Parts) -> bool:
    return any(len(documents) > 1 for documents in parts)


class _BatchForward(RunsForward):
    """Runs of equal length as entries of one batch."""

    def __init__(
        self, kernel: LinearKernel, tensors: Sequence[Tensor], decay: Decay, parts: Parts
    ) -> None:
        self._runs = len(parts)
        q, k, v = [fold(x, self._runs) for x in tensors]
        self._pass = kernel.forward(q, k, v, decay)
        self.states = by_run(self._pass.state, self._runs)

    def intra(self) -> None:
        self._pass.intra()

    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Caches]:
        out, cache = self._pass.finish(_by_batch(arrived))
        return _unfold(out, self._runs), (cache,)


class _BatchBackward(RunsBackward):
    def __init__(
        self,
        kernel: LinearKernel,
        tensors: Sequence[Tensor],
        decay: Decay,
        parts: Parts,
        caches: Caches,
    ) -> None:
        self._runs = len(parts)
        dout, q, k, v = [fold(x, self._runs) for x in tensors]
        (cache,) = caches
        self._pass = kernel.backward(dout, q, k, v, decay, cache)
        self.dstates = by_run(self._pass.dstate, self._runs)

    def intra(self) -> None:
        self._pass.intra()

    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = [_unfold(x, self._runs) for x in self._pass.finish(_by_batch(arrived))]
        return dq, dk, dv


class _DocumentsForward(RunsForward):
    """Each document by itself: what arrives meets the first one of a run, the last one's leaves."""

    def __init__(
        self, kernel: LinearKernel, tensors: Sequence[Tensor], decay: Decay, parts: Parts
    ) -> None:
        self._passes: list[list[ForwardPass]] = []
        for documents in parts:
            inputs = (_tokens(tensors, *document) for document in documents)
            self._passes.append([kernel.forward(q, k, v, decay) for q, k, v in inputs])
        self.states = torch.stack([documents[-1].state for documents in self._passes])

    def intra(self) -> None:
        for one in chain.from_iterable(self._passes):
            one.intra()

    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Caches]:
        found = []
        for run, (first, *others) in enumerate(self._passes):
            found.append(first.finish(None if arrived is None else arrived[run]))
            found += [one.finish(None) for one in others]
        outs, caches = zip(*found, strict=True)
        return torch.cat(outs, 1), caches


class _DocumentsBackward(RunsBackward):
    def __init__(
        self,
        kernel: LinearKernel,
        tensors: Sequence[Tensor],
        decay: Decay,
        parts: Parts,
        caches: Caches,
    ) -> None:
        self._passes: list[list[BackwardPass]] = []
        of_document = iter(caches)
        for documents in parts:
            inputs = (_tokens(tensors, *document) for document in documents)
            self._passes.append(
                [
                    kernel.backward(dout, q, k, v, decay, next(of_document))
                    for dout, q, k, v in inputs
                ]
            )
        self.dstates = torch.stack([documents[0].dstate for documents in self._passes])

    def intra(self) -> None:
        for one in chain.from_iterable(self._passes):
            one.intra()

    def finish(self, arrived: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        found = []
        for run, (*others, last) in enumerate(self._passes):
            found += [one.finish(None) for one in others]
            found.append(last.finish(None if arrived is None else arrived[run]))
        dq, dk, dv = (torch.cat(each, 1) for each in zip(*found, strict=True))
        return dq, dk, dv


def _tokens(tensors: Sequence[Tensor], start: int, stop: int) -> list[Tensor]:
    return [x[:, start:stop].contiguous() for x in tensors]


def fold(x: Tensor, runs: int) -> Tensor:
    """Runs of equal length as batch entries: [B,n*C,...] -> [B*n,C,...], a view."""
    if runs == 1:
        return x
    return x.unflatten(1, (runs, -1)).flatten(0, 1)


def _unfold(x: Tensor, runs: int) -> Tensor:
    """[B*n,C,...] -> [B,n*C,...]."""
    if runs == 1:
        return x
    return x.unflatten(0, (-1, runs)).flatten(1, 2)


def by_run(states: Tensor, runs: int) -> Tensor:
    """[B*n,H,D,E] -> [n,B,H,D,E]."""
    return states.unflatten(0, (-1, runs)).transpose(0, 1).contiguous()


def _by_batch(states: Tensor | None) -> Tensor | None:
    """[n,B,H,D,E] -> [B*n,H,D,E]."""
    return None if states is None else states.transpose(0, 1).flatten(0, 1)
