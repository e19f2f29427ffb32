"""Fused operations: Triton kernels in the interpreter, compiled for GPUs, and on one."""

import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from megatron_cp_plugin.core.partial import fused_for
from tests.kernels.test_decayed import STATES

FUSED = """
import torch
from megatron_cp_plugin.core.partial import merge_into
from megatron_cp_plugin.kernels import fused

torch.manual_seed(0)
a, b = (torch.randn(2, 5, 3, 8).bfloat16() for _ in "ab")
a_lse, b_lse = torch.randn(2, 5, 3).transpose(1, 2), torch.randn(2, 3, 5)
a_lse[0, 0, 1] = b_lse[0, 0, 1] = b_lse[1, 2, 3] = -torch.inf
got = torch.full((2, 5, 3, 8), torch.nan), torch.full((2, 3, 5), torch.nan)
want = tuple(torch.empty_like(x) for x in got)
fused.merge_into(*got, a, a_lse, b, b_lse)
merge_into(*want, a, a_lse, b, b_lse)
for x, y in zip(got, want):
    torch.testing.assert_close(x, y)
from megatron_cp_plugin.core.partial import merge_all_into

outs, lses = torch.stack((a, b, b, a)), torch.stack((a_lse, b_lse, b_lse + 1, a_lse - 2))
lses[:, 1, 0, 2] = -torch.inf
got = torch.full((2, 5, 4, 8), torch.nan)[:, :, 1:], torch.full((2, 3, 5), torch.nan)
want = tuple(torch.empty_like(x) for x in got)
fused.merge_all_into(*got, outs, lses.mT.contiguous().mT)
merge_all_into(*want, outs, lses)
for x, y in zip(got, want):
    torch.testing.assert_close(x, y)
from itertools import product

def rows_of(count, start, stop, dim=8):  # every second head of a tensor
    return torch.randn(2, stop - start, 2 * count, dim).bfloat16()[:, :, ::2]

for edges, in_place, wide, two in product(
    ([(0, 5)], [(1, 3)], [(1, 3), (2, 5), (2, 4)], [(0, 2), (3, 5)] * 9, []),
    (False, True), (False, True), (False, True),
):
    if in_place and not edges:
        continue
    kind = torch.float32 if wide else torch.bfloat16
    wholes = [torch.randn(2, 5, 5, 8).to(kind), torch.randn(2, 5, 5, 20).to(kind)]
    outs = [wholes[0][:, :, 1:4], wholes[1][:, :, 1:4, 2:15]][: 1 + two]
    around, before = [x.clone() for x in wholes], [x.clone() for x in outs]
    terms = [
        (slice(start, stop), (rows_of(3, start, stop), rows_of(3, start, stop, 13))[: 1 + two])
        for start, stop in edges
    ]
    fused.sum_rows(outs, terms, in_place=in_place)
    for number, (out, x) in enumerate(zip(outs, before)):
        each = [(rows, tensors[number]) for rows, tensors in terms]
        if in_place:  # added last, but first if the terms are many
            each.insert(0 if len(each) > 8 else len(each), (slice(0, 5), x))
        want = torch.zeros(x.shape)
        for rows, term in each:
            want[:, rows] += term.float()
        if wide:
            assert torch.equal(out, want)
        else:  # the interpreter rounds towards zero
            torch.testing.assert_close(out.float(), want, rtol=2**-7, atol=0)
        for row in range(5):
            if in_place and not any(start <= row < stop for start, stop in edges):
                assert torch.equal(out[:, row], x[:, row])
        out.copy_(x)
    assert all(map(torch.equal, wholes, around))  # nothing beside the outs was written
total = a.float()
fused.sum_rows((total,), [(slice(0, 5), (total,)), (slice(1, 3), (b[:, :2],))], in_place=False)
assert torch.equal(total[:, 1:3], a[:, 1:3].float() + b[:, :2].float())
assert torch.equal(total[:, 3:], a[:, 3:].float())

from megatron_cp_plugin.core.partial import _add_rows, _merge_rows, RowIndex, rows_at

to, of = torch.tensor([4, 0, 3], dtype=torch.int32), torch.tensor([1, 2, 4], dtype=torch.int32)
few = fused.rows_at(a[:, :, 1:], to)
assert torch.equal(few, a[:, [4, 0, 3], 1:]) and few.is_contiguous()
blocks = torch.full((2, 2, 3, 3, 10), torch.nan)  # of two members, each of a batch of two
fused.write_rows(blocks[0, ..., :8], torch.tensor([1, 7, 2, 6], dtype=torch.int32), b[:, :4])
for row, (member, token) in enumerate(((0, 1), (1, 1), (0, 2), (1, 0))):
    assert torch.equal(blocks[member, :, token, :, :8], b[:, row].float())
assert blocks.isnan().sum() == blocks.numel() - 4 * 2 * 3 * 8
for index in (RowIndex(to, of), RowIndex(to)):
    got, want = total.clone(), total.clone()
    added = b if index.of is not None else b[:, :3]
    fused.add_rows_into(got[:, :, 1:], index.to, added[:, :, 1:], index.of)
    _add_rows((want[:, :, 1:],), index, (added[:, :, 1:],))
    assert torch.equal(got, want) and not torch.equal(got, total)
got, want = (total.clone(), a_lse.clone()), (total.clone(), a_lse.clone())
b_lse[0, 0, 2] = -torch.inf  # of the row that goes to 3
for of in (of, None):
    partial = (b[:, :, 1:], b_lse[:, 1:]) if of is not None else (b[:, :3, 1:], b_lse[:, 1:, :3])
    fused.merge_rows_into(got[0][:, :, 1:], got[1][:, 1:], to, *partial, of)
    _merge_rows(want[0][:, :, 1:], want[1][:, 1:], RowIndex(to, of), *partial)
    for x, y, before in zip(got, want, (total, a_lse)):
        torch.testing.assert_close(x, y)
        assert not torch.equal(x, before)

delta = torch.einsum("bshd,bshd->bhs", a.float(), b.float())
torch.testing.assert_close(fused.delta_of(a, b), delta)
from megatron_cp_plugin.core.partial import placeholder_out

of_row = a.clone()
of_row[0, 0, 0, 1:], of_row[0, 1, 0], of_row[0, 2, 0, :6] = 0, 0, 0  # one element, none, two
delta[0, 0, 1], delta[1, 0, 0] = 0, torch.nan
for dout in (of_row, of_row.half(), of_row.float(), torch.stack((of_row, b), 3)[..., 0, :]):
    made = [function(dout, delta) for function in (fused.placeholder_out, placeholder_out)]
    assert all(x.dtype == dout.dtype and (x != 0).sum(-1).max() <= 3 for x in made)
    got, want = (fused.delta_of(dout, x) for x in made)
    torch.testing.assert_close(got, want, equal_nan=True)
delta = delta.nan_to_num().contiguous()
want, strided = fused.placeholder_out(b, delta), delta.transpose(1, 2).contiguous().transpose(1, 2)
assert torch.equal(fused.placeholder_out(b, strided), want)
flat = fused.placeholder_out(b.flatten(0, 1), delta.transpose(0, 1).flatten(1))
assert torch.equal(flat, want.flatten(0, 1))
x = torch.randn(2, 5, 3, 4, 8).bfloat16()[:, :, :, 1]
scale, share = torch.rand(2, 5), torch.rand(2, 5)
out = torch.full((5, 2, 3, 8), torch.nan).transpose(0, 1)
product = a.float() * x.float() * scale[..., None, None]
fused.product_into(out, a, x, scale)
torch.testing.assert_close(out, product)
fused.product_into(out, a, x, scale, (b, share))
less = product - b.float() * share[..., None, None]
torch.testing.assert_close(out, less)
"""


def test_gpus_have_fused_operations():
    """Whoever imports the package: `core` does not know of them."""
    triton_kernels = pytest.importorskip("megatron_cp_plugin.kernels.fused")
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert fused_for(on_gpu) is triton_kernels
    assert fused_for(torch.zeros(1)) is None


# Statistics and gradients of logits, against the loss in chunks.
LOGITS = """
import torch
from megatron_cp_plugin.kernels import fused

torch.manual_seed(0)
from megatron_cp_plugin import token_losses

for columns in (5, 4096, 9000):
    logits = (torch.randn(4, columns + 3) * 9).bfloat16()[:, :columns]
    logits[1, : columns // 2] = -torch.inf
    wanted, dloss = torch.tensor([columns - 1, columns - 2, -1, columns]), torch.randn(4)
    for scale in (None, torch.rand(4) + 0.5):
        for entropy in (False, True):
            given = wanted, scale, entropy
            found = fused.logit_statistics(logits, *given)
            for x, y in zip(found, token_losses.logit_statistics(logits, *given), strict=True):
                torch.testing.assert_close(x, y)
            got, want = logits.clone(), logits.clone()
            of_entropy = (found[2], torch.randn(4)) if entropy else (None, None)
            fused.logit_gradients_(got, wanted, found[0], dloss, scale, *of_entropy)
            token_losses.logit_gradients_(want, wanted, found[0], dloss, scale, *of_entropy)
            torch.testing.assert_close(got, want)
"""


def interpret(program: str) -> None:
    """Triton reads its switch at import, so the kernels run in a process of their own."""
    pytest.importorskip("triton")
    command = f"import os; os.environ['TRITON_INTERPRET'] = '1'\n{program}"
    subprocess.run([sys.executable, "-c", command], check=True)


def test_triton_kernels_in_the_interpreter():
    """All of them in one process."""
    interpret(FUSED + LOGITS + STATES)


RUN = {"dim": 128, "value_dim": 128, "CHUNK": 64, "DIM": 128, "WIDTH": 32}
COMPILED = (
    ("merge", {"at": None, "b_at": None}),
    ("merge", {}),
    ("merge_all", {}),
    ("sum", {}),
    ("sum", {"b": None, "out_at": None, "b_at": None}),
    ("sum", {"b": None, "a_at": None, "b_at": None}),
    ("sum_rows", {"DIM_2": 64, "IN_PLACE": True}),
    ("sum_rows", {"DIM_2": 64, "IN_PLACE": False}),
    ("sum_rows", {"DIM_2": 64, "IN_PLACE": True, "out_2": None}),
    ("delta", {}),
    ("placeholder", {"TERMS": 3}),
    ("product", {}),
    ("product", {"x": None, "share_ptr": None}),
    ("logit_statistics", {"BLOCK": 4096, "scale_ptr": None, "entropy_ptr": None}),
    ("logit_statistics", {"BLOCK": 4096}),
    (
        "logit_gradients",
        {"BLOCK": 4096, "scale_ptr": None, "entropy_ptr": None, "dentropy_ptr": None},
    ),
    ("logit_gradients", {"BLOCK": 4096}),
    ("add", {"TILES": 16, "TOKENS": 64, "X_DIM": 128, "OUT_DIM": 128}),
    ("pass", {"MATRIX": True, "LONG": True, "DIM": 128, "WIDTH": 32}),
    ("run", RUN | {"OF_CHANNELS": True, "BACK": False}),
    ("run", RUN | {"OF_CHANNELS": False, "BACK": True}),
)
OF_STATES = ("add", "pass", "run")
# The kernels' arguments: tensors with three strides; others, which are of float32 by default, and
# numbers of int32.
STRIDED = {
    **dict.fromkeys(("out", "out_2", "a", "b", "outs", "dout", "x"), "*bf16"),
    **dict.fromkeys(("lse", "a_lse", "b_lse", "lses", "delta"), "*fp32"),
}
OTHERS = {
    **{name: (kind, "i32", "i32", "i32") for name, kind in STRIDED.items()},
    **dict.fromkeys(("at", "out_at", "a_at", "b_at"), "*i32"),
    **dict.fromkeys(("logits_ptr", "out_ptr", "x_ptr", "read_ptr", "written_ptr"), "*bf16"),
    **dict.fromkeys(("value_ptr", "query_ptr", "dout_ptr"), "*bf16"),
    **dict.fromkeys(("interval_ptr", "bound_ptr", "which_ptr"), "*i32"),
    "wanted_ptr": "*i64",
    "added": ("*fp32", "i32", "i32"),
    **dict.fromkeys(("terms", "terms_2"), (("*bf16", "i32", "i32", "i32"),) * 3),
    "edges": ("i32",) * 6,
    "through": ("*fp32", *("i32",) * 4),
    "ways": ("*i32",) * 3,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "constants", "capability"),
    [(*kernel, (80, 90, 100)[number % 3]) for number, kernel in enumerate(COMPILED)],
)
def test_triton_kernels_compile_for_gpus(name, constants, capability, tmp_path, monkeypatch):
    """As far as machine code, without a GPU; each for one of them, in turn."""
    triton = pytest.importorskip("triton")
    compiler = pytest.importorskip("triton.backends.compiler")
    from megatron_cp_plugin.kernels import decayed, fused, fused_loss

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    module = decayed if name in OF_STATES else fused_loss if "logit" in name else fused
    kernel = getattr(module, f"_{name}_kernel")
    if module is fused:
        constants = {"ROWS": 16, "DIM": 128} | constants
    others = OTHERS | {"sizes": ("i32",) * (3 if module is decayed else 4)}
    types = {name: "*fp32" if name.endswith("_ptr") else "i32" for name in kernel.arg_names}
    types |= {name: others[name] for name in types if name in others}
    types |= dict.fromkeys(constants, "constexpr")
    source = triton.compiler.ASTSource(kernel, types, constants)
    compiled = triton.compile(source, target=compiler.GPUTarget("cuda", capability, 32))
    assert f"sm_{capability}" in compiled.asm["ptx"]
    assert len(compiled.asm["cubin"]) > 0
    assert compiled.metadata.shared <= 227 * 1024
    # In place: nothing is stored that another warp is yet to load.
    if name in ("merge", "sum") or "out_2" in constants:
        code = compiled.asm["ptx"]
        loaded, stored = code.rindex("ld.global"), code.index("st.global")
        assert loaded < code.index("bar.sync", loaded) < stored


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128])
def test_merges_in_place_on_a_busy_gpu(head_dim):
    """Warps of a program that wait for others find the lse that they are to merge."""
    from megatron_cp_plugin.kernels import fused

    device = torch.device("cuda", 0)
    generator = torch.Generator(device).manual_seed(0)

    def random(*shape):
        return torch.randn(shape, device=device, generator=generator)

    tokens = 8192
    outs = [random(2, tokens, 16, head_dim).bfloat16() for _ in "ab"]
    lses = [random(2, 16, tokens) for _ in "ab"]
    want = torch.empty_like(outs[0]), torch.empty_like(lses[0])
    fused.merge_into(*want, outs[0], lses[0], outs[1], lses[1])
    factor, other = random(4096, 4096).bfloat16(), torch.cuda.Stream()
    wrong = torch.zeros((), dtype=torch.long, device=device)
    for _ in range(300):
        got = outs[0].clone(), lses[0].clone()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            factor @ factor
        fused.merge_into(*got, *got, outs[1], lses[1])
        wrong += sum((x != y).sum() for x, y in zip(got, want, strict=True))
    assert not wrong.item()
