"""What public functions take and refuse, in one line, before anything is computed."""

import re

import numpy as np
import pytest
import torch

import megatron_cp_plugin as cp
from megatron_cp_plugin.errors import ContextParallelError

TENSOR = torch.zeros(1, 8, 4, 8)


WRONG_CALLS = {
    "window": ({"window": 1.5}, "window needs a whole number, got 1.5"),
    "flag as window": ({"window": True}, "window needs a whole number, got True"),
    "length": ({"seq_len": 8.0}, "seq_len needs a whole number, got 8.0"),
    "learnt scale": (
        {"scale": torch.ones((), requires_grad=True)},
        "scale is not differentiable, got a tensor that requires grad: multiply q by it",
    ),
    "scale": ({"scale": "auto"}, "scale needs a number, got 'auto'"),
    "fractions": (
        {"cu_seqlens": torch.tensor([0, 3.5, 8])},
        "cu_seqlens needs whole numbers from 0 to seq_len = 8, got [0.0, 3.5, 8.0]",
    ),
    "two dimensions": (
        {"cu_seqlens": torch.tensor([[0, 3, 8]])},
        "got [[0, 3, 8]]: cast them first, in one dimension",
    ),
    "no documents": ({"cu_seqlens": []}, "ascending numbers from 0 to seq_len = 8, got []"),
    "late documents": ({"cu_seqlens": [1, 8]}, "from 0 to seq_len = 8, got [1, 8]"),
    "documents that end early": ({"cu_seqlens": [0, 7]}, "from 0 to seq_len = 8, got [0, 7]"),
    "documents that descend": ({"cu_seqlens": [0, 5, 3, 8]}, "ascending numbers from 0 to seq_len"),
    "numbers in place of spans": ({"spans": range(999)}, "kind, each, got range(0, 999)"),
    "no algorithm": ({"algo": None}, "unknown context-parallel algorithm None: use one of"),
    "no kernel": ({"kernel": None}, "kernel needs a name, got None: leave it out"),
    "unknown kernel": ({"kernel": "x"}, "unknown kernel 'x': use auto or one of"),
    "algorithms": ({"algo": ["ring"]}, "unknown context-parallel algorithm ['ring'] (did you "),
    "option": ({"chunks": TENSOR}, "zigzag option chunks needs int, got tensor([[[[0., 0., "),
    "option of auto": (
        {"algo": "auto", "machine": ["h200"]},
        "option machine needs a number or a word, got ['h200']",
    ),
    "causal": ({"causal": None}, "causal needs True or False, got None"),
    "causal, a number": ({"causal": 1}, "causal needs True or False, got 1"),
    "huge scale": ({"scale": 10**999}, "scale needs a number, got 1000000"),
    "complex scale": ({"scale": torch.tensor(1j)}, "scale needs a number, got tensor(0.+1.j)"),
    "no length": ({"seq_len": -1}, "seq_len needs a number of tokens, got -1"),
    "huge length": ({"seq_len": 10**30}, "seq_len needs a number of tokens, got 1000"),
    "set of documents": (
        {"cu_seqlens": {0, 8}},
        "cu_seqlens needs numbers in order, as a list or a tensor, got {0, 8}",
    ),
    "text": ({"spans": "full"}, "spans needs numbers in order, as a list or a tensor, got 'full'"),
    "documents without elements": (
        {"cu_seqlens": TENSOR.to("meta")},
        "cu_seqlens needs elements, got a tensor on the meta device",
    ),
    "list": ({"q": [1.0]}, "q needs a tensor, got [1.0]"),
    "nothing": ({"v": None}, "v needs a tensor, got None"),
    "sparse": ({"k": TENSOR.to_sparse()}, "k needs a dense tensor, got torch.sparse_coo: give"),
    "no elements": (
        dict.fromkeys("qkv", TENSOR.to("meta")),
        "q needs elements, got a tensor on the meta device",
    ),
    "list as sink": ({"sink": [0.0] * 4}, "sink needs a tensor, got [0.0, 0.0, 0.0, 0.0]"),
    "few sinks": ({"sink": torch.zeros(2)}, "each of the 4 query heads, got (2,)"),
    "negative window": ({"window": -1}, "window"),
    "not in the group": (
        {"group": torch.distributed.GroupMember.NON_GROUP_MEMBER},
        "group needs a process group that this rank is in, got -100: of a DeviceMesh",
    ),
    "devices": (
        {"k": TENSOR.to("meta")},
        "q, k, v need one device, got cpu, meta, cpu: move them first",
    ),
    "sink's device": (
        {"sink": torch.zeros(4, device="meta")},
        "a sink needs the device of q, cpu, got meta",
    ),
    "whole numbers": (
        dict.fromkeys("qkv", TENSOR.int()),
        "q, k, v need one of torch.float16, torch.bfloat16, torch.float32, torch.float64, got "
        "torch.int32: cast them first",
    ),
    "no heads": (
        dict.fromkeys("qkv", TENSOR[:, :, :0]),
        "attention needs heads, each of one element or more, got q (1, 8, 0, 8), ",
    ),
    "one dimension": (dict.fromkeys("qkv", torch.zeros(8)), "attention needs q [B,S,H,D], k"),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_in_one_line(name):
    changed, message = WRONG_CALLS[name]
    with pytest.raises(ContextParallelError, match=re.escape(message)) as refusal:
        cp.attention(**({"q": TENSOR, "k": TENSOR, "v": TENSOR, "algo": "zigzag"} | changed))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 250


WRONG_LINEAR_CALLS = {
    "whole numbers": (dict.fromkeys("qkv", TENSOR.int()), ", got torch.int32"),
    "devices": ({"v": TENSOR.to("meta")}, "q, k, v need one device, got cpu, cpu, meta"),
    "state's device": (
        {"initial_state": torch.zeros(1, 4, 8, 8, device="meta")},
        "initial_state needs a floating dtype, q's device and the shape",
    ),
    "words": ({"decay": ["slow"] * 4}, "or one for each of 4 heads, got ['slow', "),
    "no state": ({"initial_state": 0.0}, "initial_state needs a tensor, got 0.0"),
    "complex state": (
        {"initial_state": torch.zeros(1, 4, 8, 8) * 1j},
        "got torch.complex64 (1, 4, 8, 8) on cpu",
    ),
    "state as flag": (
        {"output_final_state": TENSOR},
        "output_final_state needs True or False, got tensor([[[[0., 0., ",
    ),
    "rates without elements": (
        {"decay": torch.ones(4, device="meta")},
        "decay needs a dense tensor with elements, got torch.strided on meta",
    ),
    "no option": ({"nonsense": []}, "lasp has no option 'nonsense'"),
    "rates in two dimensions": ({"decay": torch.ones(4, 1)}, "got [[1.0], [1.0], [1.0], [1.0]]"),
}


@pytest.mark.parametrize("name", WRONG_LINEAR_CALLS)
def test_a_wrong_call_of_linear_attention_is_refused_in_one_line(name):
    changed, message = WRONG_LINEAR_CALLS[name]
    given = {"q": TENSOR, "k": TENSOR, "v": TENSOR, "algo": "lasp", "decay": 0.5} | changed
    with pytest.raises(ContextParallelError, match=re.escape(message)):
        cp.linear_attention(**given)


WRONG_OTHER_CALLS = {
    "shard, list": (cp.shard, {"x": [1]}, "x needs a tensor, got [1]"),
    "shard, no dim": (cp.shard, {"dim": 4}, "dim needs to be one of the 4 dimensions of x [1, 8,"),
    "shard, fraction": (cp.shard, {"dim": 1.0}, "dim needs a whole number, got 1.0: cast it first"),
    "shard, scalar": (cp.shard, {"x": torch.ones(())}, "dim needs to be one of the 0 dimensions"),
    "unshard, list": (cp.unshard, {"x": [1]}, "x needs a tensor, got [1]"),
    "unshard, no dim": (cp.unshard, {"dim": -5}, "dim needs to be one of the 4 dimensions of x"),
    "unshard, flag": (cp.unshard, {"dim": True}, "dim needs a whole number, got True"),
    "unshard, length": (cp.unshard, {"seq_len": 2.5}, "seq_len needs a whole number, got 2.5"),
    "positions": (cp.check_layout, {"positions": [1]}, "positions needs a tensor, got [1]"),
    "complex positions": (
        cp.check_layout,
        {"positions": torch.zeros(8) * 1j},
        "positions need integers [S] or [B,S], got torch.complex64 [8]",
    ),
    "positions, length": (cp.check_layout, {"seq_len": -1}, "seq_len needs a number of tokens"),
    "hidden": (cp.chunked_cross_entropy, {"hidden": None}, "hidden needs a tensor, got None"),
    "group": (cp.chunked_cross_entropy, {"tp_group": 2}, "tp_group needs a process group, got 2"),
    "flag": (
        cp.chunked_cross_entropy,
        {"into_main_grad": None},
        "into_main_grad needs True or False, got None",
    ),
}


@pytest.mark.parametrize("name", WRONG_OTHER_CALLS)
def test_a_wrong_call_of_another_function_is_refused_in_one_line(name):
    function, changed, message = WRONG_OTHER_CALLS[name]
    given = {
        cp.shard: {"x": TENSOR, "dim": 1, "algo": "zigzag"},
        cp.unshard: {"x": TENSOR, "dim": 1, "algo": "zigzag"},
        cp.check_layout: {"positions": torch.arange(8), "algo": "zigzag"},
        cp.chunked_cross_entropy: {
            "hidden": torch.ones(8, 4),
            "weight": torch.ones(9, 4),
            "labels": torch.zeros(8, dtype=torch.long),
        },
    }[function]
    with pytest.raises(ContextParallelError, match=re.escape(message)) as refusal:
        function(**(given | changed))
    assert "\n" not in str(refusal.value)
    assert len(str(refusal.value)) < 250


TRANSFORMS = {
    "vmap": lambda f, x: torch.func.vmap(f)(torch.stack((x, x))),
    "grad": lambda f, x: torch.func.grad(lambda y: f(y).sum())(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x,)),
    "vjp": lambda f, x: torch.func.vjp(f, x),
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
}


CALLS = {
    "attention": lambda x: cp.attention(x, x, x, algo="zigzag"),
    "linear_attention": lambda x: cp.linear_attention(x, x, x, decay=0.5),
    "chunked_cross_entropy": lambda x: cp.chunked_cross_entropy(
        x, x.new_ones(5, 8), torch.zeros(x.shape[:-1], dtype=torch.long)
    ),
    "chunked_log_probs": lambda x: cp.chunked_log_probs(
        x, x.new_ones(5, 8), torch.zeros(x.shape[:-1], dtype=torch.long), entropy=True
    )[1],
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", CALLS)
def test_transformed_functions_are_refused_in_one_line(transform, call):
    message = f"{call} cannot be transformed by torch.func"
    if transform == "jvp":
        message = f"{call} (cannot be transformed by torch.func|has no derivative in forward mode)"
    with pytest.raises(ContextParallelError, match=message) as refusal:
        TRANSFORMS[transform](CALLS[call], torch.randn(1, 8, 4, 8))
    assert "\n" not in str(refusal.value)


def test_a_transformed_gate_is_refused_beside_plain_tensors():
    x, gates = torch.randn(1, 8, 4, 8), torch.zeros(2, 1, 8, 4)
    with pytest.raises(ContextParallelError, match="linear_attention cannot be transformed by"):
        torch.func.vmap(lambda gate: cp.linear_attention(x, x, x, gate=gate))(gates)


@pytest.mark.parametrize("call", CALLS)
def test_derivatives_in_forward_mode_are_refused_in_one_line(call):
    x = torch.randn(1, 8, 4, 8)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(ContextParallelError, match=f"{call} has no derivative in forward mode"):
            CALLS[call](dual)


@pytest.mark.parametrize("call", [*CALLS, "unshard"])
def test_second_derivatives_are_refused_and_not_zero(call):
    """Where the gradient that comes in requires none, torch takes ours for a constant."""
    x = torch.randn(1, 8, 4, 8, requires_grad=True)
    out = cp.unshard(x, 1, algo="ring").square() if call == "unshard" else CALLS[call](x)
    (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (x.square().sum() + gradient.square().sum()).backward()


def test_numbers_of_other_libraries_are_numbers():
    q = torch.randn(1, 8, 4, 8)
    lengths = torch.tensor([0, 3, 8])
    expected = cp.attention(q, q, q, algo="zigzag", window=3, cu_seqlens=[0, 3, 8], scale=0.5)
    for whole, fraction in ((torch.tensor, torch.tensor), (np.int64, np.float32)):
        call = {"window": whole(3), "seq_len": whole(8), "scale": fraction(0.5)}
        assert torch.equal(
            cp.attention(q, q, q, algo="zigzag", cu_seqlens=lengths, **call), expected
        )
        rate = cp.linear_attention(q, q, q, algo="lasp", decay=fraction(0.5))
        assert torch.equal(rate, cp.linear_attention(q, q, q, algo="lasp", decay=0.5))
