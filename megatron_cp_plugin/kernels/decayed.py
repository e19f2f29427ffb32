"""Triton kernels for states: their effect on the tokens after them, the effect of runs of tokens on
them, and their passage through runs.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_cp_plugin.core.communication.devices import kept_on_device, uploaded
from megatron_cp_plugin.core.linear.states import Interval

_TOKENS = 64
_TILES = 16
_WIDTH = 64  # columns of a state that one program of `run_states` has
_FEW_RUNS = 64  # products of 64 transitions are right to 1e-5 with a sum in tensor cores
_WIDEST = 128  # a transition of this head dim fits in shared memory


@triton.jit(do_not_specialize=["longest", "batch", "tokens"])
def _add_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    x_ptr,
    state_ptr,
    log2_rate_ptr,
    interval_ptr,
    longest,
    batch,
    tokens,
    heads,
    x_dim,
    out_dim,
    TILES: tl.constexpr,
    TOKENS: tl.constexpr,
    X_DIM: tl.constexpr,
    OUT_DIM: tl.constexpr,
):
    # Of a grid's dimensions only the first takes more than 65535.
    parts = tl.cdiv(longest, TILES * TOKENS)
    first = tl.program_id(0) % parts * TILES * TOKENS
    sequence = (tl.program_id(0) // parts).to(tl.int64)
    head = sequence % heads
    entry = sequence // heads % batch
    interval = sequence // heads // batch
    start = tl.load(interval_ptr + 2 * interval).to(tl.int64)
    count = tl.load(interval_ptr + 2 * interval + 1) - start
    log2_rate = tl.load(log2_rate_ptr + head)
    # Behind some distance of a decaying head nothing is left to add.
    if tl.exp2(log2_rate * (first + 1)) > 0:
        in_column = tl.arange(0, X_DIM)
        in_live = in_column < x_dim
        column = tl.program_id(1) * OUT_DIM + tl.arange(0, OUT_DIM)
        live = column < out_dim
        state_at = (sequence * x_dim + in_column[:, None]) * out_dim + column[None, :]
        state = tl.load(state_ptr + state_at, in_live[:, None] & live[None, :], 0.0)
        state = state.to(x_ptr.dtype.element_ty)
        for tile in tl.range(TILES, num_stages=2):
            token = first + tile * TOKENS + tl.arange(0, TOKENS)
            inside = (token < count)[:, None]
            row = (entry * tokens + start + token) * heads + head
            x_at = row[:, None] * x_dim + in_column[None, :]
            x = tl.load(x_ptr + x_at, inside & in_live[None, :], 0.0)
            added = tl.dot(x, state) * tl.exp2(log2_rate * (token + 1))[:, None]
            out_at = row[:, None] * out_dim + column[None, :]
            out_inside = inside & live[None, :]
            out = tl.load(out_ptr + out_at, out_inside, 0.0).to(tl.float32) + added
            tl.store(out_ptr + out_at, out.to(out_ptr.dtype.element_ty), out_inside)


def add_decayed_(
    out: Tensor, x: Tensor, states: Tensor, log2_rates: Tensor, intervals: Sequence[Interval]
) -> None:
    """out_t += rate**t * state^T x_t in place, for tokens t = 1, 2, ... of an interval that begins
    with the state; summed in float32.

    Args: out: [B,S,H,E], x: [B,S,H,D] bfloat16; states: [n,B,H,D,E] float32; log2_rates: [H]
        float32; intervals: local tokens (start, stop) for each of n; tensors are contiguous.
    """
    batch, tokens, heads, x_dim = x.shape
    out_dim = out.shape[3]
    columns = min(128, _power_of_two(out_dim))
    longest = max([stop - start for start, stop in intervals])
    # Triton's own functions of integers take longer on the host.
    grid = (
        -(-longest // (_TILES * _TOKENS)) * len(intervals) * batch * heads,
        -(-out_dim // columns),
    )
    _add_kernel[grid](
        out,
        x,
        states.contiguous(),
        log2_rates,
        _intervals_on(tuple(intervals), x.device),
        longest,
        batch,
        tokens,
        heads,
        x_dim,
        out_dim,
        TILES=_TILES,
        TOKENS=_TOKENS,
        X_DIM=_power_of_two(x_dim),
        OUT_DIM=columns,
        num_warps=8,
    )


@triton.jit
def _product(x, y, exact):  # type: ignore[no-untyped-def]
    # Long products of transitions keep 16 bits: y in two parts of x's precision.
    high = y.to(x.dtype)
    found = tl.dot(x, high)
    if exact:
        found += tl.dot(x, (y - high.to(tl.float32)).to(x.dtype))
    return found


@triton.jit(do_not_specialize=["heads"])
def _run_kernel(  # type: ignore[no-untyped-def]
    added_ptr,
    through_ptr,
    read_ptr,
    written_ptr,
    value_ptr,
    query_ptr,
    dout_ptr,
    sum_ptr,
    bound_ptr,
    which_ptr,
    heads,
    dim: tl.constexpr,
    value_dim: tl.constexpr,
    OF_CHANNELS: tl.constexpr,
    BACK: tl.constexpr,
    CHUNK: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # S <- T S + written^T (values - read S); of gradients, on the way back,
    # S <- T S + queries^T dout - written^T (values + read S); values are 0 for transitions.
    head = (tl.program_id(0) % heads).to(tl.int64)
    place = (tl.program_id(0) // heads).to(tl.int64)
    number = tl.load(which_ptr + place)
    start = tl.load(bound_ptr + number).to(tl.int64)
    count = tl.load(bound_ptr + number + 1) - start.to(tl.int32)
    of_values = tl.cdiv(value_dim, WIDTH)
    is_value = tl.program_id(1) < of_values
    row = tl.arange(0, DIM)
    in_row = row < dim
    column = tl.program_id(1) % of_values * WIDTH + tl.arange(0, WIDTH)
    if not is_value:
        column = (tl.program_id(1) - of_values) * WIDTH + tl.arange(0, WIDTH)
    state = tl.zeros([DIM, WIDTH], dtype=tl.float32)
    if not is_value:
        state += tl.where(row[:, None] == column[None, :], 1.0, 0.0)
    in_value = column < tl.where(is_value, value_dim, 0)
    chunks = tl.cdiv(count, CHUNK)
    for turn in range(chunks):
        chunk = chunks - 1 - turn if BACK else turn
        token = chunk * CHUNK + tl.arange(0, CHUNK)
        inside = token < count
        last = start + tl.minimum((chunk + 1) * CHUNK, count) - 1
        at = (start + token) * heads + head
        tile = at[:, None] * dim + row[None, :]
        in_tile = inside[:, None] & in_row[None, :]
        of_value = at[:, None] * value_dim + column[None, :]
        in_values = inside[:, None] & in_value[None, :]
        read = tl.load(read_ptr + tile, in_tile, 0.0)
        written = tl.load(written_ptr + tile, in_tile, 0.0)
        value = tl.load(value_ptr + of_value, in_values, 0.0).to(tl.float32)
        seen = _product(read, state, not is_value)
        if OF_CHANNELS:
            kept = tl.exp2(tl.load(sum_ptr + (last * heads + head) * dim + row, in_row, 0.0))
            kept = kept[:, None]
        else:
            whole = tl.load(sum_ptr + last * heads + head)
            sums = tl.load(sum_ptr + at, inside, 0.0)
            left = tl.where(inside, tl.exp2(whole - sums), 0.0)[:, None]
            kept = tl.exp2(whole)
        if BACK:
            if not OF_CHANNELS:
                seen *= left
            query = tl.load(query_ptr + tile, in_tile, 0.0)
            dout = tl.load(dout_ptr + of_value, in_values, 0.0)
            if not OF_CHANNELS:
                dout = (dout * tl.exp2(sums)[:, None]).to(query.dtype)
            state = state * kept + tl.dot(tl.trans(query), dout)
            state -= _product(tl.trans(written), value + seen, not is_value)
        else:
            rest = value - seen
            if not OF_CHANNELS:
                rest *= left
            state = state * kept + _product(tl.trans(written), rest, not is_value)
    found = place * heads + head
    at = (found * dim + row[:, None]) * value_dim + column[None, :]
    tl.store(added_ptr + at, state, in_row[:, None] & in_value[None, :])
    if not BACK:
        at = (found * dim + row[:, None]) * dim + column[None, :]
        in_matrix = column < tl.where(is_value, 0, dim)
        tl.store(through_ptr + at, state, in_row[:, None] & in_matrix[None, :])


def run_states(
    read: Tensor,
    written: Tensor,
    values: Tensor,
    sums: Tensor,
    bounds: Tensor,
    which: Tensor,
    back: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Effect of runs of the delta rule on the state, or on its gradient on the way back.

    In chunks of 64 tokens, of the WY form (see kernels/chunked.py). States are float32 and are
    multiplied in bfloat16, as fla's; transitions in two bfloat16 parts.

    Args:
        read: W, written: keys as they are in the state [1,T,H,D] (on the way back the other way
            round); values: U, or its gradient [1,T,H,E]; sums: of gates in chunks, to base 2,
            float32 [1,T,H], or [1,T,H,D] where they are in read and written.
        bounds: of runs [m+1] int32.
        which: numbers of the runs to compute [n] int32.
        back: queries as they read the state [1,T,H,D] and gradients of outputs [1,T,H,E].

    Returns: added states [n,H,D,E], and transitions [n,H,D,D] (None on the way back); float32.
    """
    *_, heads, dim = read.shape
    value_dim = values.shape[3]
    added = read.new_empty(len(which), heads, dim, value_dim, dtype=torch.float32)
    through = None
    if back is None:
        through = read.new_empty(len(which), heads, dim, dim, dtype=torch.float32)
    width = min(_WIDTH, _power_of_two(max(dim, value_dim)))
    columns = -(-value_dim // width) + (0 if through is None else -(-dim // width))
    queries, dout = back or (None, None)
    _run_kernel[len(which) * heads, columns](
        added,
        through,
        read,
        written,
        values,
        queries,
        dout,
        sums,
        bounds,
        which,
        heads,
        dim,
        value_dim,
        OF_CHANNELS=sums.dim() == 4,
        BACK=back is not None,
        CHUNK=_TOKENS,
        DIM=_power_of_two(dim),
        WIDTH=width,
        num_warps=4,
        num_stages=2,
    )
    return added, through


@triton.jit
def _rounded_to_tf32(x):  # type: ignore[no-untyped-def]
    """float32 with a mantissa of 10 bits, the nearest."""
    return ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)


@triton.jit
def _pass_kernel(  # type: ignore[no-untyped-def]
    found_ptr,
    added,
    through,
    first_ptr,
    ways,
    sizes,
    MATRIX: tl.constexpr,
    LONG: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):
    added_ptr, added_run, added_head = added
    through_ptr, through_run, through_head, through_row, through_column = through
    bound_ptr, order_ptr, begins_ptr = ways
    heads, dim, width = sizes  # heads of all batch entries
    head = (tl.program_id(0) % heads).to(tl.int64)
    way = tl.program_id(0) // heads
    row = tl.arange(0, DIM)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    at = row[:, None] * width + column[None, :]
    inside = (row < dim)[:, None] & (column < width)[None, :]
    matrix_at = row[:, None] * through_row + row[None, :] * through_column
    in_matrix = (row < dim)[:, None] & (row < dim)[None, :]
    state = tl.zeros([DIM, WIDTH], dtype=tl.float32)
    if first_ptr is not None:
        begin = tl.load(begins_ptr + way).to(tl.int64)
        if begin >= 0:
            of_begin = first_ptr + (begin * heads + head) * dim * width
            state = tl.load(of_begin + at, inside, 0.0)
    for number in range(tl.load(bound_ptr + way), tl.load(bound_ptr + way + 1)):
        run = tl.load(order_ptr + number).to(tl.int64)
        of_run = through_ptr + run * through_run + head * through_head
        more = tl.load(added_ptr + run * added_run + head * added_head + at, inside, 0.0)
        if MATRIX:
            matrix = tl.load(of_run + matrix_at, in_matrix, 0.0)
            # In three parts, rounded: Triton's own tf32x3 cuts off, which adds up over many runs.
            high, of_state = _rounded_to_tf32(matrix), _rounded_to_tf32(state)
            low = tl.dot(matrix - high, of_state, input_precision="tf32")
            low = tl.dot(high, state - of_state, low, input_precision="tf32")
            if LONG:  # Sums in tensor cores are cut off too: there are two shorter ones.
                front = row[None, :] < DIM // 2
                low = tl.dot(tl.where(front, 0.0, high), of_state, low, input_precision="tf32")
                front_high = tl.where(front, high, 0.0)
                state = tl.dot(front_high, of_state, input_precision="tf32") + low + more
            else:
                state = tl.dot(high, of_state, low, input_precision="tf32") + more
        else:
            log = tl.load(of_run + row * through_row, row < dim, 0.0)
            state = tl.exp(log)[:, None] * state + more
    found = found_ptr + (way.to(tl.int64) * heads + head) * dim * width
    tl.store(found + at, state, inside)


def passed_along(
    added: Tensor,
    through: Tensor,
    first: Tensor | None,
    bounds: Tensor,
    order: Tensor,
    begins: Tensor,
) -> Tensor | None:
    """States after ways, each a list of runs passed in turn: S <- T S + added; None: not supported.

    Products of matrices in three TF32 parts, for head dims up to 128.

    Args:
        added: [M,B,H,D,E] of all runs, with heads of B next to each other; float32, in rows of D*E.
        through: T [M,B,H,D,D], or logarithms of its diagonal [M,B,H,1] or [M,B,H,D].
        first: [F,B,H,D,E]; None: 0.
        bounds: of the ways in order [n+1].
        order: numbers of runs.
        begins: index into `first` of each way's initial state, -1 for 0 [n]; int32.

    Returns: [n,B,H,D,E] float32.
    """
    _, batch, heads, dim, width = added.shape
    is_matrix = through.dim() == added.dim()
    if is_matrix and dim > _WIDEST:
        return None
    found = added.new_empty(len(begins), batch, heads, dim, width)
    columns = min(32, _power_of_two(width))
    by_run, _, by_head, by_row, *by_column = through.stride()
    by_row = by_row if through.shape[3] > 1 else 0
    _pass_kernel[len(begins) * batch * heads, -(-width // columns)](
        found,
        (added, added.stride(0), added.stride(2)),
        (through, by_run, by_head, by_row, by_column[0] if is_matrix else 0),
        None if first is None else first.contiguous(),
        (bounds, order, begins),
        (batch * heads, dim, width),
        MATRIX=is_matrix,
        LONG=len(added) > _FEW_RUNS,
        DIM=_power_of_two(dim),
        WIDTH=columns,
        num_warps=8,
        num_stages=2,
    )
    return found


def _power_of_two(dim: int) -> int:
    """The next one, of 16 or more."""
    return 1 << max(4, (dim - 1).bit_length())


@kept_on_device(maxsize=64)  # of some micro-batches
def _intervals_on(intervals: tuple[Interval, ...], device: torch.device) -> Tensor:
    """[n,2] int32."""
    return uploaded(torch.tensor(intervals, device="cpu"), device)
