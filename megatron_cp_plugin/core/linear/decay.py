"""Decay rates of linear attention."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log

import torch
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device
from megatron_cp_plugin.errors import ConfigError, brief


@dataclass(frozen=True)
class Decay:
    """One rate per head, each in (0, 1]; 1 is linear attention without decay.

    Powers are taken as exp(exponent * log(rate)) in float64: long distances end at 0 and never
    pass through infinity.
    """

    rates: tuple[float, ...]

    @cached_property
    def _hash(self) -> int:
        return hash(self.rates)

    def __hash__(self) -> int:
        # What is made of rates is looked up by them many times in a call.
        return self._hash

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

    @property
    def none(self) -> bool:
        """Whether nothing decays: all rates are 1."""
        return all(rate == 1 for rate in self.rates)

    def logarithms(self, device: torch.device) -> Tensor:
        """Natural logarithms of the rates: [H] float64."""
        return _logarithms(self.rates, device)

    def powers(self, exponents: Tensor) -> Tensor:
        """rate ** exponent of every head: exponents [...], not negative -> [..., H] float64."""
        return torch.exp(exponents.unsqueeze(-1) * self.logarithms(exponents.device))


@kept_on_device(maxsize=1024)
def _logarithms(rates: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor([log(rate) for rate in rates], dtype=torch.float64, device=device)
