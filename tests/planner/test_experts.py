"""Tokens and their experts: every copy counted one by one."""

from dataclasses import replace

import pytest

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.command import megatron_settings
from megatron_cp_plugin.planner.machine import Links, Machine, Rate
from megatron_cp_plugin.planner.memory import memory
from megatron_cp_plugin.planner.model import MODELS, Model, Split
from megatron_cp_plugin.planner.splits import Job
from megatron_cp_plugin.planner.step import dispatch, step

H100 = Machine.load("h100_400g")
QWEN = MODELS["qwen3-30b-a3b"]


def copies_of_rank(expert: int, node: int, active: int) -> tuple[int, int]:
    """Rows that rank 0 sends inside its node and to others: of tokens as many as ranks, of which
    as many go to each rank.
    """
    sent = [0, 0]
    for token in range(expert):
        for copy in range(active):
            if to := (token + copy) % expert:  # and its result back
                sent[to // node != 0] += 1
    return sent[0], sent[1]


@pytest.mark.parametrize(("expert", "node"), [(2, 1), (3, 2), (5, 5), (8, 4), (6, 2)])
def test_copies_go_to_their_experts(expert: int, node: int) -> None:
    """Twice, there and back; or each token once to all ranks, in a ring, if that is less."""
    split = Split(context=expert, expert=expert)
    model, machine = replace(QWEN, active=3, hidden=16), replace(H100, gpus_per_node=node)
    machine = replace(machine, cards_per_node=1, memory_bytes_per_second=1e30)
    free, slow = Links(Rate(0.0, 1e30)), Links(Rate(0.0, 1.0))
    inside, between = copies_of_rank(expert, node, 3)
    row, ring = 2 * 16, expert * (expert - 1)
    for links, copies, rows in (
        ((slow, free), inside, ring * (node > 1)),
        ((free, slow), between * node, ring * (node < expert)),
    ):
        found = dispatch(
            model, split, expert**2, replace(machine, inside=links[0], between=links[1])
        )
        assert found.messages == pytest.approx(2 * row * min(copies, rows), abs=1e-9)


def test_an_exchange_between_nodes_of_one_gpu_leaves_them_all() -> None:
    """Nothing stays in a node that has one rank of the group."""
    rate = Rate(0.0, 1e9)
    links = replace(H100.between, exchange=rate)
    machine = replace(H100, gpus_per_node=1, cards_per_node=1, between=links)
    for ranks in (2, 3, 8):
        assert machine.collective_seconds("all_to_all", ranks, 1, 1e9) == 1.0
    eights = replace(H100, between=links)  # of 15 others 7 are inside
    assert eights.collective_seconds("all_to_all", 16, 1, 1.5e9) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("expert", "expected"),
    [(1, "allgather"), (2, "allgather"), (64, "alltoall")],
)
def test_the_dispatcher_that_sends_less(expert: int, expected: str) -> None:
    """Eight copies are more than one token for each of two ranks, fewer than for each of 64."""
    split = Split(data=64, expert=expert)
    assert dispatch(QWEN, split, 8192, H100).name == expected
    job = Job(QWEN, 8192, 64, H100, next(iter(H100.kernels)), Mask(), 64)
    assert megatron_settings(job, split)["moe_token_dispatcher_type"] == expected


@pytest.mark.parametrize("split", [Split(4, data=3, expert=6), Split(4, context=2, expert=8)])
def test_all_gpus_together_have_all_states_and_all_products(split: Split) -> None:
    """Whatever is split how: 12 bytes a parameter, 6 FLOP a token and active parameter."""
    experts = 120
    model = replace(QWEN, experts=experts, layers=4, vocabulary=1, ffn=960)
    free = replace(H100, memory_bytes_per_second=1e30)
    tokens = 20 * 2**22
    found = step(model, split, tokens, free, attention=0.0)
    states = found.memory["optimizer"] * 2**30 * split.gpus
    assert states == pytest.approx(12 * model.parameters, rel=1e-6)
    active = model.attention_parameters + model.active * model.expert_parameters
    flop = 6 * model.layers * active * found.tokens
    seconds = found.parts["matrix products"] * split.gpus
    assert seconds == pytest.approx(flop / H100.matmul_flops, rel=1e-3)


def test_parts_of_experts_keep_whole_tokens() -> None:
    """Each of four parts gets the eight copies of the tokens of all four ranks."""
    split = Split(tensor=4, data=2)
    kept = [memory(QWEN, replace(split, expert_tensor=ways), 8192) for ways in (1, 4)]
    more = (kept[1]["activations"] - kept[0]["activations"]) * 2**30
    assert more == QWEN.layers * 2 * (8192 / 4) * 8 * QWEN.hidden * 3
    with pytest.raises(ConfigError, match="needs whole experts, got expert_tensor 4: use 1"):
        step(QWEN, replace(split, expert_tensor=4), 8192, H100, attention=0.0)


def test_tensor_parallelism_is_round_attention_where_only_experts_follow() -> None:
    def seconds(model: Model) -> float:
        found = step(model, Split(tensor=4), 8192, H100, attention=0.0)
        return found.parts["tensor-parallel messages"] / model.layers

    whole = seconds(replace(QWEN, experts=0))
    assert seconds(QWEN) == pytest.approx(whole / 2)
    assert seconds(replace(QWEN, shared=768)) == pytest.approx(whole)
    assert seconds(replace(QWEN, dense=24, dense_ffn=768)) == pytest.approx(whole * 3 / 4)
