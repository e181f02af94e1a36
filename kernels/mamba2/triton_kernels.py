"""The parts of a Mamba2 layer around convolution and recurrence in Triton: step sizes, skip, gate and norm."""

import triton
import triton.language as tl


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
    token, heads = tl.program_id(0).to(tl.int64), tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, COLUMNS)
    batch, node, in_heads = token // num_nodes, token % num_nodes, heads < NUM_HEADS
    of_heads = tl.load(dt + batch * dt_batch_stride + node * dt_node_stride + heads, mask=in_heads, other=0.0)
    size = _softplus(of_heads.to(tl.float32) + tl.load(dt_bias + heads, mask=in_heads, other=0.0))
    size = tl.where(size < dt_min, dt_min, size)  # comparisons let NaN pass
    size = tl.where(size > dt_max, dt_max, size)
    tl.store(g + token * NUM_HEADS + heads, size * tl.load(negative_a + heads, mask=in_heads, other=0.0), mask=in_heads)
    channels = heads[:, None] * HEAD_DIM + columns[None, :]
    in_x = in_heads[:, None] & (columns < HEAD_DIM)[None, :]
    x = tl.load(mixed + batch * mixed_batch_stride + node * mixed_node_stride + channels, mask=in_x, other=0.0)
    tl.store(u + token * NUM_HEADS * HEAD_DIM + channels, size[:, None] * x, mask=in_x)


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
