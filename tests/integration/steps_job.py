"""What may differ between ranks, in step 1, 2 and 40, and whether the next good step is right.

Two ranks over gloo print as JSON what each was told; test_over_nccl.py runs the same over NCCL.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import megatron_cp_plugin as cp
from megatron_cp_plugin.context import Group
from megatron_cp_plugin.core.communication.process_groups import ProcessGroupTopology
from megatron_cp_plugin.core.communication.virtual import VirtualWorld
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.batch import LaterValues

STEPS = (1, 2, 40)
BOUND = 1e-5
ALONE = VirtualWorld(1).topology(0)
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """Settings of a good call, and what the last rank changes in a wrong one."""

    good: Settings = field(default_factory=dict)
    wrong: Settings = field(default_factory=dict)


class Odd:
    """A number that cannot be read, for a reason that nobody has thought of."""

    def __index__(self) -> int:
        raise RuntimeError("of something else")


FULL, HALF = [(0, 16, 0, 16, "full")], [(0, 16, 0, 9, "full")]
LINEAR = {"function": "linear_attention"}
DECODING = {"function": "decode_attention"}
FUNCTIONAL = {
    "tokens": Difference({}, {"tokens": 32}),
    "length": Difference({"seq_len": 16}, {"seq_len": 32, "tokens": 32}),
    "more tokens than the length": Difference({"seq_len": 16}, {"tokens": 32}),
    "no length": Difference({"seq_len": 16}, {"seq_len": None}),
    "documents": Difference({"cu_seqlens": [0, 5, 16]}, {"cu_seqlens": [0, 7, 16]}),
    "no documents": Difference({"cu_seqlens": [0, 5, 16]}, {"cu_seqlens": None}),
    "spans": Difference({"spans": FULL}, {"spans": HALF}),
    "no spans": Difference({"spans": FULL}, {"spans": None}),
    "dtype": Difference({}, {"dtype": torch.float32}),
    "batch": Difference({}, {"batch": 2}),
    "KV heads": Difference({}, {"kv_heads": 2}),
    "training": Difference({}, {"trained": False}),
    "scale": Difference({}, {"scale": 0.1}),
    "window": Difference({"window": 5}, {"window": 6}),
    "sink": Difference({}, {"sink": torch.zeros(4)}),
    "sink of another type": Difference({}, {"sink": [0.0]}),
    "causal": Difference({}, {"causal": False}),
    "kernel": Difference({}, {"kernel": "auto"}),
    "algorithm": Difference({}, {"algo": "allgather"}),
    "option": Difference({}, {"chunks": 2}),
    "function": Difference({}, LINEAR),
    "putting together": Difference({"function": "unshard"}, {"function": "attention"}),
    "positions": Difference({"function": "check_layout"}, {"function": "attention"}),
    "decay": Difference(LINEAR, {"decay": 0.5}),
    "state": Difference(LINEAR, {"initial_state": torch.zeros(1, 4, 8, 8)}),
    "beta": Difference(LINEAR, {"beta": True}),
    "decoding": Difference(DECODING, {"scale": 0.5}),
    "decoding of a window": Difference(DECODING, {"window": 10**30}),
    "decoding of odd lengths": Difference(DECODING, {"lengths": Odd()}),
    "refusal": Difference({}, {"window": 1.5}),
    "shape": Difference({}, {"function": "flat attention"}),
    "other exception": Difference({}, {"window": Odd()}),
    "array as an option": Difference({}, {"chunks": np.array([1, 2])}),
}


def call(group: Group, **settings: Any) -> Tensor | None:
    """One call of the functional interface; returns its result, if it has one."""
    given: dict[str, Any] = {"function": "attention", "tokens": 16, "algo": "zigzag"} | settings
    function, tokens, batch = given.pop("function"), given.pop("tokens"), given.pop("batch", 1)
    dtype, kv_heads = given.pop("dtype", torch.float64), given.pop("kv_heads", 4)
    trained = given.pop("trained", True)
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(batch, tokens, 4, 8, generator=generator, dtype=torch.float64).to(device, dtype)
    how = {"algo": given.pop("algo"), "group": group}
    given |= {name: value.to(x) for name, value in given.items() if isinstance(value, Tensor)}
    if function == "decode_attention":
        given.pop("positions", None)
        lengths = given.pop("lengths", tokens)
        given["group"] = group
        if given.get("window") is not None:
            given |= {"position": 2 * tokens, "positions": torch.arange(tokens)}
        return cp.decode_attention(x[:, :1], x, x, lengths, kernel="reference", **given)
    own = cp.shard(x, 1, **how).requires_grad_(trained)
    if function == "unshard":
        return cp.unshard(own, 1, **how)
    if function == "check_layout":
        cp.check_layout(cp.shard(torch.arange(tokens), 0, **how), **how)
        return None
    if function == "linear_attention":
        how |= {"algo": "lasp2", "layout": "zigzag"}
        beta = torch.ones(own.shape[:3], dtype=dtype, device=device) / 2
        given = {"decay": 0.9} | given
        if given.pop("beta", False):
            given |= {"beta": beta, "decay": None}
        return cp.linear_attention(own, own, own, **how, **given)
    kv = own[:, :, :kv_heads]
    q = own.flatten(2) if function == "flat attention" else own
    return cp.attention(q, kv, kv, **how, **({"kernel": "reference"} | given))


def said_by(function: Callable[[], object]) -> str:
    """What is raised, which is one line of ours, or anything that this rank caused."""
    try:
        function()
    except (ContextParallelError, RuntimeError, TypeError) as error:
        return str(error)
    return ""


def refused_together(*said: str) -> bool:
    """Whether all ranks refuse in one line: the same one, but for what the last rank raises."""
    *others, last = said
    one_line = all(line and "\n" not in line for line in said)
    return one_line and all(
        line == others[0] and (line == last or line.endswith(f"Error: {last} (rank {len(others)})"))
        for line in others
    )


def off(group: Group, settings: Settings) -> float:
    """What a good call's result is off by, compared with the one of a rank alone."""
    found, expected = call(group, **settings), call(ALONE, **settings)
    if found is None or expected is None:
        return 0.0
    if settings.get("function") not in ("unshard", "decode_attention"):
        expected = cp.shard(expected, 1, algo="zigzag", group=group)
    return float((found - expected).abs().max())


def step_of(difference: Difference, group: Group, rank: int, size: int, step: int) -> str:
    """What is said of a wrong call after step - 1 good ones; then two more are good."""
    for _ in range(step - 1):
        call(group, **difference.good)
    wrong = difference.good | (difference.wrong if rank == size - 1 else {})
    said = said_by(lambda: call(group, **wrong))
    for _ in range(2):
        assert off(group, difference.good) <= BOUND
    return said


def new_topology(groups: list[Any]) -> ProcessGroupTopology:
    """All ranks, which have compared no call yet.

    Args: groups: Further process groups of all ranks that others before it have made and that it
        uses, too, because NCCL takes long to make each.
    """
    numbers = count()

    def group_of(ranks: Sequence[int]) -> Any:
        number = next(numbers)
        if number == len(groups):
            groups.append(dist.new_group(list(ranks)))
        return groups[number]

    make: Any = group_of
    world: Any = dist.group.WORLD
    return ProcessGroupTopology(world, make)


def of_functions() -> dict[str, dict[str, str]]:
    """Of every difference: what was said in which step.

    Before the last of `STEPS` good calls are made once for all differences from them.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    found: dict[str, dict[str, str]] = {name: {} for name in FUNCTIONAL}
    groups: list[Any] = []
    *early, last = STEPS
    late: dict[str, ProcessGroupTopology] = {}
    for name, difference in FUNCTIONAL.items():
        for step in early:
            topology = new_topology(groups)
            found[name][str(step)] = step_of(difference, topology, rank, size, step)
            topology.drop_peer_channels()
        good = str(difference.good)
        further = 1 if good in late else last
        topology = late.get(good) or late.setdefault(good, new_topology(groups))
        found[name][str(last)] = step_of(difference, topology, rank, size, further)
    for topology in late.values():
        topology.drop_peer_channels()
    return found


# Of models: what the last rank is given, or does, otherwise.
OF_MODELS = (
    *("totals", "documents", "no documents", "padding", "spans", "other spans", "positions"),
    *("batch", "training", "window", "scale", "sink", "dtype", "mask", "position ids"),
    *("format", "cache", "other exception"),
)
# Of batches that the plugin cuts.
OF_BATCHES = (
    *("tokens", "labels", "loss_mask", "order", "shape", "no labels", "spans", "positions"),
    *("positions without spans", "training", "mask", "documents", "no cut", "other exception"),
)
# "as on GPUs": values of a batch are compared when the model has run, and not before.
CASES = {
    "functional": tuple(FUNCTIONAL),
    "install": OF_MODELS,
    "launcher": OF_BATCHES,
    "launcher, as on GPUs": OF_BATCHES,
}
LENGTHS = (7, 24)


class Steps:
    """Forward passes of a model on batches that this program cuts."""

    def __init__(self, groups: Any, device: torch.device) -> None:
        from tests.integration.cut_batches_job import Reference, alone, make_config, make_model

        self.groups, self.device = groups, device
        self.rank, self.size = groups.cp.rank(), groups.cp.size()
        config = make_config(1, num_layers=1)
        self.reference = Reference(make_model(config, alone(groups)).to(device))
        self.expected = self._expected()

    def model(self, spec: Any = None, **settings: Any) -> Any:
        from tests.integration.cut_batches_job import make_config, make_model

        config = make_config(self.size, num_layers=1, **settings)
        model = make_model(config, self.groups, spec).to(self.device)
        model.load_state_dict(self.reference.model.state_dict(), strict=False)
        return model

    def models(self) -> dict[str, Any]:
        """Those that a rank may take for another one."""
        return {
            "window": self.model(window_size=(3, 0)),
            "scale": self.model(softmax_scale=0.5),
            "sink": self.model(softmax_type="off-by-one"),
            "dtype": self.model().double(),
        }

    def run(self, model: Any, difference: str = "", models: Mapping[str, Any] = {}) -> Tensor:
        """A forward pass, with a difference on this rank; returns the losses [1,S]."""
        from megatron_cp_plugin.megatron import attention_spans
        from tests.integration.cut_batches_job import Batch

        lengths = {"totals": (7, 40), "documents": (24, 7)}.get(difference, LENGTHS)
        rank = 1 - self.rank if difference == "position ids" else self.rank
        batch = Batch(lengths, self.rank, self.size)
        other = Batch(lengths, rank, self.size)
        packed: Any = batch.packed(real=difference != "padding", spanned=difference == "spans")
        for key, value in vars(packed).items():
            if isinstance(value, Tensor) and key.startswith("cu_seqlens"):
                setattr(packed, key, value.to(self.device))
        total = int(batch.packed(real=False).cu_seqlens_q[-1])
        if difference in ("other spans", "positions"):
            places = torch.arange(total)
            spans = [(0, total, 0, total - (difference == "other spans"), "causal")]
            packed = attention_spans(spans, places.flip(0) if difference == "positions" else None)
        if difference == "format":
            packed.qkv_format = "bshd"
        ids, labels = batch.cut(batch.ids), batch.cut(batch.labels)
        places = other.cut([torch.arange(n) for n in lengths])
        more: dict[str, Any] = {"labels": labels.to(self.device)}
        if difference == "batch":
            ids, places = ids.expand(2, -1), places.expand(2, -1)
            more["labels"] = more["labels"].expand(2, -1)
            packed = None
        if difference == "no documents":
            packed = None
        if difference == "cache":
            more["inference_context"] = object()
        if difference == "other exception":
            more["of_no_model"] = None
        mask = None
        if difference == "mask":
            packed, mask = None, (torch.arange(ids.size(1)) > 2)[None].to(self.device)
        with torch.set_grad_enabled(difference != "training"):
            losses: Tensor = models.get(difference, model)(
                *(ids.to(self.device), places.to(self.device), mask),
                **more,
                packed_seq_params=packed,
            )
        return losses

    def off(self, losses: Tensor) -> float:
        """What the losses of good batches are off by."""
        from tests.integration.cut_batches_job import Batch

        batch = Batch(LENGTHS, self.rank, self.size)
        counts = batch.cut([torch.ones(len(x)) for x in batch.ids]).to(losses)
        total = (losses.detach() * counts).sum() / batch.tokens
        dist.all_reduce(total, group=self.groups.cp)
        return abs(float(total) - self.expected) / self.expected

    def _expected(self) -> float:
        """The mean loss of each document alone, by a model that nothing splits."""
        from tests.integration.cut_batches_job import Batch

        batch, total = Batch(LENGTHS, self.rank, self.size), 0.0
        for ids, labels in zip(batch.ids, batch.labels, strict=True):
            places = torch.arange(len(ids), device=self.device)[None]
            given = ids[None].to(self.device), places, None
            with torch.no_grad():
                losses = self.reference.model(*given, labels=labels[None].to(self.device))
            total += float(losses.sum())
        return total / batch.tokens


def played(
    names: Sequence[str],
    build: Callable[[], Any],
    run: Callable[..., Tensor],
    off: Callable[[Tensor], float],
) -> dict[str, dict[str, str]]:
    """Of every difference: what was said in which step.

    Args:
        build: Makes what is run.
        run: Runs it, with a difference on this rank, if one is given.
        off: What the losses of a good run are off by.
    """
    last, is_last = max(STEPS), dist.get_rank() == dist.get_world_size() - 1
    late = build()
    for _ in range(last - 1):
        run(late)
    found: dict[str, dict[str, str]] = {name: {} for name in names}
    for name in names:
        for step in STEPS:
            made = late if step == last else build()
            for _ in range(0 if step == last else step - 1):
                run(made)
            found[name][str(step)] = said_by(partial(run, made, name if is_last else ""))
            for _ in range(2):
                assert off(run(made)) <= BOUND, (name, step)
    return found


def of_install(steps: Steps) -> dict[str, dict[str, str]]:
    """Of every difference: what was said in which step."""
    from megatron_cp_plugin import megatron as cp_megatron

    cp_megatron.install("zigzag", layout="thd", kernel="reference")
    run = partial(steps.run, models=steps.models())
    found = played(OF_MODELS, steps.model, run, steps.off)
    cp_megatron.uninstall()
    return found


def of_launcher(steps: Steps) -> dict[str, dict[str, str]]:
    """The same for batches that the plugin cuts, as it does for Megatron's training loop."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.packed_seq_params import PackedSeqParams

    from megatron_cp_plugin.config import ContextParallelConfig
    from megatron_cp_plugin.integration.batch import Batches
    from megatron_cp_plugin.integration.inputs import SplitInputs
    from megatron_cp_plugin.integration.runtime import Runtime, set_up_groups
    from megatron_cp_plugin.integration.spec import follow, with_plugin
    from tests.integration.cut_batches_job import VOCABULARY, make_config

    draw = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(1, 98, (1, 32), generator=draw).to(steps.device) for _ in range(2))
    places = torch.arange(32, device=steps.device)[None]
    with torch.no_grad():
        expected = float(steps.reference.model(ids, places, None, labels=labels).sum())

    def build() -> tuple[Any, Any]:
        runtime = Runtime(ContextParallelConfig("ring", steps.size, kernel="reference"))
        config = make_config(steps.size, num_layers=1)
        set_up_groups(runtime, None, config, steps.groups)
        model = steps.model(with_plugin(get_gpt_layer_local_spec(), config, None, runtime))
        follow(model, runtime)
        batches = Batches(runtime)
        SplitInputs(model, batches, steps.groups.cp)
        return model, batches

    def run(made: tuple[Any, Any], difference: str = "") -> Tensor:
        model, batches = made
        whole: dict[str, Any] = {"tokens": ids, "labels": labels, "position_ids": places}
        whole["loss_mask"] = torch.ones_like(ids).float()
        if difference in whole:
            whole[difference] = whole[difference].flip(1) * 2 % VOCABULARY
        if difference == "order":
            whole["position_ids"] = places.flip(1)
        if difference == "shape":
            whole = {key: x[:, :16] for key, x in whole.items()}
        if difference == "no labels":
            whole["labels"] = None
        if difference in ("spans", "positions"):
            whole["attention_spans"] = [(0, 32, 0, 32, "full")]
        if difference in ("positions", "positions without spans"):
            whole["attention_positions"] = [*range(31, -1, -1)]
        if difference == "other exception":
            whole["attention_spans"] = Odd()
        mask = torch.ones(32, 32).triu(1).bool()[None, None].to(steps.device)
        if difference == "mask":
            mask[..., :3] = True
        whole["attention_mask"] = mask
        bounds = torch.tensor([0, 8, 32], dtype=torch.int32, device=steps.device)
        packed = PackedSeqParams("thd", bounds, bounds) if difference == "documents" else None
        with torch.set_grad_enabled(difference != "training"):
            cut = whole if difference == "no cut" else batches.shard(whole, steps.groups.cp)
            losses: Tensor = model(
                *(cut["tokens"], cut["position_ids"], cut["attention_mask"]),
                labels=cut["labels"],
                packed_seq_params=packed,
            )
        return losses

    def off(losses: Tensor) -> float:
        losses = losses.detach().sum()
        dist.all_reduce(losses, group=steps.groups.cp)
        return abs(float(losses) - expected) / expected

    return played(OF_BATCHES, build, run, off)


def of_ways(device: torch.device) -> dict[str, dict[str, dict[str, str]]]:
    """Of every way to call and every difference: what this rank was told in which step."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    found = {"functional": of_functions()}
    parallel_state.initialize_model_parallel(context_parallel_size=dist.get_world_size())
    model_parallel_cuda_manual_seed(7)
    steps = Steps(ProcessGroupCollection.use_mpu_process_groups(), device)
    found |= {"install": of_install(steps), "launcher": of_launcher(steps)}
    later = property(lambda _: True, lambda _, given: None)
    with patch.object(LaterValues, "waits", later, create=True):
        return found | {"launcher, as on GPUs": of_launcher(steps)}


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = of_ways(torch.device("cpu"))
    dist.barrier()
    print("FOUND" + json.dumps(found), flush=True)


if __name__ == "__main__":
    from megatron_cp_plugin.integration.launch import whole_program

    with whole_program():
        main()
