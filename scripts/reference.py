"""Writes docs/reference.md: functions, options of all algorithms, flags and commands.

python scripts/reference.py            # rewrites the page
python scripts/reference.py --check    # exits with 1 if the page is not as the code says
"""

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import megatron_cp_plugin as cp
from megatron_cp_plugin import cli, registry
from megatron_cp_plugin.integration.args import FLAGS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"
INTRODUCTION = """# Reference

Generated from the code by `python scripts/reference.py`: the public functions, the options of all
algorithms, the plugin's flags, and the commands.
"""


def attributes(kind: type) -> dict[str, str]:
    """What the docstrings of a class and its bases say of each attribute, in one line."""
    found: dict[str, str] = {}
    entry = re.compile(r"(?:Attributes:|^)\s+([a-z_]+(?:, [a-z_]+)*): ", re.MULTILINE)
    for base in reversed(kind.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        _, named, section = text.partition("Attributes:")
        parts = entry.split(named + section)
        for names, said in zip(parts[1::2], parts[2::2], strict=True):
            for name in names.split(", "):
                found[name] = " ".join(said.split())
    return found


def values(field: dataclasses.Field[Any]) -> str:
    """What an option takes."""
    choices = get_args(field.type)
    if choices:
        return ", ".join(f"`{choice}`" for choice in choices)
    kinds: dict[object, str] = {bool: "true, false", int: "integer"}
    return kinds.get(field.type, str(field.type))


def cell(text: str) -> str:
    """Text inside a table."""
    return text.replace("|", "\\|")


def algorithms() -> Iterator[str]:
    """A section for each algorithm, with a table of its options."""
    first: dict[tuple[str, str], str] = {}  # who has an option with a meaning
    for name in cp.available():
        options = registry.algorithm_class(name).Options
        yield f"### {name}\n"
        said = attributes(options)
        fields = dataclasses.fields(options)
        if not fields:
            yield "No options.\n"
            continue
        yield "| option | values | default | meaning |\n| --- | --- | --- | --- |"
        for field in fields:
            default = str(field.default).lower() if field.type is bool else field.default
            meaning = said.get(field.name, "")
            one = first.setdefault((field.name, meaning), name)
            meaning = meaning if one == name else f"as of [{one}](#{one})"
            yield f"| `{field.name}` | {values(field)} | `{default}` | {cell(meaning)} |"
        yield ""


def functions() -> Iterator[str]:
    """The public functions and classes, with their docstrings."""
    for name in cp.__all__:
        thing = getattr(cp, name)
        if inspect.ismodule(thing):
            yield f"### {name}\n\n{inspect.cleandoc(thing.__doc__ or '').splitlines()[0]}\n"
            continue
        yield f"### {name}\n\n```text\n{name}{_signature(thing)}\n\n{inspect.getdoc(thing)}\n```\n"
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                if not method.startswith("_"):
                    line = (inspect.getdoc(function) or "").splitlines()[0]
                    yield f"- `{name}.{method}{_signature(function)}`: {line}"
            yield ""


def _signature(thing: Any) -> str:
    parameters = inspect.signature(thing).parameters.values()
    plain = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(plain))


def flags() -> Iterator[str]:
    """The plugin's own flags."""
    yield "| flag | values | meaning |\n| --- | --- | --- |"
    for name, how in FLAGS.items():
        choices = ", ".join(f"`{choice}`" for choice in how.get("choices", ()))
        taken = choices or cell(how.get("metavar", ""))
        yield f"| `{name}` | {taken} | {cell(how['help'])} |"


def commands() -> Iterator[str]:
    """What `megatron-cp` can do."""
    _, subparsers = cli.parsers()
    yield "| command | what it does |\n| --- | --- |"
    for action in subparsers._choices_actions:
        yield f"| `megatron-cp {action.dest}` | {cell(action.help or '')} |"


def page() -> str:
    """The whole page."""
    parts = [INTRODUCTION, "## Functions\n", *functions(), "## Options of algorithms\n"]
    parts += [
        "Set by `--cp-options NAME=VALUE ...`, in a run file, or as keyword arguments of "
        "`cp.Context`.\n",
        *algorithms(),
        "## Flags\n",
        "Beside Megatron's own; run files have them under `context_parallel` "
        "([megatron.md](megatron.md)).\n",
        *flags(),
        "\n## Commands\n",
        "Each has `--help`.\n",
        *commands(),
    ]
    return "\n".join(parts).rstrip() + "\n"


def main() -> int:
    """Writes the page, or compares it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        print(f"{PAGE.name} is not as the code says: run python scripts/reference.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
