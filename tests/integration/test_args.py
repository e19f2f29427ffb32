"""The plugin's own flags, and what the CPU platform adds to Megatron's."""

import argparse

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.args import add_arguments, split_flags
from megatron_cp_plugin.integration.cpu import complete_flags


def test_our_flags_are_taken_out_and_megatrons_stay_in_order() -> None:
    words = "--lr 1e-3 --context-parallel-algo zigzag --cp-comm-type p2p --cp-kernel reference "
    words += "--cp-options a=1 b=x=y --data-path one two --cp-options a=2"
    flags, rest = split_flags(words.split())
    assert (flags.algo, flags.kernel, flags.platform) == ("zigzag", "reference", None)
    assert flags.options == (("a", "1"), ("b", "x=y"), ("a", "2"))
    assert " ".join(rest) == "--lr 1e-3 --cp-comm-type p2p --data-path one two"
    assert flags.given


def test_no_flag_and_megatron_mean_no_algorithm() -> None:
    assert split_flags(["--lr", "1"])[0].algo is None
    assert not split_flags(["--lr", "1"])[0].given
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


@pytest.mark.parametrize("words", ["--cp-kernel reference", "--cp-options a=1"])
@pytest.mark.parametrize("algo", ["", " --context-parallel-algo megatron"])
def test_settings_of_an_algorithm_need_an_algorithm(words: str, algo: str) -> None:
    flags, _ = split_flags((words + algo).split())
    with pytest.raises(ConfigError, match="needs an algorithm of the plugin"):
        flags.check()


def test_add_arguments_serves_megatron_as_extra_args_provider() -> None:
    parser = argparse.ArgumentParser()
    assert add_arguments(parser) is parser
    assert parser.parse_args(["--context-parallel-algo", "ring"]).context_parallel_algo == "ring"


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
