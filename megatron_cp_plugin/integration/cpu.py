"""The CPU platform: runs Megatron's own training loop on a machine without a GPU.

Megatron-LM asks for CUDA everywhere: `device="cuda"`, `torch.cuda.current_device()`, streams,
events, CUDA random states, `tensor.type() == "torch.cuda.FloatTensor"`. `install()` answers all of
that on the CPU, for this process and for good:

- a `TorchFunctionMode` sends every tensor that is asked for on "cuda" to the CPU;
- the functions of `torch.cuda` that Megatron calls are replaced by stand-ins that do nothing or
  describe one imaginary device;
- `torch.compile` runs functions eagerly.

Nothing here is imported, let alone installed, on a machine whose GPU is used.
"""

from __future__ import annotations

import contextlib
import copy
import os
import types
from collections.abc import Callable, Sequence
from typing import Any, override

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.overrides import TorchFunctionMode

from megatron_cp_plugin.errors import ConfigError
from megatron_cp_plugin.integration import compat
from megatron_cp_plugin.integration.args import OneLineParser

# What Megatron's command line must say on a CPU: values, and why; and switches of CUDA kernels.
_VALUES = {
    "--distributed-backend": ("gloo", "NCCL needs GPUs"),
    "--transformer-impl": ("local", "Transformer Engine needs GPUs"),
    "--num-workers": ("0", "the stand-ins live in one process"),
}
_SWITCHES = (
    "--no-gradient-accumulation-fusion",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-gelu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
    "--no-persist-layer-norm",
    "--no-gradient-reduce-div-fusion",  # Megatron-FSDP would ask gloo for what only NCCL has
)


def complete_flags(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Adds the Megatron flags that a CPU run needs and nobody gave; returns all, and those.

    Raises: ConfigError if the user asked for a value that cannot work without a GPU.
    """
    parser = OneLineParser(add_help=False, allow_abbrev=False)
    for option in (*_VALUES, *_SWITCHES):
        parser.add_argument(option, dest=option, nargs="?", const="")
    given = vars(parser.parse_known_args(argv)[0])
    added: list[str] = []
    for option, (value, why) in _VALUES.items():
        if given[option] is None:
            added += [option, value]
        elif given[option] != value:
            raise ConfigError(
                f"the CPU platform needs {option} {value} ({why}), got {given[option]}: "
                f"leave {option} out, or use --cp-platform cuda"
            )
    added += [option for option in _SWITCHES if given[option] is None]
    return [*argv, *added], added


def activate(allow_untested: bool = False) -> None:
    """Activates the CPU platform for the rest of this process; a second call does nothing.

    Raises: ContextParallelError: It is such a version, or not as `contract` says.
    """
    if isinstance(torch.cuda.is_available, _StandIn):
        return
    for name, stand_in in _cuda_functions().items():
        setattr(torch.cuda, name, _StandIn(name, stand_in))
    for name, value in _CUDA_TYPES.items():
        setattr(torch.cuda, name, value)
    for name in _RANDOM:
        setattr(torch.cuda.random, name, getattr(torch.cuda, name))
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, _StandIn(name, _nothing))
    # torch's own code must not take the stand-ins for a device.
    torch.accelerator.is_available = _StandIn("is_available", lambda: False)
    _health_check = "_accelerator_graph_capture_health_check"
    for name in (_health_check, "_cuda_graph_capture_health_check"):
        if hasattr(torch.optim.Optimizer, name):
            setattr(torch.optim.Optimizer, name, lambda self: None)

    # Megatron's wrapper of torch's FSDP2 asks for a mesh of GPUs.
    make_mesh = DeviceMesh.from_group

    def mesh_on_cpu(group: Any, device_type: str, *args: Any, **kwargs: Any) -> Any:
        return make_mesh(group, _on_cpu(device_type), *args, **kwargs)

    setattr(DeviceMesh, "from_group", staticmethod(mesh_on_cpu))  # noqa: B010  (mypy)

    # While torch handles a function of a mode, the mode is not in force: nor would it be in any
    # backward that runs in this one.
    name = "has_torch_function"
    setattr(torch.autograd, name, _StandIn(name, lambda tensors: False))

    # Megatron compiles its elementwise functions at import: seconds, and a C++ compiler on a CPU.
    torch.compile = _eager
    compat.check_megatron("cpu", allow_untested=allow_untested)
    _adapt_megatron()
    _OnCpu().__enter__()


class _StandIn:
    """A function of `torch.cuda` on the CPU platform.

    The type tells it from the real one; torch._dynamo has a rule for each function of its own.
    """

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.__name__ = name
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


class _OnCpu(TorchFunctionMode):
    """Sends every tensor that is asked for on a CUDA device to the CPU."""

    @override
    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.cuda or func is torch.Tensor.pin_memory:
            return args[0]
        kwargs = dict(kwargs or {})
        if "device" in kwargs:
            kwargs["device"] = _on_cpu(kwargs["device"])
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _on_cpu(args[1]), *args[2:])
        result = func(*args, **kwargs)
        # Megatron's optimizers tell parameter kinds apart by the name of their CUDA type.
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return result.replace("torch.", "torch.cuda.", 1)
        return result


def _on_cpu(device: Any) -> Any:
    """Maps "cuda", "cuda:1", torch.device("cuda") and device numbers to the CPU."""
    if isinstance(device, bool):
        return device
    if isinstance(device, int):
        return torch.device("cpu")
    if isinstance(device, str) and device.partition(":")[0] == "cuda":
        return "cpu"
    if isinstance(device, torch.device) and device.type == "cuda":
        return torch.device("cpu")
    return device


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Takes the place of a call that only matters on a GPU."""


class _InOrder:
    """A CUDA stream or event on the CPU: everything is done in program order."""

    cuda_stream = priority = device_index = 0
    device = torch.device("cpu")
    __init__ = synchronize = wait = wait_stream = wait_event = record = __exit__ = _nothing

    def query(self) -> bool:
        return True

    def record_event(self, event: Any = None) -> Any:
        return event or _InOrder()

    def elapsed_time(self, end: Any) -> float:
        return 0.0

    def __enter__(self) -> _InOrder:
        return self


_STREAM = _InOrder()

_CUDA_TYPES: dict[str, Any] = {
    "Stream": _InOrder,
    "Event": _InOrder,
    "FloatTensor": torch.FloatTensor,
    "HalfTensor": torch.HalfTensor,
    "BFloat16Tensor": torch.BFloat16Tensor,
}

_RANDOM = ("get_rng_state", "set_rng_state", "manual_seed", "manual_seed_all", "initial_seed")


def _cuda_functions() -> dict[str, Callable[..., Any]]:
    """Returns the stand-ins for the functions of `torch.cuda` that Megatron calls."""
    properties = types.SimpleNamespace(
        name="cpu",
        # Megatron demands CUDA_DEVICE_MAX_CONNECTIONS=1 below architecture 10.
        major=10,
        minor=0,
        multi_processor_count=1,
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        "current_device": lambda: 0,
        "get_device_properties": lambda *args, **kwargs: properties,
        "get_device_capability": lambda *args, **kwargs: (properties.major, properties.minor),
        "get_device_name": lambda *args, **kwargs: properties.name,
        "current_stream": lambda *args, **kwargs: _STREAM,
        "default_stream": lambda *args, **kwargs: _STREAM,
        "stream": lambda *args, **kwargs: contextlib.nullcontext(),
        "device": lambda *args, **kwargs: contextlib.nullcontext(),
        "memory_stats": lambda *args, **kwargs: {},
        "memory_snapshot": lambda *args, **kwargs: [],
        "mem_get_info": lambda *args, **kwargs: (properties.total_memory, properties.total_memory),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda new_state, *args, **kwargs: torch.set_rng_state(new_state),
        "manual_seed": _seed,
        "manual_seed_all": _seed,
        "initial_seed": torch.initial_seed,
    }
    nothing = "init synchronize empty_cache set_device set_stream ipc_collect"
    for name in f"{nothing} reset_peak_memory_stats reset_max_memory_allocated".split():
        functions[name] = _nothing
    for quantity in ("allocated", "reserved"):
        functions[f"memory_{quantity}"] = lambda *args, **kwargs: 0
        functions[f"max_memory_{quantity}"] = lambda *args, **kwargs: 0
    return functions


def _eager(model: Any = None, **kwargs: Any) -> Any:
    """Takes the place of `torch.compile`, called or used as a decorator with arguments."""
    return (lambda function: function) if model is None else model


def _seed(seed: int) -> None:
    """Seeds the CPU generator, as CUDA's seeding functions would theirs."""
    torch.default_generator.manual_seed(int(seed))


def _adapt_megatron() -> None:
    """Points Megatron's CUDA random states at the CPU generator, and keeps that undisturbed.

    Also makes work what Megatron has on GPUs only: experts that are spread over ranks,
    `--sequence-parallel`, for which it needs the norms of apex or Transformer Engine,
    `--multi-latent-attention`, for which it needs Transformer Engine's attention, and from 0.20 on
    `--mtp-num-layers`, for which it needs classes of Transformer Engine to compare with.
    """

    def norm(make_norm: Any, cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        plain = copy.copy(config)
        plain.sequence_parallel = False
        module = make_norm(cls, plain, *args, **kwargs)
        for parameter in module.parameters():
            # Megatron then sums the gradients over the ranks, each of which has some of the tokens.
            parameter.sequence_parallel = config.sequence_parallel
        return module

    def to_cpu(original: Any, tensor: Any, as_numpy: bool = False, **others: Any) -> Any:
        # Megatron's own leaves a tensor that is there already a tensor, which no collective takes
        # for sizes.
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    hooks: dict[str, Callable[..., Any]] = {
        "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda original, new, *args, **kwargs: torch.set_rng_state(new),
        # It warms up compiled functions with random numbers, as many as a rank has tokens: the
        # model would start from other weights for each context_parallel_size.
        "_warmup_jit_function": _nothing,
        "WrappedTorchNorm.__new__": norm,
        "maybe_move_tensor_to_cpu": to_cpu,
        "is_inference_column_parallel_linear": lambda original, module: False,
    }
    compat.replace(hooks | _taking_latent_heads() | _resuming_adam(), "cpu")


def _taking_latent_heads() -> dict[str, Callable[..., Any]]:
    """Lets Megatron's own attention be built by multi-latent attention.

    What it computes has no need of equal head dims: only its output is given the wrong shape.
    """
    from megatron.core.transformer import multi_latent_attention

    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})

    def built(
        build: Any,
        self: Any,
        *args: Any,
        k_channels: int | None = None,
        v_channels: int | None = None,
        **kwargs: Any,
    ) -> None:
        build(self, *args, **kwargs)
        if v_channels is not None:
            self.hidden_size_per_partition = self.num_attention_heads_per_partition * v_channels

    return {"DotProductAttention.__init__": built}


def _resuming_adam() -> dict[str, Callable[..., Any]]:
    """Lets Megatron's distributed optimizer load a checkpoint into torch's own Adam.

    It was written for those of Apex and Transformer Engine, which need GPUs. torch's Adam counts
    steps in the state of every parameter. Megatron reads the number there, where nothing is before
    the first step; it gives all parameters one tensor with the number, which each of them would
    count up; and of each parameter it looks for the number in the checkpoint, which has none, or
    keeps the one from before.
    """
    from megatron.core.optimizer import distrib_optimizer

    if distrib_optimizer.HAVE_APEX_OR_TE:
        return {}

    def state_dict(save: Any, self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)) and not adam.state:
            for parameter in (p for group in adam.param_groups for p in group["params"]):
                moments = {key: torch.zeros_like(parameter) for key in ("exp_avg", "exp_avg_sq")}
                adam.state[parameter] = {"step": torch.tensor(0.0), **moments}
        return save(self)

    def load_state_dict(load: Any, self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()

    def fill_all_but_step(fill: Any, self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        with torch.no_grad():  # float32 weights are views of the model's
            fill(self, model_param, {**tensors, "step": None})  # None leaves it as it is

    hooks: dict[str, Callable[..., Any]] = {
        "state_dict": state_dict,
        "load_state_dict": load_state_dict,
        "_set_main_param_and_optimizer_states": fill_all_but_step,
    }
    return {f"DistributedOptimizer.{name}": hook for name, hook in hooks.items()}
