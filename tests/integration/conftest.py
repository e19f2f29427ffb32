"""Options of these tests, and what several of them need."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import start_server
from torch import distributed as dist


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--megatron-lm",
        metavar="DIR",
        default=None,
        help="checkout of Megatron-LM (core_v0.19.0) whose pretrain_gpt.py is run unmodified",
    )
    parser.addoption(
        "--megatron-core",
        metavar="DIR",
        default=None,
        help="folder with a package megatron of another version, such as a wheel of megatron-core "
        "unpacked or a checkout, to be held against what the plugin takes for granted",
    )
    parser.addoption(
        "--random-runs",
        metavar="N",
        type=int,
        default=None,
        help="how many random runs to try, others at each call; default: a few, always the same",
    )


def pytest_collection_finish(session: pytest.Session) -> None:
    """What jobs are forks of imports Megatron while tests without jobs run."""
    items = (item for item in session.items if isinstance(item, pytest.Function))
    if not session.config.option.collectonly and any(
        hasattr(item.module, "run_warm") for item in items
    ):
        start_server()


@pytest.fixture(scope="session")
def checkout_script(request: pytest.FixtureRequest) -> Path:
    folder = request.config.getoption("--megatron-lm")
    if folder is None:
        pytest.skip("needs --megatron-lm DIR, a checkout of Megatron-LM")
    return Path(folder) / "pretrain_gpt.py"


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    """This process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()
