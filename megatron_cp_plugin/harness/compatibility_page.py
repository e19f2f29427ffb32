"""Writes patches/README.md from the tables; a test keeps the page up to date."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_cp_plugin.harness.compatibility import USED, Used
from megatron_cp_plugin.integration.contract import NAMES, SETTINGS, VERSIONS, Name, Part, Version

_INTRODUCTION = """# What the plugin relies on in Megatron

Printed by `megatron-cp hooks` from `megatron_cp_plugin/integration/contract.py` and
`megatron_cp_plugin/harness/compatibility.py`. At start-up a run compares what it replaces, and the
settings that it reads, with the running Megatron: anything that is missing, or has another
signature, ends the run in one line on every rank. `megatron-cp hooks --check` compares all of these
tables, and reads Megatron's source for what they say of it; run it after an upgrade.

No patch of Megatron-LM is needed, so this folder contains none. There are two ways to use the
plugin; both run the same code.

## With the Megatron that pip installs

The wheel of `megatron-core[training]` contains Megatron's training loop. `scripts/pretrain_gpt.py`
is a GPT pretraining program that uses it, for Megatron 0.19 and later:

```sh
torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/tiny_zigzag.yaml
```

It accepts every flag of Megatron, with or without a run file.

## With your own checkout of Megatron-LM

Put the launcher before your script; nothing in the checkout changes:

```sh
torchrun --nproc-per-node 4 -m megatron_cp_plugin.launch /path/to/Megatron-LM/pretrain_gpt.py \\
    --context-parallel-size 4 --context-parallel-algo zigzag <your own flags>
```

The script's folder comes first on `sys.path`, as with `python script.py`, so the Megatron of the
checkout is used. A script of your own works if Megatron validates its arguments (by
`parse_and_validate_args` or in `pretrain`) before it builds a `GPTModel` or `HybridModel`, and if
it splits its batches with `get_batch_on_this_cp_rank`, as `pretrain_gpt.py` does. Tokens, labels
and position ids that were split in another way, by a script's own slicing or by a function that it
imported before the plugin was installed, are refused in one line on all ranks, before the first
loss.

A checkout compiles its dataset helpers with `make` at the first start, which needs a C++ compiler
and pybind11. If they are compiled already, as in the wheel, the plugin skips that step.

## Versions

VERSIONS were tested. The last one is the main branch of
22 August 2026 (commit d98e8a64d), which already has that version number. Any other minor version is
refused; `--cp-allow-untested-megatron` runs it if it has all that a run compares: try
`megatron-cp hooks --check` first.

The `pretrain_gpt.py` of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and of that main branch was run as it is, on
CPUs, with zigzag, ring (recomputing every layer), attention2d (distributed optimizer), distflash
(multi-token prediction in a pipeline), TransNormerLLM on lasp2, and from 0.19 on zigzag and Ulysses
with packed documents and `--sft`, and gave the losses of the same script on one context-parallel
rank (`pytest -k unmodified --megatron-lm DIR` repeats it). So did that main branch's
`pretrain_hybrid.py` and `pretrain_mamba.py` with attention and MLP layers (`--spec` with a stack of
local ones), with zigzag, Ulysses, distflash and multi-token prediction. On GPUs only 0.19 was run.
`pytest tests/integration/test_contract.py --megatron-core DIR` checks another version against these
tables.

## What is replaced, and when

Replacements are made in memory, before your script imports Megatron, and in every module that has
already imported a replaced name. Without `--context-parallel-algo` (or with
`--context-parallel-algo megatron`) on a machine with a GPU, nothing in Megatron changes.
"""

_CLOSING = """
## Without a GPU

Megatron calls CUDA in many places. `--cp-platform cpu`, or a machine without a GPU, selects the
CPU platform, and a log line says so: `megatron_cp_plugin/integration/cpu.py` redirects what
Megatron does on "cuda" to the CPU. It also adds the flags that a CPU run needs, such as
`--distributed-backend gloo --transformer-impl local`, and logs them. The same command without
`--cp-platform cpu` then runs on GPUs.

## What is refused

Settings that no algorithm supports end the run before training starts, with one line that names the
setting, and exit code 2 on every rank. The list is `FEATURES` in
`megatron_cp_plugin/integration/rules.py`.
"""

_PARTS: dict[Part, str] = {
    "algorithm": "With an algorithm of the plugin",
    "training": "With an algorithm of the plugin in Megatron's training loop, by the launcher",
    "any": "In every run that uses the plugin",
    "record": "With `--cp-record`, since Megatron 0.18",
    "cpu": "On the CPU platform",
    "script": "By `scripts/pretrain_gpt.py`, since Megatron 0.19",
}


def markdown() -> str:
    """The page."""
    versions = f"{', '.join(VERSIONS[:-1])} and {VERSIONS[-1]}"
    lines = [_INTRODUCTION.replace("VERSIONS", versions)]
    for part, title in _PARTS.items():
        rows = [row for row in NAMES if row.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | why | relied on | versions |"]
            lines += ["| --- | --- | --- | --- |"]
            lines += [f"| `{r.path}` | {r.why} | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    lines += ["## What is used as it is", ""]
    for part, title in _PARTS.items():
        rows = [row for row in USED if row.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | relied on | versions |", "| --- | --- | --- |"]
            lines += [f"| `{r.path}` | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    lines += ["## Settings that are read", "", "| where | settings |", "| --- | --- |"]
    groups: dict[str, list[str]] = {}
    for setting in SETTINGS:
        since = f", from {_text(setting.since)}" if setting.since else ""
        groups.setdefault(" and ".join(setting.places) + since, []).append(setting.name)
    lines += [f"| {where} | {_words(names)} |" for where, names in groups.items()]
    return "\n".join(lines) + "\n" + _CLOSING


def _shape(row: Name) -> str:
    said = []
    if row.first:
        said.append(f"first {_words(row.first)}")
    if row.parameters:
        takes = "only" if isinstance(row, Used) and row.closed else "takes"
        said.append(f"{takes} {_words(row.parameters)}")
    if isinstance(row, Used) and row.attributes:
        said.append(f"has {_words(row.attributes)}")
    if isinstance(row, Used) and row.returned:
        said.append(f"returns {_words(name or '...' for name in row.returned)}")
    return "; ".join(said)


def _words(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _range(row: Name) -> str:
    if row.before:
        return f"{_text(row.since) + ' to ' if row.since else ''}before {_text(row.before)}"
    return f"from {_text(row.since)}" if row.since else "all"


def _text(version: Version | None) -> str:
    return ".".join(map(str, version or ()))
