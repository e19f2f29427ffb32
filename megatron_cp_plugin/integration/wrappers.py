"""Data-parallel wrappers of models."""

from __future__ import annotations

from typing import Any


def unwrapped(model: Any) -> Any:
    """Opens all wrappers of a model, also the inner one of Megatron-FSDP, which Megatron leaves."""
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.utils import unwrap_model

    model = unwrap_model(model)
    if mcore_fsdp_adapter.HAVE_MEGATRON_FSDP:
        while isinstance(model, mcore_fsdp_adapter.MegatronFSDP):
            model = unwrap_model(model.module)
    return model
