"""The GPU of a rank, and what goes there from the host."""

import os

import torch
from torch import Tensor

from megatron_cp_plugin.errors import ConfigError, ContextParallelError


def take_gpu(instead: str) -> torch.device:
    """Makes the GPU of this rank of the node, or of a lone process, the current one.

    Args: instead: what a user can do without GPUs.

    Raises: ConfigError if there are fewer GPUs than ranks of the node.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < ranks:
        raise ConfigError(f"needs a GPU for each of {ranks} ranks, got {found}: {instead}")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def uploaded(numbers: Tensor, device: torch.device) -> Tensor:
    """Integers of the host as int32 on a device, without waiting for what is queued there.

    They are there for whatever is queued later on the current stream, and for what follows that.

    Raises: ContextParallelError while a CUDA graph is captured: replays would copy them again, from
    memory that is given on by then.
    """
    numbers = numbers.to(torch.int32)
    if device.type != "cuda":
        return numbers.to(device)
    if torch.cuda.is_current_stream_capturing():
        raise ContextParallelError(
            "documents and windows need indices on the GPU before a CUDA graph is captured, got a "
            "mask that is new in the capture: run the same call once before it"
        )
    return numbers.pin_memory().to(device, non_blocking=True)
