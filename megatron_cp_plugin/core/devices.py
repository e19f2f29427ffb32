"""The GPU of a rank."""

import os

import torch

from megatron_cp_plugin.errors import ConfigError


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
