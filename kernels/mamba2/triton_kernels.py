"""The parts of a Mamba2 layer around convolution and recurrence in Triton: step sizes, skip, gate and norm."""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import add_product, finite


@triton.jit
def _softplus(x):
    """log(1 + e^x) to float32's own precision, also where e^x is far below 1: log1p by Kahan's quotient."""
    y = tl.exp(-tl.abs(x))
    w = 1.0 + y
    log1p = tl.where(w == 1.0, y, tl.log(w) * (y / tl.where(w == 1.0, 1.0, w - 1.0)))
    return tl.where(x > 0.0, x, 0.0) + log1p


@triton.jit
def _silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["num_nodes", "dt_batch_stride"])
def step(
    dt, mixed, dt_bias, negative_a, u, g, dt_min, dt_max,
    dt_batch_stride, dt_node_stride, mixed_batch_stride, mixed_node_stride, num_nodes,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Step sizes of some heads of one token: u = dt x [T, H, P] and g = dt A [T, H], tokens side by side."""
    token = tl.program_id(0).to(tl.int64)
    batch, node = token // num_nodes, token % num_nodes
    dt += batch * dt_batch_stride + node * dt_node_stride
    mixed += batch * mixed_batch_stride + node * mixed_node_stride
    _step(
        dt, mixed, dt_bias, negative_a, u, g, dt_min, dt_max, token, tl.program_id(1),
        NUM_HEADS, HEAD_DIM, HEADS, COLUMNS,
    )  # fmt: skip


@triton.jit
def _step(
    dt, mixed, dt_bias, negative_a, u, g, dt_min, dt_max, token, block,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A block of a token's heads; ``dt`` and ``mixed`` are the token's."""
    heads, columns = block * HEADS + tl.arange(0, HEADS), tl.arange(0, COLUMNS)
    in_heads = heads < NUM_HEADS
    of_heads = tl.load(dt + heads, mask=in_heads, other=0.0)
    size = _softplus(of_heads.to(tl.float32) + tl.load(dt_bias + heads, mask=in_heads, other=0.0))
    size = tl.where(size < dt_min, dt_min, size)  # comparisons let NaN pass
    size = tl.where(size > dt_max, dt_max, size)
    tl.store(g + token * NUM_HEADS + heads, size * tl.load(negative_a + heads, mask=in_heads, other=0.0), mask=in_heads)
    channels = heads[:, None] * HEAD_DIM + columns[None, :]
    in_x = in_heads[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.load(mixed + channels, mask=in_x, other=0.0)
    tl.store(u + token * NUM_HEADS * HEAD_DIM + channels, size[:, None] * x, mask=in_x)


@triton.jit(do_not_specialize=["num_nodes", "node_offset", "dt_batch_stride"])
def tree_step(
    dt, mixed, dt_bias, negative_a, u, g, products, kept_b, rows, slots, num_pending, folds, dt_min, dt_max,
    num_nodes, node_offset,
    dt_batch_stride, dt_node_stride, mixed_batch_stride, mixed_node_stride,
    kept_b_row_stride, kept_b_record_stride, kept_b_group_stride,
    products_node_stride,  # N' + R' of products [B, G, N', N' + R']: nodes, and nodes and records, rounded up
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, NUM_GROUPS: tl.constexpr, STATE_DIM: tl.constexpr,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, RECORDS: tl.constexpr,
    PARTS: tl.constexpr,  # of products: see ``product``
):  # fmt: skip
    """As ``step``, for the nodes of trees; the first programs of a row make products, and keep nodes' B."""
    program, batch = tl.program_id(0), tl.program_id(1).to(tl.int64)
    if tl.load(slots + batch) == 0:
        return
    mixed += batch * mixed_batch_stride
    num_multiplying = NUM_GROUPS * (products_node_stride // RECORDS)
    if program < num_multiplying:
        group, column = program % NUM_GROUPS, program // NUM_GROUPS * RECORDS
        pending = node_offset if num_pending is None else tl.load(num_pending + batch).to(tl.int32)
        if folds is not None:  # what is pending goes into the checkpoint, and is not read beside it
            pending = tl.where(tl.load(folds + batch), 0, pending)
        kept_b += tl.load(rows + batch) * kept_b_row_stride + group * kept_b_group_stride
        products += (batch * NUM_GROUPS + group) * (NODES * products_node_stride)
        b = mixed + NUM_HEADS * HEAD_DIM + group * STATE_DIM
        _multiply(
            b + NUM_GROUPS * STATE_DIM, b, kept_b, products, num_nodes, node_offset, pending, column,
            mixed_node_stride, kept_b_record_stride, products_node_stride, STATE_DIM, NODES, LANES, RECORDS, PARTS,
        )  # fmt: skip
    else:
        node, block = (program - num_multiplying) % num_nodes, (program - num_multiplying) // num_nodes
        dt += batch * dt_batch_stride + node * dt_node_stride
        _step(
            dt, mixed + node * mixed_node_stride, dt_bias, negative_a, u, g, dt_min, dt_max,
            batch * num_nodes + node, block, NUM_HEADS, HEAD_DIM, HEADS, COLUMNS,
        )  # fmt: skip


@triton.jit
def _multiply(
    c, b, kept_b, products, num_nodes, node_offset, pending, column,
    node_stride, record_stride, products_node_stride,
    STATE_DIM: tl.constexpr, NODES: tl.constexpr, LANES: tl.constexpr, RECORDS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Products of C of all nodes with B of some nodes, or of some pending records, of one group.

    They begin at ``column``, and records at column NODES. NaN in columns of nodes whose B is not finite.
    """
    is_of_nodes = column < NODES
    num_others = tl.where(is_of_nodes, num_nodes, NODES + pending)
    i, j = tl.arange(0, NODES), column + tl.arange(0, RECORDS)
    is_node, is_other = (i < num_nodes)[:, None], (j < num_others)[:, None]
    c += i[:, None] * node_stride
    b += j[:, None] * node_stride
    record = kept_b + (j - NODES).to(tl.int64)[:, None] * record_stride
    own_record = kept_b + (node_offset + j).to(tl.int64)[:, None] * record_stride
    if column < num_others:
        scores = tl.zeros([NODES, RECORDS], tl.float32)
        for first in range(0, STATE_DIM, LANES):
            lanes = (first + tl.arange(0, LANES))[None, :]
            in_state = lanes < STATE_DIM
            of_c = tl.load(c + lanes, mask=is_node & in_state, other=0.0)
            if is_of_nodes:
                of_b = tl.load(b + lanes, mask=is_other & in_state, other=0.0)
                tl.store(own_record + lanes, finite(of_b), mask=is_other & in_state)
            else:
                of_b = tl.load(record + lanes, mask=is_other & in_state, other=0.0)
            scores = add_product(scores, of_c, tl.trans(of_b), PARTS)
        scores = tl.where(tl.abs(scores) < float("inf"), scores, float("nan"))
        tl.store(products + i[:, None] * products_node_stride + j[None, :], scores)


@triton.jit
def _skipped(recurred, mixed, skip, channels, mask, HEAD_DIM: tl.constexpr):
    """The output of the recurrence plus D x."""
    x, y = tl.load(mixed + channels, mask=mask, other=0.0), tl.load(recurred + channels, mask=mask, other=0.0)
    return y + tl.load(skip + channels // HEAD_DIM, mask=mask, other=0.0) * x


@triton.jit(do_not_specialize=["num_nodes"])
def gate_and_norm(
    recurred, mixed, gate, skip, norm, slots, out, norm_eps,
    mixed_batch_stride, mixed_node_stride, gate_batch_stride, gate_node_stride, num_nodes,
    INNER: tl.constexpr, PART: tl.constexpr, HEAD_DIM: tl.constexpr, NORM_BEFORE_GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One token's PART of the INNER channels, BLOCK at a time; ``norm`` None: the gate alone."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * PART
    batch, node = token // num_nodes, token % num_nodes
    recurred, out = recurred + token * INNER, out + token * INNER
    mixed += batch * mixed_batch_stride + node * mixed_node_stride
    gate += batch * gate_batch_stride + node * gate_node_stride
    limit = tl.where(tl.load(slots + batch) == 0, 0, PART)  # rows of padding read nothing

    scale = 1.0
    if norm is not None:
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, PART, BLOCK):
            i = start + tl.arange(0, BLOCK)
            mask, channels = i < limit, first + i
            y = _skipped(recurred, mixed, skip, channels, mask, HEAD_DIM)
            if not NORM_BEFORE_GATE:
                y *= _silu(tl.load(gate + channels, mask=mask, other=0.0).to(tl.float32))
            squares += y * y
        scale = tl.rsqrt(tl.sum(squares, axis=0) / PART + norm_eps)
    for start in range(0, PART, BLOCK):
        i = start + tl.arange(0, BLOCK)
        mask, channels = i < limit, first + i
        y = _skipped(recurred, mixed, skip, channels, mask, HEAD_DIM)
        opened = _silu(tl.load(gate + channels, mask=mask, other=0.0).to(tl.float32))
        if norm is not None:
            y = y * opened * scale if not NORM_BEFORE_GATE else y * scale * opened
            y *= tl.load(norm + channels, mask=mask, other=0.0)
        else:
            y *= opened
        tl.store(out + channels, y.to(out.dtype.element_ty), mask=i < PART)
