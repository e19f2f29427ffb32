"""Flags of the CPU platform."""

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.cpu import complete_flags


def test_cpu_flags_are_added_where_the_user_gave_none() -> None:
    given = ["--lr", "1", "--distributed-backend=gloo", "--num-workers", "0"]
    argv, added = complete_flags(given)
    assert argv == [*given, *added]
    assert "--distributed-backend" not in added
    assert "--num-workers" not in added
    assert added[:2] == ["--transformer-impl", "local"]
    assert "--no-gradient-accumulation-fusion" in added
    assert complete_flags(argv) == (argv, [])


@pytest.mark.parametrize(
    "given", ["--distributed-backend nccl", "--transformer-impl=transformer_engine"]
)
def test_values_that_need_a_gpu_are_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"the CPU platform needs --.*: leave --.* out"):
        complete_flags(given.split())
