"""Chunks of long prompts with a decay for each key channel (KDA) in Triton: products of keys. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_prefill import product_of_parts, split, store_parts


@triton.jit
def three_parts(x):
    """Three numbers in bfloat16 whose sum is a float32 number."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def sums_of(is_summed, high, middle, low, PARTS: tl.constexpr):
    """Sums over tokens, [I, K], of numbers [J, K] in three parts where ``is_summed`` [I, J], on tensor cores.

    A product with 0 or 1 is exact.
    """
    chosen, none = (
        tl.where(is_summed, 1.0, 0.0).to(tl.bfloat16),
        tl.zeros((is_summed.shape[0], high.shape[1]), tl.float32),
    )
    if PARTS == "wide":
        chosen, high, middle, low = (
            chosen.to(tl.float32),
            high.to(tl.float32),
            middle.to(tl.float32),
            low.to(tl.float32),
        )
    return tl.dot(chosen, high, tl.dot(chosen, middle, tl.dot(chosen, low, none)))


@triton.jit
def joined_products(k, q, g_high, g_middle, g_low, k_k, q_k, level, PARTS: tl.constexpr):
    """Add products of tokens in two blocks of 2^level behind each other: the second's with the first's keys.

    A key of the first block decays to its end, a key or query of the second from its start on. Both are sums of what
    lies between, so that no exponent is above 0, and one matrix of decays serves both.
    """
    at = tl.arange(0, k.shape[0])
    block, is_second = at >> level, (at >> level) % 2 == 1
    lies = tl.where(is_second[:, None], at[None, :] <= at[:, None], at[None, :] > at[:, None])
    lies = lies & (block[:, None] == block[None, :])
    decay = tl.exp(sums_of(lies, g_high, g_middle, g_low, PARTS))
    high, low = split(k * decay)
    q_high, q_low = split(q * decay)
    none = tl.zeros(k_k.shape, tl.float32)
    joins = is_second[:, None] & (block[:, None] == block[None, :] + 1)
    k_k += tl.where(joins, product_of_parts(high, low, tl.trans(high), tl.trans(low), none, PARTS), 0.0)
    q_k += tl.where(joins, product_of_parts(q_high, q_low, tl.trans(high), tl.trans(low), none, PARTS), 0.0)
    return k_k, q_k


@triton.jit(do_not_specialize=["first", "num_tokens", "num_chunks"])
def channel_products_kernel(
    q,  # [B, L, Hk, K] float32
    k,  # [B, L, Hk, K] float32
    g,  # [B, L, Hv, K] float32, contiguous
    keys,  # parts [B, Hv, chunks, 2, C, K'], written: with the decay behind each token
    state_queries,  # parts of this shape, written: with the decay up to each token
    state_keys,  # the same of keys
    grams,  # [B, Hv, chunks, 2, C, C] float32, written: Q K^T up to the diagonal, K K^T below it, with decays
    decays,  # [B, Hv, chunks, K'] float32, written: of the whole chunk
    slots,  # [B] int64
    lengths,  # [B] int64
    first,  # token at which chunks begin
    num_tokens,
    num_chunks,
    q_row_stride,
    q_token_stride,
    q_head_stride,
    k_row_stride,
    k_token_stride,
    k_head_stride,
    KEY_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_KEYS: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    NUM_LEVELS: tl.constexpr,  # half of C is 2^NUM_LEVELS
    PARTS: tl.constexpr,
):
    """All that decays by channel stand in, of half of a chunk's tokens: their products with tokens before them.

    Pairs of tokens meet at the one boundary between two blocks of 1, 2, 4, ... tokens that lies between them. 32 rows:
    with 64, products are instructions that take operands by address (see ``updates_kernel``).
    """
    half: tl.constexpr = BLOCK_TOKENS // 2
    chunk, is_second = tl.program_id(0) // 2, tl.program_id(0) % 2
    head, row = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    num_heads, at_h = tl.num_programs(1), tl.arange(0, half)
    own, other = is_second * half + at_h, (1 - is_second) * half + at_h
    start, tile = first + chunk * BLOCK_TOKENS, (row * num_heads + head) * num_chunks + chunk
    is_own, is_other = own < length - start, other < length - start
    is_old = other < tl.where(is_second == 1, length - start, 0)  # the other half, where it is before this one
    # from the first token of the chunk on, so that places of numbers need no 64 bits
    q_start = q + row * q_row_stride + (head // GROUP) * q_head_stride + start.to(tl.int64) * q_token_stride
    k_start = k + row * k_row_stride + (head // GROUP) * k_head_stride + start.to(tl.int64) * k_token_stride
    g_start = g + ((row * num_tokens + start) * num_heads + head) * KEY_DIM
    q_at, k_at = own * q_token_stride.to(tl.int32), own * k_token_stride.to(tl.int32)
    k_other_at = other * k_token_stride.to(tl.int32)
    g_at, g_other_at = own * (num_heads * KEY_DIM), other * (num_heads * KEY_DIM)
    k_k, q_k = tl.zeros((half, half), tl.float32), tl.zeros((half, half), tl.float32)
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        in_keys = is_own[:, None] & (at_k < KEY_DIM)[None, :]
        q_own = tl.load(q_start + (q_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        k_own = tl.load(k_start + (k_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        g_own = tl.load(g_start + (g_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        q_k += tl.where(at_h[:, None] == at_h[None, :], tl.sum(q_own * k_own, 1)[:, None], 0.0)
        g_high, g_middle, g_low = three_parts(g_own)
        for level in range(NUM_LEVELS):  # not unrolled, which takes more registers than there are
            k_k, q_k = joined_products(k_own, q_own, g_high, g_middle, g_low, k_k, q_k, level, PARTS)
    in_chunk = tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS)
    at_own, at_other = (own * BLOCK_TOKENS)[:, None] + own[None, :], (own * BLOCK_TOKENS)[:, None] + other[None, :]
    tl.store(grams + in_chunk + at_own, q_k)
    tl.store(grams + in_chunk + BLOCK_TOKENS * BLOCK_TOKENS + at_own, k_k)

    is_up_to, is_behind = at_h[None, :] <= at_h[:, None], at_h[None, :] > at_h[:, None]
    in_keys_of_chunk = tile * (2 * BLOCK_TOKENS * PADDED_KEYS)
    k_k, q_k = tl.zeros((half, half), tl.float32), tl.zeros((half, half), tl.float32)
    for key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = key + tl.arange(0, BLOCK_KEYS)
        in_keys = is_own[:, None] & (at_k < KEY_DIM)[None, :]
        in_other = is_other[:, None] & (at_k < KEY_DIM)[None, :]
        q_own = tl.load(q_start + (q_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        k_own = tl.load(k_start + (k_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        g_own = tl.load(g_start + (g_at[:, None] + at_k[None, :]), mask=in_keys, other=0.0)
        g_other = tl.load(g_start + (g_other_at[:, None] + at_k[None, :]), mask=in_other, other=0.0)
        g_high, g_middle, g_low = three_parts(g_own)
        up_to = sums_of(is_up_to, g_high, g_middle, g_low, PARTS)
        behind = sums_of(is_behind, g_high, g_middle, g_low, PARTS)
        of_other = tl.sum(g_other, 0)
        in_old = is_old[:, None] & (at_k < KEY_DIM)[None, :]
        old = tl.load(k_start + (k_other_at[:, None] + at_k[None, :]), mask=in_old, other=0.0)
        g_high, g_middle, g_low = three_parts(g_other)
        old *= tl.exp(sums_of(is_behind, g_high, g_middle, g_low, PARTS))
        high, low = split(tl.trans(old))
        k_high, k_low = split(k_own * tl.exp(up_to))
        k_k = product_of_parts(k_high, k_low, high, low, k_k, PARTS)
        q_high, q_low = split(q_own * tl.exp(up_to))
        q_k = product_of_parts(q_high, q_low, high, low, q_k, PARTS)
        tl.store(decays + tile * PADDED_KEYS + at_k, tl.exp(tl.sum(g_own, 0) + of_other))  # both halves the same
        up_to += tl.where(is_second == 1, of_other, 0.0)[None, :]
        behind += tl.where(is_second == 1, 0.0, of_other)[None, :]
        written_at = own[:, None] * PADDED_KEYS + at_k[None, :]
        up_to = tl.exp(up_to)
        store_parts(state_queries + in_keys_of_chunk + written_at, q_own * up_to, BLOCK_TOKENS * PADDED_KEYS)
        store_parts(state_keys + in_keys_of_chunk + written_at, k_own * up_to, BLOCK_TOKENS * PADDED_KEYS)
        store_parts(keys + in_keys_of_chunk + written_at, k_own * tl.exp(behind), BLOCK_TOKENS * PADDED_KEYS)
    # zeros where the other half is behind
    tl.store(grams + in_chunk + at_other, q_k)
    tl.store(grams + in_chunk + BLOCK_TOKENS * BLOCK_TOKENS + at_other, k_k)
