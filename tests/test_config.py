"""Settings of context parallelism: patterns of layers, and lengths."""

from dataclasses import replace

import pytest

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import leading_algorithm

HYBRID = ("lasp2",) * 7 + ("attention2d",)


@pytest.mark.parametrize(
    ("layers", "algo", "advice"),
    [
        (
            ("ring", "zigzag"),
            "ring",
            "layers ring, zigzag would all have the contiguous layout, in which zigzag gives the "
            "ranks unequal work: in place of ring use allgather or attention2d or ulysses or usp "
            "or zigzag, or add --cp-options layout=contiguous to have it so",
        ),
        (("zigzag", "ulysses", "distflash"), None, "in place of distflash use allgather or"),
        (("attention2d", "ring"), None, "which attention2d gives the ranks unequal work"),
        (("ulysses", "zigzag"), "ulysses", "work: add --cp-options layout=zigzag, or add"),
        (("lasp2", "ring", "usp"), None, "in place of ring use"),
        (("lasp", "zigzag"), "lasp", "work: in place of lasp use lasp2 or linear_ulysses$"),
    ],
)
def test_layers_do_not_lose_their_balance_silently(
    layers: tuple[str, ...], algo: str | None, advice: str
) -> None:
    config = ContextParallelConfig(algo or leading_algorithm(layers), 4, layers=layers)
    if "lasp" in layers[0]:
        config = replace(config, linear_model="transnormer")
    with pytest.raises(ConfigError, match=advice):
        config.check_layers()
    if "layout=" in advice or algo is None:
        replace(config, options=(("layout", "contiguous"),)).check_layers()
    replace(config, by_auto=True).check_layers()


@pytest.mark.parametrize("layers", [("ring", "distflash", "ulysses"), ("lasp2", "ulysses", "usp")])
def test_layers_that_keep_their_balance(layers: tuple[str, ...]) -> None:
    linear = "transnormer" if "lasp2" in layers else None
    config = ContextParallelConfig(leading_algorithm(layers), 4, layers=layers, linear_model=linear)
    config.check_layers()


def test_pattern_repeats_over_the_depth() -> None:
    config = ContextParallelConfig("attention2d", 4, layers=HYBRID, linear_model="transnormer")
    config.check_layers()
    assert [n for n in range(1, 25) if config.algo_of_layer(n) == "attention2d"] == [8, 16, 24]
    assert config.algorithms == ("lasp2", "attention2d")
    assert config.has_linear_layers
    assert config.has_softmax_layers


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ContextParallelConfig("lasp", 2), "choose --cp-linear-model transnormer or"),
        (
            ContextParallelConfig("ring", 2, linear_model="transnormer"),
            "needs layers of linear attention, got ring",
        ),
        (
            ContextParallelConfig("ring", 2, layers=("lasp2",), linear_model="transnormer"),
            "must have a layer of --context-parallel-algo ring, got lasp2",
        ),
    ],
)
def test_settings_that_do_not_fit(config: ContextParallelConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check_layers()
