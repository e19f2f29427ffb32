"""The papers' settings by name: the same as with their options written out, and right."""

from dataclasses import asdict

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.core.plans.plan import PHASES
from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError

PUBLISHED = {
    "burst": (
        "ring",
        {"backward": "query", "gradients": "model", "keep": "local", "chunks": "1"},
    ),
    "attention2d-no": ("attention2d", {"variant": "no", "chunks": "1"}),
    "attention2d-o": ("attention2d", {"variant": "overlap"}),
    "distflash-paper": ("distflash", {"last_step": "owner", "helpers": "distance"}),
    "distflash-unbalanced": ("distflash", {"helpers": "none"}),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_same_as_with_options_written_out(name: str) -> None:
    algo, options = PUBLISHED[name]
    topology, shape = VirtualWorld(4).topology(1), Shape(1, 4096, 32, 8, 128)
    one, other = (
        registry.create(*called) for called in ((name, topology, {}), (algo, topology, options))
    )
    assert asdict(one.options) == asdict(other.options)
    assert asdict(one.options) != asdict(registry.create(algo, topology, {}).options)
    assert registry.layout_of(name, {}) == registry.layout_of(algo, options)
    for phase in PHASES:
        mine, theirs = (made.plan(shape, Mask(), phase) for made in (one, other))
        assert (mine.computes, mine.moves) == (theirs.computes, theirs.moves)


def test_only_who_asks_gets_them() -> None:
    assert not PUBLISHED.keys() & set(cp.available())
    assert registry._unlisted == PUBLISHED.keys()
    with pytest.raises(ConfigError, match="did you mean 'distflash-paper'"):
        registry.algorithm_class("distflash_paper")
