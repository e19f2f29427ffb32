"""Patterns of layers, and the one layout that they must have."""

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.layers import leading_algorithm, options_by_name, parse_layers
from tests.test_config import HYBRID


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
    of_teams = (("layout", "documents"), ("ulysses", 2))
    with pytest.raises(ConfigError, match=r"usp \(documents/2\) and zigzag \(zigzag\)"):
        options_by_name(("zigzag", "usp"), "usp", of_teams)
