"""Functions that kernels of recurrent states share, and the fold. A program has blocks [keys, values] of one head."""

import triton
import triton.language as tl


@triton.jit
def not_finite(x):
    """1.0 where x is not finite, else 0.0."""
    return tl.where(tl.abs(x) < float("inf"), 0.0, 1.0)


@triton.jit
def finite(x):
    """x with 0 for values that are not finite: masked weights are 0 but still multiplied, and 0 times NaN is NaN."""
    return tl.where(tl.abs(x) < float("inf"), x, 0.0)


@triton.jit
def as_stored(state, dtype: tl.constexpr):
    """A float32 state in a pool's dtype: float16 ends at 65504, and values beyond become that; NaN stays."""
    if dtype == tl.float16:
        state = tl.where(state > 65504.0, 65504.0, state)
        state = tl.where(state < -65504.0, -65504.0, state)
    return state.to(dtype)


@triton.jit
def product(a, b, PARTS: tl.constexpr):
    """a b with sums in float32, of float32 operands: exact ("none"), or as products of parts in bfloat16 ("bf16").

    x = high + low + rest, both parts in bfloat16: what is left out, rests and low times low, is below 2^-15 of a term.
    "wide": with the same parts as float32 numbers, for Triton's interpreter, which cannot multiply bfloat16.
    """
    if PARTS == "none":
        return tl.dot(a, b, input_precision="ieee")
    else:
        a_high, b_high = a.to(tl.bfloat16), b.to(tl.bfloat16)
        a_low, b_low = (a - a_high.to(tl.float32)).to(tl.bfloat16), (b - b_high.to(tl.float32)).to(tl.bfloat16)
        if PARTS == "wide":
            a_high, a_low = a_high.to(tl.float32), a_low.to(tl.float32)
            b_high, b_low = b_high.to(tl.float32), b_low.to(tl.float32)
        return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low)))


@triton.jit
def rounded(x):
    """Numbers in float32 rounded to those that bfloat16 has, by integers, ties away from zero.

    Conversions are slow instructions on NVIDIA GPUs, and made one by one where results are needed in float32 too.
    """
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x8000) & -65536).to(tl.float32, bitcast=True)


@triton.jit
def add_product(total, a, b, PARTS: tl.constexpr):
    """Total + a b, of matrices, as ``product`` computes it: sums start from ``total``, and none are beside it."""
    if PARTS == "none":
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        a_high, b_high = rounded(a), rounded(b)
        a_low, b_low = (a - a_high).to(tl.bfloat16), (b - b_high).to(tl.bfloat16)
        if PARTS == "wide":
            a_low, b_low = a_low.to(tl.float32), b_low.to(tl.float32)
        else:
            a_high, b_high = a_high.to(tl.bfloat16), b_high.to(tl.bfloat16)
        return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low, total)))


@triton.jit
def add_sums(total, x, is_summed, PARTS: tl.constexpr):
    """Total + the sums over j of x [I, J] where ``is_summed`` [J, K], of exact terms."""
    # on tensor cores but for "none": a float32 number is the sum of three in bfloat16, and a product of such a number
    # with 0 or 1 is exact
    if PARTS == "none":
        return tl.dot(x, tl.where(is_summed, 1.0, 0.0), total, input_precision="ieee")
    else:
        for _ in tl.static_range(3):
            part = x.to(tl.bfloat16)
            if PARTS == "wide":
                total = tl.dot(part.to(tl.float32), tl.where(is_summed, 1.0, 0.0), total)
            else:
                total = tl.dot(part, tl.where(is_summed, 1.0, 0.0).to(tl.bfloat16), total)
            x -= part.to(tl.float32)
        return total


@triton.jit
def path_decay(decay, count, record_stride, BLOCK_RECORDS: tl.constexpr):
    """Log decay from a checkpoint to the last of its ``count`` pending records, 0 where nothing is pending."""
    total = 0.0
    for first in range(0, count, BLOCK_RECORDS):
        at = first + tl.arange(0, BLOCK_RECORDS)
        total += tl.sum(tl.load(decay + at * record_stride, mask=at < count, other=0.0), 0)
    return total


@triton.jit
def decays_to_last(decay, count, record_stride, block, behind, BLOCK_RECORDS: tl.constexpr):
    """A block of the pending records, counted from the last block: which they are, and the log decay behind each.

    That is summed up from the last record on, and is no difference of sums from the checkpoint on: behind a strong
    decay these have lost the digits of weak ones. ``behind`` is the third result of the block behind this one, or 0.
    """
    at = (tl.cdiv(count, BLOCK_RECORDS) - 1 - block) * BLOCK_RECORDS + tl.arange(0, BLOCK_RECORDS)
    following = tl.load(decay + (at + 1) * record_stride, mask=at + 1 < count, other=0.0)
    return at, behind + tl.cumsum(following, 0, reverse=True), behind + tl.sum(following, 0)


@triton.jit
def decay_behind(log_decay, at):
    """Log decay behind each token of a chunk, up to the last of them: [I]. Summed up, as in ``decays_to_last``."""
    return tl.sum(tl.where(at[None, :] > at[:, None], log_decay[None, :], 0.0), 1)


@triton.jit
def add_one_by_one(
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
):
    """State + the sum over the first ``count`` records of k_j u_j^T, each times the decay behind it, without products.

    The last record comes first: what lies behind one is then known when it is added.
    """
    to_last = 0.0
    for i in range(count):
        j = count - 1 - i
        key = tl.load(keys + j * keys_record_stride + at_k, mask=is_k, other=0.0)
        update = tl.load(updates + j * updates_record_stride + at_v, mask=is_v, other=0.0)
        state += key[:, None] * (update * tl.exp(to_last))[None, :]
        to_last += tl.load(decay + j * decay_record_stride)
    return state


@triton.jit
def add_ahead(
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
):
    """``add_one_by_one``, each record on its way while the one behind it is added: for registers that have room."""
    to_last = 0.0
    j = tl.maximum(count - 1, 0)  # what is loaded of record 0 beyond the first is not used
    key = tl.load(keys + j * keys_record_stride + at_k, mask=is_k, other=0.0)
    update = tl.load(updates + j * updates_record_stride + at_v, mask=is_v, other=0.0)
    own = tl.load(decay + j * decay_record_stride)
    for _ in range(count):
        j = tl.maximum(j - 1, 0)
        next_key = tl.load(keys + j * keys_record_stride + at_k, mask=is_k, other=0.0)
        next_update = tl.load(updates + j * updates_record_stride + at_v, mask=is_v, other=0.0)
        next_own = tl.load(decay + j * decay_record_stride)
        state += key[:, None] * (update * tl.exp(to_last))[None, :]
        to_last += own
        key, update, own = next_key, next_update, next_own
    return state


@triton.jit
def advance_by_channel(
    state,
    keys,  # the first record's, of these keys; so are updates and decays
    updates,
    decay,
    count,
    is_k,
    is_v,
    keys_record_stride,
    updates_record_stride,
    decay_record_stride,
):
    """The state behind ``count`` records that have a log decay for each key, one after the other.

    An explicit ``fma``: compilers may join either product with the sum, and all kernels shall round alike.
    """
    for j in range(count):
        key = tl.load(keys + j * keys_record_stride, mask=is_k, other=0.0)
        update = tl.load(updates + j * updates_record_stride, mask=is_v, other=0.0)
        step = tl.exp(tl.load(decay + j * decay_record_stride, mask=is_k, other=0.0))
        state = tl.fma(key[:, None], update[None, :], state * step[:, None])
    return state


@triton.jit
def advance(
    state,  # [BLOCK_KEYS, BLOCK_VALUES] float32
    keys,  # the first record's, of this head
    updates,
    decay,
    count,
    total,  # path_decay of the count records
    at_k,  # [BLOCK_KEYS], which of the head's keys
    at_v,
    is_k,
    is_v,
    keys_record_stride,
    keys_dim_stride,
    updates_record_stride,
    updates_dim_stride,
    decay_record_stride,
    BLOCK_RECORDS: tl.constexpr,
):
    """e^total S + sum over the first ``count`` records of k_j u_j^T, each times the decay behind it; the last first."""
    state = state * tl.exp(total)
    behind = 0.0
    for block in range(tl.cdiv(count, BLOCK_RECORDS)):
        at, to_last, behind = decays_to_last(decay, count, decay_record_stride, block, behind, BLOCK_RECORDS)
        is_pending = at < count
        weight = tl.where(is_pending, tl.exp(to_last), 0.0)
        k_at = at_k[:, None] * keys_dim_stride + at[None, :] * keys_record_stride
        k = tl.load(keys + k_at, mask=is_k[:, None] & is_pending[None, :], other=0.0)
        u_at = at[:, None] * updates_record_stride + at_v[None, :] * updates_dim_stride
        u = tl.load(updates + u_at, mask=is_pending[:, None] & is_v[None, :], other=0.0)
        state += tl.dot(k * weight[None, :], u, input_precision="ieee")
    return state


@triton.jit
def fold(
    state,  # [B, Hv, K, V] any float dtype
    records_k,  # [B, R, Hk, K] float32
    records_u,  # [B, R, Hv, V] float32
    records_decay,  # [B, R, Hv] float32, or [B, R, Hv, K]
    num_pending,  # [B] int64
    out,  # [B, Hv, K, V] any float dtype
    key_dim,
    value_dim,
    group,  # value heads of one key head
    state_row_stride,
    state_head_stride,
    state_key_stride,
    state_value_stride,
    keys_row_stride,
    keys_record_stride,
    keys_head_stride,
    keys_dim_stride,
    updates_row_stride,
    updates_record_stride,
    updates_head_stride,
    updates_dim_stride,
    decay_row_stride,
    decay_record_stride,
    decay_head_stride,
    decay_dim_stride,  # None: there is a decay for each head
    out_row_stride,
    out_head_stride,
    out_key_stride,
    out_value_stride,
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    BLOCK_RECORDS: tl.constexpr,
):
    """One program per row, head and block of values; it loops over the keys."""
    row, head = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64)
    at_v = tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    is_v = at_v < value_dim
    count = tl.load(num_pending + row).to(tl.int32)
    keys = records_k + row * keys_row_stride + (head // group) * keys_head_stride
    updates = records_u + row * updates_row_stride + head * updates_head_stride
    decay = records_decay + row * decay_row_stride + head * decay_head_stride
    if decay_dim_stride is None:
        total = path_decay(decay, count, decay_record_stride, BLOCK_RECORDS)
    for first in range(0, key_dim, BLOCK_KEYS):
        at_k = first + tl.arange(0, BLOCK_KEYS)
        is_k = at_k < key_dim
        mask = is_k[:, None] & is_v[None, :]
        read = state + row * state_row_stride + head * state_head_stride
        block = tl.load(
            read + at_k[:, None] * state_key_stride + at_v[None, :] * state_value_stride, mask=mask, other=0.0
        ).to(tl.float32)
        if decay_dim_stride is None:
            folded = advance(
                block,
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
                keys_dim_stride,
                updates_record_stride,
                updates_dim_stride,
                decay_record_stride,
                BLOCK_RECORDS,
            )
        else:
            folded = advance_by_channel(
                block,
                keys + at_k * keys_dim_stride,
                updates + at_v * updates_dim_stride,
                decay + at_k * decay_dim_stride,
                count,
                is_k,
                is_v,
                keys_record_stride,
                updates_record_stride,
                decay_record_stride,
            )
        write = out + row * out_row_stride + head * out_head_stride
        stored = as_stored(folded, out.dtype.element_ty)
        tl.store(write + at_k[:, None] * out_key_stride + at_v[None, :] * out_value_stride, stored, mask=mask)
