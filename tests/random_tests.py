"""How many examples a random test tries."""

from hypothesis import settings
from hypothesis import strategies as st

# Of `plan_tiles`: causal squares alone, all causal tiles, windows too.
TILE_KINDS = st.sampled_from(
    [{"rectangular": False}, {"rectangular": True}, {"rectangular": True, "windows": True}]
)


def examples(count: int) -> settings:
    """Of a test: `count` in `make test`, always the same ones; with --examples N, N times as many,
    others at each call. See conftest.py.
    """
    return settings(max_examples=max(1, count * settings.default.max_examples // 100))
