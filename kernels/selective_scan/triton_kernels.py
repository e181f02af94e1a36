"""The selective scan in Triton: trees of nodes behind pending records, known tokens, snapshots, folds. See README.md.

A program has all entries of some channels of one row, [LANES, COLUMNS]: channels share no sums. Each entry has a
decay of its own, so that nothing is a product of matrices: these are recurrences in registers, in float32.
"""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import as_stored, finite

LOG2_E = tl.constexpr(1.4426950408889634)  # rates are multiplied by it where they are loaded: powers are of two


@triton.jit
def step(state, b, u, dt, rates):
    """The state [LANES, COLUMNS] behind a token b [LANES], u and dt [COLUMNS]. Rounded alike wherever it is used."""
    return tl.fma(b[:, None], u[None, :], state * tl.exp2(rates * dt[None, :]))


@triton.jit
def advance(
    state, rates, kept_b, kept_u, kept_dt, count, in_lanes, in_columns,
    kept_b_record_stride, kept_u_record_stride, kept_dt_record_stride,
):  # fmt: skip
    """The state behind ``count`` records, one after the other; pointers are blocks of the first record."""
    for j in range(count):
        b = tl.load(kept_b + j * kept_b_record_stride, mask=in_lanes, other=0.0)
        u = tl.load(kept_u + j * kept_u_record_stride, mask=in_columns, other=0.0)
        dt = tl.load(kept_dt + j * kept_dt_record_stride, mask=in_columns, other=0.0)
        state = step(state, b, u, dt, rates)
    return state


@triton.jit(do_not_specialize=["num_nodes", "node_offset"])
def tree_verify(
    c, b, u, dt, rates, out, states, kept_b, kept_u, kept_dt, ancestors, rows, slots, num_pending, folds,
    num_nodes, node_offset,
    c_row_stride, c_node_stride, b_row_stride, b_node_stride, u_row_stride, u_node_stride,
    dt_row_stride, dt_node_stride, out_row_stride, out_node_stride, states_slot_stride, states_lane_stride,
    kept_b_row_stride, kept_b_record_stride, kept_u_row_stride, kept_u_record_stride,
    kept_dt_row_stride, kept_dt_record_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Any tree: the checkpoint is read once and advanced over the pending records, then every node runs its path.

    A node that continues the one before it takes one step; another runs its path from the root again, which costs
    fewer cycles than states of nodes in memory.
    """
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < CHANNELS
    in_state = in_lanes[:, None] & in_columns[None, :]
    out += batch * out_row_stride + columns
    slot, row = tl.load(slots + batch), tl.load(rows + batch)
    if slot == 0:
        for i in range(num_nodes):
            tl.store(out + i * out_node_stride, tl.zeros([COLUMNS], tl.float32), mask=in_columns)
        return

    kept_b += row * kept_b_row_stride + lanes
    kept_u += row * kept_u_row_stride + columns
    kept_dt += row * kept_dt_row_stride + columns
    count = node_offset if num_pending is None else tl.load(num_pending + batch).to(tl.int32)
    of_layer = LOG2_E * tl.load(rates + lanes[:, None] * CHANNELS + columns[None, :], mask=in_state, other=0.0)
    place = states + slot * states_slot_stride + lanes[:, None] * states_lane_stride + columns[None, :]
    root = advance(
        tl.load(place, mask=in_state, other=0.0).to(tl.float32), of_layer, kept_b, kept_u, kept_dt, count,
        in_lanes, in_columns, kept_b_record_stride, kept_u_record_stride, kept_dt_record_stride,
    )  # fmt: skip
    if folds is not None:
        is_folded = (tl.load(folds + batch) != 0) & (count > 0)
        if is_folded:
            stored = as_stored(root, states.dtype.element_ty)
            tl.store(place, stored, mask=in_state)
            root = stored.to(tl.float32)  # as the next verify will read it

    c += batch * c_row_stride + lanes
    b += batch * b_row_stride + lanes
    u += batch * u_row_stride + columns
    dt += batch * dt_row_stride + columns
    ancestors += batch * num_nodes * num_nodes
    is_kept = lanes < tl.where(block == 0, STATE_DIM, 0)  # the first of the programs that hold all of b writes it
    current, previous = root, 0
    for i in range(num_nodes):
        continues = tl.load(ancestors + i * num_nodes + previous) != 0
        first = tl.where(continues, i, 0)
        current = tl.where(continues, current, root)
        for j in range(first, i + 1):
            if tl.load(ancestors + i * num_nodes + j) != 0:
                of_b = tl.load(b + j * b_node_stride, mask=in_lanes, other=0.0)
                of_u = tl.load(u + j * u_node_stride, mask=in_columns, other=0.0)
                of_dt = tl.load(dt + j * dt_node_stride, mask=in_columns, other=0.0)
                current = step(current, of_b, of_u, of_dt, of_layer)
        of_c = tl.load(c + i * c_node_stride, mask=in_lanes, other=0.0)
        tl.store(out + i * out_node_stride, tl.sum(of_c[:, None] * current, 0), mask=in_columns)

        record = node_offset + i
        own_b = tl.load(b + i * b_node_stride, mask=is_kept, other=0.0)
        own_u = tl.load(u + i * u_node_stride, mask=in_columns, other=0.0)
        own_dt = tl.load(dt + i * dt_node_stride, mask=in_columns, other=0.0)
        tl.store(kept_b + record * kept_b_record_stride, finite(own_b), mask=is_kept)
        tl.store(kept_u + record * kept_u_record_stride, finite(own_u), mask=in_columns)
        tl.store(kept_dt + record * kept_dt_record_stride, finite(own_dt), mask=in_columns)
        previous = i


@triton.jit
def recur(
    state, c, b, u, dt, out, rates, length, lanes, columns,
    c_token_stride, b_token_stride, u_token_stride, dt_token_stride, out_token_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, COLUMNS: tl.constexpr, READS: tl.constexpr,
):  # fmt: skip
    """The state behind ``length`` > 0 tokens, one after the other, and the sum of their steps [COLUMNS].

    The next token is loaded while one is computed. Pointers are blocks of the first; outputs are written if ``READS``.
    """
    in_lanes, in_columns = lanes < STATE_DIM, columns < CHANNELS
    of_b = tl.load(b, mask=in_lanes, other=0.0)
    of_u, of_dt = tl.load(u, mask=in_columns, other=0.0), tl.load(dt, mask=in_columns, other=0.0)
    if READS:
        of_c = tl.load(c, mask=in_lanes, other=0.0)
    total = tl.zeros([COLUMNS], tl.float32)
    for t in range(length):
        has_next = t + 1 < length
        next_lanes, next_columns = lanes < tl.where(has_next, STATE_DIM, 0), columns < tl.where(has_next, CHANNELS, 0)
        b += b_token_stride
        u += u_token_stride
        dt += dt_token_stride
        next_b = tl.load(b, mask=next_lanes, other=0.0)
        next_u = tl.load(u, mask=next_columns, other=0.0)
        next_dt = tl.load(dt, mask=next_columns, other=0.0)
        state = step(state, of_b, of_u, of_dt, rates)
        if READS:
            c += c_token_stride
            next_c = tl.load(c, mask=next_lanes, other=0.0)
            tl.store(out + tl.cast(t, tl.int64) * out_token_stride, tl.sum(of_c[:, None] * state, 0), mask=in_columns)
            of_c = next_c
        else:
            total += of_dt
        of_b, of_u, of_dt = next_b, next_u, next_dt
    return state, total


@triton.jit(do_not_specialize=["num_tokens"])
def extend(
    c, b, u, dt, rates, out, states, slots, lengths, num_tokens,
    c_row_stride, c_token_stride, b_row_stride, b_token_stride, u_row_stride, u_token_stride,
    dt_row_stride, dt_token_stride, out_row_stride, out_token_stride, states_slot_stride, states_lane_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Known tokens, one after the other."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < CHANNELS
    out += batch * out_row_stride + columns
    slot = tl.load(slots + batch)
    length = tl.where(slot == 0, 0, tl.load(lengths + batch)).to(tl.int32)
    for t in range(length, num_tokens):
        tl.store(out + tl.cast(t, tl.int64) * out_token_stride, tl.zeros([COLUMNS], tl.float32), mask=in_columns)
    if length == 0:
        return

    in_state = in_lanes[:, None] & in_columns[None, :]
    of_layer = LOG2_E * tl.load(rates + lanes[:, None] * CHANNELS + columns[None, :], mask=in_state, other=0.0)
    place = states + slot * states_slot_stride + lanes[:, None] * states_lane_stride + columns[None, :]
    state, _ = recur(
        tl.load(place, mask=in_state, other=0.0).to(tl.float32),
        c + batch * c_row_stride + lanes, b + batch * b_row_stride + lanes,
        u + batch * u_row_stride + columns, dt + batch * dt_row_stride + columns, out, of_layer, length, lanes, columns,
        c_token_stride, b_token_stride, u_token_stride, dt_token_stride, out_token_stride,
        STATE_DIM, CHANNELS, COLUMNS, True,
    )  # fmt: skip
    tl.store(place, as_stored(state, states.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["num_nodes"])
def tree_verify_snapshots(
    c, b, u, dt, rates, out, state, snapshots, parents, num_nodes,
    c_row_stride, c_node_stride, b_row_stride, b_node_stride, u_row_stride, u_node_stride,
    dt_row_stride, dt_node_stride, out_row_stride, out_node_stride, state_row_stride, state_lane_stride,
    snapshots_row_stride, snapshots_node_stride, snapshots_lane_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The recurrence, node after node; each reads back the snapshot of its parent. ``parents`` None: chains."""
    block, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < CHANNELS
    in_state = in_lanes[:, None] & in_columns[None, :]
    of_layer = LOG2_E * tl.load(rates + lanes[:, None] * CHANNELS + columns[None, :], mask=in_state, other=0.0)
    state += batch * state_row_stride + lanes[:, None] * state_lane_stride + columns[None, :]
    snapshots += batch * snapshots_row_stride + lanes[:, None] * snapshots_lane_stride + columns[None, :]
    c, b = c + batch * c_row_stride + lanes, b + batch * b_row_stride + lanes
    u, dt = u + batch * u_row_stride + columns, dt + batch * dt_row_stride + columns
    out += batch * out_row_stride + columns
    checkpoint = tl.load(state, mask=in_state, other=0.0).to(tl.float32)
    current = checkpoint
    for n in range(num_nodes):
        if parents is not None:
            parent = tl.load(parents + batch * num_nodes + n)
            if parent < 0:
                current = checkpoint
            elif parent != n - 1:
                current = tl.load(snapshots + parent * snapshots_node_stride, mask=in_state, other=0.0)
        of_b = tl.load(b + n * b_node_stride, mask=in_lanes, other=0.0)
        of_u = tl.load(u + n * u_node_stride, mask=in_columns, other=0.0)
        of_dt = tl.load(dt + n * dt_node_stride, mask=in_columns, other=0.0)
        current = step(current, of_b, of_u, of_dt, of_layer)
        tl.store(snapshots + tl.cast(n, tl.int64) * snapshots_node_stride, current, mask=in_state)
        of_c = tl.load(c + n * c_node_stride, mask=in_lanes, other=0.0)
        tl.store(out + n * out_node_stride, tl.sum(of_c[:, None] * current, 0), mask=in_columns)
        tl.debug_barrier()


@triton.jit
def fold(
    state, kept_b, kept_u, kept_dt, rates, num_pending, out,
    state_row_stride, state_lane_stride, kept_b_row_stride, kept_b_record_stride,
    kept_u_row_stride, kept_u_record_stride, kept_dt_row_stride, kept_dt_record_stride,
    rates_row_stride, rates_lane_stride, out_row_stride, out_lane_stride,
    STATE_DIM: tl.constexpr, CHANNELS: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Checkpoints advanced over their pending records, into other memory."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lanes, columns = tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < CHANNELS
    in_state = in_lanes[:, None] & in_columns[None, :]
    count = tl.load(num_pending + row).to(tl.int32)
    of_layer = LOG2_E * tl.load(
        rates + row * rates_row_stride + lanes[:, None] * rates_lane_stride + columns[None, :], mask=in_state, other=0.0
    )
    read = state + row * state_row_stride + lanes[:, None] * state_lane_stride + columns[None, :]
    folded = advance(
        tl.load(read, mask=in_state, other=0.0).to(tl.float32), of_layer,
        kept_b + row * kept_b_row_stride + lanes, kept_u + row * kept_u_row_stride + columns,
        kept_dt + row * kept_dt_row_stride + columns, count, in_lanes, in_columns,
        kept_b_record_stride, kept_u_record_stride, kept_dt_record_stride,
    )  # fmt: skip
    write = out + row * out_row_stride + lanes[:, None] * out_lane_stride + columns[None, :]
    tl.store(write, as_stored(folded, out.dtype.element_ty), mask=in_state)
