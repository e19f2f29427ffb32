# Every target makes .venv first, so each of them works right after a clone.
PY := .venv/bin/python
ARGS ?=
# How many tests run at a time.
JOBS ?= 2
# A module's tests run in one process, and modules in the order of tests/conftest.py, longest first;
# xdist would take those of the fewest tests last, which train for minutes.
SPREAD := -n $(JOBS) --dist loadscope --no-loadscope-reorder
# How many tests run at a time on the GPU of `make test-gpu`: each compiles on a core of its own.
GPU_JOBS ?= 12
# What one process compiles the others of a run need not.
unexport PYTHONDONTWRITEBYTECODE
# Of `make fuzz`.
MINUTES ?= 10
EXAMPLES ?= 5

.DEFAULT_GOAL := help
.PHONY: help setup smoke test test-all test-gpu fuzz lint format docs lock clean

help: ## List the targets
	@awk 'BEGIN {FS = ":.*## "} /^[a-z-]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: ## Make .venv from requirements.lock (PYTHON=/path/to/python3.12 to choose the Python)
	@scripts/setup.sh $(if $(PYTHON),--python "$(PYTHON)")

smoke: setup ## Train a small GPT on real text, CP 1 and 4, and compare with Megatron's own attention
	@$(PY) -m megatron_cp_plugin.cli prepare-data --output data/stdlib
	@$(PY) scripts/convergence_smoke.py --config configs/tiny_zigzag.yaml --algos zigzag --cp 1,4 $(ARGS)

test: setup ## Run the tests but the slow ones (ARGS="-k layout" to choose, JOBS=8 at a time)
	@$(PY) -m pytest $(SPREAD) -m "not slow" $(ARGS)

test-all: setup ## Run all tests
	@$(PY) -m pytest $(SPREAD) $(ARGS)

# What flash-attn 4 compiles is kept on the disk, for all processes and the next call. The tests that
# are run alone take most of a GPU's memory, or measure.
ALONE := tests/kernels/test_large_tensors.py tests/planner/test_products.py
test-gpu: $(if $(filter .venv/%,$(PY)),setup) ## Run the tests that need a GPU (PY=python3: with that Python's packages)
	@export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1; failed=0; \
	$(PY) -m pytest -m gpu -n $(GPU_JOBS) --dist worksteal $(ALONE:%=--ignore=%) $(ARGS) || failed=1; \
	$(PY) -m pytest -m gpu $(ALONE) $(ARGS) || failed=1; \
	exit $$failed

fuzz: setup ## Try new random examples till a test fails (MINUTES=10; EXAMPLES=5 times as many a round)
	@end=$$(($$(date +%s) + 60 * $(MINUTES))); \
	while [ $$(date +%s) -lt $$end ]; do \
	  $(PY) -m pytest -q -x -m hypothesis --timeout 0 --examples $(EXAMPLES) \
	    --hypothesis-seed $$(od -An -N4 -tu4 /dev/urandom) $(ARGS) || exit 1; \
	done

lint: setup ## ruff and mypy
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy

format: setup ## Let ruff format and fix what it can
	@$(PY) -m ruff format .
	@$(PY) -m ruff check --fix .

docs: setup ## Build the pages of docs/ into build/docs; a broken link is an error
	@$(PY) -m sphinx -q -W --keep-going -b html docs build/docs && echo "build/docs/index.html"

lock: setup ## Resolve requirements.lock again from pyproject.toml
	@if command -v uv >/dev/null 2>&1; then uv=uv; else uv=.venv-uv/bin/uv; fi; \
	"$$uv" pip compile pyproject.toml --extra dev --universal --python-version 3.12 --quiet \
	  --no-header --no-annotate --no-emit-index-url --no-emit-find-links \
	  --output-file requirements.lock

clean: ## Remove caches and results (not .venv, not data)
	rm -rf results .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
