"""Span masks of the batch, against Megatron's own attention with a mask of N x N."""

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.core.masks.bands import FAR
from megatron_cp_plugin.core.masks.slices import Slices
from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.harness.parity import Recording, Tolerances, compare
from megatron_cp_plugin.integration.batch import Batches
from megatron_cp_plugin.integration.documents import document_mask, starts_of
from megatron_cp_plugin.integration.inputs import CutInputs, SplitInputs
from megatron_cp_plugin.integration.rope import LayoutRotaryEmbedding
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.megatron import attention_spans
from tests.integration.megatron_job import SLOWLY, TINY, run_warm
from tests.integration.ranks import ALONE, on_ranks

pytestmark = pytest.mark.timeout(300)

JOB = Path(__file__).with_name("spans_job.py")
MODEL = [*TINY, *SLOWLY, *"--swiglu --group-query-attention --num-query-groups 2".split()]
WINDOW = 13
OWN = "--mask dense --context-parallel-algo megatron"
REFERENCES = {
    "rotary": "--position-embedding-type rope",
    "stages": "--position-embedding-type rope --pipeline-model-parallel-size 2 --num-layers 4 "
    "--num-layers-per-virtual-pipeline-stage 1",
    "packed": f"--position-embedding-type rope --documents --seen {WINDOW}",
}
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def train(folder: Path, *flags: str, ranks: int = 1) -> Recording:
    words = (*MODEL, "--train-iters", "2", *flags, "--cp-record", str(folder))
    run_warm(folder, *words, ranks=ranks, script=JOB).succeeded()
    return Recording.load(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Recording]:
    """`OWN` for each of `REFERENCES`, when it is asked for."""

    @cache
    def recording(kind: str) -> Recording:
        words = (*OWN.split(), *REFERENCES[kind].split())
        return train(tmp_path_factory.mktemp(kind), *words, ranks=1 + (kind == "stages"))

    return recording


@pytest.mark.parametrize(
    ("kind", "flags", "ranks"),
    [
        ("rotary", "--mask spans --context-parallel-algo ring", 1),
        ("rotary", "--mask given --context-parallel-algo zigzag --context-parallel-size 2", 2),
        pytest.param(
            *(
                "rotary",
                "--mask spans --context-parallel-algo zigzag --cp-options layout=documents",
            ),
            2,
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("rotary", f"--mask spans --context-parallel-algo ulysses {RECOMPUTE}", 2),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *("stages", f"--mask spans --context-parallel-algo zigzag {RECOMPUTE}", 4),
            marks=pytest.mark.slow,
        ),
        ("packed", "--mask spans --context-parallel-algo zigzag --cp-options layout=documents", 2),
        pytest.param(
            *("packed", f"--mask given --context-parallel-algo distflash {RECOMPUTE}", 2),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_equals_a_mask_of_all_pairs(
    reference: Callable[[str], Recording], tmp_path: Path, kind: str, flags: str, ranks: int
) -> None:
    words = f"{REFERENCES[kind]} {flags}".replace("--seen", "--window-size").split()
    if kind == "packed":
        words[words.index(str(WINDOW))] = f"{WINDOW - 1},0"
    if ranks > 1 and "--context-parallel-size" not in words:
        words += ["--context-parallel-size", "2"]
    comparison = compare(reference(kind), train(tmp_path, *words, ranks=ranks), Tolerances())
    assert comparison.passed, comparison.problems


def test_spans_change_the_losses(reference: Callable[[str], Recording], tmp_path: Path) -> None:
    """So that the check can fail."""
    words = f"{REFERENCES['rotary']} --mask none --context-parallel-algo ring".split()
    comparison = compare(reference("rotary"), train(tmp_path, *words), Tolerances())
    assert comparison.loss.error > 1e-3
    assert comparison.gradient.error > 1e-1


def test_a_stage_without_spans_is_refused(tmp_path: Path) -> None:
    """It would see all earlier tokens, and train without a word."""
    words = "--mask first --position-embedding-type rope --pipeline-model-parallel-size 2 "
    words += "--context-parallel-algo ring"
    job = run_warm(tmp_path, *MODEL, *words.split(), ranks=2, script=JOB)
    assert all(process.returncode for process in job.processes)
    assert not job.losses
    said = r"need one attention_spans, got \(\(.* on the first stage and None on this one"
    assert len(re.findall(f"error: all pipeline stages {said}", job.text)) == 1


class Model(nn.Module):
    """Takes packed_seq_params as models of Megatron do."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.config = SimpleNamespace(**settings)

    def forward(self, input_ids: Any = None, packed_seq_params: Any = None) -> Any:
        return packed_seq_params


FULL = [(0, 8, 0, 8, "full")]
# Two answers to a prompt of three tokens.
PARTING = [(0, 5, 0, 5, "causal"), (5, 8, 0, 3, "full"), (5, 8, 5, 8, "causal")]
HALVES = [(0, 4, 0, 4, "full"), (4, 8, 4, 8, "full")]


@pytest.mark.parametrize("size", [1, 2])
def test_the_model_gets_the_spans_of_its_batch(size: int) -> None:
    def rank(group: Any) -> None:
        model, batches = Model(), Batches(Runtime(ContextParallelConfig("ring", size)))
        SplitInputs(model, batches, group)
        for spans in (FULL, torch.tensor([[[0, 8, 0, 8, 0], [0, 0, 0, 0, 0]]] * 2)):
            batch = {"tokens": torch.arange(8)[None], "attention_spans": spans}
            tokens = batches.shard(batch, group)["tokens"]
            assert "attention_spans" not in batch
            assert tokens.size(1) == 8 // size
            mask = model(tokens)
            assert mask.qkv_format == "bshd"
            assert list(mask.slices(8)) == FULL
        tokens = batches.shard({"tokens": torch.arange(8)[None]}, group)["tokens"]
        assert model(tokens) is None

    on_ranks(size, rank)


@pytest.mark.parametrize("size", [1, 3])
def test_batches_may_be_cut_before_their_turn(size: int) -> None:
    """As programs do that read ahead."""

    def rank(group: Any) -> None:
        model, batches = Model(), Batches(Runtime(ContextParallelConfig("ring", size)))
        SplitInputs(model, batches, group)
        cut = [
            batches.shard({"tokens": torch.arange(9)[None], "attention_spans": spans}, group)
            for spans in (FULL, HALVES, None)
        ]
        seen = [model(batch["tokens"]) for batch in cut]
        assert [mask and list(mask.slices(9)) for mask in seen] == [FULL, HALVES, None]

    on_ranks(size, rank)


def test_a_layout_that_follows_spans_cuts_by_those_of_the_batch() -> None:
    """Other ones given to the model, or none, would leave its tokens at wrong places."""
    spans = [(0, 12, 0, 12, "causal"), (12, 16, 12, 16, "full")]
    options = (("layout", "documents"),)

    def rank(group: Any) -> None:
        config = ContextParallelConfig("zigzag", 2, options=options)
        model, batches = Model(), Batches(Runtime(config))
        SplitInputs(model, batches, group)

        def cut(**more: Any) -> torch.Tensor:
            return batches.shard({"tokens": torch.arange(16)[None], **more}, group)["tokens"]

        tokens = cut(attention_spans=spans)
        layout = config.layout.for_documents(Slices.of(spans, 16))
        assert tokens.tolist() == [positions(layout, group.rank(), 2, 16).tolist()]
        whole = {"cu_seqlens": torch.tensor([[0, 16]])}
        assert tokens.tolist() != cut(**whole).tolist()
        model(cut(attention_spans=spans))
        with pytest.raises(
            ContextParallelError, match=r"got others, 1 documents and 2 spans: give"
        ):
            model(cut(**whole), packed_seq_params=attention_spans(spans))

    on_ranks(2, rank)


def test_a_stage_without_tokens_gets_them_too() -> None:
    model, batches = Model(), Batches(Runtime(ContextParallelConfig("ring", 1)))
    SplitInputs(model, batches, ALONE)
    batches.shard({"tokens": None, "attention_spans": FULL}, ALONE)
    assert list(model().slices(8)) == FULL


def test_position_ids_of_a_tree_are_taken() -> None:
    """Positions that neither count up nor begin again at 0, as `positions` say."""

    def rank(group: Any) -> None:
        model, batches = Model(), Batches(Runtime(ContextParallelConfig("ring", 2)))
        SplitInputs(model, batches, group)
        positions = [0, 1, 2, 2, 3, 4, 2, 3]
        whole = {"tokens": torch.arange(8)[None], "position_ids": torch.tensor([positions])}
        with pytest.raises(ContextParallelError, match="must count up from 0"):
            batches.shard(whole | {"attention_spans": FULL}, group)
        given = {"attention_spans": FULL, "attention_positions": positions}
        model(batches.shard(whole | given, group)["tokens"])
        assert batches.runtime.mask.positions.tolist() == positions
        model(batches.shard({"tokens": torch.arange(8)[None]}, group)["tokens"])
        assert batches.runtime.mask is None
        with pytest.raises(ContextParallelError, match="need attention_spans, got none"):
            batches.shard(whole | {"attention_positions": positions}, group)

    on_ranks(2, rank)


OF_TWO = torch.tensor([[[0, 8, 0, 8, 0]], [[0, 8, 0, 4, 0]]])


@pytest.mark.parametrize(
    ("spans", "positions", "message"),
    [
        (FULL, [0.5, 1.0], "attention_positions need whole numbers, got torch.float32: round them"),
        (FULL, [[0, 1], [0, 2]], "2 samples .* need the same attention_positions, got different o"),
        (OF_TWO, None, "2 samples .* need the same attention_spans, got different one"),
    ],
)
def test_masks_that_make_no_sense_are_refused(spans: Any, positions: Any, message: str) -> None:
    given = None if positions is None else torch.tensor(positions)
    with pytest.raises(ContextParallelError, match=message):
        attention_spans(spans, given)


class Seeing(Model):
    """Takes position ids and embeddings as models of Megatron do."""

    def forward(
        self,
        input_ids: Any = None,
        position_ids: Any = None,
        decoder_input: Any = None,
        labels: Any = None,
        packed_seq_params: Any = None,
    ) -> Any:
        return position_ids, decoder_input


SIZES = {"tensor_model_parallel_size": 2, "sequence_parallel": False}


def of_image(group: Any, *, whole: bool, callers: bool) -> dict[str, Any]:
    """What a model is given of 12 tokens, and what it should get."""
    tokens, ids = torch.arange(12)[None], torch.arange(36).view(3, 1, 12) % 7
    hidden = torch.arange(24.0).view(12, 1, 2)
    mine = positions(ContextParallelConfig("ring", 3).layout, group.rank(), 3, 12)
    want = {"position_ids": ids[..., mine], "decoder_input": hidden[mine]}
    given = {"position_ids": ids, "decoder_input": hidden} if whole else dict(want)
    if callers:
        return {"want": want, "given": given | {"labels": tokens[:, mine]}}
    batch = {"labels": tokens} | ({} if whole else {"position_ids": ids})
    return {"want": want, "given": given, "batch": batch}


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("callers", [True, False])
def test_positions_and_embeddings_of_images_are_cut_or_whole(callers: bool, whole: bool) -> None:
    def rank(group: Any) -> None:
        model, runtime = Seeing(**SIZES), Runtime(ContextParallelConfig("ring", 3))
        case = of_image(group, whole=whole, callers=callers)
        if callers:
            CutInputs(model, runtime, group)
        else:
            batches = Batches(runtime)
            SplitInputs(model, batches, group)
            case["given"] |= batches.shard(case["batch"], group)
        got = model(**case["given"])
        for tensor, want in zip(got, case["want"].values(), strict=True):
            assert torch.equal(tensor, want)

    on_ranks(3, rank)


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"decoder_input": torch.zeros(5, 1, 2)}, {}, "the 4 tokens of this rank, or the 12 of .*"),
        ({"position_ids": torch.zeros(3, 1, 6)}, {}, "position_ids needs .*, got 6: split it like"),
        (
            {"decoder_input": torch.zeros(12, 1, 2)},
            {"sequence_parallel": True},
            "over 2 tensor-parallel ranks, got 12 instead of 2: split it like labels before",
        ),
        (
            {"packed_seq_params": attention_spans([(0, 12, 0, 12, "full")], range(12))},
            {},
            "say where tokens are, got attention_positions beside them",
        ),
    ],
)
def test_parts_of_images_that_fit_no_rank_are_refused(
    change: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    def rank(group: Any) -> None:
        model = Seeing(**(SIZES | settings))
        CutInputs(model, Runtime(ContextParallelConfig("ring", 3)), group)
        given = of_image(group, whole=False, callers=True)["given"] | change
        with pytest.raises(ContextParallelError, match=message):
            model(**given)

    on_ranks(3, rank)


def test_unmarked_positions_of_a_rank_are_refused() -> None:
    """They may be of another layout; whole ones cannot be."""

    def rank(group: Any) -> None:
        batches = Batches(Runtime(ContextParallelConfig("ring", 3)))
        model = Seeing(**SIZES)
        SplitInputs(model, batches, group)
        case = of_image(group, whole=True, callers=False)
        labels = batches.shard(case["batch"], group)["labels"]
        with pytest.raises(ContextParallelError, match=r"got position_ids \[3, 1, 4\] that it has"):
            model(position_ids=case["want"]["position_ids"], labels=labels)
        with pytest.raises(ContextParallelError, match="needs position_ids or labels to identify"):
            model(decoder_input=case["want"]["decoder_input"])

    on_ranks(3, rank)


def test_batches_that_their_callers_cut() -> None:
    model = Model()
    CutInputs(model, Runtime(ContextParallelConfig("ring", 1), callers=True), ALONE)
    assert list(model(torch.arange(8)[None], attention_spans(FULL)).slices(8)) == FULL


@pytest.mark.parametrize("callers", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mtp_num_layers": 1}, "token 5 sees token 0, and not the one before it: leave --mtp"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local keeps .*, got attention_spans"),
    ],
)
def test_what_spans_do_not_go_with_is_refused(
    settings: dict[str, Any], message: str, callers: bool
) -> None:
    model, runtime = Model(**settings), Runtime(ContextParallelConfig("ring", 1), callers=callers)
    if callers:
        CutInputs(model, runtime, ALONE)
    else:
        SplitInputs(model, Batches(runtime), ALONE)
    with pytest.raises(ContextParallelError, match=message) as error:
        model(torch.arange(8)[None], attention_spans(PARTING))
    assert "\n" not in str(error.value)


def test_spans_after_a_choice_without_them_are_refused() -> None:
    model = Model()
    config = ContextParallelConfig("ring", 1, by_auto=True)
    SplitInputs(model, Batches(Runtime(config)), ALONE)
    assert model(torch.arange(8)[None]) is None
    with pytest.raises(ContextParallelError, match=r"ring, or in .* by --cp-example-spans$"):
        model(torch.arange(8)[None], attention_spans(FULL))
    other = Model()
    SplitInputs(other, Batches(Runtime(replace(config, for_spans=True))), ALONE)
    seen = other(torch.arange(8)[None], attention_spans(FULL))
    assert seen.spans == tuple(FULL)


@pytest.mark.parametrize("callers", [False, True])
@pytest.mark.parametrize("modules", [["mlp"], ["attn", "mlp"]])
def test_attention_beside_captured_layers_takes_spans(modules: list[str], callers: bool) -> None:
    """As it takes documents: only what is captured keeps those of its batch."""
    model = Model(cuda_graph_impl="transformer_engine", cuda_graph_modules=modules)
    runtime = Runtime(ContextParallelConfig("ring", 1), callers=callers)
    if callers:
        CutInputs(model, runtime, ALONE)
    else:
        SplitInputs(model, Batches(runtime), ALONE)
    if "attn" in modules:
        with pytest.raises(ContextParallelError, match="cuda-graph-modules mlp, or leave it or"):
            model(packed_seq_params=attention_spans(FULL))
    else:
        model(packed_seq_params=attention_spans(FULL))


def test_layers_of_linear_attention_are_refused() -> None:
    config = ContextParallelConfig(
        "zigzag", 1, layers=("zigzag", "lasp2"), linear_model="transnormer"
    )
    model = Model()
    SplitInputs(model, Batches(Runtime(config)), ALONE)
    with pytest.raises(
        ContextParallelError, match=r"linear attention see all .*, got attention_sp"
    ):
        model(packed_seq_params=attention_spans(FULL))


BOUNDS = torch.tensor([0, 3, 8], dtype=torch.int32)
IN_DOCUMENTS = [[0, 3, 0, 3, -FAR, FAR], [3, 8, 3, 8, -FAR, FAR]]


@pytest.mark.parametrize("size", [1, 2])
def test_spans_of_a_batch_in_documents_of_the_model(size: int) -> None:
    def rank(group: Any) -> None:
        model, batches = Model(), Batches(Runtime(ContextParallelConfig("ring", size)))
        SplitInputs(model, batches, group)
        batch = {"tokens": torch.arange(8)[None], "attention_spans": FULL}
        tokens = batches.shard(batch, group)["tokens"]
        mask = model(tokens, PackedSeqParams("thd", BOUNDS, BOUNDS))
        assert (mask.seq_len, mask.starts, mask.qkv_format) == (8, (3,), "bshd")
        assert batches.runtime.mask is mask
        assert mask.slices(8).bands.table.T.tolist() == IN_DOCUMENTS
        assert starts_of(mask, 8, causal=True) == (3,)
        with pytest.raises(ContextParallelError, match=r"fill the 16 tokens .* got cu_seqlens"):
            starts_of(mask, 16, causal=True)
        given = attention_spans(FULL, packed_seq_params=PackedSeqParams("thd", BOUNDS, BOUNDS))
        with pytest.raises(ContextParallelError, match="got others for the model beside them"):
            model(tokens, given)
        tokens = batches.shard({"tokens": torch.arange(8)[None]}, group)["tokens"]
        assert model(tokens, given).slices(8).bands.table.T.tolist() == IN_DOCUMENTS

    on_ranks(size, rank)


def test_a_layout_that_follows_both() -> None:
    """What a batch was cut by is what its model sees by: spans and documents."""
    spans, bounds = [(0, 16, 0, 16, "causal")], torch.tensor([0, 12, 16], dtype=torch.int32)
    slices = Slices.of(spans, 16, (12,))

    def rank(group: Any) -> None:
        config = ContextParallelConfig("zigzag", 2, options=(("layout", "documents"),))
        model, batches = Model(), Batches(Runtime(config))
        SplitInputs(model, batches, group)
        whole = {"tokens": torch.arange(16)[None], "cu_seqlens": bounds[None]}
        tokens = batches.shard(whole | {"attention_spans": spans}, group)["tokens"]
        layout = config.layout.for_documents(slices)
        assert tokens.tolist() == [positions(layout, group.rank(), 2, 16).tolist()]
        assert model(tokens, PackedSeqParams("thd", bounds, bounds)).slices(16) == slices
        for other in (None, torch.tensor([0, 8, 16], dtype=torch.int32)):
            given = None if other is None else PackedSeqParams("thd", other, other)
            with pytest.raises(ContextParallelError, match=r"by 2 documents and .* got others, "):
                model(tokens, given)

    on_ranks(2, rank)


@pytest.mark.parametrize("given", [True, False])
def test_positions_in_documents(given: bool) -> None:
    """Those that come with spans are taken as they are; else they count through each document."""
    own = [7, 0, 2, 1, 3, 5, 4, 6]
    mask = attention_spans(
        FULL,
        own if given else None,
        PackedSeqParams("thd", BOUNDS, BOUNDS, max_seqlen_q=5),
    )
    runtime = Runtime(ContextParallelConfig("ring", 1))
    runtime.mask = document_mask(mask, ALONE)
    table = torch.arange(8.0)[:, None, None, None]
    embedding: Any = SimpleNamespace(get_emb=lambda *_: table, inv_freq=None)
    angles = LayoutRotaryEmbedding(embedding, runtime, ALONE)(5)
    assert angles.flatten().tolist() == (own if given else [0, 1, 2, 0, 1, 2, 3, 4])


def test_padding_that_spans_name_is_refused() -> None:
    """Of two documents of 4 and 8 tokens the last ones, numbers 3 and 10 and 11."""
    real, padded = (torch.tensor(x, dtype=torch.int32) for x in ([0, 3, 9], [0, 4, 12]))
    packed = PackedSeqParams("thd", real, real, padded, padded, max_seqlen_q=6)

    def check(*spans: tuple[int, int, int, int, str]) -> None:
        mask = document_mask(attention_spans(spans, packed_seq_params=packed), ALONE)
        assert mask is not None
        assert mask.padding == ((3, 4), (10, 12))
        assert starts_of(mask, 12, causal=False) == (4,)

    check((0, 12, 0, 12, "causal"))
    check((0, 10, 0, 3, "full"), (4, 10, 4, 10, "full"), (10, 12, 4, 12, "full"))
    check((0, 3, 10, 12, "full"))  # of another document
    for named in ((4, 10, 4, 12, "full"), (0, 3, 0, 4, "full"), (9, 10, 10, 11, "full")):
        with pytest.raises(ContextParallelError, match=r"seen by none .* got spans that"):
            check(named)
