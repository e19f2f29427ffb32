"""A context says once how a sequence is split; what is known to be split otherwise is refused."""

import copy
import re
import traceback
from pathlib import Path

import pytest
import torch
from torch import nn

import megatron_cp_plugin as cp
from megatron_cp_plugin.core.communication.virtual import VirtualWorld, run_virtual
from megatron_cp_plugin.core.layout import LAYOUTS, positions
from megatron_cp_plugin.errors import ConfigError, ContextParallelError

PAGES = Path(__file__).parents[1] / "docs"
RANKS = 4
TOKENS = 64
DOCUMENTS = [0, 11, 40, 64]
BY_DOCUMENTS = {"algo": "zigzag", "layout": "documents"}


def whole(tokens=TOKENS, heads=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, tokens, heads, 8, generator=generator, dtype=torch.float64)


def refusals(body, ranks=RANKS):
    """What each rank says, which is one line."""

    def refused(topology):
        try:
            body(topology)
        except ContextParallelError as error:
            return str(error)
        return None

    found = run_virtual(ranks, refused)
    assert all(said is None or "\n" not in said for said in found)
    return found


def refusal(body, ranks=RANKS):
    """The same on all ranks."""
    (said,) = set(refusals(body, ranks))
    return said


OTHERWISE = {
    "ring, zigzag": ({"algo": "ring"}, {"algo": "zigzag"}, "zigzag", "contiguous"),
    "zigzag, ring": ({"algo": "zigzag"}, {"algo": "ring"}, "contiguous", "zigzag"),
    "an option": (
        {"algo": "ulysses", "layout": "zigzag"},
        {"algo": "ulysses"},
        "contiguous",
        "zigzag",
    ),
    "auto": ({"algo": "auto", "layout": "contiguous"}, {"algo": "auto"}, "zigzag", "contiguous"),
    "documents for the shard only": (
        BY_DOCUMENTS | {"cu_seqlens": DOCUMENTS},
        BY_DOCUMENTS,
        "documents",
        None,
    ),
    "documents for the call only": (
        BY_DOCUMENTS,
        BY_DOCUMENTS | {"cu_seqlens": DOCUMENTS},
        "documents",
        None,
    ),
    "other documents": (
        BY_DOCUMENTS | {"cu_seqlens": DOCUMENTS},
        BY_DOCUMENTS | {"cu_seqlens": torch.tensor([0, 60, 64])},
        "documents",
        None,
    ),
    "spans for the call only": (
        BY_DOCUMENTS,
        BY_DOCUMENTS | {"spans": cp.spans.prefix_lm(40, TOKENS)},
        "documents",
        None,
    ),
    "padded documents": (
        {"algo": "ring", "layout": "thd", "cu_seqlens": [0, 24, 64]},
        {"algo": "ring", "layout": "thd"},
        "thd",
        None,
    ),
}


def says(function, name, needed, found):
    if found is None:
        got, advice = "it as cut for other documents or spans", "cu_seqlens and spans"
    else:
        got, advice = f"it as cut in the {found} layout", "algo and options"
    return (
        f"{function} needs {name} in the {needed} layout, got {got}: give both the same {advice}, "
        "or use one cp.Context"
    )


@pytest.mark.parametrize("case", OTHERWISE)
def test_shards_that_are_known_to_be_of_another_layout_are_refused(case):
    cut, called, needed, found = OTHERWISE[case]

    def attention(topology):
        x = cp.shard(whole(), 1, group=topology, **cut)
        cp.attention(x, x, x, group=topology, **called)

    def unshard(topology):
        cp.unshard(cp.shard(whole(), 1, group=topology, **cut), 1, group=topology, **called)

    assert refusal(attention) == says("attention", "q", needed, found)
    assert refusal(unshard) == says("unshard", "x", needed, found)


def test_linear_attention_and_outputs_are_known_too():
    def linear(topology):
        x = cp.shard(whole(), 1, algo="zigzag", group=topology)
        cp.linear_attention(x, x, x, decay=0.5, group=topology)

    def of_an_output(topology):
        x = cp.shard(whole(), 1, algo="zigzag", group=topology).clone()
        out = cp.attention(x, x, x, algo="zigzag", group=topology)
        cp.unshard(out.flatten(2), 1, algo="ring", group=topology)

    def of_a_linear_output(topology):
        x = whole(16, seed=topology.rank)
        out = cp.linear_attention(x, x, x, algo="lasp", decay=0.5, group=topology)
        cp.attention(x, x, out, algo="zigzag", group=topology)

    assert refusal(linear) == says("linear_attention", "q", "contiguous", "zigzag")
    assert refusal(of_an_output) == says("unshard", "x", "contiguous", "zigzag")
    assert refusal(of_a_linear_output) == says("attention", "v", "zigzag", "contiguous")


VIEWS = {
    "itself": lambda x: x,
    "that requires a gradient": lambda x: x.requires_grad_(),
    "detached": lambda x: x.detach(),
    "a parameter": nn.Parameter,
    "of one entry of the batch": lambda x: x[:1],
    "of some heads": lambda x: x[:, :, 1:3],
    "half of it": lambda x: x.chunk(2, -1)[1],
    "transposed twice": lambda x: x.transpose(1, 2).transpose(1, 2),
    "flat and back": lambda x: x.flatten(2).unflatten(2, (4, 8)),
    "of the same dtype": lambda x: x.to(torch.float64),
    "expanded": lambda x: x.expand(3, -1, -1, -1),
}


@pytest.mark.parametrize("view", VIEWS)
def test_views_of_a_shard_are_known(view):
    def body(topology):
        x = VIEWS[view](cp.shard(whole(), 1, algo="ring", group=topology))
        cp.attention(x, x, x, algo="zigzag", group=topology)

    assert refusal(body) == says("attention", "q", "zigzag", "contiguous")


UNKNOWN = {
    "a copy": lambda x: x.clone(),
    "a product": lambda x: x * 2,
    "of another dtype": lambda x: x.float(),
    "changed in place": lambda x: x.mul_(2),
    "a view that was changed": lambda x: x[:, :, :1].zero_() is None or x,
    "some of its tokens": lambda x: x[:, :8],
    "in another order": lambda x: x.flip(1),
    "of a dimension more": lambda x: x.view(1, 4, 4, 4, 8)[:, :, 0],
}


@pytest.mark.parametrize("op", UNKNOWN)
def test_nothing_is_said_of_what_is_not_known(op):
    def body(topology):
        x = UNKNOWN[op](cp.shard(whole(), 1, algo="ring", group=topology))
        cp.attention(x, x, x, algo="zigzag", group=topology)

    assert refusal(body) is None


def test_layouts_that_give_the_same_tokens_are_the_same():
    def body(topology):
        x = cp.shard(whole(), 1, algo="zigzag", group=topology)
        cp.attention(x, x, x, algo="zigzag", layout="documents", group=topology)
        cp.attention(x, x, x, algo="ring", layout="thd", group=topology)
        x = cp.shard(whole(), 1, **BY_DOCUMENTS, cu_seqlens=[0, 11, 11, 64], group=topology)
        documents = torch.tensor([0, 11, 64], dtype=torch.int32)
        out = cp.attention(x, x, x, **BY_DOCUMENTS, cu_seqlens=documents, group=topology)
        cp.unshard(out, 1, **BY_DOCUMENTS, cu_seqlens=(0, 11, 64), group=topology)

    assert refusal(body) is None


def test_one_rank_holds_all_tokens_in_any_layout():
    x = cp.shard(whole(), 1, algo="ring")
    cp.unshard(cp.attention(x, x, x, algo="zigzag"), 1, algo="attention2d", variant="no")


def test_a_shard_of_another_group_is_refused():
    def body(topology):
        half = topology.subgroup(range(topology.rank // 2 * 2, topology.rank // 2 * 2 + 2), "half")
        x = cp.shard(whole(), 1, algo="zigzag", group=half)
        cp.attention(x, x, x, algo="zigzag", group=topology)

    said = refusal(body)
    assert said.startswith("attention needs q in the zigzag layout, got the part of rank 0 of 2 on")
    assert "on rank 0 of 4: give both the same group, or" in said


@pytest.mark.parametrize("heads", [4, 16])  # 16: as many as tokens of a rank
def test_tokens_in_another_dimension_are_refused(heads):
    def attention(topology):
        x = cp.shard(whole(heads=heads).transpose(1, 2), 2, algo="zigzag", group=topology)
        out = cp.attention(*[x.transpose(1, 2)] * 3, algo="zigzag", group=topology)
        cp.unshard(out, 1, algo="zigzag", group=topology)
        cp.attention(x, x, x, algo="zigzag", group=topology)

    def unshard(topology):
        x = cp.shard(whole(heads=heads), 1, algo="zigzag", group=topology)
        cp.unshard(x.transpose(1, 2), 1, algo="zigzag", group=topology)

    said = f"takes tokens in dimension 1 of {{0}}, got (1, {heads}, 16, 8) with tokens in "
    said += "dimension 2: give {0}.transpose(1, 2)"
    assert refusal(attention) == "attention " + said.format("q")
    assert refusal(unshard) == "unshard " + said.format("x")


@pytest.mark.parametrize("plain", [True, False])
def test_heads_that_are_split_for_tokens_are_refused(plain):
    """[B,H,N,D] looks like [B,S,H,D], but nobody has more heads than tokens."""

    def body(topology):
        context, x = cp.Context(algo="zigzag", group=topology), whole(heads=8).transpose(1, 2)
        if plain:
            q = cp.shard(x, 1, algo="zigzag", group=topology)
            cp.attention(q, q, q, algo="zigzag", group=topology)
        else:
            context.attention(*[context.shard(x)] * 3)

    def few_tokens(topology):
        context = cp.Context(algo="zigzag", group=topology, seq_len=8)
        context.attention(*[context.shard(whole(tokens=8, heads=9))] * 3)

    def as_many(topology):
        x = whole(tokens=2, heads=2 * RANKS, seed=topology.rank)
        cp.attention(x, x, x, algo="zigzag", group=topology)

    assert refusal(body) == (
        "attention takes [B,S,H,D], got 64 heads of 8 tokens in all: split x.transpose(1, 2), or "
        "pass seq_len=8 if that is right"
    )
    assert refusal(few_tokens) is None
    assert refusal(as_many) is None


def test_tokens_that_were_not_split_are_refused():
    """By their number where the length is known; else where all ranks hold the same ones."""

    def by_number(topology):
        x = whole(seed=topology.rank)
        cp.attention(x, x, x, algo="zigzag", cu_seqlens=DOCUMENTS, group=topology)

    def by_content(topology):
        cp.attention(*[whole()] * 3, algo="zigzag", group=topology)

    def later(topology):
        cp.attention(*[whole(seed=topology.rank)] * 3, algo="zigzag", group=topology)
        cp.attention(*[whole()] * 3, algo="zigzag", group=topology)

    def said_to_be(topology):
        cp.attention(*[whole()] * 3, algo="zigzag", seq_len=4 * TOKENS, group=topology)

    def alike(topology):
        cp.attention(*[torch.ones(1, TOKENS, 4, 8)] * 3, algo="zigzag", group=topology)

    assert "ascending numbers from 0 to seq_len = 256, got [0, 11, 40, 64]" in refusal(by_number)
    assert refusal(by_content) == (
        "ranks need different tokens, got the same 64 on all 4, as if they were not split: shard "
        "with cp.shard, or pass seq_len=256 if they are"
    )
    for body in (later, said_to_be, alike):
        assert refusal(body) is None


def results_of(algo, calls, how, tensors):
    """Output and gradients of a whole sequence.

    Args: calls: a context, or the functional interface. how: what its `shard` and `unshard` take.
    """
    q, k, v = (calls.shard(x, 1, **how).requires_grad_() for x in tensors)
    if algo in cp.available("linear"):
        out = calls.linear_attention(q, k, v, decay=0.9, **how)
    else:
        out = calls.attention(q, k, v, window=9, scale=0.5, **how)
    gradients = torch.autograd.grad(out.square().sum(), (q, k, v))
    return [calls.unshard(x.detach(), 1, **how) for x in (out, *gradients)]


@pytest.mark.parametrize("algo", [*cp.available(), "documents", "spans"])
def test_a_context_does_what_the_functions_do(algo):
    how = {"algo": algo, "cu_seqlens": torch.tensor(DOCUMENTS)}
    if algo in ("documents", "spans"):
        how |= BY_DOCUMENTS
    if algo == "spans":
        how["spans"] = iter(cp.spans.prefix_lm(30, TOKENS))
    tensors = [whole(seed=seed) for seed in range(3)]

    def body(topology):
        mine = dict(how)
        if algo == "spans":
            mine["spans"] = cp.spans.prefix_lm(30, TOKENS)
        context = cp.Context(**mine, group=topology)
        got = results_of(algo, context, {}, tensors)
        held = context.positions()
        assert torch.equal(held, context.shard(torch.arange(TOKENS), 0))
        context.check_layout(held)
        return got, results_of(algo, cp, mine | {"group": topology}, tensors)

    for got, want in run_virtual(RANKS, body):
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_two_algorithms_of_one_layout_share_tokens():
    def body(topology):
        softmax = cp.Context(algo="zigzag", group=topology)
        linear = cp.Context(algo="lasp2", layout="zigzag", group=topology)
        x = softmax.shard(whole())
        x = linear.linear_attention(x, x, x, decay=0.5) * 2  # nobody knows how this was split
        x = softmax.attention(x, x, x) + 1
        linear.unshard(linear.linear_attention(x, x, x, decay=0.5))

    assert refusal(body) is None


def test_a_context_refuses_tokens_that_nobody_split():
    def at_once(topology):
        x = whole(seed=topology.rank)
        cp.Context(algo="zigzag", group=topology).attention(x, x, x)

    def another_number(topology):
        context, x = cp.Context(algo="zigzag", group=topology), whole(seed=topology.rank)
        context.shard(x)
        context.attention(x, x, x)

    def of_a_length(topology):
        context, x = cp.Context(algo="ring", group=topology, seq_len=TOKENS), whole()
        context.attention(x, x, x)

    def by_positions(topology):
        context = cp.Context(algo="zigzag", group=topology)
        x = whole()[:, context.positions(TOKENS)]
        context.attention(x, x, x)

    assert refusal(at_once) == (
        "a context needs tokens that were split in its zigzag layout, got 64 on rank 0 of 4, as of "
        "no sequence so far: split them by its shard or positions, or give it seq_len="
    )
    assert "in its zigzag layout, got 64 on rank" in refusal(another_number)
    assert refusal(of_a_length) == (
        "rank 0 of 4 holds 16 of 64 tokens (contiguous layout), got 64: shard with cp.shard"
    )
    assert refusal(by_positions) is None


def test_a_context_of_a_known_length_shards_no_other_dimension():
    for settings in ({"seq_len": TOKENS}, {"cu_seqlens": DOCUMENTS}):
        context = cp.Context(algo="zigzag", group=VirtualWorld(2).topology(0), **settings)
        assert context.shard(whole().transpose(1, 2), 2).shape == (1, 4, 32, 8)
        message = "x needs the 64 tokens of the sequence in dimension 1, got [1, 4, 64, 8]: pass"
        with pytest.raises(ContextParallelError, match=re.escape(message)):
            context.shard(whole().transpose(1, 2))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algo": "zigzg"}, "unknown context-parallel algorithm 'zigzg' (did you mean 'zigzag'?)"),
        ({"algo": "ring", "cu_seqlens": [0, 4], "seq_len": 5}, "from 0 to seq_len = 5, got [0, 4]"),
        ({"algo": "ring", "spans": [(0, 9, 0, 9, "full")], "seq_len": 8}, "spans need 0 <= start"),
        ({"algo": "ring", "group": 3}, "group needs a process group that this rank is in, got 3"),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_when_they_are_said(settings, message):
    with pytest.raises(ContextParallelError, match=re.escape(message)):
        cp.Context(**settings)


def test_other_refusals_of_contexts():
    context = cp.Context(algo="ring")
    with pytest.raises(ContextParallelError, match=r"which is not known, got None: pass seq_len"):
        context.positions()
    context.shard(whole())
    assert len(context.positions()) == TOKENS
    with pytest.raises(ContextParallelError, match="the length of the sequence, 9, got 8"):
        cp.Context(algo="ring", seq_len=9).positions(8)
    with pytest.raises(ConfigError, match="linear attention got 'ring'"):
        context.linear_attention(*[whole()] * 3, decay=0.5)
    spans = cp.Context(algo="lasp", spans=[(0, 64, 0, 64, "full")])
    with pytest.raises(ContextParallelError, match="linear attention has no spans"):
        spans.linear_attention(*[whole()] * 3, decay=0.5)
    module = nn.Module()
    module.context = context
    assert copy.deepcopy(module).context is context


UNSPLIT = {
    "zigzag": {"algo": "zigzag"},
    "documents": {**BY_DOCUMENTS, "cu_seqlens": [0, 5, 17]},
    "cyclic": {"algo": "attention2d", "variant": "no"},
}


def losses(rank, x):
    """Each rank has another one."""
    return ((rank + 1) * x).sin().sum()


@pytest.mark.parametrize("dim", [0, -2])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("case", UNSPLIT)
def test_the_gradient_of_unshard_is_that_of_the_sum_of_all_ranks_losses(case, size, dim):
    shape = (17, 3) if dim == 0 else (2, 17, 3)
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    x.requires_grad_()
    sum(losses(rank, x) for rank in range(size)).backward()

    def body(topology):
        how = {**UNSPLIT[case], "group": topology}
        own = cp.shard(x.detach(), dim, **how).requires_grad_()
        found = cp.unshard(own * 2, dim, seq_len=17, **how)
        assert torch.equal(found, 2 * x.detach())
        losses(topology.rank, found / 2).backward()
        return own.grad, cp.shard(x.grad, dim, **how)

    with cp.record_communication() as log:
        found = run_virtual(size, body)
    for got, want in found:
        torch.testing.assert_close(got, want, rtol=0, atol=1e-14)
    # All but its own part goes to others once, and comes from each.
    part = 8 * x.numel() // 17
    held = 17 - len(found[0][0].movedim(dim, 0)) if size > 1 else 0
    assert log.bytes(rank=0, phase="backward") == held * part


def test_gradients_of_unshard_are_summed_in_float32():
    """In bfloat16 each sum of them would round: 256 + 1 + 1 + 1 is 256."""

    def body(topology):
        own = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
        found = cp.unshard(own, 0, algo="ring", group=topology)
        (found * (256 if topology.rank == 0 else 1)).sum().backward()
        return own.grad

    for gradient in run_virtual(RANKS, body):
        assert gradient.dtype == torch.bfloat16
        assert (gradient == torch.tensor(259.0).bfloat16()).all()


def test_ranks_that_disagree_in_a_gradient_of_unshard_are_refused():
    def body(topology):
        x = cp.shard(whole(), 1, algo="ring", group=topology)
        cp.unshard(x.requires_grad_(topology.rank == 1), 1, algo="ring", group=topology)

    assert refusal(body) == (
        "all ranks need one requires_grad, got False on rank 0 and True on rank 1: make the same "
        "call on all"
    )


def test_a_refusal_names_the_caller_s_line():
    """Not fifty lines of this package, on each rank."""
    with pytest.raises(ContextParallelError) as refused:
        cp.attention(*[whole()] * 3, algo="zigzg")
    frames = traceback.extract_tb(refused.value.__traceback__)
    assert [frame.filename for frame in frames[:-1]] == [__file__]
    assert len(traceback.format_exception(refused.value)) <= 4


def test_positions_are_those_of_the_layout():
    for rank in range(3):
        context = cp.Context(algo="zigzag", group=VirtualWorld(3).topology(rank))
        found = context.positions(20)
        assert found.dtype == torch.int64
        assert torch.equal(found, positions(LAYOUTS["zigzag"], rank, 3, 20))


@pytest.mark.parametrize("page", ["functional", "spans"])
def test_the_pages_code_runs(page):
    code = re.findall(r"```python\n(.*?)```", (PAGES / f"{page}.md").read_text(), re.DOTALL)
    exec(compile("\n".join(code), page, "exec"), {})
    assert len(code) > 1
