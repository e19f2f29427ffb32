"""The plugin's own flags, and what the CPU platform adds to Megatron's."""

import argparse

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.args import add_arguments, split_flags


def test_our_flags_are_taken_out_and_megatrons_stay_in_order() -> None:
    words = "--lr 1e-3 --context-parallel-algo zigzag --cp-comm-type p2p --cp-kernel reference "
    words += "--cp-options a=1 b=x=y --data-path one two --cp-options a=2"
    flags, rest = split_flags(words.split())
    assert (flags.algo, flags.kernel, flags.platform) == ("zigzag", "reference", None)
    assert flags.options == (("a", "1"), ("b", "x=y"), ("a", "2"))
    assert " ".join(rest) == "--lr 1e-3 --data-path one two"


def test_no_flag_and_megatron_mean_no_algorithm() -> None:
    assert split_flags(["--lr", "1"])[0].algo is None
    assert split_flags(["--context-parallel-algo", "megatron"])[0].algo is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cp-platform gpu", "choose from"),
        ("--context-parallel-algo", "expected one argument"),
        ("--cp-options a", "KEY=VALUE, got 'a'"),
        ("--cp-options =1", "KEY=VALUE, got '=1'"),
    ],
)
def test_wrong_values_are_one_line(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        split_flags(words.split())
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "words",
    [
        "--cp-kernel reference",
        "--cp-options a=1",
        "--cp-recompute-attention",
        "--cp-chunked-loss",
        "--cp-linear-model transnormer",
    ],
)
@pytest.mark.parametrize("algo", ["", " --context-parallel-algo megatron"])
def test_settings_of_an_algorithm_need_an_algorithm(words: str, algo: str) -> None:
    flags, _ = split_flags((words + algo).split())
    with pytest.raises(ConfigError, match="needs an algorithm of the plugin"):
        flags.check()


def test_add_arguments_serves_megatron_as_extra_args_provider() -> None:
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    assert parser.parse_args(["--context-parallel-algo", "ring"]).context_parallel_algo == "ring"
