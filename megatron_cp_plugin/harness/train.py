"""`megatron-cp train`: the training program, under torchrun or on ranks that it starts itself."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Self

import torch

from megatron_cp_plugin.commands import parser_of
from megatron_cp_plugin.core.document_layout import Balanced
from megatron_cp_plugin.errors import ConfigError, ContextParallelError
from megatron_cp_plugin.integration import launch
from megatron_cp_plugin.integration.args import OneLineParser, PluginFlags, split_flags
from megatron_cp_plugin.integration.settings import PACKING, SIZES
from megatron_cp_plugin.process_exit import INTERRUPTED, REFUSED, one_line_errors, whole_program
from megatron_cp_plugin.registry import AUTO
from megatron_cp_plugin.terminal import flag_of


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    if "RANK" not in os.environ:
        if launch.HELPS.isdisjoint(argv):
            with one_line_errors():
                return start(argv, "megatron_cp_plugin.cli", "train")
        if not {"-h", "--help"}.isdisjoint(argv):
            parser_of("train").print_help()
    train(argv)
    return 0


def train(argv: Sequence[str]) -> None:
    """Trains in this process, as one of the ranks; ends the process."""
    with whole_program():
        CommandLine.of(argv).check()
        sys.argv[1:] = launch.prepare(argv, run_file=True)
        # Not before: the plugin must be installed when Megatron's names are imported.
        from megatron_cp_plugin.harness.pretrain import run

        run()


def start(argv: Sequence[str], *program: str) -> int:
    """Starts ranks and waits for them; returns the exit code of the first that failed.

    Args: program: each rank runs `python -m *program *argv`.
    """
    known, words = parser_of("train").parse_known_args(argv)
    line = CommandLine.of(words)
    line.check()
    ranks = line.ranks if known.nproc_per_node is None else known.nproc_per_node
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpus and ranks > gpus and line.flags.platform != "cpu":
        raise ConfigError(
            f"{ranks} ranks need as many GPUs, got {gpus}: start it with torchrun on several "
            "machines, or add --cp-platform cpu"
        )

    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
    )
    print(f"megatron_cp_plugin: {ranks} rank(s)", flush=True)
    try:
        elastic_launch(config, sys.executable)("-m", *program, *words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        said = failure.error_file_data["message"]
        if isinstance(said, dict) and failure.exitcode == REFUSED:
            print(said["message"], file=sys.stderr)
        else:
            code = failure.exitcode
            print(f"megatron-cp: rank {rank} ended with exit code {code}", file=sys.stderr)
        return failure.exitcode if failure.exitcode > 0 else 1
    except (SignalException, KeyboardInterrupt):
        # The first rank has said so.
        return INTERRUPTED
    return 0


def logged(log: Path, program: Sequence[str], said: Mapping[str, str]) -> list[str]:
    """Runs `python -m *program`; returns the lines that it prints, which go to a file.

    Args: said: more environment variables.

    Raises: ContextParallelError if it failed.
    """
    with log.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-m", *program],
            stdout=file,
            stderr=subprocess.STDOUT,
            env=said | os.environ,
            check=False,
        )
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode:
        last = next((line for line in reversed(lines) if line.strip()), "it printed nothing")
        raise ContextParallelError(f"the run of {log.stem} failed, see {log}: {last.strip()}")
    return lines


@dataclass(frozen=True)
class CommandLine:
    """Flags of `megatron-cp train`.

    Attributes:
        path: The run file; None: there is none.
        rest: The other flags, without --config.
        flags: The plugin's, of the run file too.
        of_megatron: Megatron's.
        content: The run file as it is written; {}: there is none.
    """

    path: str | None
    rest: list[str]
    flags: PluginFlags
    of_megatron: list[str]
    content: Mapping[str, Any]

    @classmethod
    def of(cls, words: Sequence[str]) -> Self:
        """Reads it. Raises: as `launch.own_flags`."""
        path, rest = launch.split_run_file(words)
        flags, of_megatron = launch.own_flags(path, rest)
        return cls(path, rest, flags, of_megatron, launch.read_run_file(path))

    @classmethod
    def read(cls, command: str, words: Sequence[str]) -> Self:
        """As `of`, for another command that starts runs with these flags.

        Raises: ConfigError: It chooses no algorithm of the plugin, or cannot be read.
        """
        if "RANK" in os.environ:
            raise ConfigError(
                f"{command} starts its own ranks, got those of torchrun: call it without"
            )
        found = cls.of(words)
        if found.flags.algo is None:
            raise ConfigError(
                f"{command} needs an algorithm of the plugin, got none: add "
                "--context-parallel-algo zigzag"
            )
        return found

    def check(self) -> None:
        """Raises: ConfigError for a layout by documents where no flag brings documents."""
        packs = any(self.given(name, False) for name in PACKING)
        algo, path = self.flags.algo, self.path
        named = algo not in (None, AUTO)
        if packs or not named or not isinstance(self.flags.config(1).layout, Balanced):
            return
        in_words = path is None or split_flags(self.rest)[0].options
        raise ConfigError(
            f"{'' if in_words else f'{path}: context_parallel: '}layout=documents needs documents, "
            "got neither --sft nor --dataloader-inter-document-masking: add one of them, or leave "
            "layout out"
        )

    @property
    def section(self) -> Mapping[str, Any]:
        """The run file's settings of the plugin."""
        return self.content.get("context_parallel") or {}

    @property
    def sizes(self) -> dict[str, int]:
        """Of context, tensor and pipeline parallelism, by Megatron's names; 1 for other words."""
        given = {name: self.given(name, 1) for name in SIZES}
        return {name: size if isinstance(size, int) else 1 for name, size in given.items()}

    @property
    def ranks(self) -> int:
        """The number of ranks that these flags need; 1 if a size is wrong: a rank refuses it."""
        return max(1, prod(self.sizes.values()))

    def by(self, algo: str) -> list[str]:
        """Megatron's flags with another algorithm, on the same platform."""
        platform = self.flags.platform
        of_platform = ["--cp-platform", platform] if platform else []
        return [*self.of_megatron, "--context-parallel-algo", algo, *of_platform]

    def given(self, name: str, default: Any) -> Any:
        """The value of a flag of Megatron, of default's type, else of the run file."""
        parser = OneLineParser(add_help=False, allow_abbrev=False)
        kind = type(default)
        parser.add_argument(flag_of(name), dest="value", nargs="?", const=True, type=kind)
        value = parser.parse_known_args(self.of_megatron)[0].value
        section = self.content.get("megatron") or {}
        of_file = {str(key).replace("-", "_"): value for key, value in section.items()}
        return of_file.get(name, default) if value is None else value

    def run_file(
        self, path: Path, section: Mapping[str, Any], dropped: Collection[str]
    ) -> list[str]:
        """Writes the run file, if there is one, with another section of the plugin.

        Args: dropped: settings of Megatron that it lacks then.
        """
        if not self.content:
            return []
        import yaml

        written = (self.content.get("megatron") or {}).items()
        kept = {key: v for key, v in written if str(key).replace("-", "_") not in dropped}
        content = {**self.content, "megatron": kept, "context_parallel": dict(section)}
        path.write_text(yaml.safe_dump(content))
        return ["--config", str(path)]
