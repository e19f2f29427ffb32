"""What programs around Megatron do with a model's logits: chunked_logits_job.py TENSOR CONTEXT.

With `install(chunked_loss=...)`, beside sequence parallelism if TENSOR > 1. It prints, for each
program, what log-probabilities, entropies and gradients are off by, compared with those of all
logits, and what is said of logits that are taken apart, as JSON. Where a program is not installed,
functions that refuse to be called take its functions' names.
"""

import importlib
import json
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.chunked_loss import Head
from tests.integration.cut_batches_job import Batch, make_config, make_model, set_up

LENGTHS = (13, 2, 27, 6)
TEMPERATURE = 0.7


def original(*args: Any, **kwargs: Any) -> str:
    return "the program's own"


NAMES = {
    "verl.utils.megatron.tensor_parallel": (
        "vocab_parallel_log_probs_from_logits",
        "_VocabParallelEntropy.apply",
    ),
    "verl.workers.engine.megatron.transformer_impl": (
        "MegatronEngineWithLMHead._lm_head_logits_processor",
    ),
    "slime.utils.ppo_utils": ("calculate_log_probs_and_entropy",),
    "nemo_rl.distributed.model_utils": (
        "DistributedLogprob.apply",
        "ChunkedDistributedLogprob.apply",
    ),
    "skyrl.backends.skyrl_train.distributed.megatron.model_utils": (
        "DistributedLogprob.apply",
        "ChunkedDistributedLogprob.apply",
        "vocab_parallel_entropy",
        "vocab_parallel_entropy_weighted_sum",
    ),
}


def program(path: str) -> Any:
    """A module of a program, or what stands for it."""
    try:
        return importlib.import_module(path)
    except ImportError:
        parts = path.split(".")
        for end in range(1, len(parts) + 1):
            name = ".".join(parts[:end])
            sys.modules.setdefault(name, types.ModuleType(name)).__path__ = []  # type: ignore[attr-defined]
        for name in NAMES[path]:
            kind, _, method = name.partition(".")
            found: Any = original
            if method:
                own = engines_logits_processor if "logits" in method else staticmethod(original)
                found = type(kind, (), {method: own})
            setattr(sys.modules[path], kind, found)
        return sys.modules[path]


def by_verl(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As MegatronEngine._lm_head_logits_processor."""
    module = program("verl.utils.megatron.tensor_parallel")
    temperature = torch.full(labels.shape, TEMPERATURE)
    assert logits.shape[:2] == labels.shape[:2]
    logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))
    kept = logits.clone()
    entropy = module._VocabParallelEntropy.apply(logits)
    return module.vocab_parallel_log_probs_from_logits(kept, labels), entropy


def engines_logits_processor(
    self: Any, logits: Any, label: Tensor, temperature: Tensor, *, calculate_entropy: bool, **_: Any
) -> dict[str, Tensor]:
    """As MegatronEngine._lm_head_logits_processor, of which verl makes a function of logits."""
    logits.div_(temperature.unsqueeze(dim=-1).to(logits.dtype))
    module = program("verl.utils.megatron.tensor_parallel")
    found = {}
    if calculate_entropy:
        found["entropy"] = module._VocabParallelEntropy.apply(logits.clone())
    return found | {"log_probs": module.vocab_parallel_log_probs_from_logits(logits, label)}


def by_verls_engine(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """The same, in one pass over the output layer."""
    engine = program("verl.workers.engine.megatron.transformer_impl").MegatronEngineWithLMHead
    temperature = torch.full(labels.shape, TEMPERATURE)
    passes, statistics = [], Head.statistics

    def counted(*args: Any, **kwargs: Any) -> Any:
        passes.append(1)
        return statistics(*args, **kwargs)

    Head.statistics = counted  # type: ignore[method-assign]
    found = engine._lm_head_logits_processor(
        object.__new__(engine),
        logits,
        labels,
        temperature,
        calculate_sum_pi_squared=False,
        calculate_entropy=True,
        distillation_use_topk=False,
        distillation_only=False,
        logits_processor_func=None,
        batch=None,
        data_format="thd",
    )
    Head.statistics = statistics  # type: ignore[method-assign]
    assert len(passes) == 1
    return found["log_probs"], found["entropy"]


def by_verl_in_chunks(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """With entropy_from_logits_with_chunking."""
    module = program("verl.utils.megatron.tensor_parallel")
    logits.div_(TEMPERATURE)
    entropy = torch.zeros(list(logits.shape[:-1]))
    for at in range(0, logits.shape[1], 5):
        entropy[:, at : at + 5] = module._VocabParallelEntropy.apply(logits[:, at : at + 5, :])
    return module.vocab_parallel_log_probs_from_logits(logits, labels), entropy


def by_slime(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As get_log_probs_and_entropy, and the zero that it adds."""
    module = program("slime.utils.ppo_utils")
    assert logits.dtype == torch.float32
    assert len(logits.shape) == 3
    assert logits.size(0) == 1
    every, logits = logits, logits.squeeze(0)
    logits = (logits / TEMPERATURE).contiguous()
    log_probs, entropy = module.calculate_log_probs_and_entropy(
        logits, labels[0], None, with_entropy=True, chunk_size=-1, log_prob_keep_mask=None
    )
    return log_probs.squeeze(-1)[None] + 0 * every.sum(), entropy[None]


def by_slime_recomputed(*given: Any) -> tuple[Tensor, Tensor]:
    """With --recompute-loss-function."""
    found: tuple[Tensor, Tensor] = checkpoint(by_slime, *given, use_reentrant=False)
    return found


def by_nemo(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, None]:
    """As the loss of each sequence of a pack takes them."""
    module = program("nemo_rl.distributed.model_utils")
    logits.div_(TEMPERATURE)
    found, start = [], 0
    for number, ids in enumerate(batch.cut([x])[0] for x in batch.ids):
        part = logits.narrow(1, start, len(ids)).to(torch.float32)
        kind = ("DistributedLogprob", "ChunkedDistributedLogprob")[number % 2]
        chunk = (4,) * (number % 2)
        vocabulary = (0, part.shape[-1], *chunk, None, False)
        target = labels[:, start : start + len(ids)]
        found.append(getattr(module, kind).apply(part, target, *vocabulary).contiguous())
        start += len(ids)
    return torch.cat(found, 1), None


def by_nemo_packed(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, None]:
    """As from_parallel_logits_to_logprobs_packed_sequences."""
    module = program("nemo_rl.distributed.model_utils")
    logits.div_(TEMPERATURE)
    logits = logits.squeeze(0).unsqueeze(0)
    log_probs = module.DistributedLogprob.apply(logits, labels, 0, logits.shape[-1], None, True)
    return log_probs, None


def by_skyrl(logits: Any, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """As from_parallel_logits_to_logprobs_packed_sequences, and entropies of answers alone."""
    module = program("skyrl.backends.skyrl_train.distributed.megatron.model_utils")
    logits.div_(TEMPERATURE)
    one = logits.squeeze(0).unsqueeze(0)
    vocabulary = 0, one.shape[-1], 5, None, False
    log_probs = module.ChunkedDistributedLogprob.apply(one, labels, *vocabulary).contiguous()
    entropy = module.vocab_parallel_entropy(logits[:, -7:, :], chunk_size=0, chunk_memory_mb=512)
    weights = torch.linspace(0, 1, logits.shape[-2], dtype=logits.dtype, device=logits.device)
    total = module.vocab_parallel_entropy_weighted_sum(logits, weights, chunk_size=0)
    every = module.vocab_parallel_entropy(logits)
    assert torch.equal(every[:, -7:], entropy)
    torch.testing.assert_close(total, (every * weights).sum())
    return log_probs, every


def of_all_logits(logits: Tensor, labels: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    every = torch.log_softmax(logits.double() / TEMPERATURE, -1)
    return every.gather(-1, labels[..., None])[..., 0], -(every.exp() * every).sum(-1)


def refusals(model: Callable[[], Any]) -> dict[str, str]:
    """What is said where the logits themselves are needed."""
    slime = program("slime.utils.ppo_utils").calculate_log_probs_and_entropy
    tries: dict[str, Callable[[Any], Any]] = {
        "max": lambda x: x.max(-1),
        "softmax": lambda x: torch.log_softmax(x, -1),
        "an id": lambda x: x[:, :, 3],
        "bfloat16": lambda x: x.to(torch.bfloat16),
        "top-p": lambda x: slime(x[0], x._rows[0, :, 0], None, False, -1, torch.ones(1)),
        "labels": lambda x: x.log_probs(x._rows[:, 1:, 0]),
        "no temperature": lambda x: x.div_(0),
    }
    said = {}
    for name, taken in tries.items():
        try:
            taken(model())
            said[name] = ""
        except ContextParallelError as error:
            said[name] = str(error)
    return said


def main(tensor: int, context: int) -> dict[str, Any]:
    from megatron_cp_plugin import megatron as cp_megatron

    groups = set_up(context, tensor)
    for path in NAMES:
        program(path)
    cp_megatron.install("zigzag", chunked_loss=7)
    cp_megatron.install("zigzag", chunked_loss=7)
    config = make_config(context, tensor_model_parallel_size=tensor, sequence_parallel=tensor > 1)
    model = make_model(config, groups)
    batch = Batch(LENGTHS, groups.cp.rank(), context)
    ids, labels = batch.cut(batch.ids), batch.cut(batch.labels)
    places = batch.cut([torch.arange(len(x)) for x in batch.ids])

    def logits(**settings: Any) -> Any:
        return model(ids, places, None, packed_seq_params=batch.packed(real=True), **settings)

    weights = torch.linspace(-1, 1, labels.numel()).view(labels.shape)

    def step(taken: Callable[..., Any], given: Any) -> tuple[Any, ...]:
        model.zero_grad()
        log_probs, entropy = taken(given, labels, batch)
        total = (log_probs * weights).sum()
        if entropy is not None:
            total = total + (entropy * weights.flip(1)).sum()
        torch.autograd.backward(total)  # as Megatron does, and the CPU platform needs
        return log_probs.detach(), entropy, [x.grad.clone() for x in model.parameters()]

    def without_entropy(*args: Any) -> tuple[Tensor, None]:
        return of_all_logits(*args)[0], None

    taken = (by_verl, by_verls_engine, by_verl_in_chunks, by_slime, by_slime_recomputed)
    taken = (*taken, by_nemo, by_nemo_packed, by_skyrl)
    found: dict[str, Any] = {}
    for each in taken:
        log_probs, entropy, gradients = step(each, logits())
        whole = of_all_logits if entropy is not None else without_entropy
        want, want_entropy, want_gradients = step(whole, logits(runtime_gather_output=True))
        worst = max(
            float((x - y).abs().max() / y.abs().max().clamp_min(1e-3))
            for x, y in zip(gradients, want_gradients, strict=True)
        )
        found[each.__name__] = {
            "log-probs": float((log_probs - want).abs().max()),
            "entropy": float((entropy - want_entropy).abs().max()) if entropy is not None else 0.0,
            "gradients": worst,
        }
    gathered = logits(runtime_gather_output=True)
    every = torch.log_softmax(gathered.detach().double(), -1)
    losses = logits(labels=labels) + every.gather(-1, labels[..., None])[..., 0]
    found["losses"] = float(losses.detach().abs().max())
    found["sum"] = abs(float(_total(logits().sum(), groups.tp) - gathered.sum().detach()))
    found["refused"] = refusals(logits)
    for name, size in (("two sizes", 8), ("nothing", 0)):
        try:
            cp_megatron.install("zigzag", chunked_loss=size)
        except ContextParallelError as error:
            found["refused"][name] = str(error)
    cp_megatron.uninstall()
    return found


def _total(x: Tensor, group: Any) -> Tensor:
    x = x.detach().clone()
    dist.all_reduce(x, group=group)
    return x


if __name__ == "__main__":
    print("FOUND" + json.dumps(main(*map(int, sys.argv[1:]))), flush=True)
    dist.barrier()
    dist.destroy_process_group()
