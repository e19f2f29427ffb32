"""Megatron's own spelling of context parallelism, --cp-comm-type."""

import argparse

import pytest

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration.args import split_flags


@pytest.mark.parametrize(
    ("words", "algo", "layers", "options"),
    [
        ("--cp-comm-type p2p", "zigzag", (), ()),
        ("--cp-comm-type all_gather", "allgather", (), ()),
        ("--cp-comm-type=allgather", "allgather", (), ()),
        ("--cp-comm-type a2a", "ulysses", (), ()),
        (
            "--cp-comm-type a2a --cp-options layout=zigzag",
            "ulysses",
            (),
            (("layout", "zigzag"),),
        ),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4",
            "usp",
            (),
            (("ulysses", "2"),),
        ),
        # Layers of one model have one layout: ulysses takes that of zigzag.
        ("--cp-comm-type a2a p2p", "zigzag", ("ulysses", "zigzag"), ()),
        (
            "--cp-comm-type p2p a2a+p2p --hierarchical-context-parallel-sizes 4 2",
            "usp",
            ("zigzag", "usp"),
            (("ulysses", "4"),),
        ),
    ],
)
def test_megatrons_spelling(
    words: str, algo: str, layers: tuple[str, ...], options: tuple[tuple[str, str], ...]
) -> None:
    flags, rest = split_flags(["--lr", "1", *words.split()])
    flags.check()
    assert (flags.algo, flags.layers, flags.options) == (algo, layers, options)
    assert rest == ["--lr", "1"]
    config = flags.config(8)
    assert config.layout.name == ("contiguous" if words == "--cp-comm-type a2a" else "zigzag")
    assert set(config.algorithms) == set(layers or (algo,))


def test_both_spellings_may_say_the_same() -> None:
    for words in (
        "--cp-comm-type p2p --context-parallel-algo zigzag",
        "--cp-comm-type a2a p2p a2a p2p --cp-layers ulysses,zigzag",
        "--cp-comm-type p2p p2p --context-parallel-algo zigzag",
        "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 "
        "--context-parallel-algo usp --cp-options ulysses=2",
    ):
        split_flags(words.split())[0].check()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--cp-comm-type p2", r"got 'p2' \(did you mean 'p2p'\?\): use p2p, all_gather, a2a or"),
        (
            "--cp-comm-type p2p --context-parallel-algo ring",
            "--cp-comm-type p2p means zigzag, got also --context-parallel-algo ring: leave one",
        ),
        (
            "--cp-comm-type p2p a2a --context-parallel-algo zigzag",
            "means zigzag, ulysses, got also --context-parallel-algo zigzag",
        ),
        (
            "--cp-comm-type a2a --cp-layers zigzag*2,ulysses",
            "means ulysses, got also --cp-layers zigzag, zigzag, ulysses: leave one",
        ),
        ("--cp-comm-type a2a+p2p", "needs two --hierarchical-context-parallel-sizes, got none"),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 2",
            "sizes, got 2 2 2: give the ranks that exchange heads and the number of such teams",
        ),
        (
            "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 4 --cp-options "
            "ulysses=4",
            "means ulysses=2, got also ulysses=4",
        ),
        (
            "--context-parallel-algo ring --hierarchical-context-parallel-sizes 2 4",
            "needs --cp-comm-type a2a.p2p, got ring: leave it out, or use",
        ),
    ],
)
def test_spellings_that_conflict(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        split_flags(words.split())[0].check()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("algo", ["", "--context-parallel-algo megatron "])
def test_megatrons_own_path_keeps_its_flags(algo: str) -> None:
    theirs = "--hierarchical-context-parallel-sizes 2 2"
    if algo:
        theirs += " --cp-comm-type a2a+p2p --lr 1"
    flags, rest = split_flags((algo + theirs).split())
    flags.check()
    assert flags.algo is None
    assert rest == theirs.split()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("p2p a2a", "takes one type, or one for each of the 4 layers, got 2: use --cp-layers"),
        (
            "a2a+p2p --hierarchical-context-parallel-sizes 2 2",
            "2 2 must multiply to context_parallel_size 8, got 4",
        ),
    ],
)
def test_megatrons_spelling_and_the_model(words: str, message: str) -> None:
    flags, _ = split_flags(["--cp-comm-type", *words.split()])
    flags.check()
    args = argparse.Namespace(num_layers=4, context_parallel_size=8)
    with pytest.raises(ConfigError, match=message):
        flags.comm_type.check_model(args)
