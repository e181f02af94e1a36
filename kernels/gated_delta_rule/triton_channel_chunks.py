"""Chunks of long prompts with a decay for each key channel (KDA) in Triton: products of keys. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_prefill import product_of_parts, split, store_parts


@triton.jit
def sums_of(is_summed, log_decay, PARTS: tl.constexpr):
    """Sums over tokens, [I, K], of log decays [J, K] where ``is_summed`` [I, J], on tensor cores.

    A float32 number is the sum of three in bfloat16, and a product with 0 or 1 is exact.
    """
    chosen = tl.where(is_summed, 1.0, 0.0).to(tl.bfloat16)
    total, rest = tl.zeros((is_summed.shape[0], log_decay.shape[1]), tl.float32), log_decay
    for _ in tl.static_range(3):
        part = rest.to(tl.bfloat16)
        if PARTS == "wide":
            total = tl.dot(chosen.to(tl.float32), part.to(tl.float32), total)
        else:
            total = tl.dot(chosen, part, total)
        rest -= part.to(tl.float32)
    return total


@triton.jit
def joined_products(k, q, log_decay, k_k, q_k, LEVEL: tl.constexpr, PARTS: tl.constexpr):
    """Add products of tokens in two blocks of 2^LEVEL behind each other: the second's with the first's keys.

    A key of the first block decays to its end, a key or query of the second from its start on. Both are sums of what
    lies between, so that no exponent is above 0, and one matrix of decays serves both.
    """
    at = tl.arange(0, k.shape[0])
    block, is_second = at >> LEVEL, (at >> LEVEL) % 2 == 1
    if LEVEL == 0:
        decay = tl.where(is_second[:, None], tl.exp(log_decay), 1.0)
    else:
        lies = tl.where(is_second[:, None], at[None, :] <= at[:, None], at[None, :] > at[:, None])
        decay = tl.exp(sums_of(lies & (block[:, None] == block[None, :]), log_decay, PARTS))
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
    at, at_other = first + chunk * BLOCK_TOKENS + own, first + chunk * BLOCK_TOKENS + other
    q_at = q + row * q_row_stride + (head // GROUP) * q_head_stride + at[:, None].to(tl.int64) * q_token_stride
    k_row = k + row * k_row_stride + (head // GROUP) * k_head_stride
    g_row = g + (row * num_tokens * num_heads + head) * KEY_DIM
    g_at = g_row + at[:, None].to(tl.int64) * num_heads * KEY_DIM
    g_other_at = g_row + at_other[:, None].to(tl.int64) * num_heads * KEY_DIM
    tile = (row * num_heads + head) * num_chunks + chunk
    own_tile = tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + own[:, None] * PADDED_KEYS
    is_up_to, is_behind = at_h[None, :] <= at_h[:, None], at_h[None, :] > at_h[:, None]
    is_own = at_h[:, None] == at_h[None, :]
    k_k, q_k = tl.zeros((half, half), tl.float32), tl.zeros((half, half), tl.float32)
    k_old, q_old = tl.zeros((half, half), tl.float32), tl.zeros((half, half), tl.float32)
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        in_keys = (at < length)[:, None] & (at_k < KEY_DIM)[None, :]
        in_other = (at_other < length)[:, None] & (at_k < KEY_DIM)[None, :]
        q_own = tl.load(q_at + at_k[None, :], mask=in_keys, other=0.0)
        k_own = tl.load(k_row + at[:, None].to(tl.int64) * k_token_stride + at_k[None, :], mask=in_keys, other=0.0)
        g_own = tl.load(g_at + at_k[None, :], mask=in_keys, other=0.0)
        g_other = tl.load(g_other_at + at_k[None, :], mask=in_other, other=0.0)

        q_k += tl.where(is_own, tl.sum(q_own * k_own, 1)[:, None], 0.0)
        for level in tl.static_range(6):
            if (1 << level) < half:
                k_k, q_k = joined_products(k_own, q_own, g_own, k_k, q_k, level, PARTS)

        up_to, behind = sums_of(is_up_to, g_own, PARTS), sums_of(is_behind, g_own, PARTS)
        of_other = tl.sum(g_other, 0)[None, :]
        if is_second == 1:
            k_high, k_low = split(k_own * tl.exp(up_to))
            q_high, q_low = split(q_own * tl.exp(up_to))
            old_at = k_row + at_other[:, None].to(tl.int64) * k_token_stride + at_k[None, :]
            old = tl.load(old_at, mask=in_other, other=0.0) * tl.exp(sums_of(is_behind, g_other, PARTS))
            high, low = split(tl.trans(old))
            k_old = product_of_parts(k_high, k_low, high, low, k_old, PARTS)
            q_old = product_of_parts(q_high, q_low, high, low, q_old, PARTS)
            up_to += of_other
        else:
            behind += of_other
            tl.store(decays + tile * PADDED_KEYS + at_k, tl.exp(tl.sum(g_own, 0) + tl.sum(g_other, 0)))
        own_at = own_tile + at_k[None, :]
        store_parts(state_queries + own_at, q_own * tl.exp(up_to), BLOCK_TOKENS * PADDED_KEYS)
        store_parts(state_keys + own_at, k_own * tl.exp(up_to), BLOCK_TOKENS * PADDED_KEYS)
        store_parts(keys + own_at, k_own * tl.exp(behind), BLOCK_TOKENS * PADDED_KEYS)

    grams_at = grams + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + own[:, None] * BLOCK_TOKENS
    tl.store(grams_at + own[None, :], q_k)
    tl.store(grams_at + other[None, :], q_old)  # zeros where the other half is behind
    tl.store(grams_at + BLOCK_TOKENS * BLOCK_TOKENS + own[None, :], k_k)
    tl.store(grams_at + BLOCK_TOKENS * BLOCK_TOKENS + other[None, :], k_old)
