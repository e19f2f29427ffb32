"""The table of commands: every row is a command, and every flag one that argparse takes."""

from importlib.util import find_spec

import pytest

from megatron_cp_plugin import cli
from megatron_cp_plugin.commands import _COMMON, COMMANDS, parser_of


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_a_parser_and_something_that_runs_it(command: str) -> None:
    table = COMMANDS[command]
    assert table.keys() <= {"help", "description", "module", "needs", "quiet", "flags"}
    given = [word for word in table["flags"] if not table["flags"][word].get("required")]
    parser = parser_of(command)
    assert [name for name in given if f"--{name}" in parser._option_string_actions] == [
        name for name in given if "positional" not in table["flags"][name]
    ]
    assert table["description"].strip() in parser.format_help()
    if "module" in table:
        assert find_spec(f"megatron_cp_plugin.harness.{table['module']}")
    assert ("module" in table) != (command in cli._RUN)


def test_common_flags_are_used_and_may_differ_in_what_a_command_says() -> None:
    used = {name for table in COMMANDS.values() for name, how in table["flags"].items() if not how}
    assert used == set(_COMMON)
    assert parser_of("plan").parse_args([]).heads is None
    found = parser_of("doctor").parse_args([])
    assert (found.heads, found.head_dim) == ((32, 8), [128])


def test_defaults_of_one_call_are_not_those_of_the_next() -> None:
    parser = parser_of("draw")
    words = ["--algo", "zigzag", "--size", "2", "--option", "route=straight"]
    assert parser.parse_args(words).option == [("route", "straight")]
    assert parser.parse_args(words[:-2]).option == []
