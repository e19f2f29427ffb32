"""Patterns of layers, and the one layout that they must have."""

from dataclasses import replace

import pytest

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import leading_algorithm, options_by_name, parse_layers

HYBRID = ("lasp2",) * 7 + ("attention2d",)


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("lasp2*7, attention2d", HYBRID),
        ("zigzag", ("zigzag",)),
        (" lasp * 2,lasp2,lasp", ("lasp", "lasp", "lasp2", "lasp")),
    ],
)
def test_patterns(text: str, layers: tuple[str, ...]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "lasp2,", "lasp2*", "lasp2*0", "lasp2*-1", "*3", "lasp2*x"])
def test_malformed_patterns(text: str) -> None:
    with pytest.raises(ConfigError, match=r"layers takes NAME or NAME\*COUNT"):
        parse_layers(text)


def test_unknown_names() -> None:
    with pytest.raises(ConfigError, match="did you mean 'lasp2'"):
        parse_layers("lsp2*7, zigzag")


def test_layout_follows_softmax_attention() -> None:
    assert leading_algorithm(HYBRID) == "attention2d"
    assert leading_algorithm(("lasp", "lasp2")) == "lasp"
    # Either can take the other's layout, of which that of zigzag has equal causal work.
    assert leading_algorithm(("ulysses", "zigzag")) == "zigzag"
    assert leading_algorithm(("ring", "zigzag")) == "ring"  # which cannot have that of zigzag
    for algo, layout in (("zigzag", "zigzag"), ("ring", "contiguous")):
        options = options_by_name(("lasp2", algo), algo, ())
        assert options == {algo: (), "lasp2": (("layout", layout),)}


def test_layouts_that_cannot_agree() -> None:
    with pytest.raises(ConfigError, match=r"zigzag \(zigzag\) and lasp \(contiguous\).* use lasp2"):
        options_by_name(("lasp", "zigzag"), "zigzag", ())
    with pytest.raises(ConfigError, match=r"zigzag \(zigzag\) and ring \(contiguous\)"):
        options_by_name(("zigzag", "ring"), "zigzag", ())


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
