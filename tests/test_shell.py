"""What a shell script would run, read without running it."""

from pathlib import Path

import pytest

from megatron_cp_plugin.harness.shell import UNKNOWN, script_commands

SCRIPT = r"""
#!/bin/bash
# a comment with "quotes"
set -ex
HERE="$(cd "$(dirname "$0")" && pwd)"
source "${HERE}/sizes.sh"
LAYERS=$((DENSE + 3 * (4 - 2)))
TENSOR=${TENSOR:-2}
NAME='one $two' OTHER="${TENSOR}x"
if [ "$TENSOR" -gt 1 ]; then
    SPLIT=(--sequence-parallel)   # taken
else
    SPLIT=()
fi
if [[ -n "${NOWHERE}" ]]; then MORE=(--from-nowhere); fi
for ((i = 0; i < 2; i++)); do counts+=(1); done
helper() { echo --never; }
cat <<EOF > file
--not-a-flag of this script
EOF
ARGS=(
    --num-layers $LAYERS
    --tensor "$TENSOR"  # with a comment
    --name "$NAME" --other ${OTHER}
    "${SPLIT[@]}"
)
ARGS+=(--last)
run \
    "${ARGS[@]}" ${MORE[@]} --host $HOSTNAME --list "[1, 2]" ${NEVER[@]} "$@" && echo done
"""


def test_a_script(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text(SCRIPT)
    (tmp_path / "sizes.sh").write_text("export DENSE=5\n")
    every, problems = script_commands(tmp_path / "run.sh")
    assert not problems
    (command,) = (each for each in every if each[0].text == "run")
    assert " ".join(word.text for word in command) == (
        "run --num-layers 11 --tensor 2 --name one $two --other 2x --sequence-parallel --last "
        f"{UNKNOWN} --host {UNKNOWN} --list [1, 2]"
    )
    assert [word.text for word in command if not word.known] == [UNKNOWN, UNKNOWN]
    places = {word.text: word.place for word in command}
    assert places["--num-layers"] == "run.sh:22"
    assert places["--host"] == "run.sh:29"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("A=3; B=$((A * 2))", "6"),
        ("A=7; B=$(( (A + 1) / 2 ))", "4"),
        ("B=${A:-${C:-deep}}", "deep"),
        ("A=x; B=${A}/y", "x/y"),
        ("A=x; if [ $A = y ]; then B=1; elif [ $A != y ]; then B=2; else B=3; fi", "2"),
        ("if [ -z $A ]; then B=1; fi", UNKNOWN),
        ("if unknown-command; then B=1; else B=2; fi", UNKNOWN),
        ("B=1; case $X in a) B=2 ;; esac", UNKNOWN),
        ("B=$(date)", UNKNOWN),
        ("B=`date`", UNKNOWN),
        ("A=1; B=$((A * x))", UNKNOWN),
        ("B=$((9 ** 9))", UNKNOWN),
    ],
)
def test_values(tmp_path: Path, text: str, value: str) -> None:
    path = tmp_path / "run.sh"
    path.write_text(f"{text}\nprintme $B\n")
    (command,) = (each for each in script_commands(path)[0] if each[0].text == "printme")
    assert command[1].text == value
    assert command[1].known == (value != UNKNOWN)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "run.sh").write_text("source /elsewhere/models/none.sh\n")
    assert script_commands(tmp_path / "run.sh")[1] == [
        "run.sh:1: source /elsewhere/models/none.sh: no such file here"
    ]
