"""Options of these tests, and what several of them need."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
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


@pytest.fixture(scope="session")
def documents(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags of a data set of documents that end in the middle of chunks, and fill many."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    folder, rng = tmp_path_factory.mktemp("documents"), random.Random(0)
    end = 126  # the last id of --vocab-size 127
    builder = IndexedDatasetBuilder(str(folder / "data.bin"), dtype=np.int32)
    for _ in range(400):
        text = [rng.randrange(end) for _ in range(rng.choice((1, 2, 3, 5, 9, 17, 40, 90)))]
        builder.add_document(np.array([*text, end]), [len(text) + 1])
    builder.finalize(str(folder / "data.idx"))
    data = ["--data-path", str(folder / "data"), "--split", "1,0,0"]
    return [*data, "--data-cache-path", str(folder / "cache")]
