#!/usr/bin/env bash
# Makes .venv, the environment of this checkout: a Python 3.12 or 3.13, the exact versions of
# requirements.lock, and the project itself, editable. Run again it does nothing until one of the
# files that it reads changes.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

usage() {
  echo "usage: scripts/setup.sh [--python PATH]   (PATH: a Python 3.12 or 3.13; found by itself if absent)"
}

say() { echo "setup: $*" >&2; }

fail() {
  say "$*"
  exit 1
}

asked_python=""
while [ $# -gt 0 ]; do
  case "$1" in
    --python)
      [ $# -ge 2 ] || fail "--python needs a path, e.g. --python /usr/bin/python3.12"
      asked_python="$2"
      shift 2
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    *)
      usage >&2
      exit 2
      ;;
  esac
done

stamp_file=.venv/.setup-stamp
# The folder is part of it: scripts in a virtual environment hold absolute paths.
stamp="$(cksum requirements.lock pyproject.toml scripts/setup.sh) in $PWD${asked_python:+ with $asked_python}"
if [ -x .venv/bin/python ] && [ "$(cat "$stamp_file" 2>/dev/null)" = "$stamp" ] &&
  .venv/bin/python -c '' 2>/dev/null; then
  exit 0
fi

# Megatron 0.19 needs at least 3.12, and its parser fails on 3.14 (BooleanOptionalAction's type).
suits() {
  "$1" -c 'import sys; sys.exit(not (3, 12) <= sys.version_info < (3, 14))' >/dev/null 2>&1
}

# Prints the path of the first Python that suits, or nothing.
find_python() {
  local candidate
  # A command's name may be a pyenv shim that refuses to run, so each is tried, not only looked up.
  for candidate in python3 python3.12 python3.13 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.*/bin/python; do
    if command -v "$candidate" >/dev/null 2>&1 && suits "$candidate"; then
      "$candidate" -c 'import sys; print(sys.executable)'
      return
    fi
  done
}

# Prints the path of a uv that runs: the one on PATH, or one installed from PyPI into .venv-uv.
find_uv() {
  local candidate
  for candidate in uv .venv-uv/bin/uv; do
    if "$candidate" --version >/dev/null 2>&1; then
      command -v "$candidate"
      return
    fi
  done
  say "installing uv into .venv-uv"
  for candidate in "$@" python3 python; do
    "$candidate" -c '' >/dev/null 2>&1 || continue
    rm -rf .venv-uv
    # The second way, which takes three seconds more, is for Pythons packaged without pip.
    if { "$candidate" -m pip install --quiet --target .venv-uv uv ||
      { "$candidate" -m venv .venv-uv && .venv-uv/bin/python -m pip install --quiet uv; }; } >&2; then
      .venv-uv/bin/uv --version >/dev/null 2>&1 && echo .venv-uv/bin/uv && return
    fi
  done
}

if [ -n "$asked_python" ]; then
  suits "$asked_python" || fail "--python $asked_python is not a Python 3.12 or 3.13 that runs"
  python="$asked_python"
else
  python="$(find_python)"
fi

uv="$(find_uv ${python:+"$python"})"
[ -n "$uv" ] || fail "uv is not on PATH and could not be installed from PyPI (see above):" \
  "install it, e.g. 'pipx install uv', and run this again"

if [ -z "$python" ]; then
  # uv looks at the Pythons that it manages itself, and fetches one only if there is none.
  python="$("$uv" python find --no-project --system '>=3.12,<3.14' 2>/dev/null ||
    { "$uv" python install --quiet 3.12 >&2 && "$uv" python find --no-project --system '>=3.12,<3.14'; } ||
    true)"
fi
[ -n "$python" ] || fail "no Python 3.12 or 3.13: tried python3, python3.12, python3.13," \
  "pyenv's versions and uv's own. Install one, e.g. 'apt-get install python3.12'," \
  "'pyenv install 3.12' or 'uv python install 3.12', or name it: make setup PYTHON=/path/to/python"

# An environment of another Python, or half made, is made anew; a sound one keeps what a user added.
if ! { [ -x .venv/bin/python ] && suits .venv/bin/python && [ -z "$asked_python" ]; }; then
  say "making .venv with $("$python" --version) at $python"
  "$uv" venv --quiet --clear --python "$python" .venv
fi
say "installing requirements.lock into .venv"
"$uv" pip install --quiet --python .venv/bin/python --requirement requirements.lock
# Without isolation the build uses the pinned setuptools; without dependencies nothing unpinned enters.
"$uv" pip install --quiet --python .venv/bin/python --no-deps --no-build-isolation --editable .
# What training imports is compiled now, a fifth of all: where writing bytecode is turned off, each
# rank of each run would compile it in memory.
env -u PYTHONDONTWRITEBYTECODE .venv/bin/python -c \
  'import torch._dynamo, megatron.training.training' 2>/dev/null ||
  fail ".venv was made but torch or Megatron do not import: run" \
    "'.venv/bin/python -c \"import torch, megatron.training.training\"' to see why"
echo "$stamp" >"$stamp_file"
say "done"
