"""Ways to split a model: ranked, and only those that fit."""

from dataclasses import replace

import pytest

from megatron_cp_plugin.core.tiles import Mask
from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.planner.command import megatron_settings
from megatron_cp_plugin.planner.detected_machine import machine_named
from megatron_cp_plugin.planner.model import MODELS, Split
from megatron_cp_plugin.planner.splits import Job, proposals
from megatron_cp_plugin.planner.step import step


def test_a_loss_is_in_chunks_where_attention_leaves_no_room_for_whole_logits() -> None:
    machine = machine_named("h100")
    kernel = next(iter(machine.kernels))
    job = Job(MODELS["llama3-8b"], 65536, 8, machine, kernel, Mask(), 8)
    unchunked = [one for one in proposals(job, 20) if not one.split.chunked_loss]
    whole = max(unchunked, key=lambda one: one.step.memory["logits, or a layer run again"])
    room = whole.step.gib - whole.step.memory["attention"] / 2
    smaller = replace(job, machine=replace(machine, memory_gib=room / 0.9))
    found = proposals(smaller, 20)
    assert replace(whole.split, chunked_loss=True) in [one.split for one in found]
    assert all(one.step.fits(smaller.machine) for one in found)


def test_ways_to_split_a_model_are_ranked_and_fit() -> None:
    machine = machine_named("h100")
    kernel = next(iter(machine.kernels))
    job = Job(MODELS["llama3-8b"], 65536, 8, machine, kernel, Mask(), 8)
    found = proposals(job, 4)
    assert 1 < len(found) <= 4
    assert [one.rate for one in found] == sorted((one.rate for one in found), reverse=True)
    for one in found:
        assert one.split.gpus == 8
        assert one.step.fits(machine)
        assert one.step.memory["attention"] > 0
        settings = megatron_settings(job, one.split)
        assert settings["context_parallel_size"] == one.split.context
        assert settings["num_query_groups"] == 8


def test_what_fits_only_without_attention_is_refused() -> None:
    machine, model = machine_named("h100"), MODELS["llama3-8b"]
    ways = [
        Split(**{name: 2, "micro_batches": 1 if name == "data" else 2}, recompute="full")
        for name in ("tensor", "context", "pipeline", "data")
    ]
    least = min(
        step(model, replace(way, chunked_loss=True), 65536, machine, attention=0.0).gib
        for way in ways
    )
    few = replace(machine, memory_gib=(least + 1e-6) / 0.9)
    job = Job(model, 65536, 2, few, next(iter(few.kernels)), Mask(), 2)
    with pytest.raises(ConfigError, match=r"does not fit 2 GPUs of .* GiB, got .* GiB at least"):
        proposals(job, 4)
