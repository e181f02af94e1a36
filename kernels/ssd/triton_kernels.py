"""State space duality in Triton: tree verification from records, chunks of known tokens, snapshots. See README.md.

Every program has one head of one row, and a block of its P columns: programs share no sums. All arithmetic is
float32; states are read and written in the pool's dtype. Loops take LANES of a state's rows at a time, and RECORDS
records or nodes: a float32 product holds its operands in registers, and so must not be deep.
"""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import (
    add_ahead,
    add_one_by_one,
    add_product,
    add_sums,
    decay_behind,
    decays_to_last,
    finite,
    path_decay,
)


@triton.jit
def _vectors(base, index, stride, lanes, num_vectors, num_lanes):
    """[I, D]: contiguous vectors of ``num_lanes``, one per index, float32; 0 outside."""
    mask = (index < num_vectors)[:, None] & (lanes < num_lanes)[None, :]
    return tl.load(base + index.to(tl.int64)[:, None] * stride + lanes[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _flaw(x):
    """0 where x is finite, else NaN."""
    return tl.where(tl.abs(x) < float("inf"), 0.0, float("nan"))


@triton.jit
def _as_stored(state, dtype: tl.constexpr):
    """A float32 state as slots keep it: float16 ends at 65504, and no state may become infinite by being stored."""
    if dtype == tl.float16:
        state = tl.where(state > 65504.0, 65504.0, tl.where(state < -65504.0, -65504.0, state))
    return state.to(dtype)


@triton.jit
def _row_of(batch, rows):
    if rows is None:
        return batch
    else:
        return tl.load(rows + batch)


@triton.jit
def _pending_of(batch, num_pending, node_offset, folds):
    """How many records are pending, and whether they go into the checkpoint now."""
    if num_pending is None:
        pending = node_offset.to(tl.int32)
    else:
        pending = tl.load(num_pending + batch).to(tl.int32)
    if folds is None:
        is_folding = False  # known to the compiler: code for folds is left out
    else:
        is_folding = tl.load(folds + batch) != 0
    return pending, is_folding


@triton.jit
def _advance(
    state, kept_b, kept_u, kept_decay, pending, last_decay, lanes, columns,
    kept_b_record_stride, kept_u_record_stride, kept_decay_record_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Some lanes of a state [S, P] advanced over its pending records."""
    state *= tl.exp(last_decay)
    behind = 0.0
    for block in range(tl.cdiv(pending, RECORDS)):
        j, to_last, behind = decays_to_last(kept_decay, pending, kept_decay_record_stride, block, behind, RECORDS)
        b = _vectors(kept_b, j, kept_b_record_stride, lanes, pending, STATE_DIM)
        u = _vectors(kept_u, j, kept_u_record_stride, columns, pending, HEAD_DIM)
        state += tl.dot(tl.trans(b), u * tl.exp(to_last)[:, None], input_precision="ieee")
    return state


@triton.jit
def _sees(ancestors, i, j, num_nodes):
    """[I, J]: whether node j is on the path to node i."""
    in_tree = (i < num_nodes)[:, None] & (j < num_nodes)[None, :]
    return tl.load(ancestors + i[:, None] * num_nodes + j[None, :], mask=in_tree, other=0) != 0


@triton.jit
def _log_decay(ancestors, g, g_node_stride, i, num_nodes, NODES: tl.constexpr):
    """Log decay of the paths from the root to nodes i, [I]."""
    j = tl.arange(0, NODES)
    of_nodes = tl.load(g + j * g_node_stride, mask=j < num_nodes, other=0.0)
    return tl.sum(tl.where(_sees(ancestors, i, j, num_nodes), finite(of_nodes)[None, :], 0.0), axis=1)


@triton.jit
def _decay_between(
    ancestors, g, g_node_stride, i, j, num_nodes, NODES: tl.constexpr, RECORDS: tl.constexpr, PARTS: tl.constexpr
):
    """Decay from node j to node i that sees it, else 0: [I, J], of RECORDS nodes j.

    What lies between the two is summed up, and is no difference of sums from the root on: behind a strong decay these
    have lost the digits of weak ones.
    """
    between = tl.zeros([NODES, RECORDS], tl.float32)
    for first in range(0, num_nodes, RECORDS):
        n = first + tl.arange(0, RECORDS)
        own = finite(tl.load(g + n * g_node_stride, mask=n < num_nodes, other=0.0))
        is_behind = _sees(ancestors, n, j, num_nodes) & (n[:, None] != j[None, :])
        on_path = tl.where(_sees(ancestors, i, n, num_nodes), own[None, :], 0.0)
        between = add_sums(between, on_path, is_behind, PARTS)
    return tl.where(_sees(ancestors, i, j, num_nodes), tl.exp(between), 0.0)


@triton.jit
def _scores(
    products, sees, c, i, c_node_stride, num_nodes, b, j, b_node_stride,
    STATE_DIM: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, RECORDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Products of C of nodes i with B of nodes j, [I, J], and NaN for each j that is not finite, [J].

    ``products``: where they are found, NaN already for such j; [I, 1] of node 0. None: they are made.
    """
    scores, flaws = tl.zeros([NODES, RECORDS], tl.float32), tl.zeros([RECORDS], tl.float32)
    if products is None:
        for first_again in range(0, STATE_DIM, LANES):
            lanes = first_again + tl.arange(0, LANES)
            of_c = _vectors(c, i, c_node_stride, lanes, num_nodes, STATE_DIM)
            of_b = _vectors(b, j, b_node_stride, lanes, num_nodes, STATE_DIM)
            flaws += tl.sum(_flaw(of_b), axis=1)
            scores = add_product(scores, of_c, tl.trans(finite(of_b)), PARTS)
    else:
        scores = tl.load(products + j[None, :], mask=sees, other=0.0)
    return scores, flaws


@triton.jit
def _scores_of_records(
    products, c, i, c_node_stride, num_nodes, kept_b, j, kept_b_record_stride, pending,
    STATE_DIM: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, RECORDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Products of C of nodes i with B of pending records j, [I, J], found or made; records are finite."""
    scores = tl.zeros([NODES, RECORDS], tl.float32)
    if products is None:
        for first_of_records in range(0, STATE_DIM, LANES):
            lanes = first_of_records + tl.arange(0, LANES)
            of_c = _vectors(c, i, c_node_stride, lanes, num_nodes, STATE_DIM)
            of_b = _vectors(kept_b, j, kept_b_record_stride, lanes, pending, STATE_DIM)
            scores = add_product(scores, of_c, tl.trans(of_b), PARTS)
    else:
        is_pending = (i < num_nodes)[:, None] & (j < pending)[None, :]
        scores = tl.load(products + NODES + j[None, :], mask=is_pending, other=0.0)
    return scores


@triton.jit
def _keep(
    b, b_node_stride, kept_b, kept_b_record_stride, i, node_offset, num_nodes,
    STATE_DIM: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Store B of nodes i in their records."""
    for first_kept in range(0, STATE_DIM, LANES):
        lanes = first_kept + tl.arange(0, LANES)
        of_b = finite(_vectors(b, i, b_node_stride, lanes, num_nodes, STATE_DIM))
        in_record = (i < num_nodes)[:, None] & (lanes < STATE_DIM)[None, :]
        place = kept_b + (node_offset + i).to(tl.int64)[:, None] * kept_b_record_stride + lanes[None, :]
        tl.store(place, of_b, mask=in_record)


@triton.jit(do_not_specialize=["node_offset", "num_nodes", "g_batch_stride"])
def tree_verify(
    c, b, u, g, out, states, kept_b, kept_u, kept_decay, ancestors, products, rows, slots, num_pending, folds,
    node_offset, num_nodes, heads_per_group,
    c_batch_stride, c_node_stride, c_group_stride, b_batch_stride, b_node_stride, b_group_stride,
    u_batch_stride, u_node_stride, u_head_stride, g_batch_stride, g_node_stride, out_batch_stride, out_node_stride,
    states_slot_stride, states_head_stride, states_lane_stride,
    kept_b_row_stride, kept_b_record_stride, kept_b_group_stride,
    kept_u_row_stride, kept_u_record_stride, kept_u_head_stride, kept_decay_row_stride, kept_decay_record_stride,
    products_node_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    NODES: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, RECORDS: tl.constexpr,
    PARTS: tl.constexpr,  # of products: see ``product``
):  # fmt: skip
    """Up to NODES nodes at once, every sum a matrix product; ``rows`` and ``slots`` None: those of the batch itself.

    ``products`` None: those of C and B are made here, and nodes' B are left in their records; else both is done.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, i, columns = head // heads_per_group, tl.arange(0, NODES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < HEAD_DIM
    in_out = (i < num_nodes)[:, None] & in_columns[None, :]
    slot, row = _row_of(batch, slots), _row_of(batch, rows)
    is_padding = slot == 0 if slots is not None else False
    if is_padding:
        # not as at the end: the same addresses would be kept in registers up to there
        out += batch * out_batch_stride + head * HEAD_DIM
        zeros = tl.zeros([NODES, COLUMNS], tl.float32)
        tl.store(out + (i[:, None] * out_node_stride + columns[None, :]), zeros, mask=in_out)
        return

    states += slot * states_slot_stride + head * states_head_stride
    kept_b += row * kept_b_row_stride + group * kept_b_group_stride
    kept_u += row * kept_u_row_stride + head * kept_u_head_stride
    kept_decay += row * kept_decay_row_stride + head
    c, b = c + batch * c_batch_stride + group * c_group_stride, b + batch * b_batch_stride + group * b_group_stride
    u, g = u + batch * u_batch_stride + head * u_head_stride, g + batch * g_batch_stride + head
    ancestors += batch * num_nodes * num_nodes
    pending, is_folding = _pending_of(batch, num_pending, node_offset, folds)
    last_decay = path_decay(kept_decay, pending, kept_decay_record_stride, RECORDS)

    total = tl.zeros([NODES, COLUMNS], tl.float32)
    for first in range(0, STATE_DIM, LANES):
        lanes = first + tl.arange(0, LANES)
        in_state = (lanes < STATE_DIM)[:, None] & in_columns[None, :]
        place = states + lanes.to(tl.int64)[:, None] * states_lane_stride + tl.max_contiguous(columns, 4)[None, :]
        state = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
        if is_folding:
            if PARTS == "none":
                state = _advance(
                    state, kept_b, kept_u, kept_decay, pending, last_decay, lanes, columns,
                    kept_b_record_stride, kept_u_record_stride, kept_decay_record_stride, STATE_DIM, HEAD_DIM, RECORDS,
                )  # fmt: skip
            else:  # exact too, and without the registers of such a product
                state = add_one_by_one(
                    state * tl.exp(last_decay), kept_b, kept_u, kept_decay, pending, lanes, columns,
                    lanes < STATE_DIM, in_columns,
                    kept_b_record_stride, kept_u_record_stride, kept_decay_record_stride,
                )  # fmt: skip
            stored = _as_stored(state, states.dtype.element_ty)
            tl.store(place, stored, mask=in_state)
            state = stored.to(tl.float32)
        of_c = _vectors(c, i, c_node_stride, lanes, num_nodes, STATE_DIM)
        total = add_product(total, of_c, state, PARTS)
    decay = _log_decay(ancestors, g, g_node_stride, i, num_nodes, NODES)  # from the pending records on
    total *= tl.exp(decay + tl.where(is_folding, 0.0, last_decay))[:, None]

    if products is not None:
        num_groups = tl.num_programs(1) // heads_per_group
        products += (batch * num_groups + group) * (NODES * products_node_stride) + i[:, None] * products_node_stride
    for start in range(0, num_nodes, RECORDS):
        j = start + tl.arange(0, RECORDS)
        own = tl.load(g + j * g_node_stride, mask=j < num_nodes, other=0.0)
        of_u = _vectors(u, j, u_node_stride, columns, num_nodes, HEAD_DIM)
        between = _decay_between(ancestors, g, g_node_stride, i, j, num_nodes, NODES, RECORDS, PARTS)
        is_seen = _sees(ancestors, i, j, num_nodes)
        scores, flaws = _scores(
            products, is_seen, c, i, c_node_stride, num_nodes, b, j, b_node_stride,
            STATE_DIM, NODES, LANES, RECORDS, PARTS,
        )  # fmt: skip
        flaws += tl.sum(_flaw(of_u), axis=1) + _flaw(own)
        of_u = finite(of_u)
        weights = scores * between + tl.where(is_seen, flaws[None, :], 0.0)
        total = add_product(total, weights, of_u, PARTS)

        record = (node_offset + j).to(tl.int64)
        in_record = (j < num_nodes)[:, None] & in_columns[None, :]
        tl.store(kept_u + record[:, None] * kept_u_record_stride + columns[None, :], of_u, mask=in_record)
        if block == 0:
            tl.store(kept_decay + record * kept_decay_record_stride, finite(own), mask=j < num_nodes)
    is_keeping = (block == 0) & (head % heads_per_group == 0) if products is None else False
    if is_keeping:
        _keep(b, b_node_stride, kept_b, kept_b_record_stride, i, node_offset, num_nodes, STATE_DIM, LANES)

    behind = 0.0
    num_beside = tl.where(is_folding, 0, pending)  # records that are read beside the state
    for part in range(tl.cdiv(num_beside, RECORDS)):
        j, to_last, behind = decays_to_last(kept_decay, pending, kept_decay_record_stride, part, behind, RECORDS)
        between = tl.exp(decay[:, None] + to_last[None, :])
        of_u = _vectors(kept_u, j, kept_u_record_stride, columns, pending, HEAD_DIM)
        scores = _scores_of_records(
            products, c, i, c_node_stride, num_nodes, kept_b, j, kept_b_record_stride, pending,
            STATE_DIM, NODES, LANES, RECORDS, PARTS,
        )  # fmt: skip
        total = add_product(total, scores * between, of_u, PARTS)
    out += batch * out_batch_stride + i[:, None].to(tl.int64) * out_node_stride + head * HEAD_DIM + columns[None, :]
    tl.store(out, total, mask=in_out)


@triton.jit(do_not_specialize=["node_offset", "g_batch_stride"])
def root_verify(
    c, b, u, g, out, states, kept_b, kept_u, kept_decay, rows, slots, num_pending, folds,
    node_offset, heads_per_group,
    c_batch_stride, c_group_stride, b_batch_stride, b_group_stride, u_batch_stride, u_head_stride, g_batch_stride,
    out_batch_stride, states_slot_stride, states_head_stride, states_lane_stride,
    kept_b_row_stride, kept_b_record_stride, kept_b_group_stride,
    kept_u_row_stride, kept_u_record_stride, kept_u_head_stride, kept_decay_row_stride, kept_decay_record_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    LANES: tl.constexpr, COLUMNS: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Trees that have only their root, as in plain decoding: as ``tree_verify``, whole vectors in place of matrices."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, lanes, columns = head // heads_per_group, tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < HEAD_DIM
    out += batch * out_batch_stride + head * HEAD_DIM + columns
    slot, row = _row_of(batch, slots), _row_of(batch, rows)
    is_padding = slot == 0 if slots is not None else False
    if is_padding:
        tl.store(out, tl.zeros([COLUMNS], tl.float32), mask=in_columns)
        return

    kept_b += row * kept_b_row_stride + group * kept_b_group_stride
    kept_u += row * kept_u_row_stride + head * kept_u_head_stride
    kept_decay += row * kept_decay_row_stride + head
    place = states + slot * states_slot_stride + head * states_head_stride
    place += lanes.to(tl.int64)[:, None] * states_lane_stride + columns[None, :]
    in_state = in_lanes[:, None] & in_columns[None, :]
    state = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    c = tl.load(c + batch * c_batch_stride + group * c_group_stride + lanes, mask=in_lanes, other=0.0)
    b = tl.load(b + batch * b_batch_stride + group * b_group_stride + lanes, mask=in_lanes, other=0.0)
    u = tl.load(u + batch * u_batch_stride + head * u_head_stride + columns, mask=in_columns, other=0.0)
    g = tl.load(g + batch * g_batch_stride + head)
    pending, is_folding = _pending_of(batch, num_pending, node_offset, folds)
    last_decay = path_decay(kept_decay, pending, kept_decay_record_stride, RECORDS)
    flaw = _flaw(g) + tl.sum(_flaw(b), axis=0) + tl.sum(_flaw(u), axis=0)
    b, u, own = finite(b), finite(u), finite(g)
    decay = own + tl.where(is_folding, 0.0, last_decay)

    record = node_offset.to(tl.int64)
    tl.store(kept_u + record * kept_u_record_stride + columns, u, mask=in_columns)
    if block == 0:
        tl.store(kept_decay + record * kept_decay_record_stride, own)
        if head % heads_per_group == 0:
            tl.store(kept_b + record * kept_b_record_stride + lanes, b, mask=in_lanes)

    if is_folding:
        state = add_one_by_one(
            state * tl.exp(last_decay), kept_b, kept_u, kept_decay, pending, lanes, columns, in_lanes, in_columns,
            kept_b_record_stride, kept_u_record_stride, kept_decay_record_stride,
        )  # fmt: skip
        stored = _as_stored(state, states.dtype.element_ty)
        tl.store(place, stored, mask=in_state)
        state = stored.to(tl.float32)
    total = tl.sum(c[:, None] * state, axis=0) * tl.exp(decay) + (tl.sum(c * b, axis=0) + flaw) * u
    behind = own
    for part in range(tl.where(is_folding, 0, tl.cdiv(pending, RECORDS))):
        j, to_root, behind = decays_to_last(kept_decay, pending, kept_decay_record_stride, part, behind, RECORDS)
        between = tl.exp(to_root)
        of_b = _vectors(kept_b, j, kept_b_record_stride, lanes, pending, STATE_DIM)
        of_u = _vectors(kept_u, j, kept_u_record_stride, columns, pending, HEAD_DIM)
        weights = tl.sum(of_b * c[None, :], axis=1) * between
        total += tl.sum(weights[:, None] * of_u, axis=0)
    tl.store(out, total, mask=in_columns)


@triton.jit(do_not_specialize=["node_offset", "num_nodes", "g_batch_stride"])
def chain_verify(
    c, b, u, g, out, states, kept_b, kept_u, kept_decay, rows, slots, num_pending, folds,
    node_offset, num_nodes, heads_per_group,
    c_batch_stride, c_node_stride, c_group_stride, b_batch_stride, b_node_stride, b_group_stride,
    u_batch_stride, u_node_stride, u_head_stride, g_batch_stride, g_node_stride, out_batch_stride, out_node_stride,
    states_slot_stride, states_head_stride, states_lane_stride,
    kept_b_row_stride, kept_b_record_stride, kept_b_group_stride,
    kept_u_row_stride, kept_u_record_stride, kept_u_head_stride, kept_decay_row_stride, kept_decay_record_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    NODES: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr, RECORDS: tl.constexpr,
):  # fmt: skip
    """Chains of up to NODES nodes: the recurrence itself, on a state that stays in registers from its one read on."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, lanes, columns = head // heads_per_group, tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < HEAD_DIM
    out += batch * out_batch_stride + head * HEAD_DIM + columns
    slot, row = _row_of(batch, slots), _row_of(batch, rows)
    is_padding = slot == 0 if slots is not None else False
    if is_padding:
        i = tl.arange(0, NODES)
        in_out = (i < num_nodes)[:, None] & in_columns[None, :]
        tl.store(out[None, :] + i[:, None] * out_node_stride, tl.zeros([NODES, COLUMNS], tl.float32), mask=in_out)
        return

    kept_b += row * kept_b_row_stride + group * kept_b_group_stride
    kept_u += row * kept_u_row_stride + head * kept_u_head_stride
    kept_decay += row * kept_decay_row_stride + head
    place = states + slot * states_slot_stride + head * states_head_stride
    place += lanes.to(tl.int64)[:, None] * states_lane_stride + columns[None, :]
    in_state = in_lanes[:, None] & in_columns[None, :]
    state = tl.load(place, mask=in_state, other=0.0)  # on its way while records are counted
    pending, is_folding = _pending_of(batch, num_pending, node_offset, folds)
    last_decay = path_decay(kept_decay, pending, kept_decay_record_stride, RECORDS)
    state = state.to(tl.float32) * tl.exp(last_decay)
    state = add_ahead(
        state, kept_b, kept_u, kept_decay, pending, lanes, columns, in_lanes, in_columns,
        kept_b_record_stride, kept_u_record_stride, kept_decay_record_stride,
    )  # fmt: skip
    if is_folding:
        stored = _as_stored(state, states.dtype.element_ty)
        tl.store(place, stored, mask=in_state)
        state = stored.to(tl.float32)

    c += batch * c_batch_stride + group * c_group_stride + lanes
    b += batch * b_batch_stride + group * b_group_stride + lanes
    u += batch * u_batch_stride + head * u_head_stride + columns
    g += batch * g_batch_stride + head
    flaw = 0.0
    for i in range(num_nodes):
        c_node = tl.load(c + i * c_node_stride, mask=in_lanes, other=0.0)
        b_raw = tl.load(b + i * b_node_stride, mask=in_lanes, other=0.0)
        u_raw = tl.load(u + i * u_node_stride, mask=in_columns, other=0.0)
        g_raw = tl.load(g + i * g_node_stride)
        flaw += _flaw(g_raw) + tl.sum(_flaw(b_raw), axis=0) + tl.sum(_flaw(u_raw), axis=0)
        b_node, u_node, g_node = finite(b_raw), finite(u_raw), finite(g_raw)
        state = state * tl.exp(g_node) + b_node[:, None] * u_node[None, :]
        total = tl.sum(c_node[:, None] * state, axis=0) + flaw
        tl.store(out + i * out_node_stride, total, mask=in_columns)

        record = node_offset + i
        tl.store(kept_u + record * kept_u_record_stride + columns, u_node, mask=in_columns)
        if block == 0:
            tl.store(kept_decay + record * kept_decay_record_stride, g_node)
            if head % heads_per_group == 0:
                tl.store(kept_b + record * kept_b_record_stride + lanes, b_node, mask=in_lanes)


@triton.jit
def _sliced(base, index, stride, lanes, length, num_lanes):
    """[SLICES, I, LANES]: vectors of tokens cut into slices, lanes [SLICES, LANES]; 0 outside."""
    mask = (index < length)[None, :, None] & (lanes < num_lanes)[:, None, :]
    return tl.load(base + (index * stride)[None, :, None] + lanes[:, None, :], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["max_length", "g_batch_stride"])
def extend(
    c, b, u, g, out, states, slots, lengths, max_length, heads_per_group,
    c_batch_stride, c_token_stride, c_group_stride, b_batch_stride, b_token_stride, b_group_stride,
    u_batch_stride, u_token_stride, u_head_stride, g_batch_stride, g_token_stride, out_batch_stride, out_token_stride,
    states_slot_stride, states_head_stride, states_lane_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr,
    TOKENS: tl.constexpr, SLICES: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Runs of known tokens, TOKENS at a time; a block of the state stays in registers from first to last.

    Its rows are cut into slices, and products over them are made slice by slice, then added.
    """
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, i, columns = head // heads_per_group, tl.arange(0, TOKENS), block * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = columns < HEAD_DIM
    lanes = tl.arange(0, SLICES)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    out += batch * out_batch_stride + head * HEAD_DIM + columns[None, :]
    slot = tl.load(slots + batch)
    length = tl.where(slot == 0, 0, tl.load(lengths + batch)).to(tl.int32)

    for start in range(length // TOKENS * TOKENS, max_length, TOKENS):
        t = (start + i).to(tl.int64)
        is_padding = ((t >= length) & (t < max_length))[:, None] & in_columns[None, :]
        tl.store(out + t[:, None] * out_token_stride, tl.zeros([TOKENS, COLUMNS], tl.float32), mask=is_padding)
    if length == 0:
        return

    c, b = c + batch * c_batch_stride + group * c_group_stride, b + batch * b_batch_stride + group * b_group_stride
    u, g = u + batch * u_batch_stride + head * u_head_stride, g + batch * g_batch_stride + head
    place = states + slot * states_slot_stride + head * states_head_stride
    place += lanes.to(tl.int64)[:, :, None] * states_lane_stride + columns[None, None, :]
    in_state = (lanes < STATE_DIM)[:, :, None] & in_columns[None, None, :]
    state = tl.load(place, mask=in_state, other=0.0).to(tl.float32)
    is_before = i[:, None] >= i[None, :]
    for start in range(0, length, TOKENS):
        t = (start + i).to(tl.int64)
        of_c = _sliced(c, t, c_token_stride, lanes, length, STATE_DIM)
        of_b = _sliced(b, t, b_token_stride, lanes, length, STATE_DIM)
        of_u = _vectors(u, t, u_token_stride, columns, length, HEAD_DIM)
        of_g = tl.load(g + t * g_token_stride, mask=t < length, other=0.0)
        own = tl.where(is_before, of_g[None, :], 0.0)
        decay, last = tl.sum(own, axis=1), tl.sum(of_g, axis=0)
        sums = tl.dot(own, tl.where(i[:, None] > i[None, :], 1.0, 0.0), input_precision="ieee")
        between = tl.where(is_before, tl.exp(sums), 0.0)
        scores = tl.sum(tl.dot(of_c, tl.permute(of_b, (0, 2, 1)), input_precision="ieee"), axis=0) * between
        total = tl.sum(tl.dot(of_c, state, input_precision="ieee"), axis=0) * tl.exp(decay)[:, None]
        total += tl.dot(scores, of_u, input_precision="ieee")
        tl.store(out + t[:, None] * out_token_stride, total, mask=(t < length)[:, None] & in_columns[None, :])
        left = tl.broadcast_to((of_u * tl.exp(decay_behind(of_g, i))[:, None])[None, :, :], (SLICES, TOKENS, COLUMNS))
        state = state * tl.exp(last) + tl.dot(tl.permute(of_b, (0, 2, 1)), left, input_precision="ieee")
    tl.store(place, _as_stored(state, states.dtype.element_ty), mask=in_state)


@triton.jit(do_not_specialize=["num_nodes", "g_batch_stride"])
def tree_verify_snapshots(
    c, b, u, g, out, state, snapshots, parents, num_nodes, heads_per_group,
    c_batch_stride, c_node_stride, c_group_stride, b_batch_stride, b_node_stride, b_group_stride,
    u_batch_stride, u_node_stride, u_head_stride, g_batch_stride, g_node_stride, out_batch_stride, out_node_stride,
    state_batch_stride, state_head_stride, state_lane_stride,
    snapshots_batch_stride, snapshots_node_stride, snapshots_head_stride, snapshots_lane_stride,
    STATE_DIM: tl.constexpr, HEAD_DIM: tl.constexpr, LANES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The recurrence, node after node; each reads back the snapshot of its parent. ``parents`` None: chains."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    group, lanes, columns = head // heads_per_group, tl.arange(0, LANES), block * COLUMNS + tl.arange(0, COLUMNS)
    in_lanes, in_columns = lanes < STATE_DIM, columns < HEAD_DIM
    in_state, far = in_lanes[:, None] & in_columns[None, :], lanes.to(tl.int64)[:, None]
    c, b = (
        c + batch * c_batch_stride + group * c_group_stride + lanes,
        b + batch * b_batch_stride + group * b_group_stride + lanes,
    )
    u, g = u + batch * u_batch_stride + head * u_head_stride + columns, g + batch * g_batch_stride + head
    out += batch * out_batch_stride + head * HEAD_DIM + columns
    snapshots += (
        batch * snapshots_batch_stride + head * snapshots_head_stride + far * snapshots_lane_stride + columns[None, :]
    )
    state += batch * state_batch_stride + head * state_head_stride + far * state_lane_stride + columns[None, :]
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
        current = current * tl.exp(tl.load(g + n * g_node_stride)) + of_b[:, None] * of_u[None, :]
        tl.store(snapshots + n * snapshots_node_stride, current, mask=in_state)
        of_c = tl.load(c + n * c_node_stride, mask=in_lanes, other=0.0)
        tl.store(out + n * out_node_stride, tl.sum(of_c[:, None] * current, axis=0), mask=in_columns)
        tl.debug_barrier()
