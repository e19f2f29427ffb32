"""What tokens, and runs of tokens, do to the state of linear attention.

B batch, S local tokens, H heads, D head dim of q and k, E head dim of v, n runs, M runs of all
ranks. A token takes the state S to T S + U: its transition T and what it adds U are

    T = diag(exp(g))                  U = k v^T                  with gates g, or constant rates
    T = (I - b k k^T) diag(exp(g))    U = b k v^T                with b: the delta rule

A run of tokens does the same with the product of their transitions. Gradients of states take the
same way back with T^T.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.fused import fused_for
from megatron_cp_plugin.core.linear.decay import Decay, combine
from megatron_cp_plugin.core.linear.route import Chains, Route

# From so many pairs of runs on, weights for each pair take more memory than states.
_PAIRS = 4096


class Gates(NamedTuple):
    """What decides the transitions of tokens, where they are no constants.

    Attributes:
        gate: natural logarithms, at most 0: [B,S,H], or [B,S,H,D] for each channel; None: 0.
        beta: [B,S,H] makes it the delta rule; None: it is none.
    """

    gate: Tensor | None = None
    beta: Tensor | None = None

    @property
    def some(self) -> bool:
        """Whether there are any."""
        return self.gate is not None or self.beta is not None

    def numbers(self, head_dim: int) -> int:
        """Of how many numbers a head's transition is."""
        if self.beta is not None:
            return head_dim * head_dim
        return 0 if self.gate is None else head_dim if self.gate.dim() == 4 else 1


NO_GATES = Gates()


@dataclass(frozen=True)
class RunStates:
    """What runs do to the state, or to its gradient on the way back.

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
        """One message of so many runs, those that there are not filled with zeros: [runs,B,H,*]."""
        message = self.added.flatten(3)
        if isinstance(self.through, Tensor):
            message = torch.cat((message, self.through.flatten(3)), 3)
        missing = runs - len(message)
        if missing:
            message = torch.cat((message, message.new_zeros(missing, *message.shape[1:])))
        return message

    def unpacked(self, messages: Tensor, counts: Sequence[int]) -> "RunStates":
        """Of all ranks' runs, from their messages [P,runs,B,H,*]. Args: counts: of runs by rank."""
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
        """The state [B,H,D,E] behind one of the runs, of so many tokens, given that before it."""
        added, through = self.added[number], self.through
        if isinstance(through, Decay):
            weights = through.weights(((length, 0),), added.dtype, added.device)
            return combine(torch.stack((before, added)), weights)[0]
        return _passed(before, added, through[number])

    def reaching(
        self, route: Route, first: Tensor | None, places: Sequence[int], *, to_the_end: bool
    ) -> Tensor:
        """The states before runs, and at the end of the route if wanted.

        Args:
            route: the way through all runs, which are these, by rank.
            first: where the route begins [B,H,D,E]; None: 0.
            places: numbers of runs among all.

        Returns: [places (and one),B,H,D,E].
        """
        few = (len(places) + 1) * len(self.added) <= _PAIRS
        if isinstance(self.through, Decay) or self.through.dim() == 4:
            if few:
                return self._weighed(route, first, places, to_the_end=to_the_end)
        elif self.added.dtype == torch.float32 and (fused := fused_for(self.added)) is not None:
            ways = _ways(route, tuple(places), to_the_end, self.added.device)
            begin = None if first is None else first.unsqueeze(0)
            found = fused.passed_along(self.added, self.through, begin, *ways)
            if found is not None:
                return found
        seen, end = self._followed(route.chains, first, places, to_the_end=to_the_end)
        before, count = [], 0
        for round_ in seen:
            before.append(count)
            count += len(round_)
        arriving = [route.chains.arriving[number] for number in places]
        index = tuple(count if one is None else before[one[0]] + one[1] for one in arriving)
        seen.append(torch.zeros_like(self.added[:1]))
        if end is not None:
            seen.append(end.unsqueeze(0))
            index += (count + 1,)
        return torch.cat(seen).index_select(0, _numbers(index, self.added.device))

    def _weighed(
        self, route: Route, first: Tensor | None, places: Sequence[int], *, to_the_end: bool
    ) -> Tensor:
        """See `reaching`: sums over all runs, weighted by what is between."""
        runs = [run for of_rank in route.runs for run in of_rank]
        starts = [runs[number][0] for number in places] + [route.length] * to_the_end
        distances = route.distances(starts)
        states = self.added
        if first is not None:
            states = torch.cat((states, first.unsqueeze(0)))
        else:
            distances = tuple(row[:-1] for row in distances)
        if isinstance(self.through, Decay):
            weights = self.through.weights(distances, states.dtype, states.device)
            return combine(states, weights)
        order = sorted(range(len(runs)), key=lambda number: runs[number])
        behind = [*sorted(order, key=order.__getitem__), -1]  # the place of each run in this order
        bounds = [sum(run < (start, start) for run in runs) for start in starts]
        columns = behind[: len(states)]
        tables = _reach(distances, tuple(order), tuple(columns), tuple(bounds), states.device)
        logs = self.through.double().index_select(0, tables.order).cumsum(0)
        logs = torch.cat((torch.zeros_like(logs[:1]), logs))
        before, after = logs[tables.bounds], logs[tables.columns]
        exponents = before.unsqueeze(1) - after.unsqueeze(0)  # [places,M,B,H,1 or D]
        reached = tables.reached[..., None, None, None]
        weights = exponents.masked_fill(~reached, -torch.inf).exp().to(states.dtype)
        if weights.shape[4] == 1:
            return torch.einsum("pmbh,mbhde->pbhde", weights.squeeze(4), states)
        return torch.einsum("pmbhd,mbhde->pbhde", weights, states)

    def _followed(
        self, chains: Chains, first: Tensor | None, places: Sequence[int], *, to_the_end: bool
    ) -> tuple[list[Tensor], Tensor | None]:
        """See `reaching`: run after run, in all chains at once, as far as it is asked for.

        Returns: the states before the runs of each round; and the one at the end of the route.
        """
        through = self.through
        if isinstance(through, Decay):
            lengths = _lengths(chains, self.added.device)
            logs = through.logarithms(self.added.device) * lengths[:, None]
            through = logs.to(self.added.dtype)[:, None, :, None]
        state = self.added.new_zeros(len(chains.rounds[0]), *self.added.shape[1:])
        if first is not None:
            state[chains.first] = first
        arriving = [chains.arriving[number] for number in places]
        last = max((one[0] for one in arriving if one is not None), default=0)
        seen: list[Tensor] = []
        for number, round_ in enumerate(chains.rounds):
            state = state[: len(round_)]
            seen.append(state)
            if number == last and not to_the_end:
                break
            if len(round_) == 1:
                added, of_runs = (x.narrow(0, round_[0], 1) for x in (self.added, through))
            else:
                index = _numbers(round_, state.device)
                added, of_runs = (x.index_select(0, index) for x in (self.added, through))
            state = _passed(state, added, of_runs)
            if number == chains.last_round:
                end = state[chains.last]
        return seen, end if to_the_end else None


def _passed(before: Tensor, added: Tensor, through: Tensor) -> Tensor:
    """T before + added: [...,D,E] twice, with logarithms [...,1 or D] or matrices [...,D,D]."""
    if through.dim() == added.dim() - 1:
        return torch.addcmul(added, through.exp().unsqueeze(-1), before)
    inputs = (x.flatten(0, -3) for x in (added, through, before))
    return torch.baddbmm(*inputs).view_as(added)


class _Reach(NamedTuple):
    """Which runs reach which places, on a device.

    Attributes: order: runs by position [M]. bounds: how many of them are before each place.
        columns: how many are up to each state, itself included. reached: [places,states].
    """

    order: Tensor
    bounds: Tensor
    columns: Tensor
    reached: Tensor


@kept_on_device(maxsize=128)
def _reach(
    distances: tuple[tuple[int | None, ...], ...],
    order: tuple[int, ...],
    columns: tuple[int, ...],
    bounds: tuple[int, ...],
    device: torch.device,
) -> _Reach:
    reached = torch.tensor([[n is not None for n in row] for row in distances], dtype=torch.int32)
    found = order, bounds, [column + 1 for column in columns]
    order_, bounds_, columns_ = (uploaded(torch.tensor(x, device="cpu"), device) for x in found)
    return _Reach(order_, bounds_, columns_, uploaded(reached, device).bool())


class Ways(NamedTuple):
    """Runs that states pass one after another, as of `FusedOperations.passed_along`."""

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
def _ways(route: Route, places: tuple[int, ...], to_the_end: bool, device: torch.device) -> Ways:
    chains = route.chains
    ends = [chains.arriving[number] for number in places]
    ends += [(chains.last_round + 1, chains.last)] * to_the_end
    ways: list[tuple[list[int], int]] = []
    for end in ends:
        if end is None:
            ways.append(([], -1))
        else:
            runs = [chains.rounds[at][end[1]] for at in range(end[0])]
            ways.append((runs, 0 if end[1] == chains.first else -1))
    return Ways.of(ways, device)


@kept_on_device(maxsize=256)
def _numbers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """An index."""
    return uploaded(torch.tensor(numbers, dtype=torch.long, device="cpu"), device)


@kept_on_device(maxsize=64)
def _present(counts: tuple[int, ...], runs: int, device: torch.device) -> Tensor:
    """Which of P times so many runs there are."""
    found = [rank * runs + run for rank, count in enumerate(counts) for run in range(count)]
    return uploaded(torch.tensor(found, dtype=torch.long, device="cpu"), device)


@kept_on_device(maxsize=64)
def _lengths(chains: Chains, device: torch.device) -> Tensor:
    """Of all runs in tokens, float64 [M]."""
    return uploaded(torch.tensor(chains.lengths, device="cpu"), device).double()
