"""--dataloader-inter-document-masking, against Megatron's own attention with a mask of N x N."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import Tolerances
from megatron_cp_plugin.integration import inputs
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.inputs import CutInputs, SplitInputs
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.megatron_job import LAUNCHER, SLOWLY, TINY, run
from tests.integration.ranks import ALONE, Place, on_ranks

pytestmark = pytest.mark.timeout(300)

DOCUMENTS = "--dataloader-inter-document-masking"


def test_unmodified_script_of_a_checkout(checkout_script: Path, documents: list[str]) -> None:
    """Megatron's own needs Transformer Engine for documents; a mask of N x N that ends where they
    end does not.
    """
    if DOCUMENTS.removeprefix("--").replace("-", "_") not in checkout_script.read_text():
        pytest.skip(f"{checkout_script} has no {DOCUMENTS}")
    flags = [*TINY, *SLOWLY, *documents, "--swiglu", "--position-embedding-type", "rope"]
    flags.remove("--mock-data")
    own = "--context-parallel-algo megatron --reset-attention-mask --reset-position-ids"
    ours = f"{DOCUMENTS} --context-parallel-algo zigzag --cp-options layout=documents"
    program = (*LAUNCHER, str(checkout_script))
    reference = run(*flags, *own.split(), program=program).succeeded()
    ours += " --context-parallel-size 4"
    job = run(*flags, *ours.split(), ranks=4, program=program).succeeded()
    assert len(job.losses) == 3
    assert job.losses == pytest.approx(reference.losses, rel=Tolerances().loss)


def served(algo: str = "ring", size: int = 1, **options: str) -> tuple[nn.Module, Batches]:
    """A model that takes packed_seq_params, and what cuts its batches."""
    config = ContextParallelConfig(algo, size, options=tuple(options.items()))
    model, batches = Model(), Batches(Runtime(config))
    SplitInputs(model, batches, ALONE)
    return model, batches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qkv_format": "sbhd"}, "need the format thd and cu_seqlens_q, got sbhd"),
        ({"cu_seqlens_q": None}, "got thd without it"),
        ({"cu_seqlens_kv": [0, 2, 8]}, "got cu_seqlens_kv that differ from cu_seqlens_q"),
        (
            {"cu_seqlens_q_padded": [0, 4, 8]},
            "cu_seqlens_q_padded needs for each document at least",
        ),
        ({"cp_group": object()}, "got another cp_group: leave it out"),
        ({"local_cp_size": 2}, "cp_group of their local_cp_size 2, got one of 1 ranks"),
    ],
)
def test_sequences_that_the_model_cannot_take_are_refused(
    change: dict[str, Any], message: str
) -> None:
    model, _ = served()
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    values = {k: torch.tensor(v).int() if isinstance(v, list) else v for k, v in change.items()}
    with pytest.raises(ContextParallelError, match=message):
        model(packed_seq_params=replace(PackedSeqParams("thd", bounds, bounds), **values))


@pytest.mark.parametrize(
    ("change", "tokens", "message"),
    [
        ({}, 16, "need the lengths of all documents as they were split, padding included: 32 tok"),
        ({"cp_partition_mode": "contiguous"}, 8, "with cp_partition_mode zigzag, got contiguous:"),
        ({"max_seqlen_q": 3}, 8, "max_seqlen_q needs to be the length of the longest document, 12"),
    ],
)
def test_packs_that_callers_cut_otherwise_are_refused(
    change: dict[str, Any], tokens: int, message: str
) -> None:
    config = ContextParallelConfig("ring", 2, options=(("layout", "thd"),))
    bounds = torch.tensor([0, 4, 16], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds)
    vars(packed).update(change)

    def rank(group: Any) -> None:
        model = Model()
        CutInputs(model, Runtime(config, callers=True), group)
        with pytest.raises(ContextParallelError, match=message):
            model(torch.zeros(1, tokens), packed_seq_params=packed)

    on_ranks(2, rank)


def test_the_model_gets_a_mask_and_the_runtime_is_told() -> None:
    model, batches = served()
    bounds = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    packed = PackedSeqParams("thd", bounds, bounds, bounds.clone(), tokens_per_sample=4)
    mask = model(packed_seq_params=packed)
    assert (mask.qkv_format, mask.starts, mask.seq_len) == ("bshd", (3,), 8)
    assert mask.tokens_per_sample == 4
    assert batches.runtime.mask is mask
    assert model() is None
    assert batches.runtime.mask is None


@pytest.mark.parametrize("by_callers", [False, True])
def test_a_model_that_is_served_can_be_copied(by_callers: bool) -> None:
    """Its hooks hold process groups, which cannot."""
    model, runtime = Model(), Runtime(ContextParallelConfig("ring", 1))
    group: Any = (number for number in range(1))  # cannot be copied either
    with pytest.raises(TypeError):
        deepcopy(group)
    if by_callers:
        CutInputs(model, runtime, group)
    else:
        SplitInputs(model, Batches(runtime), group)
    hooks = [*deepcopy(model)._forward_pre_hooks.values()]
    assert hooks == [*model._forward_pre_hooks.values()]


@pytest.mark.parametrize("impl", ["local", "transformer_engine", "full_iteration"])
def test_documents_of_a_script_s_own_are_not_captured(impl: str) -> None:
    """A replay would attend to the documents of the first batch."""
    model = Model(impl)
    SplitInputs(model, Batches(Runtime(ContextParallelConfig("ring", 1))), ALONE)
    bounds = torch.tensor([0, 3, 8], dtype=torch.int32)
    assert model() is None
    with pytest.raises(ContextParallelError, match=f"--cuda-graph-impl {impl} keeps the documents"):
        model(packed_seq_params=PackedSeqParams("thd", bounds, bounds))


def test_a_copy_of_a_batch_is_not_compared_while_it_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU that would end the capture with an error of CUDA's."""

    def cut(group: Any) -> tuple[Batches, torch.Tensor]:
        batches = Batches(Runtime(ContextParallelConfig("zigzag", 2)))
        return batches, batches.shard({"tokens": torch.arange(16)[None]}, group)["tokens"]

    for batches, tokens in on_ranks(2, cut):
        assert batches.cut_of("tokens", tokens.clone()) is not None
        with monkeypatch.context() as patch:
            patch.setattr("megatron_cp_plugin.integration.batch.capturing", lambda tensor: True)
            assert batches.cut_of("tokens", tokens) is not None
            with pytest.raises(ContextParallelError, match="got a copy of tokens, which cannot be"):
                batches.cut_of("tokens", tokens.clone())


def cut_by(layout: str, bounds: list[int], place: tuple[int, int], *, inside: bool) -> torch.Tensor:
    """Position ids [1,S] of a rank's tokens, counted inside documents or through the pack."""
    cut = NAMED[layout].for_documents(tuple(bounds[1:-1]))
    pack = positions(cut, *place, bounds[-1])
    starts = torch.tensor(bounds)
    return (pack - inside * starts[torch.bucketize(pack, starts, right=True) - 1])[None]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize(
    ("chosen", "given", "said"),
    [
        ("thd", "thd", ""),
        ("contiguous", "contiguous", ""),
        ("thd", "contiguous", "the contiguous layout: split them so, or use layout=contiguous"),
        ("thd", "zigzag", "the zigzag layout: split them so"),
        ("contiguous", "thd", "the thd layout: split them so, or use layout=thd"),
        ("thd", "cyclic", ""),  # nobody cuts so: they mean something else
    ],
)
def test_positions_of_packs_that_callers_cut_otherwise(
    chosen: str, given: str, said: str, inside: bool
) -> None:
    """With padding, of which nothing is known by them."""
    padded, real = [0, 8, 20, 32], torch.tensor([0, 8, 17, 28], dtype=torch.int32)
    config = ContextParallelConfig("ring", 2, options=(("layout", chosen),))

    def rank(group: Any) -> str:
        model, with_padding = Model(), torch.tensor(padded, dtype=torch.int32)
        CutInputs(model, Runtime(config, callers=True), group)
        ids = cut_by(given, padded, (group.rank(), 2), inside=inside)
        pack = cut_by(given, padded, (group.rank(), 2), inside=False)
        ids[torch.isin(pack, torch.tensor([17, 18, 19, 31]))] = 0
        packed = PackedSeqParams("thd", real, real, with_padding, with_padding)
        try:
            model(ids, ids, packed_seq_params=packed)
        except ContextParallelError as error:
            return str(error)
        return ""

    for found in on_ranks(2, rank):
        # Those of rank 0 may be right: contiguous ones count through what a rank has.
        assert found.removesuffix(" (rank 1)").endswith(said)
        assert bool(found) == bool(said)


@pytest.mark.parametrize(
    "ids", [torch.zeros(1, 12), torch.arange(12)[None], torch.arange(12).flip(0)[None]], ids=str
)
def test_positions_by_which_nothing_is_known(ids: torch.Tensor) -> None:
    """The plugin knows the positions of tokens without them, so that such batches are right."""
    for layout in ("thd", "contiguous"):
        config = ContextParallelConfig("ring", 3, options=(("layout", layout),))
        for bounds in ([0, 36], [0, 12, 24, 36], [*range(0, 37, 6)]):

            def rank(group: Any, config: Any = config, bounds: list[int] = bounds) -> None:
                model, real = Model(), torch.tensor(bounds, dtype=torch.int32)
                padded = real
                if bounds[1] == 6:  # documents of one token each
                    real = torch.arange(len(bounds), dtype=torch.int32)
                CutInputs(model, Runtime(config, callers=True), group)
                packed = PackedSeqParams("thd", real, real, padded, padded)
                for _ in range(2):
                    model(ids, ids, packed_seq_params=packed)

            on_ranks(3, rank)


def test_positions_that_callers_leave_as_they_were() -> None:
    """Of two samples that are packed; a rank has as many tokens as a sample."""
    config = ContextParallelConfig("ring", 2, options=(("layout", "thd"),))
    bounds = torch.tensor([0, 8, 16], dtype=torch.int32)

    def rank(group: Any) -> None:
        model = Model()
        CutInputs(model, Runtime(config), group)
        samples = torch.arange(8).expand(2, 8)
        model(torch.zeros(1, 8), samples, packed_seq_params=PackedSeqParams("thd", bounds, bounds))

    on_ranks(2, rank)


def test_stages_of_two_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first stages run before the later ones, whose models were built alike."""
    store = dist.HashStore()
    monkeypatch.setattr(inputs, "_store", lambda: store)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
    bounds = [torch.tensor(each, dtype=torch.int32) for each in ([0, 8, 16], [0, 4, 8, 16])]
    for rank in (0, 1):
        models = [Model() for _ in bounds]
        for model in models:
            model.pre_process = rank == 0
            model.pg_collection = SimpleNamespace(pp=Place(rank, 2))
            CutInputs(model, Runtime(ContextParallelConfig("ring", 1), callers=True), ALONE)
        ids = torch.zeros(1, 16) if rank == 0 else None
        for model, each in zip(models, bounds, strict=True):
            model(ids, packed_seq_params=PackedSeqParams("thd", each, each))
    assert not [key for key in store.list_keys() if "stages" in key]


class Model(nn.Module):
    """Takes packed_seq_params as models of Megatron do."""

    def __init__(self, cuda_graph_impl: str = "none") -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_impl=cuda_graph_impl)

    def forward(
        self, input_ids: Any = None, position_ids: Any = None, *, packed_seq_params: Any = None
    ) -> Any:
        return packed_seq_params


def test_tokens_that_tensor_parallel_ranks_cannot_share() -> None:
    model = Model()
    model.config.sequence_parallel, model.config.tensor_model_parallel_size = True, 4
    CutInputs(model, Runtime(ContextParallelConfig("ring", 1), callers=True), ALONE)
    model(torch.zeros(1, 8))
    message = (
        "divisible by tensor_model_parallel_size = 4, got 6: pad the sequence to a multiple of 4"
    )
    with pytest.raises(ContextParallelError, match=message):
        model(torch.zeros(1, 6))
