"""The gated delta rule in Triton. One program has a block of one head's values, [all keys, block], of one row."""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import (
    add_ahead,
    add_one_by_one,
    add_product,
    add_sums,
    advance,
    as_stored,
    decay_behind,
    decays_to_last,
    finite,
    not_finite,
    path_decay,
    product,
)


@triton.jit
def solve(system, u, num_steps):
    """Solve (I + L) X = u in place of u, L = ``system`` strictly lower triangular: forward substitution.

    Values that are not finite stay in their row of u, and count as 0 in the rows after it.
    """
    at = tl.arange(0, u.shape[0])
    for i in range(num_steps):
        row = tl.sum(tl.where(at[:, None] == i, u, 0.0), 0)
        column = tl.sum(tl.where(at[None, :] == i, system, 0.0), 1)
        u -= column[:, None] * finite(row)[None, :]
    return u


@triton.jit
def inverse(system, PARTS: tl.constexpr):
    """The inverse of I + L, L = ``system`` strictly lower triangular: blocks of 1, 2, 4, ... rows on the diagonal.

    [[A, 0], [C, B]]^-1 = [[A^-1, 0], [-B^-1 C A^-1, B^-1]]. Entries stay those of inverses, so that nothing cancels, as
    it does where powers of L are summed.
    """
    size: tl.constexpr = system.shape[0]
    at = tl.arange(0, size)
    rows, columns = at[:, None], at[None, :]
    result = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows == columns + 1) & (columns % 2 == 0), system, 0.0)
    for level in tl.static_range(1, 7):
        if (1 << level) < size:
            result = join_inverses(result, system, rows, columns, level, PARTS)
    return result


@triton.jit
def join_inverses(result, system, rows, columns, LEVEL: tl.constexpr, PARTS: tl.constexpr):
    """One step of ``inverse``: of two blocks of 2^LEVEL rows behind each other, the inverse of both."""
    of_row, of_column = rows >> LEVEL, columns >> LEVEL
    joined = tl.where((of_row == of_column + 1) & (of_column % 2 == 0), system, 0.0)
    return result - product(result, product(joined, result, PARTS), PARTS)


@triton.jit
def decays(log_decay, precedes, PARTS: tl.constexpr):
    """Decay from token j to token i of a chunk where j precedes i, else 0; ``log_decay``: tokens' own.

    What lies between the two is summed up, and is no difference of sums: behind a strong decay these have lost the
    digits of weak ones.
    """
    at = tl.arange(0, log_decay.shape[0])
    own = tl.where(precedes, log_decay[None, :], 0.0)
    between = add_sums(tl.zeros(precedes.shape, tl.float32), own, at[:, None] > at[None, :], PARTS)
    return tl.where(precedes, tl.exp(between), 0.0)


@triton.jit
def tree_decays(
    g, num_heads, ancestors, node_stride, sees, num_nodes, BLOCK_RECORDS: tl.constexpr, PARTS: tl.constexpr
):
    """The same between nodes of a tree, of which ``sees`` [I, J] says which precede; BLOCK_RECORDS nodes at a time.

    ``g``: the first node's log decay, of one head; ``ancestors``: of one row.
    """
    at_n = tl.arange(0, sees.shape[0])
    is_n = at_n < num_nodes
    between = tl.zeros(sees.shape, tl.float32)
    for first in range(0, num_nodes, BLOCK_RECORDS):
        at = first + tl.arange(0, BLOCK_RECORDS)
        is_node = at < num_nodes
        own = finite(tl.load(g + at * num_heads, mask=is_node, other=0.0))
        seen_at = ancestors + at_n[:, None] * node_stride + at[None, :]
        is_on_path = tl.load(seen_at, mask=is_n[:, None] & is_node[None, :], other=0) != 0
        behind_at = ancestors + at[:, None] * node_stride + at_n[None, :]
        lies_behind = tl.load(behind_at, mask=is_node[:, None] & is_n[None, :], other=0) != 0
        lies_behind &= at[:, None] != at_n[None, :]
        own_on_path = tl.where(is_on_path, own[None, :], 0.0)
        between = add_sums(between, own_on_path, lies_behind, PARTS)
    return tl.where(sees, tl.exp(between), 0.0)


@triton.jit
def add_records(
    q_read,
    k_read,
    q_at,
    k_at,
    keys,
    updates,
    decay,
    count,
    num_unfolded,
    is_n,
    at_v,
    is_v,
    keys_record_stride,
    updates_record_stride,
    decay_record_stride,
    KEY_DIM: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What queries and keys of nodes, whose first ones are at ``q_at`` and ``k_at`` [I, 1], read in pending records.

    Beside the state, and as of the last record: added to ``q_read`` and ``k_read``.
    """
    behind = 0.0
    for block in range(tl.cdiv(num_unfolded, BLOCK_RECORDS)):
        at, to_last, behind = decays_to_last(decay, count, decay_record_stride, block, behind, BLOCK_RECORDS)
        is_pending = at < count
        weight = tl.where(is_pending, tl.exp(to_last), 0.0)
        q_old = tl.zeros((is_n.shape[0], BLOCK_RECORDS), tl.float32)
        k_old = tl.zeros((is_n.shape[0], BLOCK_RECORDS), tl.float32)
        for first_key in range(0, KEY_DIM, BLOCK_KEYS):
            at_k = first_key + tl.arange(0, BLOCK_KEYS)
            is_k = at_k < KEY_DIM
            old_at = keys + at[:, None] * keys_record_stride + at_k[None, :]
            old = tl.trans(tl.load(old_at, mask=is_pending[:, None] & is_k[None, :], other=0.0))
            in_keys = is_n[:, None] & is_k[None, :]
            q_old = add_product(q_old, tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0), old, PARTS)
            k_old = add_product(k_old, tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0), old, PARTS)
        update_at = updates + at[:, None] * updates_record_stride + at_v[None, :]
        update = tl.load(update_at, mask=is_pending[:, None] & is_v[None, :], other=0.0) * weight[:, None]
        q_read = add_product(q_read, q_old, update, PARTS)
        k_read = add_product(k_read, k_old, update, PARTS)
    return q_read, k_read


@triton.jit
def add_multiplied_records(
    q_read,
    k_read,
    products_at,
    of_keys,
    updates,
    decay,
    count,
    num_unread,
    is_n,
    at_v,
    is_v,
    updates_record_stride,
    decay_record_stride,
    BLOCK_RECORDS: tl.constexpr,
    PARTS: tl.constexpr,
):
    """As ``add_records``; ``products_at`` [I, 1]: of queries with the first record's key, and ``of_keys`` behind it."""
    behind = 0.0
    for block in range(tl.cdiv(num_unread, BLOCK_RECORDS)):
        at, to_last, behind = decays_to_last(decay, count, decay_record_stride, block, behind, BLOCK_RECORDS)
        is_pending = at < count
        weight = tl.where(is_pending, tl.exp(to_last), 0.0)
        in_products = is_n[:, None] & is_pending[None, :]
        q_old = tl.load(products_at + at[None, :], mask=in_products, other=0.0)
        k_old = tl.load(products_at + of_keys + at[None, :], mask=in_products, other=0.0)
        update_at = updates + at[:, None] * updates_record_stride + at_v[None, :]
        update = tl.load(update_at, mask=is_pending[:, None] & is_v[None, :], other=0.0) * weight[:, None]
        q_read = add_product(q_read, q_old, update, PARTS)
        k_read = add_product(k_read, k_old, update, PARTS)
    return q_read, k_read


@triton.jit(do_not_specialize=["node_offset", "padding_slot"])
def root_kernel(
    q,  # [B, 1, Hk, K] float32
    k,  # [B, 1, Hk, K] float32
    v,  # [B, 1, Hv, V] float32
    g,  # [B, 1, Hv] float32, contiguous
    beta,  # [B, 1, Hv] float32, contiguous
    out,  # [B, 1, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    records_k,  # [rows, R, Hk, K] float32
    records_u,  # [rows, R, Hv, V] float32
    records_decay,  # [rows, R, Hv] float32
    rows,  # [B] int64
    slots,  # [B] int64
    num_pending,  # [B] int64 or None
    folds,  # [B] bool or None
    node_offset,
    padding_slot,
    q_row_stride,
    q_head_stride,
    k_row_stride,
    k_head_stride,
    v_row_stride,
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_KEYS: tl.constexpr,  # all keys
    BLOCK_VALUES: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
):
    """A tree that has only its root: plain decoding. Pending records are read beside the state, not added to it."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    at_k, at_v = tl.arange(0, BLOCK_KEYS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_k, is_v = at_k < KEY_DIM, at_v < VALUE_DIM
    token = row * tl.num_programs(1) + head
    slot, ring = tl.load(slots + row), tl.load(rows + row)
    if slot == padding_slot:
        tl.store(out + token * VALUE_DIM + at_v, tl.zeros((BLOCK_VALUES,), tl.float32), mask=is_v)
        return
    state_at = states + slot * state_slot_stride + head * state_head_stride
    state_at += at_k[:, None] * state_key_stride + at_v[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    state_raw = tl.load(state_at, mask=in_state, other=0.0)  # on its way while records are counted
    q_root = tl.load(q + row * q_row_stride + (head // GROUP) * q_head_stride + at_k, mask=is_k, other=0.0)
    k_raw = tl.load(k + row * k_row_stride + (head // GROUP) * k_head_stride + at_k, mask=is_k, other=0.0)
    v_root = tl.load(v + row * v_row_stride + head * v_head_stride + at_v, mask=is_v, other=0.0)
    g_raw, beta_raw = tl.load(g + token), tl.load(beta + token)

    keys = records_k + ring * keys_row_stride + (head // GROUP) * keys_head_stride
    updates = records_u + ring * updates_row_stride + head * updates_head_stride
    decay = records_decay + ring * decay_row_stride + head
    count = node_offset if num_pending is None else tl.load(num_pending + row).to(tl.int32)
    total = path_decay(decay, count, decay_record_stride, BLOCK_RECORDS)

    state = state_raw.to(tl.float32)
    if folds is not None:
        is_folded = tl.load(folds + row) & (count > 0)
        if is_folded:
            state = advance(
                state,
                keys,
                updates,
                decay,
                count,
                total,
                at_k,
                at_v,
                is_k,
                is_v,
                keys_record_stride,
                1,
                updates_record_stride,
                1,
                decay_record_stride,
                BLOCK_RECORDS,
            )
            stored = as_stored(state, states.dtype.element_ty)
            tl.store(state_at, stored, mask=in_state)
            state = stored.to(tl.float32)  # as the next verify will read it
        count, total = tl.where(is_folded, 0, count), tl.where(is_folded, 0.0, total)

    flaws = tl.sum(not_finite(k_raw), 0) + not_finite(g_raw) + not_finite(beta_raw)
    k_root, g_root = finite(k_raw), finite(g_raw)

    to_root = tl.exp(total)
    q_read = tl.sum(q_root[:, None] * state, 0) * to_root
    k_read = tl.sum(k_root[:, None] * state, 0) * to_root
    behind = 0.0
    for block in range(tl.cdiv(count, BLOCK_RECORDS)):
        at, to_last, behind = decays_to_last(decay, count, decay_record_stride, block, behind, BLOCK_RECORDS)
        is_pending = at < count
        weight = tl.where(is_pending, tl.exp(to_last), 0.0)
        key_at = keys + at[:, None] * keys_record_stride + at_k[None, :]
        key = tl.load(key_at, mask=is_pending[:, None] & is_k[None, :], other=0.0)
        update_at = updates + at[:, None] * updates_record_stride + at_v[None, :]
        update = tl.load(update_at, mask=is_pending[:, None] & is_v[None, :], other=0.0)
        q_read += tl.sum((tl.sum(key * q_root[None, :], 1) * weight)[:, None] * update, 0)
        k_read += tl.sum((tl.sum(key * k_root[None, :], 1) * weight)[:, None] * update, 0)

    step = tl.exp(g_root)
    u = finite(beta_raw) * (v_root - k_read * step)
    flaws += tl.sum(not_finite(u), 0)
    u = finite(u)
    result = q_read * step + tl.sum(q_root * k_root, 0) * u
    tl.store(out + token * VALUE_DIM + at_v, tl.where(flaws > 0, float("nan"), result), mask=is_v)

    tl.store(updates + node_offset * updates_record_stride + at_v, u, mask=is_v)
    if tl.program_id(0) == 0:
        tl.store(decay + node_offset * decay_record_stride, g_root)
        if head % GROUP == 0:
            tl.store(keys + node_offset * keys_record_stride + at_k, k_root, mask=is_k)


@triton.jit(
    do_not_specialize=["num_nodes", "node_offset", "padding_slot", "ancestors_row_stride", "ancestors_node_stride"]
)
def tree_kernel(
    q,  # [B, N, Hk, K] float32
    k,  # [B, N, Hk, K] float32
    v,  # [B, N, Hv, V] float32
    g,  # [B, N, Hv] float32, contiguous
    beta,  # [B, N, Hv] float32, contiguous
    out,  # [B, N, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    records_k,  # [rows, R, Hk, K] float32
    records_u,  # [rows, R, Hv, V] float32
    records_decay,  # [rows, R, Hv] float32
    rows,  # [B] int64
    slots,  # [B] int64
    num_pending,  # [B] int64 or None
    folds,  # [B] bool or None
    ancestors,  # [B, N, N] bool
    products,  # [B, Hk, 2, N', N' + R'] float32, contiguous: of queries, then keys, with keys of nodes and of records
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
    ancestors_row_stride,
    ancestors_node_stride,
    products_node_stride,  # N' + R'
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_NODES: tl.constexpr,  # all nodes
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
    PARTS: tl.constexpr,  # of products: see ``product``
):
    """Any tree: one loop over the keys reads the state for all nodes; pending records go into it, or beside it.

    ``products`` None: they are made here, and nodes' keys are left in their records; else both is done.
    """
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_n, at_v = tl.arange(0, BLOCK_NODES), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_n, is_v = at_n < num_nodes, at_v < VALUE_DIM
    in_values = is_n[:, None] & is_v[None, :]
    token = row * num_nodes * num_heads + head  # of the first node
    slot, ring = tl.load(slots + row), tl.load(rows + row)
    if slot == padding_slot:
        out_at = out + token * VALUE_DIM + at_n[:, None] * (num_heads * VALUE_DIM) + at_v[None, :]
        tl.store(out_at, tl.zeros((BLOCK_NODES, BLOCK_VALUES), tl.float32), mask=in_values)
        return
    keys = records_k + ring * keys_row_stride + (head // GROUP) * keys_head_stride
    updates = records_u + ring * updates_row_stride + head * updates_head_stride
    decay = records_decay + ring * decay_row_stride + head
    count = node_offset if num_pending is None else tl.load(num_pending + row).to(tl.int32)
    total = path_decay(decay, count, decay_record_stride, BLOCK_RECORDS)
    is_folded = False
    if folds is not None:
        is_folded = tl.load(folds + row) & (count > 0)

    q_read = tl.zeros((BLOCK_NODES, BLOCK_VALUES), tl.float32)
    k_read = tl.zeros((BLOCK_NODES, BLOCK_VALUES), tl.float32)
    num_beside = tl.where(is_folded, 0, count)  # records that are read beside the state, where products are in parts
    if PARTS != "none" and products is None:
        q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_n[:, None] * q_node_stride
        k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_n[:, None] * k_node_stride
        q_read, k_read = add_records(
            q_read,
            k_read,
            q_at,
            k_at,
            keys,
            updates,
            decay,
            count,
            num_beside,
            is_n,
            at_v,
            is_v,
            keys_record_stride,
            updates_record_stride,
            decay_record_stride,
            KEY_DIM,
            BLOCK_KEYS,
            BLOCK_RECORDS,
            PARTS,
        )

    # side by side in a thread: of 16 bits, eight leave too few registers in two warps; four take longer in one
    of_values = tl.max_contiguous(at_v, 4 if BLOCK_VALUES > 32 else 8)
    for first in range(0, KEY_DIM, BLOCK_KEYS):
        at_k = first + tl.arange(0, BLOCK_KEYS)
        is_k = at_k < KEY_DIM
        state_at = states + slot * state_slot_stride + head * state_head_stride
        state_at += at_k[:, None] * state_key_stride + of_values[None, :]
        in_state = is_k[:, None] & is_v[None, :]
        state = tl.load(state_at, mask=in_state, other=0.0).to(tl.float32)
        if PARTS != "none":  # pending records are read beside the state, unless they go into it: that is exact
            state *= tl.exp(total)
            if is_folded:
                state = add_one_by_one(
                    state,
                    keys,
                    updates,
                    decay,
                    count,
                    at_k,
                    at_v,
                    is_k,
                    is_v,
                    keys_record_stride,
                    updates_record_stride,
                    decay_record_stride,
                )
        else:
            state = advance(
                state,
                keys,
                updates,
                decay,
                count,
                total,
                at_k,
                at_v,
                is_k,
                is_v,
                keys_record_stride,
                1,
                updates_record_stride,
                1,
                decay_record_stride,
                BLOCK_RECORDS,
            )
        if is_folded:
            stored = as_stored(state, states.dtype.element_ty)
            tl.store(state_at, stored, mask=in_state)
            state = stored.to(tl.float32)  # as the next verify will read it
        in_keys = is_n[:, None] & is_k[None, :]
        q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_n[:, None] * q_node_stride
        k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_n[:, None] * k_node_stride
        q_part = tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0)
        k_part = tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0)
        q_read = add_product(q_read, q_part, state, PARTS)
        k_read = add_product(k_read, k_part, state, PARTS)

    num_kept = tl.where(tl.program_id(0) == 0, num_nodes, 0)  # written by the first of the programs that hold them all
    record = node_offset + at_n
    if products is None:
        q_k = tl.zeros((BLOCK_NODES, BLOCK_NODES), tl.float32)
        k_k = tl.zeros((BLOCK_NODES, BLOCK_NODES), tl.float32)
        is_kept = at_n < tl.where(head % GROUP == 0, num_kept, 0)
        for first_again in range(0, KEY_DIM, BLOCK_KEYS):  # in a loop of its own: registers are needed for the state
            at_k = first_again + tl.arange(0, BLOCK_KEYS)
            is_k = at_k < KEY_DIM
            in_keys = is_n[:, None] & is_k[None, :]
            q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_n[:, None] * q_node_stride
            k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_n[:, None] * k_node_stride
            q_part = tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0)
            k_part = tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0)
            kept_at = keys + record[:, None] * keys_record_stride + at_k[None, :]
            tl.store(kept_at, finite(k_part), mask=in_keys & is_kept[:, None])
            q_k = add_product(q_k, q_part, tl.trans(k_part), PARTS)
            k_k = add_product(k_k, k_part, tl.trans(k_part), PARTS)
    else:  # all behind the loop over the state, which needs the registers
        products += (row * (num_heads // GROUP) + head // GROUP) * (2 * BLOCK_NODES * products_node_stride)
        products_at = products + at_n[:, None] * products_node_stride
        of_keys = BLOCK_NODES * products_node_stride
        if PARTS != "none":
            q_read, k_read = add_multiplied_records(
                q_read,
                k_read,
                products_at + BLOCK_NODES,
                of_keys,
                updates,
                decay,
                count,
                num_beside,
                is_n,
                at_v,
                is_v,
                updates_record_stride,
                decay_record_stride,
                BLOCK_RECORDS,
                PARTS,
            )
        q_k, k_k = tl.load(products_at + at_n[None, :]), tl.load(products_at + of_keys + at_n[None, :])

    of_row = ancestors + row * ancestors_row_stride
    seen_at = of_row + at_n[:, None] * ancestors_node_stride + at_n[None, :]
    sees = tl.load(seen_at, mask=is_n[:, None] & is_n[None, :], other=0) != 0
    g_raw = tl.load(g + token + at_n * num_heads, mask=is_n, other=0.0)
    beta_raw = tl.load(beta + token + at_n * num_heads, mask=is_n, other=0.0)
    flaws = (g_raw + beta_raw) * 0.0  # NaN where something is not finite
    log_decay = tl.sum(tl.where(sees, finite(g_raw)[None, :], 0.0), 1)  # from the pending records on
    between = tree_decays(g + token, num_heads, of_row, ancestors_node_stride, sees, num_nodes, BLOCK_RECORDS, PARTS)
    of_state = tl.exp(log_decay)[:, None]
    v_at = v + row * v_row_stride + head * v_head_stride + at_n[:, None] * v_node_stride + at_v[None, :]
    u = finite(beta_raw)[:, None] * (tl.load(v_at, mask=in_values, other=0.0) - of_state * k_read)
    is_strict = sees & (at_n[:, None] != at_n[None, :])
    system = tl.where(is_strict, finite(beta_raw)[:, None] * finite(k_k) * between, 0.0)
    if PARTS != "none":
        flaws += tl.sum(u * 0.0, 1)
        u = product(inverse(system, PARTS), finite(u), PARTS)
    else:
        u = solve(system, u, num_nodes - 1)
    flaws = not_finite(flaws + tl.sum(u * 0.0, 1))
    u = finite(u)
    tl.store(updates + record[:, None] * updates_record_stride + at_v[None, :], u, mask=in_values)
    tl.store(decay + record * decay_record_stride, finite(g_raw), mask=at_n < num_kept)

    result = of_state * q_read + product(tl.where(sees, finite(q_k) * between, 0.0), u, PARTS)
    affected = tl.sum(tl.where(sees, flaws[None, :], 0.0), 1)
    out_at = out + token * VALUE_DIM + at_n[:, None] * (num_heads * VALUE_DIM) + at_v[None, :]
    tl.store(out_at, tl.where(affected[:, None] > 0, float("nan"), result), mask=in_values)


@triton.jit(do_not_specialize=["num_nodes", "node_offset", "padding_slot"])
def chain_kernel(
    q,  # [B, N, Hk, K] float32
    k,  # [B, N, Hk, K] float32
    v,  # [B, N, Hv, V] float32
    g,  # [B, N, Hv] float32, contiguous
    beta,  # [B, N, Hv] float32, contiguous
    out,  # [B, N, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    records_k,  # [rows, R, Hk, K] float32
    records_u,  # [rows, R, Hv, V] float32
    records_decay,  # [rows, R, Hv] float32
    rows,  # [B] int64
    slots,  # [B] int64
    num_pending,  # [B] int64 or None
    folds,  # [B] bool or None
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
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_NODES: tl.constexpr,  # no fewer than there are nodes
    BLOCK_KEYS: tl.constexpr,  # all keys
    BLOCK_VALUES: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
):
    """Chains: the recurrence itself, node after node, on a state that stays in registers from its one read on."""
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_k, at_v = tl.arange(0, BLOCK_KEYS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_k, is_v = at_k < KEY_DIM, at_v < VALUE_DIM
    token = row * num_nodes * num_heads + head
    slot, ring = tl.load(slots + row), tl.load(rows + row)
    if slot == padding_slot:
        at_n = tl.arange(0, BLOCK_NODES)
        out_at = out + (token + at_n[:, None] * num_heads) * VALUE_DIM + at_v[None, :]
        in_values = (at_n < num_nodes)[:, None] & is_v[None, :]
        tl.store(out_at, tl.zeros((BLOCK_NODES, BLOCK_VALUES), tl.float32), mask=in_values)
        return
    state_at = states + slot * state_slot_stride + head * state_head_stride
    # four values side by side in a thread for any dtype: eight of 16 bits would leave sums over more lanes to be made
    of_values = tl.max_contiguous(at_v, 4)
    state_at += at_k[:, None] * state_key_stride + of_values[None, :]
    in_state = is_k[:, None] & is_v[None, :]
    state = tl.load(state_at, mask=in_state, other=0.0)  # on its way while records are counted

    keys = records_k + ring * keys_row_stride + (head // GROUP) * keys_head_stride
    updates = records_u + ring * updates_row_stride + head * updates_head_stride
    decay = records_decay + ring * decay_row_stride + head
    count = node_offset if num_pending is None else tl.load(num_pending + row).to(tl.int32)
    total = path_decay(decay, count, decay_record_stride, BLOCK_RECORDS)

    state = state.to(tl.float32) * tl.exp(total)
    state = add_ahead(
        state,
        keys,
        updates,
        decay,
        count,
        at_k,
        at_v,
        is_k,
        is_v,
        keys_record_stride,
        updates_record_stride,
        decay_record_stride,
    )
    if folds is not None:
        is_folded = tl.load(folds + row) & (count > 0)
        if is_folded:
            stored = as_stored(state, states.dtype.element_ty)
            tl.store(state_at, stored, mask=in_state)
            state = stored.to(tl.float32)  # as the next verify will read it

    q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at_k
    k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at_k
    v_at = v + row * v_row_stride + head * v_head_stride + at_v
    is_first = tl.program_id(0) == 0  # the first of the programs that hold all of them writes keys and decays
    flaws = 0.0
    k_raw = tl.load(k_at, mask=is_k, other=0.0)
    v_node = tl.load(v_at, mask=is_v, other=0.0)
    g_raw, beta_raw = tl.load(g + token), tl.load(beta + token)
    for i in range(num_nodes):
        q_node = tl.load(q_at + i * q_node_stride, mask=is_k, other=0.0)
        j = tl.minimum(i + 1, num_nodes - 1)  # the next node is on its way while this one is computed
        next_k = tl.load(k_at + j * k_node_stride, mask=is_k, other=0.0)
        next_v = tl.load(v_at + j * v_node_stride, mask=is_v, other=0.0)
        next_g, next_beta = tl.load(g + token + j * num_heads), tl.load(beta + token + j * num_heads)
        k_node, g_node = finite(k_raw), finite(g_raw)

        step = tl.exp(g_node)
        u = finite(beta_raw) * (v_node - step * tl.sum(k_node[:, None] * state, 0))
        flaws += tl.sum(not_finite(k_raw), 0) + tl.sum(not_finite(u), 0) + not_finite(g_raw) + not_finite(beta_raw)
        u = finite(u)
        state = state * step + k_node[:, None] * u[None, :]
        result = tl.sum(q_node[:, None] * state, 0)
        out_at = out + (token + i * num_heads) * VALUE_DIM + at_v
        tl.store(out_at, tl.where(flaws > 0, float("nan"), result), mask=is_v)

        record = node_offset + i
        tl.store(updates + record * updates_record_stride + at_v, u, mask=is_v)
        if is_first:
            tl.store(decay + record * decay_record_stride, g_node)
            if head % GROUP == 0:
                tl.store(keys + record * keys_record_stride + at_k, k_node, mask=is_k)
        k_raw, v_node, g_raw, beta_raw = next_k, next_v, next_g, next_beta


@triton.jit(do_not_specialize=["num_nodes", "parents_row_stride"])
def snapshots_kernel(
    q,  # [B, N, Hk, K] float32
    k,  # [B, N, Hk, K] float32
    v,  # [B, N, Hv, V] float32
    g,  # [B, N, Hv] or [B, N, Hv, K] float32, contiguous
    beta,  # [B, N, Hv] float32, contiguous
    out,  # [B, N, Hv, V] float32, contiguous
    state,  # [B, Hv, K, V] any float dtype
    snapshots,  # [B, N, Hv, K, V] any float dtype
    parents,  # [B, N] int64, or None: chains
    num_nodes,
    q_row_stride,
    q_node_stride,
    q_head_stride,
    k_row_stride,
    k_node_stride,
    k_head_stride,
    v_row_stride,
    v_node_stride,
    v_head_stride,
    state_row_stride,
    state_head_stride,
    state_key_stride,
    snapshot_row_stride,
    snapshot_node_stride,
    snapshot_head_stride,
    snapshot_key_stride,
    parents_row_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_KEYS: tl.constexpr,  # all keys
    BLOCK_VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # a log decay for each key
):
    """The recurrence itself, node after node; every thread reads only those parts of snapshots that it wrote."""
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_k, at_v = tl.arange(0, BLOCK_KEYS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_k, is_v = at_k < KEY_DIM, at_v < VALUE_DIM
    in_state = is_k[:, None] & is_v[None, :]
    state_at = state + row * state_row_stride + head * state_head_stride
    checkpoint = tl.load(state_at + at_k[:, None] * state_key_stride + at_v[None, :], mask=in_state, other=0.0)
    checkpoint = checkpoint.to(tl.float32)
    of_head = snapshots + row * snapshot_row_stride + head * snapshot_head_stride
    of_head += at_k[:, None] * snapshot_key_stride + at_v[None, :]
    current = checkpoint
    for i in range(num_nodes):
        if parents is not None:
            parent = tl.load(parents + row * parents_row_stride + i)
            in_parent = (at_k < tl.where(parent < 0, 0, KEY_DIM))[:, None] & is_v[None, :]
            read = tl.load(of_head + parent * snapshot_node_stride, mask=in_parent, other=0.0)
            current = tl.where(parent < 0, checkpoint, read.to(tl.float32))
        token = (row * num_nodes + i) * num_heads + head
        q_at = q + row * q_row_stride + i * q_node_stride + (head // GROUP) * q_head_stride
        k_at = k + row * k_row_stride + i * k_node_stride + (head // GROUP) * k_head_stride
        v_at = v + row * v_row_stride + i * v_node_stride + head * v_head_stride
        q_node, k_node = tl.load(q_at + at_k, mask=is_k, other=0.0), tl.load(k_at + at_k, mask=is_k, other=0.0)
        if BY_CHANNEL:
            current *= tl.exp(tl.load(g + token * KEY_DIM + at_k, mask=is_k, other=0.0))[:, None]
        else:
            current *= tl.exp(tl.load(g + token))
        read_by_k = tl.sum(k_node[:, None] * current, 0)
        u = tl.load(beta + token) * (tl.load(v_at + at_v, mask=is_v, other=0.0) - read_by_k)
        current += k_node[:, None] * u[None, :]
        tl.store(out + token * VALUE_DIM + at_v, tl.sum(q_node[:, None] * current, 0), mask=is_v)
        stored = as_stored(current, snapshots.dtype.element_ty)
        tl.store(of_head + tl.cast(i, tl.int64) * snapshot_node_stride, stored, mask=in_state)
        if parents is not None:
            tl.debug_barrier()


@triton.jit(do_not_specialize=["num_tokens"])
def extend_kernel(
    q,  # [B, L, Hk, K] float32
    k,  # [B, L, Hk, K] float32
    v,  # [B, L, Hv, V] float32
    g,  # [B, L, Hv] float32, contiguous
    beta,  # [B, L, Hv] float32, contiguous
    out,  # [B, L, Hv, V] float32, contiguous
    states,  # [slots, Hv, K, V] any float dtype
    work,  # [B, Hv, K, V] float32, contiguous; None: float32 states are worked on where they are
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
    BLOCK_TOKENS: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PARTS: tl.constexpr,  # of products: see ``product``
):
    """Known tokens, a chunk at a time: inside it all u solve one triangular system.

    The state of a program stays in memory, which is in a cache: products over all keys at once want too many registers.
    """
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_c, at_v = tl.arange(0, BLOCK_TOKENS), tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_v = at_v < VALUE_DIM
    slot = tl.load(slots + row)
    length = tl.where(slot == 0, 0, tl.load(lengths + row))
    num_keys = tl.where(length > 0, KEY_DIM, 0)  # keys of the state that are copied
    kept = states + slot * state_slot_stride + head * state_head_stride + at_v[None, :]
    if work is None:
        state_at, key_stride = kept, state_key_stride
    else:
        state_at, key_stride = work + (row * num_heads + head) * (KEY_DIM * VALUE_DIM) + at_v[None, :], VALUE_DIM
        copy_state(kept, state_key_stride, state_at, key_stride, num_keys, is_v, BLOCK_KEYS)
        tl.debug_barrier()
    is_below = at_c[:, None] >= at_c[None, :]
    for first in range(0, length, BLOCK_TOKENS):
        at = first + at_c
        is_token = at < length
        in_values = is_token[:, None] & is_v[None, :]
        token = (row * num_tokens + at) * num_heads + head
        q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at[:, None] * q_token_stride
        k_at = k + row * k_row_stride + (head // GROUP) * k_head_stride + at[:, None] * k_token_stride
        v_at = v + row * v_row_stride + head * v_head_stride + at[:, None] * v_token_stride
        if PARTS == "none":  # otherwise as late as can be: no registers are left
            v_chunk = tl.load(v_at + at_v[None, :], mask=in_values, other=0.0)
        g_chunk = tl.load(g + token, mask=is_token, other=0.0)
        beta_chunk = tl.load(beta + token, mask=is_token, other=0.0)
        log_decay = tl.sum(tl.where(is_below, g_chunk[None, :], 0.0), 1)
        last = tl.sum(g_chunk, 0)

        q_read = tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32)
        k_read = tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32)
        q_k = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)
        k_k = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)
        if PARTS != "none":  # before the state is read: together they spill registers
            q_k, k_k = add_grams(q_k, k_k, q_at, k_at, is_token, KEY_DIM, BLOCK_KEYS, PARTS)
            between, system = chunk_system(k_k, g_chunk, beta_chunk, is_below, PARTS)
            q_k *= between
        for first_again in range(0, KEY_DIM, BLOCK_KEYS):
            at_k = first_again + tl.arange(0, BLOCK_KEYS)
            is_k = at_k < KEY_DIM
            in_keys, in_state = is_token[:, None] & is_k[None, :], is_k[:, None] & is_v[None, :]
            state = tl.load(state_at + at_k[:, None] * key_stride, mask=in_state, other=0.0)
            q_part = tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0)
            k_part = tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0)
            q_read = add_product(q_read, q_part, state, PARTS)
            k_read = add_product(k_read, k_part, state, PARTS)
            if PARTS == "none":
                q_k = add_product(q_k, q_part, tl.trans(k_part), PARTS)
                k_k = add_product(k_k, k_part, tl.trans(k_part), PARTS)

        of_state = tl.exp(log_decay)[:, None]
        if PARTS != "none":
            v_chunk = tl.load(v_at + at_v[None, :], mask=in_values, other=0.0)
        u = beta_chunk[:, None] * (v_chunk - of_state * k_read)
        if PARTS != "none":
            u = product(system, finite(u), PARTS) + u * 0.0  # what is not finite stays in its row
        else:
            between, system = chunk_system(k_k, g_chunk, beta_chunk, is_below, PARTS)
            u = solve(system, u, BLOCK_TOKENS - 1)
            q_k *= between
        result = of_state * q_read + product(q_k, u, PARTS)
        tl.store(out + token[:, None] * VALUE_DIM + at_v[None, :], result, mask=in_values)

        tl.debug_barrier()  # all threads have read the state
        to_last, whole = tl.exp(decay_behind(g_chunk, at_c)), tl.exp(last)
        for first_updated in range(0, KEY_DIM, BLOCK_KEYS):
            at_k = first_updated + tl.arange(0, BLOCK_KEYS)
            is_k = at_k < KEY_DIM
            in_state = is_k[:, None] & is_v[None, :]
            k_turned = k + row * k_row_stride + (head // GROUP) * k_head_stride + at[None, :] * k_token_stride
            k_part = tl.load(k_turned + at_k[:, None], mask=is_k[:, None] & is_token[None, :], other=0.0)
            state = tl.load(state_at + at_k[:, None] * key_stride, mask=in_state, other=0.0)
            state = add_product(whole * state, k_part * to_last[None, :], u, PARTS)
            tl.store(state_at + at_k[:, None] * key_stride, state, mask=in_state)
        tl.debug_barrier()
    if work is not None:
        copy_state(state_at, key_stride, kept, state_key_stride, num_keys, is_v, BLOCK_KEYS)

    for first in range(length, num_tokens, BLOCK_TOKENS):
        at = first + at_c
        token = (row * num_tokens + at) * num_heads + head
        in_values = (at < num_tokens)[:, None] & is_v[None, :]
        zeros = tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32)
        tl.store(out + token[:, None] * VALUE_DIM + at_v[None, :], zeros, mask=in_values)


@triton.jit
def add_grams(q_k, k_k, q_at, k_at, is_token, KEY_DIM: tl.constexpr, BLOCK_KEYS: tl.constexpr, PARTS: tl.constexpr):
    """Q K^T and K K^T of a chunk's tokens, of which ``q_at`` and ``k_at`` [tokens, 1] are the first keys, added up."""
    for first_key in range(0, KEY_DIM, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        in_keys = is_token[:, None] & (at_k < KEY_DIM)[None, :]
        q_part = tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0)
        k_part = tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0)
        q_k = add_product(q_k, q_part, tl.trans(k_part), PARTS)
        k_k = add_product(k_k, k_part, tl.trans(k_part), PARTS)
    return q_k, k_k


@triton.jit
def chunk_system(k_k, g_chunk, beta_chunk, is_below, PARTS: tl.constexpr):
    """Decays between a chunk's tokens, and the system of their updates: its inverse where products are not exact."""
    at = tl.arange(0, k_k.shape[0])
    between = decays(g_chunk, is_below, PARTS)
    system = tl.where(at[:, None] > at[None, :], beta_chunk[:, None] * k_k * between, 0.0)
    if PARTS != "none":
        system = inverse(system, PARTS)
    return between, system


@triton.jit
def copy_state(source, source_key_stride, target, target_key_stride, num_keys, is_v, BLOCK_KEYS: tl.constexpr):
    """A block of values of a head's state into memory of another dtype; pointers are [1, values], the first key's."""
    for first in range(0, num_keys, BLOCK_KEYS):
        at_k = first + tl.arange(0, BLOCK_KEYS)
        in_state = (at_k < num_keys)[:, None] & is_v[None, :]
        state = tl.load(source + at_k[:, None] * source_key_stride, mask=in_state, other=0.0).to(tl.float32)
        stored = as_stored(state, target.dtype.element_ty)
        tl.store(target + at_k[:, None] * target_key_stride, stored, mask=in_state)
