"""The unmodified script of a Megatron-LM checkout is tested where there is one."""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-lm",
        metavar="DIR",
        default=None,
        help="checkout of Megatron-LM (core_v0.19.0) whose pretrain_gpt.py is run unmodified",
    )
    parser.addoption(
        "--random-runs",
        metavar="N",
        type=int,
        default=None,
        help="how many random runs to try, others at each call; default: a few, always the same",
    )


@pytest.fixture(scope="session")
def checkout_script(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--megatron-lm")
    if folder is None:
        pytest.skip("needs --megatron-lm DIR, a checkout of Megatron-LM")
    return Path(folder) / "pretrain_gpt.py"
