"""patches/README.md, printed from `contract` by `megatron-cp hooks`; a test holds the two equal."""

from __future__ import annotations

from collections.abc import Iterable

from megatron_cp_plugin.integration.contract import NAMES, SETTINGS, VERSIONS, Name, Part, Version

_INTRODUCTION = """# What the plugin takes for granted of Megatron

Printed by `megatron-cp hooks` from `megatron_cp_plugin/integration/contract.py`. The same table is
checked against the running Megatron at start-up: what is missing, has another signature or is
another setting ends the run in one line on every rank. `megatron-cp hooks --check` says all that is
not as it should be; try it after an upgrade.

No patch of Megatron-LM is needed, so this folder holds none. There are two ways in; both put the
same code in force.

## With the Megatron that pip installs

The wheel of `megatron-core[training]` holds Megatron's training loop. `scripts/pretrain_gpt.py`
is a GPT pretraining program on it, for Megatron 0.19 and later:

```sh
torchrun --nproc-per-node 4 scripts/pretrain_gpt.py --config configs/tiny_zigzag.yaml
```

It takes every flag of Megatron, after the run file or without one.

## With your own checkout of Megatron-LM

Put the launcher before your script; nothing in the checkout changes:

```sh
torchrun --nproc-per-node 4 -m megatron_cp_plugin.launch /path/to/Megatron-LM/pretrain_gpt.py \\
    --context-parallel-size 4 --context-parallel-algo zigzag <your own flags>
```

The script's folder comes first on `sys.path`, as `python script.py` would have it, so the Megatron
of the checkout is used. A script of your own works if Megatron validates its arguments (by
`parse_and_validate_args` or in `pretrain`) before it builds a `GPTModel` or `HybridModel`, and if
it cuts its batches with `get_batch_on_this_cp_rank`, as `pretrain_gpt.py` does: tokens, labels and
position ids that were cut otherwise, by a script's own slicing or by a function that it imported
before the plugin was in force, are refused in one line on all ranks, before the first loss.

A checkout compiles its dataset helpers with `make` at its first start, which needs a C++ compiler
and pybind11. Where they are compiled already, and in the wheel, the plugin skips that step.

## Versions

VERSIONS were run. The last one is the main branch of
22 August 2026 (commit d98e8a64d), which calls itself so before its release. A version whose first
two numbers are those of none of them is refused; `--cp-allow-untested-megatron` runs it if it has
all of this table.

The `pretrain_gpt.py` of 0.16.1, 0.17.1, 0.18.2, 0.19.0 and of that main branch was run as it is, on
CPUs, with zigzag, ring (recomputing every layer), attention2d (distributed optimizer), distflash
(multi-token prediction in a pipeline), TransNormerLLM on lasp2, and from 0.19 on zigzag and Ulysses
with packed documents and `--sft`, and gave the losses of the same script on one context-parallel
rank (`pytest -k unmodified --megatron-lm DIR` repeats it). So did `pretrain_hybrid.py` and
`pretrain_mamba.py` of that main branch, of attention and MLP layers (`--spec` with a stack of local
ones), with zigzag, Ulysses, distflash and multi-token prediction. On GPUs only 0.19 was run.
`pytest tests/integration/test_contract.py --megatron-core DIR` holds another version against this
table.

## What is replaced, and when

In memory, before your script imports it, here and wherever it has been imported already.
Without `--context-parallel-algo` (or with `--context-parallel-algo megatron`) on a machine with a
GPU, nothing of Megatron changes.
"""

_CLOSING = """
## Without a GPU

Megatron asks for CUDA at every turn. `--cp-platform cpu` (or no GPU, and a line in the log) puts
the CPU platform in force: `megatron_cp_plugin/integration/cpu.py`, one file, sends what Megatron
asks for on "cuda" to the CPU. It also adds the flags that a CPU run needs, such as
`--distributed-backend gloo --transformer-impl local`, and says so. The same command without
`--cp-platform cpu` then runs on GPUs.

## What is refused

Settings that no algorithm serves end the run before training starts: one line that names the
setting, exit code 2 on every rank. The list is `FEATURES` in
`megatron_cp_plugin/integration/features.py`.
"""

_PARTS: dict[Part, str] = {
    "algorithm": "With an algorithm of the plugin",
    "training": "With an algorithm of the plugin in Megatron's training loop, by the launcher",
    "any": "In every run that the plugin has a part in",
    "record": "With `--cp-record`, from Megatron 0.18 on",
    "cpu": "On the CPU platform",
    "script": "By `scripts/pretrain_gpt.py`, from Megatron 0.19 on",
}


def markdown() -> str:
    """The page."""
    versions = f"{', '.join(VERSIONS[:-1])} and {VERSIONS[-1]}"
    lines = [_INTRODUCTION.replace("VERSIONS", versions)]
    for part, title in _PARTS.items():
        rows = [row for row in NAMES if row.replaced and row.part == part]
        if rows:
            lines += [f"{title}:", "", "| name | why | relied on | versions |"]
            lines += ["| --- | --- | --- | --- |"]
            lines += [f"| `{r.path}` | {r.why} | {_shape(r)} | {_range(r)} |" for r in rows]
            lines.append("")
    lines += ["## What is used as it is", ""]
    for part, title in _PARTS.items():
        rows = [row for row in NAMES if not row.replaced and row.part == part]
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
        said.append(f"{'only' if row.closed else 'takes'} {_words(row.parameters)}")
    if row.attributes:
        said.append(f"has {_words(row.attributes)}")
    if row.returned:
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
