"""The gated delta rule with a decay for each key channel (KDA) in Triton: the recurrence itself. See README.md.

A program has all keys of a block of one head's values, [keys, values], in registers, of one row. Decays stand inside
the sums over keys, so that pairs of tokens do not become products of matrices.
"""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import advance_by_channel, as_stored, finite, not_finite


@triton.jit(
    do_not_specialize=["num_nodes", "node_offset", "padding_slot", "ancestors_row_stride", "ancestors_node_stride"]
)
def channel_tree_kernel(
    q,  # [B, N, Hk, K] float32
    k,  # [B, N, Hk, K] float32
    v,  # [B, N, Hv, V] float32
    g,  # [B, N, Hv, K] float32, contiguous
    beta,  # [B, N, Hv] float32, contiguous
    out,  # [B, N, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    records_k,  # [rows, R, Hk, K] float32
    records_u,  # [rows, R, Hv, V] float32
    records_decay,  # [rows, R, Hv, K] float32
    rows,  # [B] int64
    slots,  # [B] int64
    num_pending,  # [B] int64 or None
    folds,  # [B] bool or None
    ancestors,  # [B, N, N] bool
    num_nodes,
    node_offset,
    padding_slot,
    q_row_stride,
    q_node_stride,
    q_head_stride,
    k_row_stride,
    k_node_stride,
    k_head_stride,
    v_row_stride,
    v_node_stride,
    v_head_stride,
    state_slot_stride,
    state_head_stride,
    state_key_stride,
    keys_row_stride,
    keys_record_stride,
    keys_head_stride,
    updates_row_stride,
    updates_record_stride,
    updates_head_stride,
    decay_row_stride,
    decay_record_stride,
    decay_head_stride,
    ancestors_row_stride,
    ancestors_node_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_NODES: tl.constexpr,  # no fewer than there are nodes
    BLOCK_KEYS: tl.constexpr,  # all keys
    BLOCK_VALUES: tl.constexpr,
):
    """Any tree: the checkpoint is read once and advanced over the pending records, then nodes run in order.

    A node that continues the one before it goes on from the state that is there. Another one goes back to the state
    before the root, and advances it over the records of its ancestors, which are final.
    """
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_k, at_v = tl.arange(0, BLOCK_KEYS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    at_n = tl.arange(0, BLOCK_NODES)
    is_k, is_v = at_k < KEY_DIM, at_v < VALUE_DIM
    token = row * num_nodes * num_heads + head
    slot, ring = tl.load(slots + row), tl.load(rows + row)
    if slot == padding_slot:
        out_at = out + (token + at_n[:, None] * num_heads) * VALUE_DIM + at_v[None, :]
        in_values = (at_n < num_nodes)[:, None] & is_v[None, :]
        tl.store(out_at, tl.zeros((BLOCK_NODES, BLOCK_VALUES), tl.float32), mask=in_values)
        return
    keys = records_k + ring * keys_row_stride + (head // GROUP) * keys_head_stride + at_k
    updates = records_u + ring * updates_row_stride + head * updates_head_stride + at_v
    decay = records_decay + ring * decay_row_stride + head * decay_head_stride + at_k
    count = node_offset if num_pending is None else tl.load(num_pending + row).to(tl.int32)

    state_at = states + slot * state_slot_stride + head * state_head_stride
    state_at += at_k[:, None] * state_key_stride + at_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    root = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)
    root = advance_by_channel(
        root, keys, updates, decay, count, is_k, is_v, keys_record_stride, updates_record_stride, decay_record_stride
    )
    if folds is not None:
        is_folded = (tl.load(folds + row) != 0) & (count > 0)
        if is_folded:
            stored = as_stored(root, states.dtype.element_ty)
            tl.store(state_at, stored, mask=in_state)
            root = stored.to(tl.float32)  # as the next verify will read it

    q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_k
    k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_k
    v_at = v + row * v_row_stride + head * v_head_stride + at_v
    g_at = g + token * KEY_DIM + at_k
    of_row = ancestors + row * ancestors_row_stride
    is_first = tl.program_id(0) == 0  # the first of the programs that hold all of them writes keys and decays
    in_decays = at_k < tl.where(is_first, KEY_DIM, 0)
    in_keys = at_k < tl.where(is_first & (head % GROUP == 0), KEY_DIM, 0)
    flaws = tl.zeros((BLOCK_NODES,), tl.float32)
    current, previous = root, 0
    for i in range(num_nodes):
        of_node = of_row + i * ancestors_node_stride
        continues = tl.load(of_node + previous) != 0
        current = tl.where(continues, current, root)
        for j in range(tl.where(continues, i, 0), i):
            if tl.load(of_node + j) != 0:
                k_old = finite(tl.load(k_at + j * k_node_stride, mask=is_k, other=0.0))
                g_old = finite(tl.load(g_at + j * num_heads * KEY_DIM, mask=is_k, other=0.0))
                u_old = tl.load(updates + (node_offset + j) * updates_record_stride, mask=is_v, other=0.0)
                current = tl.fma(k_old[:, None], u_old[None, :], current * tl.exp(g_old)[:, None])

        k_raw = tl.load(k_at + i * k_node_stride, mask=is_k, other=0.0)
        g_raw = tl.load(g_at + i * num_heads * KEY_DIM, mask=is_k, other=0.0)
        v_raw = tl.load(v_at + i * v_node_stride, mask=is_v, other=0.0)
        q_node, beta_raw = (
            tl.load(q_at + i * q_node_stride, mask=is_k, other=0.0),
            tl.load(beta + token + i * num_heads),
        )
        k_node, g_node = finite(k_raw), finite(g_raw)
        current = current * tl.exp(g_node)[:, None]
        u = finite(beta_raw) * (v_raw - tl.sum(k_node[:, None] * current, 0))
        flaw = tl.sum(not_finite(k_raw) + not_finite(g_raw), 0) + tl.sum(not_finite(u), 0) + not_finite(beta_raw)
        u = finite(u)
        current = tl.fma(k_node[:, None], u[None, :], current)
        result = tl.sum(q_node[:, None] * current, 0)

        flaws = tl.where(at_n == i, flaw, flaws)
        sees = tl.load(of_node + at_n, mask=at_n < num_nodes, other=0) != 0
        affected = tl.sum(tl.where(sees, flaws, 0.0), 0)
        out_at = out + (token + i * num_heads) * VALUE_DIM + at_v
        tl.store(out_at, tl.where(affected > 0, float("nan"), result), mask=is_v)
        record = node_offset + i
        tl.store(updates + record * updates_record_stride, u, mask=is_v)
        tl.store(decay + record * decay_record_stride, g_node, mask=in_decays)
        tl.store(keys + record * keys_record_stride, k_node, mask=in_keys)
        tl.debug_barrier()  # threads read updates that others wrote
        previous = i


@triton.jit(do_not_specialize=["num_tokens"])
def channel_extend_kernel(
    q,  # [B, L, Hk, K] float32
    k,  # [B, L, Hk, K] float32
    v,  # [B, L, Hv, V] float32
    g,  # [B, L, Hv, K] float32, contiguous
    beta,  # [B, L, Hv] float32, contiguous
    out,  # [B, L, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    slots,  # [B] int64
    lengths,  # [B] int64
    num_tokens,
    q_row_stride,
    q_token_stride,
    q_head_stride,
    k_row_stride,
    k_token_stride,
    k_head_stride,
    v_row_stride,
    v_token_stride,
    v_head_stride,
    state_slot_stride,
    state_head_stride,
    state_key_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_KEYS: tl.constexpr,  # all keys
    BLOCK_VALUES: tl.constexpr,
):
    """Known tokens, one after the other; the next one is loaded while a token is computed."""
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_k, at_v = tl.arange(0, BLOCK_KEYS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_k, is_v = at_k < KEY_DIM, at_v < VALUE_DIM
    token, slot = row * num_tokens * num_heads + head, tl.load(slots + row)
    length = tl.where(slot == 0, 0, tl.load(lengths + row)).to(tl.int32)
    out_at = out + token * VALUE_DIM + at_v
    for t in range(length, num_tokens):
        tl.store(
            out_at + tl.cast(t, tl.int64) * num_heads * VALUE_DIM, tl.zeros((BLOCK_VALUES,), tl.float32), mask=is_v
        )
    if length == 0:
        return

    state_at = states + slot * state_slot_stride + head * state_head_stride
    state_at += at_k[:, None] * state_key_stride + at_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)
    q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_k
    k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_k
    v_at = v + row * v_row_stride + head * v_head_stride + at_v
    g_at, beta_at = g + token * KEY_DIM + at_k, beta + token
    q_token, k_token = tl.load(q_at, mask=is_k, other=0.0), tl.load(k_at, mask=is_k, other=0.0)
    v_token, g_token = tl.load(v_at, mask=is_v, other=0.0), tl.load(g_at, mask=is_k, other=0.0)
    for t in range(length):
        has_next = t + 1 < length
        next_k, next_v = at_k < tl.where(has_next, KEY_DIM, 0), at_v < tl.where(has_next, VALUE_DIM, 0)
        q_at += q_token_stride
        k_at += k_token_stride
        v_at += v_token_stride
        g_at += num_heads * KEY_DIM
        q_next, k_next = tl.load(q_at, mask=next_k, other=0.0), tl.load(k_at, mask=next_k, other=0.0)
        v_next, g_next = tl.load(v_at, mask=next_v, other=0.0), tl.load(g_at, mask=next_k, other=0.0)
        beta_token = tl.load(beta_at + tl.cast(t, tl.int64) * num_heads)
        state = state * tl.exp(g_token)[:, None]
        u = beta_token * (v_token - tl.sum(k_token[:, None] * state, 0))
        state = tl.fma(k_token[:, None], u[None, :], state)
        tl.store(out_at + tl.cast(t, tl.int64) * num_heads * VALUE_DIM, tl.sum(q_token[:, None] * state, 0), mask=is_v)
        q_token, k_token, v_token, g_token = q_next, k_next, v_next, g_next
    tl.store(state_at, as_stored(state, states.dtype.element_ty), mask=in_state)
