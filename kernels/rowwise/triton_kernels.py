"""What is computed for each token on its own, in Triton. See README.md, "On a GPU"; shapes are in ``triton_ops.py``.

Everything is computed in float32 and rounded once, where it is stored.
"""

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x), with no e^ that overflows."""
    small = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, small) / (1.0 + small)


@triton.jit
def silu(x):
    """x * sigmoid(x), in the dtype of x."""
    return x * sigmoid(x)


@triton.jit
def softplus(x):
    """log(1 + e^x). Of e = e^-|x|, log(1 + e) = 2 artanh(s) with s = e / (2 + e) <= 1/3: exact where e is tiny, too."""
    small = tl.exp(-tl.abs(x))
    s = small / (2.0 + small)
    z = s * s
    series = z * (1.0 / 13.0) + 1.0 / 11.0
    series = series * z + 1.0 / 9.0
    series = series * z + 1.0 / 7.0
    series = series * z + 1.0 / 5.0
    series = series * z + 1.0 / 3.0
    return tl.maximum(x, 0.0) + 2.0 * s * (series * z + 1.0)


@triton.jit
def log_decay(rate, step, bound, HAS_BOUND: tl.constexpr):
    """What a state decays by: rate softplus(step), or bound sigmoid(-rate step)."""
    if HAS_BOUND:
        return bound * sigmoid(-rate * step)
    else:
        return rate * softplus(step)


@triton.jit
def _place(rows, num_heads, length, stride_b, stride_t, stride_h):
    """Offsets of heads that are numbered row by row, token by token: rows [ROWS] -> [ROWS] int64."""
    tokens, heads = rows // num_heads, rows % num_heads
    outer, inner = (tokens // length).to(tl.int64), (tokens % length).to(tl.int64)
    return outer * stride_b + inner * stride_t + heads.to(tl.int64) * stride_h


@triton.jit(do_not_specialize=["num_rows", "length"])
def norm_kernel(
    x,  # [B, L, H, D]
    gate,  # [B, L, H, D] or None
    added,  # [B, L, H, D] contiguous, or None
    weight,  # [D], or [H, D]
    y,  # [B, L, H, D] contiguous
    total,  # [B, L, H, D] contiguous; None without ``added``
    eps,
    num_rows,  # B L H
    length,
    num_heads,
    width,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    gate_stride_b,
    gate_stride_t,
    gate_stride_h,
    weight_stride_h,  # 0: all heads have the same
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    IS_SIGMOID: tl.constexpr,  # of the gate, in place of SiLU
):
    """RMSNorm of rows of D values, gated where there is a gate; of x + added, which is kept, where that is given."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK_D)
    is_column = columns < width
    mask = (rows < num_rows)[:, None] & is_column[None, :]
    at = _place(rows, num_heads, length, x_stride_b, x_stride_t, x_stride_h)
    wide = tl.load(x + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    if added is not None:
        at = rows.to(tl.int64)[:, None] * width + columns[None, :]
        summed = (wide + tl.load(added + at, mask=mask, other=0.0).to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + at, summed, mask=mask)
        wide = summed.to(tl.float32)
    at = (rows % num_heads)[:, None] * weight_stride_h + columns[None, :]
    factor = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 1) / width + eps)[:, None] * factor
    if gate is not None:
        at = _place(rows, num_heads, length, gate_stride_b, gate_stride_t, gate_stride_h)
        wide = tl.load(gate + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        if IS_SIGMOID:
            normed *= sigmoid(wide)
        else:
            normed *= silu(wide)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(y + at, normed.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "length"])
def gate_heads_kernel(
    x,  # [B, L, H, D] contiguous
    gates,  # [B, L, H]
    y,  # [B, L, H, D] contiguous
    num_rows,  # B L H
    length,
    num_heads,
    width,
    gate_stride_b,
    gate_stride_t,
    gate_stride_h,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Heads times the sigmoids of their gates."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns, is_row = tl.arange(0, BLOCK_D), rows < num_rows
    at = _place(rows, num_heads, length, gate_stride_b, gate_stride_t, gate_stride_h)
    gate = sigmoid(tl.load(gates + at, mask=is_row, other=0.0).to(tl.float32)).to(y.dtype.element_ty).to(tl.float32)
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    mask = is_row[:, None] & (columns < width)[None, :]
    wide = tl.load(x + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + at, (wide * gate[:, None]).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length"])
def silu_mul_kernel(
    gate_up,  # [B, L, 2 I]
    y,  # [B, L, I] contiguous
    length,
    width,  # I
    stride_b,
    stride_t,
    BLOCK: tl.constexpr,
):
    """silu(gate) * up of the two halves of each row."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < width
    gate_up += token // length * stride_b + token % length * stride_t
    gate = tl.load(gate_up + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + width + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + token * width + columns, (silu(gate) * up).to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows", "length"])
def rotate_kernel(
    x,  # [B, L, H, D]
    cos,  # [B, L, 1, R]
    sin,  # [B, L, 1, R]
    y,  # [B, L, H, D] contiguous
    num_rows,  # B L H
    length,
    num_heads,
    width,
    rotary_width,
    x_stride_b,
    x_stride_t,
    x_stride_h,
    cos_stride_b,
    cos_stride_t,
    sin_stride_b,
    sin_stride_t,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Rotary embedding of the first R components of each head."""
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns, half = tl.arange(0, BLOCK_D), rotary_width // 2
    mask = (rows < num_rows)[:, None] & (columns < width)[None, :]
    turns = mask & (columns < rotary_width)[None, :]
    partner = tl.where(columns < half, columns + half, columns - half)
    at = _place(rows, num_heads, length, x_stride_b, x_stride_t, x_stride_h)[:, None]
    own = tl.load(x + at + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x + at + partner[None, :], mask=turns, other=0.0).to(tl.float32)
    at = _place(rows, num_heads, length, cos_stride_b, cos_stride_t, 0)[:, None]
    c = tl.load(cos + at + columns[None, :], mask=turns, other=1.0).to(tl.float32)
    at = _place(rows, num_heads, length, sin_stride_b, sin_stride_t, 0)[:, None]
    s = tl.load(sin + at + columns[None, :], mask=turns, other=0.0).to(tl.float32)
    turned = own * c + tl.where(columns < half, -1.0, 1.0)[None, :] * other * s
    at = rows.to(tl.int64)[:, None] * width + columns[None, :]
    tl.store(y + at, turned.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "a_stride_b", "b_stride_b"])
def delta_inputs_kernel(
    mixed,  # [B, L, C]
    a,  # [B, L, Hv], or by channel [B, L, Hv, K]
    b,  # [B, L, Hv]
    negative_a,  # [Hv]
    dt_bias,  # [Hv], or by channel [Hv, K] contiguous
    q,  # [B, L, Hk, K] contiguous
    k,  # [B, L, Hk, K] contiguous
    g,  # a's shape, contiguous
    beta,  # [B, L, Hv] contiguous
    length,
    num_key_heads,
    key_dim,
    num_value_heads,
    query_scale,
    eps,
    step_scale,
    bound,  # of log decays
    mixed_stride_b,
    mixed_stride_t,
    a_stride_b,
    a_stride_t,
    a_stride_h,
    b_stride_b,
    b_stride_t,
    BLOCK_HEADS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # decays are
    HAS_BOUND: tl.constexpr,
):
    """Normalized q and k, decay g and beta of a gated delta net from its projections."""
    token = tl.program_id(0).to(tl.int64)
    outer, inner = token // length, token % length
    heads = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)  # queries', then keys'
    columns = tl.arange(0, BLOCK_K)
    mask = (heads < 2 * num_key_heads)[:, None] & (columns < key_dim)[None, :]
    at = outer * mixed_stride_b + inner * mixed_stride_t + heads[:, None] * key_dim + columns[None, :]
    x = tl.load(mixed + at, mask=mask, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 1) + eps) * tl.where(heads < num_key_heads, query_scale, 1.0)
    at = (token * num_key_heads + heads % num_key_heads)[:, None] * key_dim + columns[None, :]
    is_query = (heads < num_key_heads)[:, None]
    tl.store(q + at, x * factor[:, None], mask=mask & is_query)
    tl.store(k + at, x * factor[:, None], mask=mask & (is_query == 0))

    if BY_CHANNEL:  # of as many value heads
        own = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        mask = (own < num_value_heads)[:, None] & (columns < key_dim)[None, :]
        at = outer * a_stride_b + inner * a_stride_t + own[:, None].to(tl.int64) * a_stride_h + columns[None, :]
        decays = tl.load(a + at, mask=mask, other=0.0).to(tl.float32)
        at = own[:, None] * key_dim + columns[None, :]
        decays += tl.load(dt_bias + at, mask=mask, other=0.0).to(tl.float32)
        rates = tl.load(negative_a + own, mask=own < num_value_heads, other=0.0).to(tl.float32)
        decays = log_decay(rates[:, None], decays, bound, HAS_BOUND)
        tl.store(g + token * num_value_heads * key_dim + at, decays, mask=mask)
    if tl.program_id(1) == 0:
        values = tl.arange(0, BLOCK_V)
        is_value = values < num_value_heads
        step = tl.load(b + outer * b_stride_b + inner * b_stride_t + values, mask=is_value, other=0.0).to(tl.float32)
        own_value = token * num_value_heads + values
        tl.store(beta + own_value, step_scale * sigmoid(step), mask=is_value)
        if not BY_CHANNEL:
            decay = tl.load(a + outer * a_stride_b + inner * a_stride_t + values, mask=is_value, other=0.0)
            decay = decay.to(tl.float32) + tl.load(dt_bias + values, mask=is_value, other=0.0).to(tl.float32)
            rate = tl.load(negative_a + values, mask=is_value, other=0.0).to(tl.float32)
            tl.store(g + own_value, log_decay(rate, decay, bound, HAS_BOUND), mask=is_value)


@triton.jit(do_not_specialize=["num_tokens", "length", "stride_b"])
def angles_kernel(
    positions,  # [B, L]
    frequencies,  # [R]
    cos,  # [B, L, 1, R] contiguous
    sin,  # [B, L, 1, R] contiguous
    scaling,
    num_tokens,  # B L
    length,
    width,  # R
    stride_b,
    stride_t,
    BLOCK_T: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Cosines and sines of positions times frequencies."""
    tokens = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_R)
    is_token, is_column = tokens < num_tokens, columns < width
    at = (tokens // length).to(tl.int64) * stride_b + (tokens % length).to(tl.int64) * stride_t
    position = tl.load(positions + at, mask=is_token, other=0).to(tl.float32)
    frequency = tl.load(frequencies + columns, mask=is_column, other=0.0)
    phase = position[:, None] * frequency[None, :]
    at = tokens.to(tl.int64)[:, None] * width + columns[None, :]
    mask = is_token[:, None] & is_column[None, :]
    tl.store(cos + at, (tl.cos(phase) * scaling).to(cos.dtype.element_ty), mask=mask)
    tl.store(sin + at, (tl.sin(phase) * scaling).to(sin.dtype.element_ty), mask=mask)
