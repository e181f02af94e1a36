"""Long prompts of 16-bit models in Triton: what delta rule and Mamba2 share of three kernels over chunks.

What kernels leave to each other is in parts of bfloat16, high and low, so that a number is split once and not by every
program that reads it. Such tensors are [..., chunks, 2, tokens, dim], without gaps, and padded: nothing in them is
masked.
"""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_kernels import as_stored


@triton.jit
def split(x):
    """The parts of float32 numbers in bfloat16, high and low: see ``product``."""
    high = x.to(tl.bfloat16)
    return high, (x - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def product_of_parts(a_high, a_low, b_high, b_low, sums, PARTS: tl.constexpr):
    """``sums`` + a b, as ``product`` computes it, of operands that are in parts."""
    if PARTS == "wide":
        a_high, a_low = a_high.to(tl.float32), a_low.to(tl.float32)
        b_high, b_low = b_high.to(tl.float32), b_low.to(tl.float32)
    return tl.dot(a_high, b_high, tl.dot(a_low, b_high, tl.dot(a_high, b_low, sums)))


@triton.jit
def load_parts(at, SIZE: tl.constexpr):
    """Both parts of a block; ``SIZE``: of the whole tile, behind which is that of low parts."""
    return tl.load(at), tl.load(at + SIZE)


@triton.jit
def store_parts(at, x, SIZE: tl.constexpr):
    """The other way round."""
    high, low = split(x)
    tl.store(at, high)
    tl.store(at + SIZE, low)


@triton.jit
def leave_decays(at_first, g, num_heads, at_c, is_token, has_next, BLOCK_TOKENS: tl.constexpr):
    """Log decays of a chunk's tokens; decays up to each of them and behind it are left to the other kernels.

    ``at_first``: where those of the chunk go; ``g``: [C], where log decays of one head are.
    """
    own = tl.load(g, mask=is_token, other=0.0)
    up_to = tl.exp(tl.cumsum(own, 0))
    behind = tl.exp(tl.cumsum(tl.load(g + num_heads, mask=has_next, other=0.0), 0, reverse=True))
    tl.store(at_first + at_c, up_to)
    tl.store(at_first + BLOCK_TOKENS + at_c, behind)
    return own


@triton.jit
def chunk_decays(log_decay, PARTS: tl.constexpr):
    """``decays`` from each token of a chunk to those behind it and itself, on tensor cores.

    A float32 number is the sum of three in bfloat16, and a product with 0 or 1 is exact.
    """
    at = tl.arange(0, log_decay.shape[0])
    is_below = at[:, None] >= at[None, :]
    lies_behind = tl.where(at[:, None] > at[None, :], 1.0, 0.0).to(tl.bfloat16)
    between = tl.zeros((log_decay.shape[0], log_decay.shape[0]), tl.float32)
    rest = log_decay
    for _ in tl.static_range(3):
        part = rest.to(tl.bfloat16).to(tl.float32)
        own = tl.where(is_below, part[None, :], 0.0).to(tl.bfloat16)
        if PARTS == "wide":
            between = tl.dot(own.to(tl.float32), lies_behind.to(tl.float32), between)
        else:
            between = tl.dot(own, lies_behind, between)
        rest -= part
    return tl.where(is_below, tl.exp(between), 0.0)


@triton.jit(do_not_specialize=["first", "num_chunks"])
def grams_kernel(
    q,  # [B, L, Hk, K] float32
    k,  # [B, L, Hk, K] float32
    keys,  # parts [B, Hk, chunks, 2, C, K'], written
    grams,  # [B, Hk, chunks, 2, C, C] float32, written: Q K^T and, where it is needed, K K^T
    slots,  # [B] int64
    lengths,  # [B] int64
    first,  # token at which chunks begin
    num_chunks,
    q_row_stride,
    q_token_stride,
    q_head_stride,
    k_row_stride,
    k_token_stride,
    k_head_stride,
    KEY_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_KEYS: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    HAS_SYSTEM: tl.constexpr,  # K K^T is needed
    PARTS: tl.constexpr,
):
    """Products of a chunk's keys, once for all value heads of a key head."""
    chunk, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    at_c = tl.arange(0, BLOCK_TOKENS)
    at = first + chunk * BLOCK_TOKENS + at_c
    q_at = q + row * q_row_stride + head * q_head_stride + at[:, None].to(tl.int64) * q_token_stride
    k_at = k + row * k_row_stride + head * k_head_stride + at[:, None].to(tl.int64) * k_token_stride
    tile = (row * tl.num_programs(1) + head) * num_chunks + chunk
    keys_at = keys + tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS
    q_k = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)
    k_k = tl.zeros((BLOCK_TOKENS, BLOCK_TOKENS), tl.float32)
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        in_keys = (at < length)[:, None] & (at_k < KEY_DIM)[None, :]
        q_high, q_low = split(tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0))
        k_high, k_low = split(tl.load(k_at + at_k[None, :], mask=in_keys, other=0.0))
        tl.store(keys_at + at_k[None, :], k_high)
        tl.store(keys_at + at_k[None, :] + BLOCK_TOKENS * PADDED_KEYS, k_low)
        q_k = product_of_parts(q_high, q_low, tl.trans(k_high), tl.trans(k_low), q_k, PARTS)
        if HAS_SYSTEM:
            k_k = product_of_parts(k_high, k_low, tl.trans(k_high), tl.trans(k_low), k_k, PARTS)
    grams_at = grams + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    tl.store(grams_at, q_k)
    if HAS_SYSTEM:
        tl.store(grams_at + BLOCK_TOKENS * BLOCK_TOKENS, k_k)


@triton.jit(do_not_specialize=["first", "num_chunks"])
def states_kernel(
    states,  # [slots, Hv, K, V] any float dtype
    work,  # [B, Hv, K, V] float32, contiguous: states between calls for parts of a prompt; None: this is all of it
    keys,  # parts [B, Hk, chunks, 2, C, K']
    weights,  # parts [B, Hv, chunks, 2, C, K'] of the state in updates; None: these do not depend on it
    updates,  # parts [B, Hv, chunks, 2, C, V'], behind a state of zeros: replaced by those behind the state there is
    before,  # parts [B, Hv, chunks, 2, K', V'], written: the state before each chunk
    decays,  # [B, Hv, chunks, 2, C] float32; by channel: [B, Hv, chunks, K'], of whole chunks, and keys have their own
    slots,  # [B] int64
    lengths,  # [B] int64
    first,
    num_chunks,
    state_slot_stride,
    state_head_stride,
    state_key_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_VALUES: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    PADDED_VALUES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,  # decays are
    PARTS: tl.constexpr,
):
    """The recurrence from chunk to chunk, on a state that stays in registers: the one part that is sequential."""
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    at_c, at_k = tl.arange(0, BLOCK_TOKENS), tl.arange(0, PADDED_KEYS)
    at_v = tl.program_id(0) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    slot = tl.load(slots + row)
    length = tl.where(slot == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if length <= first:
        return
    in_state = (at_k < KEY_DIM)[:, None] & (at_v < VALUE_DIM)[None, :]
    kept = states + slot * state_slot_stride + head * state_head_stride
    kept += at_k[:, None] * state_key_stride + at_v[None, :]
    if work is None:
        state = tl.load(kept, mask=in_state, other=0.0).to(tl.float32)
    else:
        work_at = work + (row * num_heads + head) * (KEY_DIM * VALUE_DIM) + at_k[:, None] * VALUE_DIM + at_v[None, :]
        if first == 0:
            state = tl.load(kept, mask=in_state, other=0.0).to(tl.float32)
        else:
            state = tl.load(work_at, mask=in_state, other=0.0)

    tile = (row * num_heads + head) * num_chunks
    key_tile = (row * (num_heads // GROUP) + head // GROUP) * num_chunks
    keys_at = keys + key_tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS + at_k[None, :]
    if weights is not None:
        weights_at = weights + tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS + at_k[None, :]
    updates_at = updates + tile * (2 * BLOCK_TOKENS * PADDED_VALUES) + at_c[:, None] * PADDED_VALUES + at_v[None, :]
    before_at = before + tile * (2 * PADDED_KEYS * PADDED_VALUES) + at_k[:, None] * PADDED_VALUES + at_v[None, :]
    decays_size: tl.constexpr = PADDED_KEYS if BY_CHANNEL else 2 * BLOCK_TOKENS
    decays_at = decays + tile * decays_size
    num_own = tl.minimum(tl.cdiv(length - first, BLOCK_TOKENS), num_chunks)
    for _ in range(num_own):
        state_high, state_low = split(state)
        tl.store(before_at, state_high)
        tl.store(before_at + PADDED_KEYS * PADDED_VALUES, state_low)
        u_high, u_low = load_parts(updates_at, BLOCK_TOKENS * PADDED_VALUES)
        u = u_high.to(tl.float32) + u_low.to(tl.float32)
        if weights is not None:
            w_high, w_low = load_parts(weights_at, BLOCK_TOKENS * PADDED_KEYS)
            taken = tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32)
            u -= product_of_parts(w_high, w_low, state_high, state_low, taken, PARTS)
            store_parts(updates_at, u, BLOCK_TOKENS * PADDED_VALUES)
            weights_at += 2 * BLOCK_TOKENS * PADDED_KEYS

        k_high, k_low = load_parts(keys_at, BLOCK_TOKENS * PADDED_KEYS)
        if BY_CHANNEL:
            state *= tl.load(decays_at + at_k)[:, None]
        else:
            u *= tl.load(decays_at + BLOCK_TOKENS + at_c)[:, None]
            state *= tl.load(decays_at + BLOCK_TOKENS - 1)
        high, low = split(u)
        state = product_of_parts(tl.trans(k_high), tl.trans(k_low), high, low, state, PARTS)
        keys_at += 2 * BLOCK_TOKENS * PADDED_KEYS
        updates_at += 2 * BLOCK_TOKENS * PADDED_VALUES
        before_at += 2 * PADDED_KEYS * PADDED_VALUES
        decays_at += decays_size

    if work is None:
        tl.store(kept, as_stored(state, states.dtype.element_ty), mask=in_state)
    else:
        if length <= first + num_chunks * BLOCK_TOKENS:
            tl.store(kept, as_stored(state, states.dtype.element_ty), mask=in_state)
        else:
            tl.store(work_at, state, mask=in_state)


@triton.jit(do_not_specialize=["first", "num_tokens", "num_chunks"])
def outputs_kernel(
    q,  # [B, L, Hk, K] float32
    queries,  # parts [B, Hv, chunks, 2, C, K'] with decays by channel; None: decays are by head
    out,  # [B, L, Hv, V] float32, contiguous
    updates,  # parts [B, Hv, chunks, 2, C, V']
    scores,  # parts [B, Hv, chunks, 2, C, C]
    before,  # parts [B, Hv, chunks, 2, K', V']
    decays,  # [B, Hv, chunks, 2, C] float32
    slots,  # [B] int64
    lengths,  # [B] int64
    first,
    num_tokens,
    num_chunks,
    q_row_stride,
    q_token_stride,
    q_head_stride,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    PADDED_VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Outputs of a chunk: what queries read of the state before it, and of its updates. Zeros on padding."""
    num_blocks: tl.constexpr = (VALUE_DIM + BLOCK_VALUES - 1) // BLOCK_VALUES
    row, head, num_heads = tl.program_id(2).to(tl.int64), tl.program_id(1).to(tl.int64), tl.num_programs(1)
    chunk = tl.program_id(0) // num_blocks
    at_c, at_v = tl.arange(0, BLOCK_TOKENS), (tl.program_id(0) % num_blocks) * BLOCK_VALUES + tl.arange(0, BLOCK_VALUES)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    at = first + chunk * BLOCK_TOKENS + at_c
    result = tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32)
    out_at = out + ((row * num_tokens + at) * num_heads + head)[:, None] * VALUE_DIM + at_v[None, :]
    in_values = (at < num_tokens)[:, None] & (at_v < VALUE_DIM)[None, :]
    if first + chunk * BLOCK_TOKENS >= length:
        tl.store(out_at, result, mask=in_values)
        return
    tile = (row * num_heads + head) * num_chunks + chunk
    q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at[:, None].to(tl.int64) * q_token_stride
    if queries is not None:
        queries_at = queries + tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS
    before_at = before + tile * (2 * PADDED_KEYS * PADDED_VALUES) + at_v[None, :]
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        if queries is None:
            in_keys = (at < length)[:, None] & (at_k < KEY_DIM)[None, :]
            q_high, q_low = split(tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0))
        else:
            q_high, q_low = load_parts(queries_at + at_k[None, :], BLOCK_TOKENS * PADDED_KEYS)
        high, low = load_parts(before_at + at_k[:, None] * PADDED_VALUES, PADDED_KEYS * PADDED_VALUES)
        result = product_of_parts(q_high, q_low, high, low, result, PARTS)
    if queries is None:
        result *= tl.load(decays + tile * (2 * BLOCK_TOKENS) + at_c)[:, None]

    scores_at = scores + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    updates_at = updates + tile * (2 * BLOCK_TOKENS * PADDED_VALUES) + at_c[:, None] * PADDED_VALUES + at_v[None, :]
    score_high, score_low = load_parts(scores_at, BLOCK_TOKENS * BLOCK_TOKENS)
    u_high, u_low = load_parts(updates_at, BLOCK_TOKENS * PADDED_VALUES)
    result = product_of_parts(score_high, score_low, u_high, u_low, result, PARTS)
    if queries is None:  # as another sum: the same addresses would be kept in registers up to here
        out_at = out + (row * num_tokens * num_heads + head) * VALUE_DIM
        out_at += at[:, None] * (num_heads * VALUE_DIM) + at_v[None, :]
    tl.store(out_at, result, mask=in_values)
