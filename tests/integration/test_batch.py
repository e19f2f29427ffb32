"""Batches, position embeddings and attention take the tokens that the layout names."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from megatron_cp_plugin.config import ContextParallelConfig
from megatron_cp_plugin.core.document_layout import NAMED
from megatron_cp_plugin.core.layout import positions
from megatron_cp_plugin.errors import CommunicationError, ContextParallelError
from megatron_cp_plugin.integration import attention_mask
from megatron_cp_plugin.integration.batch import Batches, LaterValues
from megatron_cp_plugin.integration.documents import DocumentMask
from megatron_cp_plugin.integration.inputs import SplitInputs
from megatron_cp_plugin.integration.rope import LayoutRotaryEmbedding, set_cos_sin_cache, use_layout
from megatron_cp_plugin.integration.runtime import Runtime
from tests.integration.ranks import ALONE, Place, on_ranks

N = 24
# Written out by hand: the tokens of rank 1 of 3.
EXPECTED = {
    "contiguous": [8, 9, 10, 11, 12, 13, 14, 15],
    "zigzag": [4, 5, 6, 7, 16, 17, 18, 19],
    "cyclic": [1, 4, 7, 10, 13, 16, 19, 22],
}


def runtime(layout: str) -> Runtime:
    config: Any = SimpleNamespace(algo="any", layout=NAMED[layout])
    return Runtime(config)


def shard(layout: str, batch: dict[str, Any], size: int, rank: int) -> dict[str, Any]:
    """What a rank has of a batch."""
    return on_ranks(size, lambda group: Batches(runtime(layout)).shard(dict(batch), group))[rank]


def hiding(rule: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """A mask [1, 1, N, N] as Megatron has them: true where a query does not see a key."""
    place = torch.arange(N)
    return rule(place[:, None], place)[None, None]


@pytest.mark.parametrize("layout", EXPECTED)
def test_batch(layout: str) -> None:
    batch = {
        "tokens": torch.arange(2 * N).view(2, N),
        "labels": torch.arange(2 * N).view(2, N) + 1,
        "position_ids": torch.arange(N).expand(2, N),
        "attention_mask": hiding(lambda query, key: key > query),
        "loss_mask": None,
        "cu_seqlens": None,
    }
    local = shard(layout, batch, 3, 1)
    assert local["position_ids"][0].tolist() == EXPECTED[layout]
    assert local["tokens"][1].tolist() == [N + p for p in EXPECTED[layout]]
    assert torch.equal(local["labels"], local["tokens"] + 1)
    assert (~local["attention_mask"][0, 0]).sum(1).tolist() == [p + 1 for p in EXPECTED[layout]]
    assert local["loss_mask"] is None


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(hiding(lambda q, k: (k > q) | (k // 10 != q // 10)), id="documents"),
        pytest.param(hiding(lambda q, k: (k > q) & (k >= 5)), id="prefix"),
        pytest.param(hiding(lambda q, k: k <= q), id="inverted"),
        pytest.param(hiding(lambda q, k: k > N + q)[:, 0, 0], id="padding"),
    ],
)
@pytest.mark.parametrize("step", [1, 2])
def test_a_mask_that_attention_would_not_look_at(mask: Tensor, size: int, step: int) -> None:
    def rank(group: Any) -> None:
        batches, model = Batches(Runtime(ContextParallelConfig("zigzag", size))), Trained()
        SplitInputs(model, batches, group)

        def give(mask: Tensor | None, **more: Any) -> None:
            batch = {"tokens": torch.arange(N)[None], "attention_mask": mask} | more
            cut = batches.shard(batch, group)
            model(cut["tokens"], attention_mask=cut["attention_mask"])

        causal = hiding(lambda q, k: k > q)
        for _ in range(step - 1):
            give(causal)
        with pytest.raises(ContextParallelError, match="attention_mask may only hide later tok"):
            give(mask)
        give(mask, attention_spans=[(0, N, 0, N, "causal")])
        give(causal)

    on_ranks(size, rank)


PADDED = 5  # tokens
MASKS = {
    "padding at the end": (hiding(lambda q, k: (k > q) | (k >= N - PADDED)), ()),
    "padding at the end, as of tokens": ((torch.arange(N) < N - PADDED)[None], ()),
    "padding at the end, of keys": ((torch.arange(N) >= N - PADDED)[None, None, None], ()),
    "documents that attention has": (hiding(lambda q, k: (k > q) | (k // 8 != q // 8)), (8, 16)),
    "one element": (torch.ones(1, 1, 1, 1, dtype=torch.bool), ()),
    "numbers that are added": (torch.full((N, N), -torch.inf).triu(1)[None, None], ()),
    "padding at the beginning": (hiding(lambda q, k: (k > q) | (k < PADDED)), None),
    "padding at the beginning, as of tokens": ((torch.arange(N) >= PADDED)[None], None),
    "padding at the beginning, of keys": ((torch.arange(N) < PADDED)[None, None, None], None),
    "padding alone, as of tokens": (torch.zeros(1, N, dtype=torch.bool), None),
    "all tokens": (hiding(lambda q, k: k > N + q), None),
    "no tokens": (hiding(lambda q, k: k < N + q), None),
    "a window": (hiding(lambda q, k: (k > q) | (k < q - 3)), None),
    "other documents": (hiding(lambda q, k: (k > q) | (k // 6 != q // 6)), None),
    "a shape that says nothing": (torch.zeros(1, 7, dtype=torch.bool)[None], None),
}


@pytest.mark.parametrize("part", [False, True])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, part: bool) -> None:
    """None: not those of attention. Also where a rank has its part of queries, or of tokens."""
    mask, starts = MASKS[name]
    answers = []
    for rank in range(3):
        places = positions(NAMED["zigzag"], rank, 3, N)
        mine = mask
        if part and mask.dim() == 4 and mask.size(2) == N:
            mine = mask[:, :, places]
        elif part and mask.size(-1) == N:
            mine = mask[..., places]
        found = attention_mask.differs(mine, places, N, starts or (), causal=True)
        answers.append(bool(found))
    assert any(answers) == (starts is None)


def test_a_model_that_sees_later_tokens() -> None:
    for mask, other in (
        (hiding(lambda q, k: k > N + q), False),
        (hiding(lambda q, k: k > q), True),
    ):
        assert attention_mask.differs(mask, torch.arange(N), N, (), causal=False) == other


def test_batch_of_one_rank_is_left_alone() -> None:
    tokens = torch.arange(N).view(1, N)
    assert Batches(runtime("zigzag")).shard({"tokens": tokens}, ALONE)["tokens"] is tokens


def test_what_tells_of_documents_is_not_cut() -> None:
    batch = {"tokens": torch.arange(N).view(1, N), "cu_seqlens": torch.tensor([[0, 5, N]])}
    local = shard("zigzag", batch, 2, 0)
    assert local["tokens"].numel() < N
    assert local["cu_seqlens"] is batch["cu_seqlens"]


def test_a_layout_of_documents_needs_some() -> None:
    """Else a run whose flags pack none would train on attention over whole sequences."""
    batch = {"tokens": torch.arange(N).view(1, N), "cu_seqlens": None}
    with pytest.raises(ContextParallelError, match=r"layout=documents follows .* got one without"):
        shard("documents", batch, 2, 0)
    for some in (
        {"cu_seqlens": torch.tensor([0, N])},
        {"attention_spans": [(0, N, 0, N, "causal")]},
        {"tokens": None},  # inside a pipeline
    ):
        assert "tokens" in shard("documents", batch | some, 2, 0)


@pytest.mark.parametrize(
    ("ids", "got"),
    [
        ([*range(12, 24)], "12, 13 from token 0"),
        ([*range(6), *range(18, 24)], "4, 5, 18, 19 from token 4"),
        ([1, 2, 3, 0], "1, 2 from token 0"),
        ([0, 1, 1, 2], "0, 1, 1, 2 from token 0"),
        ([0, 2, 4, 6], "0, 2, 4 from token 0"),
    ],
)
def test_a_batch_that_is_not_whole(ids: list[int], got: str) -> None:
    """Is refused on all ranks, whenever it comes."""
    right = torch.arange(len(ids))[None]

    def rank(group: Any) -> None:
        batches, mine = Batches(runtime("contiguous")), torch.tensor([ids])
        if group.rank():
            mine = right
        for good in (False, False, True, False):
            expected = pytest.raises(ContextParallelError, match=f"got {got} on.*rank 0")
            with nullcontext() if good else expected:
                batches.shard({"position_ids": right if good else mine}, group)

    on_ranks(2, rank)


KEYS = ("tokens", "labels", "loss_mask")


class Trained(nn.Module):
    """Stands for a model in training; counts the forward passes that came to their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(cuda_graph_impl="none")
        self.passed = 0

    def forward(
        self,
        input_ids: Any,
        position_ids: Any = None,
        labels: Any = None,
        attention_mask: Any = None,
        packed_seq_params: Any = None,
    ) -> None:
        """Megatron's names."""


def train_on(batches: Batches, model: Trained, group: Any, batch: dict[str, Tensor]) -> None:
    cut = batches.shard(batch, group)
    model(cut["tokens"], cut.get("position_ids"), cut["labels"], cut.get("attention_mask"))
    model.passed += 1


@pytest.mark.parametrize(
    ("key", "number", "size"),
    [("tokens", 2, 2), ("labels", 3, 5), ("loss_mask", 40, 3), ("attention_mask", 2, 3)],
)
def test_one_batch_of_other_samples_on_a_rank(
    monkeypatch: pytest.MonkeyPatch, key: str, number: int, size: int
) -> None:
    """Is refused on all ranks, before its loss is used: GPUs sum elements, and hosts read the sums
    when the model has run. Those of CPUs: test_steps.py.
    """
    whole = {name: torch.arange(30.0)[None] for name in KEYS}
    whole["attention_mask"] = torch.ones(30, 30).triu(1)[None, None]
    waits = property(lambda self: True, lambda *_: None)
    monkeypatch.setattr(LaterValues, "waits", waits, raising=False)

    def rank(group: Any) -> tuple[int, str]:
        batches, model = Batches(runtime("contiguous")), Trained()
        SplitInputs(model, batches, group)
        for _ in range(number - 1):
            train_on(batches, model, group, dict(whole))
        mine = dict(whole)
        if group.rank() == size - 1:
            mine[key] = mine[key].flip(-1)
        with pytest.raises(ContextParallelError) as error:
            train_on(batches, model, group, mine)
        return model.passed, str(error.value)

    for passed, said in on_ranks(size, rank):
        assert passed == number - 1
        if key == "attention_mask":
            assert said.endswith(f"or use attention_spans (docs/spans.md) (rank {size - 1})")
            continue
        assert said == (
            "ranks of a context-parallel group need the same whole samples before the split, "
            f"got other {key} on rank {size - 1} than on rank 0: load them by data-parallel rank, "
            "and let get_batch_on_this_cp_rank split them"
        )


def test_a_rank_that_ends_before_the_others_is_missed() -> None:
    """Within the timeout of the group, in words that say what was waited for."""

    def rank(group: Any) -> None:
        batches, model = Batches(runtime("contiguous")), Trained()
        SplitInputs(model, batches, group)
        batch = {name: torch.arange(8.0)[None] for name in KEYS}
        train_on(batches, model, group, dict(batch))
        if group.rank() == 0:
            with pytest.raises(CommunicationError, match="lost the others in a comparison; has "):
                train_on(batches, model, group, dict(batch))

    on_ranks(2, rank, timeout_s=3)


def test_positions_that_begin_again_are_those_of_a_whole_batch() -> None:
    ids = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2], [*range(8)]])
    assert shard("contiguous", {"position_ids": ids}, 2, 1)["position_ids"][0].tolist() == [
        1,
        0,
        1,
        2,
    ]


class Angles(nn.Module):
    """An embedding whose table holds the positions themselves."""

    def get_emb(self, max_seq_len: int, offset: int = 0) -> Any:
        return (torch.arange(max_seq_len) + offset).view(-1, 1, 1, 1)


def test_tables_of_ever_new_lengths_are_freed() -> None:
    inner: Any = Angles()
    group: Any = Place(1, 3)
    embedding = LayoutRotaryEmbedding(inner, runtime("contiguous"), group)
    tables = [weakref.ref(embedding(3 * length)) for length in range(1, 20)]
    assert embedding(3 * 19) is tables[-1]()
    assert sum(table() is not None for table in tables) <= 4


def test_yarn_of_a_length_that_its_ranks_do_not_divide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron fails to cut a table of the original 4096 positions for 2 * 3 pieces."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: "cpu")
    ours = partialmethod(partial(set_cos_sin_cache, YarnRotaryEmbedding._set_cos_sin_cache))
    monkeypatch.setattr(YarnRotaryEmbedding, "_set_cos_sin_cache", ours)
    made = [
        YarnRotaryEmbedding(
            8,
            original_max_position_embeddings=4096,
            use_cpu_initialization=True,
            cp_group=Place(0, size),
        )
        for size in (3, 1)
    ]
    assert [hasattr(yarn, "cos_cached") for yarn in made] == [False, True]
    group: Any = Place(1, 3)
    angles, scale = LayoutRotaryEmbedding(made[0], runtime("contiguous"), group)(N)
    want, want_scale = made[1](N)
    assert scale == want_scale
    assert torch.equal(angles, want[EXPECTED["contiguous"]])


@pytest.mark.parametrize("layout", EXPECTED)
def test_positions_count_from_the_beginning_of_a_document(layout: str) -> None:
    inner: Any = Angles()
    group: Any = Place(1, 3)
    run = runtime(layout)
    embedding = LayoutRotaryEmbedding(inner, run, group)
    for documents in ((4, 5, 9), (3,), ()):
        run.mask = DocumentMask(seq_len=N, starts=documents)
        starts = [max(s for s in (0, *documents) if s <= p) for p in EXPECTED[layout]]
        want = [p - start for p, start in zip(EXPECTED[layout], starts, strict=True)]
        assert embedding(N).flatten().tolist() == want


def owner(kind: type[nn.Module], embedding: type[nn.Module], group: Place) -> Any:
    """A module with a rotary embedding, neither of them built."""
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    made.rotary_pos_emb = embedding.__new__(embedding)
    nn.Module.__init__(made.rotary_pos_emb)
    made.pg_collection = SimpleNamespace(cp=group)
    made.config = SimpleNamespace(cuda_graph_impl="none")
    return made


KINDS = pytest.mark.parametrize("kind", [RotaryEmbedding, YarnRotaryEmbedding])


@KINDS
def test_the_embedding_of_a_model_is_replaced(kind: type[nn.Module]) -> None:
    with_rope = owner(nn.Module, kind, Place(1, 3))
    without = nn.Module()
    for model in (with_rope, without):
        use_layout(model, runtime("zigzag"))
    assert isinstance(with_rope.rotary_pos_emb, LayoutRotaryEmbedding)
    assert not hasattr(without, "rotary_pos_emb")


@KINDS
@pytest.mark.parametrize("size", [1, 3])
def test_the_embeddings_of_latent_attention_are_replaced(kind: type[nn.Module], size: int) -> None:
    """Wherever its layers are; one rank has nothing to cut."""
    layers = [owner(MLASelfAttention, kind, Place(0, size)) for _ in range(2)]
    model = nn.ModuleDict({"decoder": nn.ModuleList(layers[:1]), "mtp": layers[1]})
    use_layout(model, runtime("zigzag"))
    for layer in layers:
        assert type(layer.rotary_pos_emb) is (LayoutRotaryEmbedding if size > 1 else kind)
        layer.rotary_pos_emb = nn.Linear(1, 1)
    with pytest.raises(ContextParallelError, match="got Linear"):
        use_layout(model, runtime("zigzag"))


def test_latent_attention_in_local_graphs_has_no_hooks() -> None:
    """Which Megatron refuses to capture; documents, for which they are, are refused there."""
    for impl, hooks in (("local", 0), ("transformer_engine", 1)):
        layer = owner(MLASelfAttention, RotaryEmbedding, Place(0, 2))
        layer.config.cuda_graph_impl = impl
        use_layout(nn.ModuleDict({"layer": layer}), runtime("zigzag"))
        assert len(layer._forward_pre_hooks) == hooks


def test_other_rotary_embeddings_are_refused() -> None:
    chunk: Any = nn.Module()
    chunk.rotary_pos_emb = nn.Linear(1, 1)
    with pytest.raises(ContextParallelError, match="got Linear"):
        use_layout(chunk, runtime("zigzag"))
