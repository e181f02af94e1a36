"""What verifies of trees need of a gated delta net's projections, in Triton. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.rowwise.triton_kernels import log_decay, sigmoid
from specmamba.kernels.state_records.triton_kernels import add_product, finite


@triton.jit
def load_part(x, at_k, is_row, KEY_DIM: tl.constexpr):
    """Some numbers of vectors whose first ones are at ``x`` [I, 1], as float32: [I, K]."""
    return tl.load(x + at_k[None, :], mask=is_row[:, None] & (at_k < KEY_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["num_nodes", "node_offset", "a_stride_b", "b_stride_b"])
def tree_inputs_kernel(
    mixed,  # [B, N, C]
    a,  # [B, N, Hv]
    b,  # [B, N, Hv]
    negative_a,  # [Hv]
    dt_bias,  # [Hv]
    q,  # [B, N, Hk, K] float32, contiguous, written
    k,  # the same
    g,  # [B, N, Hv] float32, contiguous, written
    beta,  # the same
    products,  # [B, Hk, 2, N', N' + R'] float32, contiguous, written: of queries, then keys, with keys of both
    records_k,  # [rows, R, Hk, K] float32, written for nodes
    rows,  # [B] int64
    slots,  # [B] int64; rows of slot 0 are padding: nothing is written
    num_pending,  # [B] int64 or None
    folds,  # [B] bool or None
    num_nodes,
    node_offset,
    query_scale,
    eps,
    step_scale,
    bound,  # of log decays
    mixed_stride_b,
    mixed_stride_t,
    a_stride_b,
    a_stride_t,
    b_stride_b,
    b_stride_t,
    keys_row_stride,
    keys_record_stride,
    keys_head_stride,
    products_node_stride,  # N' + R'
    KEY_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_NODES: tl.constexpr,  # N': all nodes
    BLOCK_KEYS: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,  # nodes or records that one program multiplies all nodes with
    BLOCK_GROUP: tl.constexpr,
    HAS_BOUND: tl.constexpr,
    PARTS: tl.constexpr,  # of products: see ``product``
):
    """Unit queries and keys, decays, step sizes, nodes' keys in their records; and products, once for a key head.

    A program has one key head of one row, and multiplies with some nodes or pending records; the first does the rest.
    """
    head, row, num_heads = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64), tl.num_programs(1)
    column = tl.program_id(0) * BLOCK_RECORDS
    slot, ring = tl.load(slots + row), tl.load(rows + row)
    count = node_offset if num_pending is None else tl.load(num_pending + row).to(tl.int32)
    if folds is not None:  # what is pending goes into the checkpoint, and is not read beside it
        count = tl.where(tl.load(folds + row), 0, count)
    is_of_nodes, is_first = column < BLOCK_NODES, column == 0
    num_others = tl.where(is_of_nodes, num_nodes, BLOCK_NODES + count)
    if (slot == 0) | (column >= num_others):
        return

    at_n, at_o = tl.arange(0, BLOCK_NODES), column + tl.arange(0, BLOCK_RECORDS)
    is_n, is_o = at_n < num_nodes, at_o < num_others
    of_head = mixed + row * mixed_stride_b + head * KEY_DIM
    q_from = of_head + at_n[:, None] * mixed_stride_t
    k_from = q_from + num_heads * KEY_DIM
    node_from = of_head + num_heads * KEY_DIM + at_o[:, None] * mixed_stride_t
    of_records = records_k + ring * keys_row_stride + head * keys_head_stride
    record_from = of_records + (at_o - BLOCK_NODES)[:, None] * keys_record_stride
    is_o_node = at_o < tl.where(is_of_nodes, num_nodes, 0)
    q_squares, k_squares = tl.zeros((BLOCK_NODES,), tl.float32), tl.zeros((BLOCK_NODES,), tl.float32)
    o_squares = tl.zeros((BLOCK_RECORDS,), tl.float32)
    for first in range(0, KEY_DIM, BLOCK_KEYS):
        at_k = first + tl.arange(0, BLOCK_KEYS)
        q_part, k_part = load_part(q_from, at_k, is_n, KEY_DIM), load_part(k_from, at_k, is_n, KEY_DIM)
        o_part = load_part(node_from, at_k, is_o_node, KEY_DIM)
        q_squares += tl.sum(q_part * q_part, 1)
        k_squares += tl.sum(k_part * k_part, 1)
        o_squares += tl.sum(o_part * o_part, 1)
    q_factor, k_factor = query_scale * tl.rsqrt(q_squares + eps), tl.rsqrt(k_squares + eps)
    o_factor = tl.rsqrt(o_squares + eps)

    q_o = tl.zeros((BLOCK_NODES, BLOCK_RECORDS), tl.float32)
    k_o = tl.zeros((BLOCK_NODES, BLOCK_RECORDS), tl.float32)
    is_written = at_n < tl.where(is_first, num_nodes, 0)
    token = (row * num_nodes + at_n) * num_heads + head
    for first_again in range(0, KEY_DIM, BLOCK_KEYS):
        at_k = first_again + tl.arange(0, BLOCK_KEYS)
        in_written = is_written[:, None] & (at_k < KEY_DIM)[None, :]
        q_part = load_part(q_from, at_k, is_n, KEY_DIM) * q_factor[:, None]
        k_part = load_part(k_from, at_k, is_n, KEY_DIM) * k_factor[:, None]
        if is_of_nodes:
            other = load_part(node_from, at_k, is_o, KEY_DIM) * o_factor[:, None]
        else:
            other = load_part(record_from, at_k, is_o, KEY_DIM)
        at = token[:, None] * KEY_DIM + at_k[None, :]
        tl.store(q + at, q_part, mask=in_written)
        tl.store(k + at, k_part, mask=in_written)
        record_at = of_records + (node_offset + at_n)[:, None] * keys_record_stride + at_k[None, :]
        tl.store(record_at, finite(k_part), mask=in_written)
        q_o = add_product(q_o, q_part, tl.trans(other), PARTS)
        k_o = add_product(k_o, k_part, tl.trans(other), PARTS)
    of_queries = products + (row * num_heads + head) * (2 * BLOCK_NODES * products_node_stride)
    of_queries += at_n[:, None] * products_node_stride + at_o[None, :]
    tl.store(of_queries, q_o)
    tl.store(of_queries + BLOCK_NODES * products_node_stride, k_o)

    if is_first:
        at_h = tl.arange(0, BLOCK_GROUP)
        of_values = head * GROUP + at_h
        is_h = at_h < GROUP
        in_values = is_n[:, None] & is_h[None, :]
        at = (row * num_nodes + at_n)[:, None] * (num_heads * GROUP) + of_values[None, :]
        b_at = b + row * b_stride_b + at_n[:, None] * b_stride_t + of_values[None, :]
        a_at = a + row * a_stride_b + at_n[:, None] * a_stride_t + of_values[None, :]
        step = tl.load(b_at, mask=in_values, other=0.0).to(tl.float32)
        tl.store(beta + at, step_scale * sigmoid(step), mask=in_values)
        raw = tl.load(a_at, mask=in_values, other=0.0).to(tl.float32)
        bias = tl.load(dt_bias + of_values, mask=is_h, other=0.0).to(tl.float32)
        rate = tl.load(negative_a + of_values, mask=is_h, other=0.0).to(tl.float32)
        decays = log_decay(rate[None, :], raw + bias[None, :], bound, HAS_BOUND)
        tl.store(g + at, decays, mask=in_values)
