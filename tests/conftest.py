"""Settings of all tests: one torch thread, GPU tests only where there is a GPU, random numbers that
are the same whatever ran before, and the examples of random tests the same at each call, unless
others are asked for.
"""

import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from forks import start_server
from hypothesis import HealthCheck, settings


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--examples",
        metavar="N",
        type=int,
        default=None,
        help="random tests try N times as many examples as in `make test`, others at each call",
    )


# What Megatron compiles when it is imported would import torch's compiler for two seconds, and call
# a compiler of C++.
_compile = torch.compile


def _eager(function: Any = None, **_: Any) -> Any:
    return function or _eager


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, too
    # Megatron imports it for a second, and nobody logs there.
    sys.modules["wandb"] = None  # type: ignore[assignment]
    if not torch.cuda.is_available():
        torch.compile = _eager  # type: ignore[assignment]
    if "fork server" in (given := getattr(config, "workerinput", {})):
        server: Any = forkserver._forkserver  # type: ignore[attr-defined]
        server._forkserver_address = given["fork server"]
        server._forkserver_alive_fd = os.open(os.devnull, os.O_RDONLY)
        forkserver.ensure_running = server.ensure_running = lambda: None
    times = config.getoption("--examples")
    # 100 is what `examples` in random_tests.py counts from. How loaded a machine is tells nothing
    # about a test.
    settings.register_profile(
        "random tests",
        max_examples=100 * (times or 1),
        derandomize=times is None,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        print_blob=False,
    )
    settings.load_profile("random tests")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Jobs of all of xdist's processes are forks of one, which imports Megatron once for all."""
    start_server()
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    node.workerinput["fork server"] = server._forkserver_address


# Modules that take longest, which come first, so that no process is left alone with one at the end.
# The first two start no jobs: what jobs are forks of imports Megatron meanwhile.
LONGEST = """
    test_conformance test_linear_conformance integration/test_equal_runs test_many_packs
    integration/test_cut_batches integration/test_mistakes test_documented_commands
    integration/test_steps test_parity_runs integration/test_resume kernels/test_fused
    integration/test_inputs integration/test_auto integration/test_training test_benchmark_train
    integration/test_rollouts_in_megatron integration/test_model_cards integration/test_recompute
    integration/test_determinism integration/test_launch integration/test_endings test_cli
    integration/test_chunked_loss kernels/test_decayed planner/test_choose test_doctor
    integration/test_linear_models test_random_attention test_convergence_smoke test_functional
    test_spans core/test_plan test_wrappers test_compare_log_probs
""".split()
_TESTS = Path(__file__).parent
_RANKS = {_TESTS / f"{name}.py": rank for rank, name in enumerate(LONGEST)}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _RANKS.get(item.path, len(_RANKS)))
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def pytest_collection_finish() -> None:
    torch.compile = _compile
    if not torch.cuda.is_available():  # whose memory garbage would keep
        # Imports are no garbage: to look through them again and again takes a tenth of the time.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
    # Around each test pytest adds its handlers to every logger that does not propagate, of which
    # torch has a hundred.
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch"):
            logging.getLogger(name).propagate = True


@pytest.fixture
def keys_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the backward, however few, as at real lengths."""
    monkeypatch.setattr("megatron_cp_plugin.algorithms.ring._KEPT", (1, 2**26))


@pytest.fixture(autouse=True)
def _seeds() -> Iterator[None]:
    random.seed(1)
    np.random.seed(1)
    # Not torch.manual_seed, which writes down its callers each time where there is no GPU.
    torch.default_generator.manual_seed(1)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(1)
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes share the GPU


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    times, seed = config.getoption("--examples"), config.getoption("--hypothesis-seed")
    if times is None or seed is None:
        return
    for report in terminalreporter.getreports("failed"):
        terminalreporter.write_line(
            f"again: .venv/bin/python -m pytest '{report.nodeid}' --timeout 0 --examples {times} "
            f"--hypothesis-seed {seed}"
        )
