"""Long prompts of the selective scan in Triton: chunks of tokens side by side. See README.md, "On a GPU".

Three launches: the state that each chunk leaves behind one of zeros, states from chunk to chunk, and each chunk again
from the state before it. All is float32, and a decay is that of a sum of steps >= 0: nothing overflows or cancels.
"""

import triton
import triton.language as tl

from specmamba.kernels.selective_scan.triton_kernels import LOG2_E, recur
from specmamba.kernels.state_records.triton_kernels import as_stored


@triton.jit
def chunk_states(
    b, u, dt, rates, local, totals, slots, lengths,
    b_row_stride, b_token_stride, u_row_stride, u_token_stride, dt_row_stride, dt_token_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """What chunks add to a state, ``local`` [B, chunks, M, C], and sums of their steps, ``totals`` [B, chunks, C].

    Of those chunks of a row behind which there is another.
    """
    block, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    length = tl.where(tl.load(slots + batch) == 0, 0, tl.load(lengths + batch)).to(tl.int32)
    first = (chunk * TOKENS).to(tl.int64)
    if first + TOKENS >= length:
        return
    in_state = (lanes < STATE_DIM)[:, None] & (columns < CHANNELS)[None, :]
    of_layer = LOG2_E * tl.load(rates + lanes[:, None] * CHANNELS + columns[None, :], mask=in_state, other=0.0)
    b += batch * b_row_stride + first * b_token_stride + lanes
    u += batch * u_row_stride + first * u_token_stride + columns
    dt += batch * dt_row_stride + first * dt_token_stride + columns
    count = tl.minimum(length - first, TOKENS).to(tl.int32)  # all of them; a loop over a constant would be unrolled
    state, total = recur(
        tl.zeros([LANES, COLUMNS], tl.float32), None, b, u, dt, None, of_layer, count, lanes, columns,
        0, b_token_stride, u_token_stride, dt_token_stride, 0, STATE_DIM, CHANNELS, COLUMNS, False,
    )  # fmt: skip
    tile = batch * tl.num_programs(1) + chunk
    local += tile * (STATE_DIM * CHANNELS) + lanes[:, None] * CHANNELS + columns[None, :]
    tl.store(local, state, mask=in_state)
    tl.store(totals + tile * CHANNELS + columns, total, mask=columns < CHANNELS)


@triton.jit(do_not_specialize=["num_chunks"])
def join_chunks(
    local, totals, before, rates, states, slots, lengths, num_chunks, states_slot_stride, states_lane_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The states ``before`` [B, chunks, M, C] each chunk of a row, one after the other."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    slot = tl.load(slots + batch)
    length = tl.where(slot == 0, 0, tl.load(lengths + batch)).to(tl.int32)
    if length == 0:
        return
    in_columns = columns < CHANNELS
    in_state = (lanes < STATE_DIM)[:, None] & in_columns[None, :]
    own = lanes[:, None] * CHANNELS + columns[None, :]
    of_layer = LOG2_E * tl.load(rates + own, mask=in_state, other=0.0)
    place = states + slot * states_slot_stride + lanes[:, None] * states_lane_stride + columns[None, :]
    state = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    tile = batch * num_chunks
    local += tile * (STATE_DIM * CHANNELS) + own
    before += tile * (STATE_DIM * CHANNELS) + own
    totals += tile * CHANNELS + columns
    tl.store(before, state, mask=in_state)
    num_joined = (length - 1) // TOKENS  # chunks behind which there is another
    has_any = num_joined > 0
    is_lane, is_column = lanes < tl.where(has_any, STATE_DIM, 0), columns < tl.where(has_any, CHANNELS, 0)
    added = tl.load(local, mask=is_lane[:, None] & in_columns[None, :], other=0.0)
    total = tl.load(totals, mask=is_column, other=0.0)
    for i in range(num_joined):
        has_next = i + 1 < num_joined
        is_lane, is_column = lanes < tl.where(has_next, STATE_DIM, 0), columns < tl.where(has_next, CHANNELS, 0)
        local += STATE_DIM * CHANNELS
        before += STATE_DIM * CHANNELS
        totals += CHANNELS
        next_added = tl.load(local, mask=is_lane[:, None] & in_columns[None, :], other=0.0)
        next_total = tl.load(totals, mask=is_column, other=0.0)
        state = tl.fma(state, tl.exp2(of_layer * total[None, :]), added)
        tl.store(before, state, mask=in_state)
        added, total = next_added, next_total


@triton.jit(do_not_specialize=["num_tokens"])
def chunk_outputs(
    c, b, u, dt, rates, out, before, states, slots, lengths, num_tokens,
    c_row_stride, c_token_stride, b_row_stride, b_token_stride, u_row_stride, u_token_stride,
    dt_row_stride, dt_token_stride, out_row_stride, out_token_stride, states_slot_stride, states_lane_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Outputs of each chunk from the state before it; the last one of a row leaves the state behind it."""
    block, chunk, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < CHANNELS
    slot, first = tl.load(slots + batch), (chunk * TOKENS).to(tl.int64)
    length = tl.where(slot == 0, 0, tl.load(lengths + batch))
    count = tl.minimum(tl.maximum(length - first, 0), TOKENS).to(tl.int32)
    out += batch * out_row_stride + first * out_token_stride + columns
    end = tl.minimum(num_tokens - first, TOKENS).to(tl.int32)
    for t in range(count, end):
        tl.store(out + tl.cast(t, tl.int64) * out_token_stride, tl.zeros([COLUMNS], tl.float32), mask=in_columns)
    if count == 0:
        return
    in_state = (lanes < STATE_DIM)[:, None] & in_columns[None, :]
    own = lanes[:, None] * CHANNELS + columns[None, :]
    of_layer = LOG2_E * tl.load(rates + own, mask=in_state, other=0.0)
    before += (batch * tl.num_programs(1) + chunk) * (STATE_DIM * CHANNELS) + own
    state, _ = recur(
        tl.load(before, mask=in_state, other=0.0),
        c + batch * c_row_stride + first * c_token_stride + lanes,
        b + batch * b_row_stride + first * b_token_stride + lanes,
        u + batch * u_row_stride + first * u_token_stride + columns,
        dt + batch * dt_row_stride + first * dt_token_stride + columns, out, of_layer, count, lanes, columns,
        c_token_stride, b_token_stride, u_token_stride, dt_token_stride, out_token_stride,
        STATE_DIM, CHANNELS, COLUMNS, True,
    )  # fmt: skip
    if first + count == length:
        place = states + slot * states_slot_stride + lanes[:, None] * states_lane_stride + columns[None, :]
        tl.store(place, as_stored(state, states.dtype.element_ty), mask=in_state)
