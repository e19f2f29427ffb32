"""Rotary position embeddings of a rank's tokens under the run's layout."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch import Tensor, nn

from megatron_cp_plugin.errors import ContextParallelError
from megatron_cp_plugin.integration.attention import ContextParallelAttention
from megatron_cp_plugin.integration.documents import ALONE, DocumentMask
from megatron_cp_plugin.integration.rules import SPLIT_LATENTS
from megatron_cp_plugin.integration.runtime import Runtime
from megatron_cp_plugin.integration.settings import Settings

# Training and evaluation have one length each; tables of ever new lengths are not kept.
_TABLES = 4


class LayoutRotaryEmbedding(nn.Module):
    """A rotary embedding of Megatron whose table is cut by the layout instead of zigzag.

    Other methods, such as `get_freqs_non_repeated`, are Megatron's.

    Attributes: packed: documents of the running forward pass; None: the runtime's.
    """

    packed: DocumentMask | None = None

    def __init__(
        self,
        embedding: RotaryEmbedding | YarnRotaryEmbedding,
        runtime: Runtime,
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self._runtime = runtime
        self._group = group
        self._tables: dict[tuple[object, ...], Any] = {}

    @property
    def inv_freq(self) -> Tensor:
        """inv_freq of Megatron's embedding; frameworks set their own."""
        return self.embedding.inv_freq

    @inv_freq.setter
    def inv_freq(self, value: Tensor) -> None:
        self.embedding.inv_freq = value
        self._tables.clear()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "embedding":
                raise
            return getattr(self.embedding, name)

    def forward(
        self,
        max_seq_len: int,
        offset: int = 0,
        packed_seq: bool = False,
        cp_group: dist.ProcessGroup | None = None,
    ) -> Tensor | tuple[Tensor, float]:
        """Computes the angles of this rank's tokens.

        Args:
            max_seq_len: Tokens of the whole sequence; with packed documents callers may give the
                length of the longest one.
            offset: Added to every position.
            packed_seq: Must be False; positions are those that came with spans, or count from the
                beginning of each of the runtime's documents.
            cp_group: Must be None or the group of the run.

        Returns: [S,1,1,D]; YaRN: that and its scale.
        """
        if packed_seq or cp_group not in (None, self._group):
            raise ContextParallelError("packed sequences need a model that the plugin serves")
        mask = self._runtime.mask if self.packed is None else self.packed
        max_seq_len = (mask.seq_len if mask else 0) or max_seq_len
        if mask and (mask.starts or mask.spans is not None):
            return self._angles(max_seq_len, offset, mask)
        group = mask.group if mask and mask.group else self._group
        key = (max_seq_len, offset, group)
        if key not in self._tables:
            if len(self._tables) == _TABLES:
                del self._tables[next(iter(self._tables))]
            self._tables[key] = self._angles(max_seq_len, offset, DocumentMask(group=group))
        return self._tables[key]

    def _angles(self, seq_len: int, offset: int, mask: DocumentMask) -> Any:
        documents, given = mask.starts, mask.positions
        if given is not None and len(given) != seq_len:
            raise ContextParallelError(
                f"attention_positions need one for each of the {seq_len} tokens of the whole "
                f"sequence, got {len(given)}: pass those of all ranks"
            )
        whole = self.embedding.get_emb(seq_len, offset)
        angles = whole[0] if isinstance(whole, tuple) else whole
        positions = self._runtime.positions(
            mask.group or self._group, seq_len, angles.device, mask.resolved(seq_len)
        )
        if given is not None:
            positions = given.to(angles.device)[positions]
        elif documents:
            starts = torch.tensor((0, *documents), device=angles.device)
            positions = positions - starts[torch.bucketize(positions, starts, right=True) - 1]
        angles = angles[positions]
        return (angles, *whole[1:]) if isinstance(whole, tuple) else angles

    def get_rotary_seq_len(self, *given: Any, packed_seq_params: Any = None, **more: Any) -> int:
        """Returns the length of the whole sequence, documents or not: those would come fifth."""
        return self.embedding.get_rotary_seq_len(*given[:4], **more)


def set_cos_sin_cache(
    original: Callable[..., None], embedding: YarnRotaryEmbedding, *args: Any, **kwargs: Any
) -> None:
    """Takes the place of YarnRotaryEmbedding's method of this name, which builds a table.

    Megatron cuts the table by its own layout, and fails where the original length of the model is
    no multiple of 2P. Only fused kernels of multi-latent attention read it, which are refused where
    there is something to cut.
    """
    if embedding.cp_group is None or embedding.cp_group.size() == 1:
        original(embedding, *args, **kwargs)


def _takes_positions(embedding: Any) -> bool:
    """Whether angles are computed from position ids, as in Megatron's and Bridge's embeddings for
    images.
    """
    parameters = inspect.signature(embedding.forward).parameters
    return next(iter(parameters), "") == "position_ids" and hasattr(embedding, "cp_group")


def _check_angles(embedding: nn.Module, args: tuple[Any, ...], angles: Any) -> None:
    if isinstance(angles, Tensor) and args and angles.size(0) != args[0].size(-1):
        raise ContextParallelError(
            f"{type(embedding).__name__} needs to return the angles of the {args[0].size(-1)} "
            f"position_ids of a rank, got those of {angles.size(0)}: split none of them there"
        )


def use_layout(model: nn.Module, runtime: Runtime) -> None:
    """Makes the rotary embeddings of a model follow the layout.

    There is none, one for the whole model, or one in each layer of multi-latent attention. Those
    that follow it already stay as they are. One for the whole model that takes position ids gets
    those of the rank's own tokens (`integration.inputs`), and splits nothing.

    Raises: ContextParallelError: One is of another kind; or tensor-parallel ranks split latents.
    """
    owners = [m for m in model.modules() if isinstance(m, MultiLatentAttention)]
    for owner in owners:
        _check_projection(owner)
        # Modules that Megatron captures by itself may have no hooks, and see no documents.
        captured = Settings(owner.config).graphs == "local"
        if not captured and _keep_documents not in owner._forward_pre_hooks.values():
            owner.register_forward_pre_hook(_keep_documents, with_kwargs=True)
    for owner in (model, *owners):
        embedding = getattr(owner, "rotary_pos_emb", None)
        if embedding is None or isinstance(embedding, LayoutRotaryEmbedding):
            continue
        if owner is model and _takes_positions(embedding):
            if embedding.cp_group is not ALONE:  # its positions are those of the rank's own tokens
                embedding.cp_group = ALONE
                embedding.register_forward_hook(_check_angles)
            continue
        if not isinstance(embedding, (RotaryEmbedding, YarnRotaryEmbedding)):
            raise ContextParallelError(
                f"{runtime.config.algo} supports rope, yarn and mrope, got "
                f"{type(embedding).__name__}: use --position-embedding-type rope"
            )
        group: Any = owner.pg_collection
        if owner is not model and group.cp.size() == 1 and not runtime.has_groups:
            # Nothing to cut, and its fused kernels ask the embedding for more than angles.
            continue
        owner.rotary_pos_emb = LayoutRotaryEmbedding(embedding, runtime, group.cp)


def _check_projection(owner: Any) -> None:
    """Refuses ranks that split the projection to latents, as Megatron's own layers do."""
    settings, down = Settings(owner.config), getattr(owner, "linear_kv_down_proj", None)
    if settings.tensor == 1:
        return
    rows = settings.kv_lora_rank + settings.qk_pos_emb_head_dim
    if down is None or down.weight.size(0) < rows:  # Megatron always splits the fused one
        raise ContextParallelError(
            f"{SPLIT_LATENTS}, got one split over {settings.tensor}: use layers of Transformer "
            "Engine without mla_down_proj_fusion, or tensor_model_parallel_size 1"
        )


def _keep_documents(
    owner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hands documents round multi-latent attention, which would drop the dimension of samples."""
    packed = kwargs.get("packed_seq_params")
    core: Any = owner.core_attention
    if not isinstance(core, ContextParallelAttention):
        return args, kwargs
    again = core.runtime.config.recompute_attention and owner.checkpoint_core_attention
    if packed is not None and again:
        raise ContextParallelError(
            "multi-latent attention of packed documents cannot be recomputed alone, got "
            "recompute_modules with core_attn: leave it out, or do not recompute attention"
        )
    for part in (core, getattr(owner, "rotary_pos_emb", None)):
        if isinstance(part, (ContextParallelAttention, LayoutRotaryEmbedding)):
            part.packed = packed
    return args, kwargs | {"packed_seq_params": None}
