"""What may be registered, and what is refused."""

from dataclasses import dataclass
from typing import Literal

import pytest

import megatron_cp_plugin as cp
from megatron_cp_plugin import registry
from megatron_cp_plugin.core.algorithm import Algorithm, PointToPoint
from megatron_cp_plugin.core.layout import Contiguous, Layout
from megatron_cp_plugin.errors import ConfigError
from tests.halves import Halves


def test_classes_that_are_no_algorithm_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    cp.available()
    monkeypatch.setattr(registry, "_algorithms", dict(registry._algorithms))

    class WithoutPlacement(PointToPoint):
        layout = Contiguous()

    class WithoutLayout(Halves):
        @classmethod
        def layout_for(cls, options: Algorithm.Options) -> Layout:
            return PointToPoint.layout

    class WithoutDefault(Halves):
        @dataclass(frozen=True, kw_only=True)
        class Options(PointToPoint.Options):
            rows: int

    class WithATuple(Halves):
        @dataclass(frozen=True)
        class Options(PointToPoint.Options):
            rows: tuple[int, ...] = ()

    class WithLayoutsOfItsOwn(Halves):
        @dataclass(frozen=True)
        class Options(PointToPoint.Options):
            layout: Literal["spiral"] = "spiral"

    for cls, message in (
        (WithLayoutsOfItsOwn, "'mine' has no layout: .* or define layout_for if its options"),
        (WithoutPlacement, "'mine' has no method placement: define it in WithoutPlacement"),
        (WithoutLayout, "'mine' has no layout: set one in WithoutLayout"),
        (WithoutDefault, "option rows of mine has no default: give it one"),
        (WithATuple, r"option rows of mine has the type tuple\[int, ...\]: use a Literal"),
    ):
        with pytest.raises(ConfigError, match=message):
            cp.register("mine")(cls)
    assert "mine" not in cp.available()


def test_kinds_in_the_registry() -> None:
    assert set(cp.available()) == set(cp.available("softmax")) | set(cp.available("linear"))
    # And those of other packages that are installed.
    assert {"lasp", "lasp2", "linear_ulysses"} <= set(cp.available("linear"))
    assert set(cp.available("softmax")).isdisjoint(cp.available("linear"))
