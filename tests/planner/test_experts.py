"""Tokens and their experts: every copy counted one by one, groups as Megatron makes them."""

from dataclasses import replace
from itertools import pairwise

import pytest
from megatron.core.parallel_state import RankGenerator

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.command import megatron_settings
from megatron_cp_plugin.planner.experts import Dispatch, Dispatcher
from megatron_cp_plugin.planner.machine import Machine, Rate
from megatron_cp_plugin.planner.model import MODELS, Model, Split
from megatron_cp_plugin.planner.splits import Job, _ways
from megatron_cp_plugin.planner.step import check_split, dispatch, step

H100 = Machine.load("h100_400g")
QWEN = MODELS["qwen3-30b-a3b"]
SIZES = [(2, 1, 1), (3, 1, 2), (5, 1, 5), (8, 1, 4), (6, 2, 4), (4, 2, 8), (3, 2, 1), (1, 4, 4)]


def copies_of_rank(expert: int, tensor: int, node: int, active: int) -> tuple[float, float]:
    """Rows that rank 0 sends inside its node and to others: of tokens as many as experts, to each
    of which as many go; what comes to an expert-parallel rank goes on to all parts of the expert.
    """
    nodes = [rank // node for rank in range(expert * tensor)]
    sent = [0, 0]

    def send(to: int, rows: int) -> None:
        if to:
            sent[nodes[to] != nodes[0]] += rows

    for token in range(expert):
        for copy in range(active):
            send((token + copy) % expert * tensor, 1)  # and its result back
    for part in range(1, tensor):
        send(part, expert * active)
    return sent[0], sent[1]


@pytest.mark.parametrize(("expert", "tensor", "node"), SIZES)
def test_copies_go_to_their_experts(expert: int, tensor: int, node: int) -> None:
    """Twice: there and back."""
    active, hidden = 3, 16
    machine = replace(H100, gpus_per_node=node)
    found = Dispatch(expert, hidden, active, expert, tensor).bytes("alltoall", machine)
    inside, between = copies_of_rank(expert, tensor, node, active)
    assert found == pytest.approx((4 * hidden * inside, 4 * hidden * between))


@pytest.mark.parametrize(("expert", "tensor", "node"), [*SIZES, (1, 4, 2)])
def test_gathered_tokens_come_once_to_all(expert: int, tensor: int, node: int) -> None:
    """A rank passes on all rows but its own, in a ring that leaves a node by one of its ranks."""
    machine, ranks = replace(H100, gpus_per_node=node), expert * tensor
    inside, between = Dispatch(5, 16, 3, expert, tensor).bytes("allgather", machine)
    assert inside + between == 2 * 2 * 5 * 16 * (ranks - 1)
    leaves = ranks > node
    assert between == pytest.approx((inside + between) / min(node, ranks) if leaves else 0)


@pytest.mark.parametrize(("expert", "tensor", "data"), [(4, 1, 2), (4, 2, 3), (3, 4, 1), (1, 8, 2)])
def test_groups_are_those_of_megatron(expert: int, tensor: int, data: int) -> None:
    groups = RankGenerator(
        tp=tensor, ep=expert, dp=data, pp=2, cp=1, order="tp-cp-ep-dp-pp"
    ).get_ranks
    made = {"all_to_all": "ep", "all_gather": "tp", "reduce_scatter": "tp"}
    one = Dispatch(8, 16, 3, expert, tensor)
    for dispatcher in ("alltoall", "allgather"):
        for message in one.messages(dispatcher):
            token = "tp-ep" if dispatcher == "allgather" else made[message.operation]
            ranks = groups(token)[0]
            assert len(ranks) == message.ranks
            assert {b - a for a, b in pairwise(ranks)} == {message.stride}


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
def test_the_dispatcher_that_sends_less(expert: int, expected: Dispatcher) -> None:
    """Eight copies are more than one token for each of two ranks, fewer than for each of 64."""
    split = Split(data=64, expert=expert)
    assert dispatch(QWEN, split, 8192).fastest(H100) == expected
    job = Job(QWEN, 8192, 64, H100, next(iter(H100.kernels)), Mask(), 64)
    assert megatron_settings(job, split)["moe_token_dispatcher_type"] == expected


@pytest.mark.parametrize(
    "split",
    [
        Split(tensor=4, data=3, expert=6, expert_tensor=1),
        Split(tensor=4, data=3, expert=3, expert_tensor=4),
        Split(tensor=2, context=5, expert=5, expert_tensor=2),
        Split(tensor=4, context=2, expert=8),
    ],
)
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
    kept = [
        step(QWEN, replace(split, expert_tensor=ways), 8192, H100, attention=0.0) for ways in (1, 4)
    ]
    more = (kept[1].memory["activations"] - kept[0].memory["activations"]) * 2**30
    assert more == QWEN.layers * 2 * (8192 / 4) * 8 * QWEN.hidden * 3


def test_tensor_parallelism_is_round_attention_where_only_experts_follow() -> None:
    def seconds(model: Model) -> float:
        found = step(model, Split(tensor=4), 8192, H100, attention=0.0)
        return found.parts["tensor-parallel messages"] / model.layers

    whole = seconds(replace(QWEN, experts=0))
    assert seconds(QWEN) == pytest.approx(whole / 2)
    assert seconds(replace(QWEN, shared=768)) == pytest.approx(whole)
    assert seconds(replace(QWEN, dense=24, dense_ffn=768)) == pytest.approx(whole * 3 / 4)


def test_whole_experts_on_few_gpus_are_faster_than_parts_of_all() -> None:
    """128 experts cut in four have narrow matrices of few rows."""
    way = Split(tensor=4, context=2, data=8)
    parts, whole = (
        step(QWEN, replace(way, expert=expert, expert_tensor=cut), 131072, H100, attention=0)
        for expert, cut in ((1, 4), (4, 1))
    )
    assert parts.memory["optimizer"] == pytest.approx(whole.memory["optimizer"])
    assert parts.seconds > 1.05 * whole.seconds


def test_experts_may_be_split_among_the_ranks_of_tensor_parallelism() -> None:
    """TP 8 alone: 8 experts of one part each, or parts of all; nothing larger."""
    model = MODELS["mixtral-8x7b"]
    for expert, cut in ((8, 1), (4, 2), (1, 8)):
        check_split(model, Split(tensor=8, expert=expert, expert_tensor=cut), 8192)
    message = "expert . expert_tensor, got 8 tensor . context . data and expert . expert_tensor 16"
    with pytest.raises(ConfigError, match=message):
        check_split(model, Split(tensor=8, expert=8, expert_tensor=2), 8192)


def test_experts_are_split_among_up_to_as_many_ranks_as_the_rest() -> None:
    job = Job(MODELS["mixtral-8x7b"], 8192, 8, H100, next(iter(H100.kernels)), Mask(), 8)
    found = {(one.tensor, one.expert, one.expert_tensor) for one in _ways(job)}
    assert {parts for tensor, _, parts in found if tensor == 4} == {1, 2, 4}
    assert {parts for tensor, _, parts in found if tensor == 1} == {1}
    assert (4, 4, 2) in found
    assert (4, 8, 2) not in found  # 16 ranks
