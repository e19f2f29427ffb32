"""What `install` refuses before anything is replaced."""

from dataclasses import replace
from typing import Any

import pytest

from megatron_cp_plugin import megatron as cp_megatron
from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.errors import ConfigError, ContextParallelError


def test_a_process_that_builds_no_models_is_told_so() -> None:
    """Such as a driver, in place of its workers."""
    with pytest.raises(ContextParallelError, match="call it in each worker") as error:
        cp_megatron.install("zigzag")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"algo": "auto"},
            "auto needs the tokens of a micro-batch on all context-parallel ranks, got none: pass",
        ),
        ({"algo": "auto", "tokens": 0}, "tokens must be at least 1, got 0"),
        ({"algo": "zigzag", "tokens": 64}, "tokens needs algorithm auto, got zigzag"),
        ({"algo": "ring", "mean_document": 64}, "mean_document needs algorithm auto, got "),
        ({"algo": "auto", "tokens": 64, "chunks": 2}, "auto has no option 'chunks': it takes"),
    ],
)
def test_what_a_choice_needs(group: object, given: dict[str, Any], message: str) -> None:
    from megatron.core import parallel_state

    from megatron_cp_plugin.integration.install import install

    parallel_state.initialize_model_parallel()
    try:
        with pytest.raises(ConfigError, match=message) as error:
            install(**given)
        assert "\n" not in str(error.value)
    finally:
        parallel_state.destroy_model_parallel()


def test_what_the_launcher_has_chosen_may_be_installed_again() -> None:
    from megatron_cp_plugin.integration.install import _read, _words

    named = ContextParallelConfig("zigzag", 2, options=(("layout", "zigzag"),))
    chosen = replace(named, options=(), by_auto=True, mean_document=8192, for_spans=True)
    assert _read(chosen) == _read(named)
    for other in ({"chunked_loss": 64}, {"options": (("chunks", 2),)}, {"kernel": "reference"}):
        assert _read(chosen) != _read(replace(named, **other))
    assert _words(chosen) == "zigzag (mean_document=8192)"
    assert _words(replace(named, kernel="x")) == "zigzag (layout=zigzag, kernel=x)"
