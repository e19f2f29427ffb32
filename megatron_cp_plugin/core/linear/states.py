"""Runs of consecutive tokens, the route of states through all ranks' runs, and the effect of tokens
and runs on the state of linear attention.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v, n runs, M runs of all
ranks. A token takes the state S to T S + U: its transition T and what it adds U are

    T = diag(exp(g))                  U = k v^T                  with gates g, or constant rates
    T = (I - b k k^T) diag(exp(g))    U = b k v^T                with b: the delta rule

A run of tokens does the same with the product of their transitions. Gradients of states take the
same route back, with T^T.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.blocks.assembly import padded
from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.layout import Layout
from megatron_cp_plugin.core.partial import fused_for
from megatron_cp_plugin.core.ranges import Span
from megatron_cp_plugin.errors import ConfigError, brief

Interval = tuple[int, int]


@dataclass(frozen=True)
class Runs:
    """Runs that follow each other in a rank's local tokens, each of one document or more.

    Attributes: documents: by run, the local tokens (start, stop) of every document in it; a run
        without tokens has one without tokens.
    """

    documents: tuple[tuple[Interval, ...], ...]

    @staticmethod
    def single(tokens: int) -> "Runs":
        """One run of one document."""
        return Runs((((0, tokens),),))

    def __len__(self) -> int:
        return len(self.documents)

    @cached_property
    def _hash(self) -> int:
        return hash(self.documents)

    def __hash__(self) -> int:
        # Runs are a key of caches, looked up several times in a call.
        return self._hash

    @cached_property
    def firsts(self) -> tuple[Interval, ...]:
        """The first document of each run: a state from before the run continues there."""
        return tuple(documents[0] for documents in self.documents)

    @cached_property
    def lasts(self) -> tuple[Interval, ...]:
        """The last document of each run: its state continues behind the run."""
        return tuple(documents[-1] for documents in self.documents)


@dataclass(frozen=True, eq=False)
class Route:
    """The route of states over the whole sequence, and the part of it that each run covers.

    A route equals only itself, because caches are kept by route.

    Attributes:
        runs: for each rank (start, stop) of its runs in local order, counted from the beginning of
            the route.
        length: of the route, the global N.
        documents: positions where documents but the first begin; no state continues there.
    """

    runs: tuple[tuple[Interval, ...], ...]
    length: int
    documents: tuple[int, ...] = ()

    @staticmethod
    @lru_cache(maxsize=64)  # every pass has the same
    def of(layout: Layout, size: int, seq_len: int, documents: tuple[int, ...] = ()) -> "Route":
        """The route from the first token to the last. A rank without tokens has a run of none."""
        end = (Span(seq_len, seq_len),)
        return Route(
            tuple(
                tuple((span.start, span.stop) for span in layout.spans(rank, size, seq_len) or end)
                for rank in range(size)
            ),
            seq_len,
            documents,
        )

    @cached_property
    def back(self) -> "Route":
        """The same runs on the route in the other direction."""
        return Route(
            tuple(
                tuple((self.length - stop, self.length - start) for start, stop in runs)
                for runs in self.runs
            ),
            self.length,
            tuple(self.length - start for start in reversed(self.documents)),
        )

    def lasts(self, start: int, stop: int) -> bool:
        """Whether no document begins between two places on the route, both included."""
        after = bisect_left(self.documents, start)
        return after == len(self.documents) or self.documents[after] > stop

    def local(self, rank: int) -> Runs:
        """The runs of a rank, by its local tokens."""
        return _local_runs(self, rank)

    @cached_property
    def last_rank(self) -> int:
        """The rank that holds the last run; of those without tokens the last one."""
        return max(range(len(self.runs)), key=lambda rank: (max(self.runs[rank]), rank))

    @cached_property
    def ways(self) -> tuple[tuple[tuple[int, ...], int], ...]:
        """For each run, by rank, and for the end: the runs that a state passes in turn to get
        there, none where a document begins; and 0 if the state comes from the beginning of the
        route, else -1.
        """
        runs = [run for of_rank in self.runs for run in of_rank]
        found: list[tuple[tuple[int, ...], int]] = [((), -1)] * len(runs)
        passed: tuple[int, ...] = ()
        begin = 0
        for number in sorted(range(len(runs)), key=lambda number: runs[number]):
            start, stop = runs[number]
            if self.lasts(start, start):
                found[number] = passed, begin
            if not self.lasts(start, stop - 1):
                passed, begin = (), -1
            passed += (number,)
        return *found, (passed, begin)

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of all runs, by rank."""
        return tuple(stop - start for runs in self.runs for start, stop in runs)

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """How many runs each rank has."""
        return tuple(map(len, self.runs))

    @cached_property
    def flipped(self) -> "Route":
        """The route from the last token to the first, with each rank's tokens in reverse order."""
        back = self.back
        return replace(back, runs=tuple(runs[::-1] for runs in back.runs))


@lru_cache(maxsize=256)
def _local_runs(route: Route, rank: int) -> Runs:
    found, before = [], 0
    for start, stop in route.runs[rank]:
        first, end = bisect_right(route.documents, start), bisect_left(route.documents, stop)
        edges = [before + at - start for at in (start, *route.documents[first:end], stop)]
        found.append(tuple(pairwise(edges)))
        before = edges[-1]
    return Runs(tuple(found))


@dataclass(frozen=True)
class Decay:
    """One rate per head, each in (0, 1]; 1 is linear attention without decay."""

    rates: tuple[float, ...]

    @staticmethod
    def of(decay: float | Sequence[float] | Tensor, heads: int) -> "Decay":
        """Reads what users give: a number for all heads, or one per head.

        A tensor on a GPU is copied to the host, which waits for it: keep rates on the CPU.

        Raises: ConfigError if the number of rates or a rate does not fit.
        """
        if isinstance(decay, Tensor):
            if decay.requires_grad:
                raise ConfigError(
                    "decay is not differentiable, got a tensor that requires grad: "
                    "pass decay.detach()"
                )
            if decay.is_meta or decay.layout != torch.strided:
                raise ConfigError(
                    f"decay needs a dense tensor with elements, got {decay.layout} on "
                    f"{decay.device}"
                )
            decay = decay.tolist()
        try:
            if isinstance(decay, Iterable):
                rates = tuple(map(float, decay))
            else:
                rates = (float(decay),) * heads
        except (TypeError, ValueError):
            raise ConfigError(
                f"decay needs a number, or one for each of {heads} heads, got {brief(decay)}"
            ) from None
        if len(rates) != heads:
            raise ConfigError(f"decay needs one rate for each of {heads} heads, got {len(rates)}")
        for rate in rates:
            if not 0 < rate <= 1:
                raise ConfigError(f"decay rates must be above 0 and at most 1, got {rate}")
        return Decay(rates)

    @kept_on_device(maxsize=1024)
    def logarithms(self, device: torch.device) -> Tensor:
        """Natural logarithms of the rates: [H] float64."""
        return torch.tensor([log(rate) for rate in self.rates], dtype=torch.float64, device=device)


class Gates(NamedTuple):
    """Gates, from which the transitions of tokens follow if they are not constant rates.

    Attributes:
        gate: natural logarithms, at most 0: [B,S,H], or [B,S,H,D] for each channel; None: 0.
        beta: [B,S,H], for the delta rule; None: no delta rule.
    """

    gate: Tensor | None = None
    beta: Tensor | None = None

    @property
    def some(self) -> bool:
        """Whether there are gates."""
        return self.gate is not None or self.beta is not None

    def each(self, change: Callable[[Tensor], Tensor]) -> "Gates":
        """The gates after applying a function to each that is not None."""
        return Gates(*(None if x is None else change(x) for x in self))


NO_GATES = Gates()


@dataclass(frozen=True)
class RunStates:
    """Effect of runs on the state, or on its gradient on the way back.

    Attributes:
        added: [n,B,H,D,E], float32 (float64 for float64).
        through: the transitions in added's dtype: the rates of constant decay; logarithms
            [n,B,H,1] or [n,B,H,D]; or matrices [n,B,H,D,D]. Where a document begins inside a run,
            nothing passes, and its transition is not read.
    """

    added: Tensor
    through: Decay | Tensor

    @property
    def back(self) -> "RunStates":
        """The same for gradients."""
        if isinstance(self.through, Decay) or self.through.dim() == 4:
            return self
        return replace(self, through=self.through.mT)

    def packed(self, runs: int) -> Tensor:
        """One message of `runs` runs, missing ones filled with zeros: [runs,B,H,*]."""
        message = self.added.flatten(3)
        if isinstance(self.through, Tensor):
            message = torch.cat((message, self.through.flatten(3)), 3)
        return padded(message, 0, runs)

    def unpacked(self, messages: Tensor, counts: Sequence[int]) -> "RunStates":
        """The states of all ranks' runs, `counts` by rank, from messages [P,runs,B,H,*]."""
        runs = messages.shape[1]
        found = messages.flatten(0, 1)
        if any(count < runs for count in counts):
            found = found.index_select(0, _present(tuple(counts), runs, found.device))
        *_, head_dim, value_dim = self.added.shape
        added, others = found.tensor_split((head_dim * value_dim,), 3)
        through = self.through
        if isinstance(through, Tensor):
            through = others.unflatten(3, through.shape[3:])
        return RunStates(added.unflatten(3, (head_dim, value_dim)), through)

    def passed(self, number: int, length: int, before: Tensor) -> Tensor:
        """The state [B,H,D,E] after a run of `length` tokens, given the state before it."""
        added, through = self.added[number], self.through
        if isinstance(through, Decay):
            logs = through.logarithms(added.device) * length
            return _passed(before, added, logs.to(added.dtype)[None, :, None])
        return _passed(before, added, through[number])

    def reaching(
        self, route: Route, first: Tensor | None, places: Sequence[int], *, to_the_end: bool
    ) -> Tensor:
        """The states before runs, and at the end of the route if wanted.

        Args:
            first: state at the beginning of the route [B,H,D,E]; None: 0.
            places: numbers of runs among all.

        Returns: [places (and one),B,H,D,E].
        """
        through, wanted = self.through, (*places, *[-1] * to_the_end)
        if isinstance(through, Decay):
            given = route.lengths, self.added.shape[1], self.added.dtype
            through = _logs(through, *given, self.added.device)
        if self.added.dtype == torch.float32 and (fused := fused_for(self.added)) is not None:
            ways = _ways_of(route, wanted, self.added.device)
            begin = None if first is None else first.unsqueeze(0)
            found = fused.passed_along(self.added, through, begin, *ways)
            if found is not None:
                return found
        states, behind = [], dict[int, Tensor]()  # each run is on one way, or on none
        for runs, which in (route.ways[number] for number in wanted):
            begin = None if which < 0 else first
            state = torch.zeros_like(self.added[0]) if begin is None else begin.to(self.added)
            for run in runs:
                if run not in behind:
                    behind[run] = _passed(state, self.added[run], through[run])
                state = behind[run]
            states.append(state)
        return torch.stack(states)


def _passed(before: Tensor, added: Tensor, through: Tensor) -> Tensor:
    """T before + added: [...,D,E] twice, with logarithms [...,1 or D] or matrices [...,D,D]."""
    if through.dim() == added.dim() - 1:
        return torch.addcmul(added, through.exp().unsqueeze(-1), before)
    inputs = (x.flatten(0, -3) for x in (added, through, before))
    return torch.baddbmm(*inputs).view_as(added)


class Ways(NamedTuple):
    """Runs that states pass one after another, as of `kernels.decayed.passed_along`."""

    bounds: Tensor
    order: Tensor
    begins: Tensor

    @staticmethod
    def of(ways: Sequence[tuple[Sequence[int], int]], device: torch.device) -> "Ways":
        """On a device. Args: ways: the numbers of the runs of each, and its beginning."""
        runs, begins = zip(*ways, strict=True)
        lists = [0, *accumulate(map(len, runs))], [one for way in runs for one in way], begins
        return Ways(
            *(uploaded(torch.tensor(x, dtype=torch.int32, device="cpu"), device) for x in lists)
        )


@kept_on_device(maxsize=128)
def _ways_of(route: Route, wanted: tuple[int, ...], device: torch.device) -> Ways:
    return Ways.of([route.ways[number] for number in wanted], device)


@kept_on_device(maxsize=64)
def _present(counts: tuple[int, ...], runs: int, device: torch.device) -> Tensor:
    """Which of P times `runs` runs there are."""
    found = [rank * runs + run for rank, count in enumerate(counts) for run in range(count)]
    return uploaded(torch.tensor(found, dtype=torch.long, device="cpu"), device)


@kept_on_device(maxsize=256)
def _logs(
    decay: Decay, lengths: tuple[int, ...], batch: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    tokens = uploaded(torch.tensor(lengths, device="cpu"), device).double()
    logs = (decay.logarithms(device) * tokens[:, None]).to(dtype)
    return logs[:, None, :, None].expand(-1, batch, -1, -1).contiguous()
