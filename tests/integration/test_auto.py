"""`--context-parallel-algo auto`: a name takes its place before anything asks for one."""

import argparse
from typing import Any

import pytest
import torch
from megatron.training.arguments import add_megatron_arguments

from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration.args import PluginFlags, split_flags
from megatron_cp_plugin.integration.auto import resolve
from megatron_cp_plugin.integration.checks import check_arguments

CPU = torch.device("cpu")
AUTO = "--context-parallel-algo auto"
TINY = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 64 "
TINY += "--context-parallel-size 4 --attention-dropout 0 --position-embedding-type rope "


@pytest.fixture(scope="module")
def parser() -> argparse.ArgumentParser:
    return add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))


@pytest.fixture
def chosen(parser: argparse.ArgumentParser, monkeypatch: pytest.MonkeyPatch) -> Any:
    def choose(words: str, world_size: int = 8) -> tuple[PluginFlags, list[str]]:
        flags, rest = split_flags(f"{AUTO} {words}".split(" ") if "'" not in words else words)
        flags.check()
        args = parser.parse_args([word for word in rest if word])
        args.world_size = world_size
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(min(8, world_size)))
        named, said = resolve(flags, args, CPU)
        check_arguments(args, named.config(args.context_parallel_size), CPU)
        assert resolve(flags, args, CPU) == (named, said)
        return named, said

    return choose


LLAMA = (
    "--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --bf16 --group-query-attention "
)
LLAMA += "--num-query-groups 8 --attention-dropout 0 --position-embedding-type rope "
CASES = {
    "heads enough": (LLAMA + "--seq-length 65536 --context-parallel-size 8", 8),
    "8 nodes": (LLAMA + "--seq-length 524288 --context-parallel-size 64", 64),
    "windows": (
        LLAMA + "--seq-length 65536 --context-parallel-size 8 --window-size 1023,0",
        8,
    ),
    "some windows": (
        LLAMA + "--seq-length 65536 --context-parallel-size 8 --window-size 1023,0 "
        "--window-attn-skip-freq 4",
        8,
    ),
    "tp 8": (
        LLAMA + "--seq-length 131072 --context-parallel-size 8 --tensor-model-parallel-size 8",
        64,
    ),
    "tiny": (TINY, 8),
    "one rank": (TINY + "--context-parallel-size 1", 8),
    "odd": (TINY + "--seq-length 68", 8),
    "linear": (TINY + "--cp-linear-model transnormer --position-embedding-type none", 8),
}


@pytest.mark.parametrize("case", CASES)
def test_show(chosen: Any, case: str) -> None:
    import time

    t = time.time()
    c = time.process_time()
    named, said = chosen(*CASES[case])
    print(
        case,
        time.time() - t,
        time.process_time() - c,
        named.algo,
        named.options,
        named.layers,
        *said,
    )
