"""How a sequence is split among ranks, said once; and all that the functional interface does.

Shapes are in the letters of `functional`; positions and lengths are in tokens.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial, wraps
from operator import index
from typing import Any, NamedTuple, cast
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_cp_plugin import registry
from megatron_cp_plugin.arguments import (
    SpanMask,
    as_numbers,
    check_tensors,
    chosen,
    dimension,
    documents_of,
    fixed_number,
    flag,
    length,
    word,
)
from megatron_cp_plugin.core import layout as layouts
from megatron_cp_plugin.core.agree import Digest, SameCall, content_of
from megatron_cp_plugin.core.autograd.function import (
    Attention,
    cast_inputs,
    check_shapes,
    compiled_call,
)
from megatron_cp_plugin.core.autograd.whole import whole_of
from megatron_cp_plugin.core.call import Shape
from megatron_cp_plugin.core.comm import Topology
from megatron_cp_plugin.core.communication.process_groups import existing, topology_of
from megatron_cp_plugin.core.document_layout import describe_mismatch
from megatron_cp_plugin.core.layout import Documents, Layout, check_cut, remember
from megatron_cp_plugin.core.linear.function import attend_linearly, check_linear_shapes
from megatron_cp_plugin.core.linear.states import Decay
from megatron_cp_plugin.core.tiles import mask_of
from megatron_cp_plugin.errors import ContextParallelError, brief, whole_number
from megatron_cp_plugin.kernels import resolver
from megatron_cp_plugin.kernels.linear import resolve_linear

Group = dist.ProcessGroup | Topology | None


def not_compiled[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """The function as torch.compile leaves it alone: a break between two graphs.

    No part of it could be compiled: it plans in Python, and messages travel while kernels run. Its
    errors have a traceback of the caller's lines alone.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        try:
            return function(*args, **kwargs)
        except ContextParallelError as error:
            raise error.with_traceback(None) from None

    return call


class _Resolved(NamedTuple):
    """A layout for a number of tokens, and the documents or spans that it follows."""

    seq_len: int
    layout: Layout
    documents: Documents


class CallSettings:
    """How sequences are split among the ranks of a group, and the functions on such sequences.

    The methods are the functional interface's. Settings are read within the first call: if one rank
    refuses them, all ranks do.
    """

    _algo: str
    _layout: Layout
    _options: tuple[tuple[str, object], ...]
    _seq_len: int | None
    _cu_seqlens: Sequence[int] | None
    _spans: SpanMask | None
    # Whether tokens must have been split by a context, if nobody says how many there are in all.
    _splits = False
    _last: int | None = None  # tokens of the sequence that was split last
    _found: _Resolved | None = None

    def __init__(
        self,
        algo: str,
        group: "Group | ref[dist.ProcessGroup]",
        seq_len: int | None,
        cu_seqlens: Sequence[int] | Tensor | None,
        spans: SpanMask | None,
        options: Mapping[str, object],
    ) -> None:
        """Args: as of `Context`."""
        self._group = group
        self._unread: tuple[Any, ...] | None = (algo, seq_len, cu_seqlens, spans, options)

    def shard(self, x: Tensor, dim: int = 1) -> Tensor:
        """See `megatron_cp_plugin.shard`."""
        topology = topology_for(self._group)
        check_tensors(x=x)
        self._read()
        dim = dimension(x, dim)
        seq_len = x.shape[dim]
        if self._seq_len not in (None, seq_len):
            raise ContextParallelError(
                f"x needs the {self._seq_len} tokens of the sequence in dimension {dim}, got "
                f"{list(x.shape)}: pass the dimension that has them"
            )
        layout = self._split(topology, seq_len)
        part = layouts.shard(x, dim, layout, topology.rank, topology.size)
        if topology.size > 1:
            remember(part, dim, layout, seq_len, topology.rank, topology.size)
        return part

    def unshard(self, x: Tensor, dim: int = 1) -> Tensor:
        """See `megatron_cp_plugin.unshard`."""
        topology = topology_for(self._group)
        with SameCall(topology, "unshard") as made:
            check_tensors("unshard", x=x)
            self._read()
            dim = dimension(x, dim)
            of_cut = self._layout, self._layout_of, topology.rank, topology.size
            known = topology.size == 1 or check_cut("unshard", dim, *of_cut, {"x": x})
            made.values = {
                **self._shared(made, x.shape[dim], known=known),
                "dim": dim,
                "shape beside tokens": (*x.shape[:dim], -1, *x.shape[dim + 1 :]),
                "dtype": x.dtype,
                "requires_grad": torch.is_grad_enabled() and x.requires_grad,
            }
        seq_len, layout, *_ = self._whole(made, x.shape[dim])
        self._check_length(topology, x.shape[dim], seq_len)
        return whole_of(x, dim, layout, seq_len, topology)

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        causal: bool = True,
        scale: float | None = None,
        kernel: str = "auto",
        window: int | None = None,
        sink: Tensor | None = None,
    ) -> Tensor:
        """See `megatron_cp_plugin.attention`."""
        topology = topology_for(self._group)
        with SameCall(topology, "attention") as made:
            known, q, k, v = self._take(made, q, k, v, sink_or_none=sink)
            causal = causal if isinstance(causal, bool) else flag("causal", causal)
            scale = None if scale is None else fixed_number("scale", scale)
            window = None if window is None else whole_number("window", window)
            check_shapes(q, k, v)
            if self._spans is not None and not causal:
                raise ContextParallelError("spans replace causal=False, got both: leave causal out")
            trained = torch.is_grad_enabled()
            made.values = {
                **self._shared(made, q.shape[1], known=known, q=q),
                **made.values,
                "causal": causal,
                "scale": scale,
                "window": window,
                "kernel": kernel if isinstance(kernel, str) else word("kernel", kernel),
                "sink": None if sink is None else (sink.dtype, *sink.shape),
                "requires_grad of q": trained and q.requires_grad,
                "requires_grad of k or v": trained and (k.requires_grad or v.requires_grad),
            }
        if self._algo != registry.AUTO:
            algorithm = softmax_algorithm(self._algo, topology, self._options)
        seq_len, layout, documents = self._whole(made, q.shape[1])
        if window is not None:
            window = min(window, max(seq_len, 1))  # sys.maxsize is too large to be added to
        mask = mask_of(causal, window, documents)
        if self._algo == registry.AUTO:
            shape = Shape.of(q, k, v, seq_len)
            from megatron_cp_plugin.planner.detected_machine import choose_for

            given = dict(self._options)
            algo, options = choose_for(topology, shape, mask, kernel, given, q.device)
            algorithm = softmax_algorithm(algo, topology, tuple(sorted(options)))
        compiled = compiled_call(algorithm, q, k, v, sink, seq_len, mask, scale, resolver(kernel))
        out: Tensor = Attention.apply(q, k, v, sink, compiled, None)
        if topology.size > 1:
            remember(out, 1, layout, seq_len, topology.rank, topology.size)
        return out

    def linear_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        decay: float | Sequence[float] | Tensor | None = None,
        gate: Tensor | None = None,
        beta: Tensor | None = None,
        causal: bool = True,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        kernel: str = "auto",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """See `megatron_cp_plugin.linear_attention`."""
        topology = topology_for(self._group)
        with SameCall(topology, "linear_attention") as made:
            known, q, k, v = self._take(
                *(made, q, k, v),
                initial_state_or_none=initial_state,
                gate_or_none=gate,
                beta_or_none=beta,
            )
            causal = flag("causal", causal)
            output_final_state = flag("output_final_state", output_final_state)
            check_linear_shapes(q, k, v, gate, beta)
            if self._spans is not None:
                raise ContextParallelError(
                    "linear attention has no spans, got some: leave them out"
                )
            states = max(k.shape[2], v.shape[2])
            rates = None if decay is None else Decay.of(decay, states)
            made.values = {
                **self._shared(made, q.shape[1], known=known, q=q),
                **made.values,
                "causal": causal,
                "kernel": word("kernel", kernel),
                "initial_state": initial_state is not None,
                "output_final_state": output_final_state,
                "gate": None if gate is None else gate.shape[3:],
                "beta": beta is not None,
                "decay": None if rates is None else rates.rates,
            }
        algorithm = linear_algorithm(self._algo, topology, self._options)
        seq_len, layout, documents = self._whole(made, q.shape[1])
        out, final_state = attend_linearly(
            q,
            k,
            v,
            algorithm=algorithm,
            seq_len=seq_len,
            decay=rates,
            gate=gate,
            beta=beta,
            causal=causal,
            kernel_for=partial(resolve_linear, kernel),
            initial_state=initial_state,
            output_final_state=output_final_state,
            documents=cast(tuple[int, ...], documents),
        )
        if topology.size > 1:
            remember(out, 1, layout, seq_len, topology.rank, topology.size)
        return out if final_state is None else (out, final_state)

    def check_layout(self, positions: Tensor) -> None:
        """See `megatron_cp_plugin.check_layout`."""
        topology = topology_for(self._group)
        with SameCall(topology, "check_layout") as made:
            check_tensors(positions=positions)
            self._read()
            tokens = positions.shape[-1] if positions.dim() else 0
            made.values = self._shared(made, tokens, known=True)
        total, layout, *_ = self._whole(made, tokens)
        mine = describe_mismatch(positions, layout, topology.rank, topology.size, total)
        found = topology.gather(mine)
        for rank, mismatch in enumerate(found):
            if mismatch is not None:
                raise ContextParallelError(
                    f"{self._algo} on {topology.size} ranks needs the {layout.name} layout of "
                    f"{total} tokens, got others on rank {rank}: {mismatch}; shard with "
                    f"cp.shard(..., algo={self._algo!r})"
                )

    def _take(
        self, made: SameCall, q: Tensor, k: Tensor, v: Tensor, **others: Tensor | None
    ) -> tuple[bool, Tensor, Tensor, Tensor]:
        """Reads the settings, and notes the properties of q, k and v that all ranks share.

        Args: others: further tensors, see `check_tensors`.

        Returns: whether q, k and v are known to be split so, and they in autocast's dtype.
        """
        check_tensors(made.function, q=q, k=k, v=v, **others)
        self._read()
        rank, size = made.topology.rank, made.topology.size
        of_cut = self._layout, self._layout_of, rank, size
        known = size == 1 or check_cut(made.function, 1, *of_cut, {"q": q, "k": k, "v": v})
        q, k, v = qkv = cast_inputs(q, k, v)
        # Lists in between: generators are a call for each tensor, in every layer.
        made.values = {
            "dtype of q, k, v": tuple([x.dtype for x in qkv]),
            "shape of q, k, v beside tokens": tuple([(*x.shape[:1], *x.shape[2:]) for x in qkv]),
        }
        return known, q, k, v

    def _read(self) -> None:
        """Reads the settings, once."""
        if self._unread is None:
            return
        algo, seq_len, cu_seqlens, spans, options = self._unread
        self._layout = registry.layout_of(algo, options)
        self._algo, self._options = algo, chosen(options) if options else ()
        self._seq_len = None if seq_len is None else length("seq_len", seq_len)
        self._cu_seqlens = None if cu_seqlens is None else as_numbers("cu_seqlens", cu_seqlens)
        self._spans = None if spans is None else as_numbers("spans", spans)
        given = self._cu_seqlens, self._spans
        self._digests = [None if each is None else Digest(each) for each in given]
        self._unread = None

    def _resolved(self, seq_len: int) -> _Resolved:
        """The layout, and what it follows, for a number of tokens in all."""
        if self._found is None or self._found.seq_len != seq_len:
            self._found = _Resolved(seq_len, self._layout, ())
            if self._cu_seqlens is not None or self._spans is not None:
                documents = documents_of(self._cu_seqlens, self._spans, seq_len)
                layout = self._layout.for_documents(documents)
                self._found = _Resolved(seq_len, layout, documents)
        return self._found

    def _layout_of(self, seq_len: int) -> Layout:
        return self._resolved(seq_len).layout

    def _split(self, topology: Topology, seq_len: int) -> Layout:
        """The layout by which `seq_len` tokens are split now."""
        layout = self._layout_of(seq_len)
        self._last = seq_len
        tokens = layout.length(topology.rank, topology.size, seq_len)
        topology.cut.add((layout.name, tokens))
        return layout

    def _shared(
        self, made: SameCall, tokens: int, *, known: bool, q: Tensor | None = None
    ) -> dict[str, object]:
        """What is equal on all ranks which hold the tokens of one layout.

        Args:
            tokens: of this rank.
            known: whether they are known to be split by the layout.
            q: [B,S,H,D]; if nobody knows whether it was split, ranks compare its elements, once for
                a number of tokens.

        Raises: ContextParallelError if the layout cannot give a rank this number of tokens, if no
        sequence so far was split so, or if heads look like tokens.
        """
        topology, seq_len = made.topology, self._seq_len
        made.refusal = self._refusal
        documents, spans = self._digests
        shared: dict[str, object] = {
            "algo": self._algo,
            "options": self._options,
            "seq_len": seq_len,
            "tokens": tokens if seq_len is None else None,
            "cu_seqlens": documents,
            "spans": spans,
        }
        if seq_len is not None:
            self._check_length(topology, tokens, seq_len)
            return shared
        if self._splits and not known and (self._layout.name, tokens) not in topology.cut:
            raise ContextParallelError(
                f"a context needs tokens that were split in its {self._layout.name} layout, got "
                f"{tokens} on rank {topology.rank} of {topology.size}, as of no sequence so far: "
                "split them by its shard or positions, or give it seq_len="
            )
        total = tokens * topology.size
        if q is not None and topology.size > 1 and total < q.shape[2]:
            raise ContextParallelError(
                f"attention takes [B,S,H,D], got {q.shape[2]} heads of {total} tokens in all: "
                f"split x.transpose(1, 2), or pass seq_len={total} if that is right"
            )
        if q is not None and not known and tokens not in topology.held:
            made.content = content_of(q)
        return shared

    def _check_length(self, topology: Topology, tokens: int, seq_len: int) -> None:
        """Raises: ContextParallelError unless this rank holds its part of a sequence."""
        layout, rank, size = self._layout_of(seq_len), topology.rank, topology.size
        if size > 1 and tokens != (expected := layout.length(rank, size, seq_len)):
            raise layouts.unfit(layout, rank, size, seq_len, expected, tokens)

    def _refusal(self, name: str, words: Sequence[str], rank: int) -> str:
        """As of `SameCall`."""
        need, advice = f"all ranks need one {name}", "make the same call on all"
        if name == "seq_len":
            advice = "pass the global length on all"
        if name == "tokens":
            held, size = list(map(int, words)), len(words)
            lengths = [self._layout.length(each, size, sum(held)) for each in range(size)]
            need = "ranks hold unequally many tokens"
            advice = "shard with cp.shard, and pass seq_len="
            advice = f"pass seq_len={sum(held)}" if lengths == held else advice
        return f"{need}, got {words[0]} on rank 0 and {words[rank]} on rank {rank}: {advice}"

    def _whole(self, made: SameCall, tokens: int) -> _Resolved:
        """The global length with its layout and documents, once the ranks agree on their tokens."""
        if self._seq_len is not None:
            return self._resolved(self._seq_len)
        if made.content:
            made.topology.held.add(tokens)
        return self._resolved(tokens * made.topology.size)


class Context(CallSettings):
    """How sequences are split among the ranks of a group: settings that all calls share, said once.

        c = cp.Context(algo="zigzag")
        q, k, v = (c.shard(x) for x in (q, k, v))   # [B,N,H,D] -> [B,S,H,D]
        out = c.attention(q, k, v)
        whole = c.unshard(out)

    The methods are the package's functions of these names, with these settings. A context is cheap:
    for packed documents make one for each batch, which reads them once for all layers. Layers of
    two algorithms have two contexts of one layout.

    Tokens that nobody has split are refused: attention takes tensors of `seq_len` tokens in all; or
    without it, of as many tokens a rank as `shard` or `positions` have made of some sequence, of
    this context or of another one with its group and layout.
    """

    _splits = True

    @not_compiled
    def __init__(
        self,
        *,
        algo: str,
        group: Group = None,
        seq_len: int | None = None,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        spans: SpanMask | None = None,
        **options: object,
    ) -> None:
        """Needs no other ranks.

        Args:
            algo: a name of `available()`, or "auto", see `attention`.
            group: process group of the context-parallel ranks; None: all processes.
            seq_len: N, needed only where ranks hold unequal numbers of tokens; None: the last of
                cu_seqlens, if there are any.
            cu_seqlens, spans: as in `attention`. A tensor on a GPU is copied to the host here.
            options: of the algorithm.

        Raises: ConfigError for an unknown name or option, ContextParallelError for a group that
        does not exist and for documents that are none.
        """
        topology_for(group)
        # Referred to weakly, see `existing`: contexts are kept as long as models.
        weak = ref(group) if isinstance(group, dist.ProcessGroup) else group
        super().__init__(algo, weak, seq_len, cu_seqlens, spans, options)
        self._read()
        if self._cu_seqlens is not None and self._seq_len is None:
            self._seq_len = 0  # which documents that are none do not fit
            with suppress(TypeError, IndexError):
                self._seq_len = length("seq_len", index(self._cu_seqlens[-1]))
        if self._seq_len is not None:
            self._resolved(self._seq_len)

    def __deepcopy__(self, memo: dict[int, object]) -> "Context":
        """Modules that hold it may be copied; process groups may not."""
        return self

    @not_compiled
    def positions(
        self, seq_len: int | None = None, *, device: torch.device | str | None = None
    ) -> Tensor:
        """Positions in the whole sequence of the tokens that this rank holds, in its local order.

        They count through all documents: for rotary embeddings, and for programs that split
        tokens themselves.

        Args: seq_len: N; None: the context's, or the length of the tensor that it split last.

        Returns: int64 [S]. Raises: ContextParallelError if N is not known.
        """
        topology, known = topology_for(self._group), self._seq_len
        seq_len = length("seq_len", seq_len)
        if seq_len is None:
            seq_len = self._last if known is None else known
        if seq_len is None or known not in (None, seq_len):
            raise ContextParallelError(
                f"positions need the length of the sequence, {known or 'which is not known'}, got "
                f"{seq_len}: pass seq_len= to the context or to positions"
            )
        layout = self._split(topology, seq_len)
        return layouts.positions(layout, topology.rank, topology.size, seq_len, device or "cpu")

    shard = not_compiled(CallSettings.shard)
    unshard = not_compiled(CallSettings.unshard)
    attention = not_compiled(CallSettings.attention)
    linear_attention = not_compiled(CallSettings.linear_attention)
    check_layout = not_compiled(CallSettings.check_layout)


def topology_for(group: "Group | ref[dist.ProcessGroup]") -> Topology:
    """The ranks of a group. Raises: ContextParallelError if it does not exist."""
    if isinstance(group, Topology):
        return group
    if isinstance(group, ref):
        group = existing(group)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        raise ContextParallelError(
            f"group needs a process group that this rank is in, got {brief(group)}: of a "
            "DeviceMesh pass get_group(), and call on the group's ranks alone"
        )
    topology = topology_of(group)
    if group is None and topology.size == 1 and not dist.is_initialized():
        processes = os.environ.get("WORLD_SIZE", "1")
        if processes != "1":
            raise ContextParallelError(
                f"{processes} processes (WORLD_SIZE) need a process group to split a sequence, got "
                "none: call torch.distributed.init_process_group first, or pass group="
            )
    return topology


# As in the registry, made once for all calls; options are tuples of pairs.
softmax_algorithm = lru_cache(maxsize=256)(registry.create)
linear_algorithm = lru_cache(maxsize=256)(registry.create_linear)
