"""Chunks of long prompts through the gated delta rule in Triton: systems and what they solve. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.gated_delta_rule.triton_kernels import join_inverses
from specmamba.kernels.state_records.triton_prefill import (
    chunk_decays,
    leave_decays,
    load_parts,
    product_of_parts,
    split,
    store_parts,
)


@triton.jit
def blocked_inverse(system, BLOCK: tl.constexpr, PARTS: tl.constexpr):
    """``inverse`` of a large system: all blocks of BLOCK rows on its diagonal side by side, then these are joined."""
    size: tl.constexpr = system.shape[0]
    count: tl.constexpr = size // BLOCK
    at_block, at_row, at = tl.arange(0, count), tl.arange(0, BLOCK), tl.arange(0, size)
    is_diagonal = at_block[:, None, None, None] == at_block[None, None, :, None]
    in_blocks = tl.reshape(system, [count, BLOCK, count, BLOCK])
    diagonal = tl.sum(tl.where(is_diagonal, in_blocks, 0.0), 2)
    rows, columns = at_row[None, :, None], at_row[None, None, :]
    result = tl.where(rows == columns, 1.0, 0.0) - tl.where((rows == columns + 1) & (columns % 2 == 0), diagonal, 0.0)
    for level in tl.static_range(1, 7):
        if (1 << level) < BLOCK:
            result = join_inverses(result, diagonal, rows, columns, level, PARTS)
    result = tl.reshape(tl.where(is_diagonal, result[:, :, None, :], 0.0), [size, size])
    for level in tl.static_range(1, 7):
        if (1 << level) >= BLOCK and (1 << level) < size:
            result = join_inverses(result, system, at[:, None], at[None, :], level, PARTS)
    return result


@triton.jit(do_not_specialize=["first", "num_tokens", "num_chunks"])
def systems_kernel(
    g,  # [B, L, Hv] float32, contiguous; None: products have decays, by channel
    beta,  # [B, L, Hv] float32, contiguous
    grams,  # [B, Hk, chunks, 2, C, C] float32: Q K^T, K K^T
    solutions,  # parts [B, Hv, chunks, 2, C, C], written: (I + L)^-1 diag(beta)
    scores,  # parts [B, Hv, chunks, 2, C, C], written: of updates in outputs
    decays,  # [B, Hv, chunks, 2, C] float32, written where there is g: up to each token, and behind it
    slots,  # [B] int64
    lengths,  # [B] int64
    first,  # token at which chunks begin
    num_tokens,
    num_chunks,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_TOKENS: tl.constexpr,  # C
    PARTS: tl.constexpr,
):
    """The system of a chunk, solved, and scores: with D the decays between its tokens, these are Q K^T * D."""
    chunk, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    num_heads, at_c = tl.num_programs(1), tl.arange(0, BLOCK_TOKENS)
    at = first + chunk * BLOCK_TOKENS + at_c
    is_token, has_next = at < length, (at + 1 < length) & (at_c + 1 < BLOCK_TOKENS)
    token, tile = (row * num_tokens + at) * num_heads + head, (row * num_heads + head) * num_chunks + chunk
    key_tile = (row * (num_heads // GROUP) + head // GROUP) * num_chunks + chunk
    if g is None:
        between = tl.where(at_c[:, None] >= at_c[None, :], 1.0, 0.0)
    else:
        of_decays = decays + tile * (2 * BLOCK_TOKENS)
        own = leave_decays(of_decays, g + token, num_heads, at_c, is_token, has_next, BLOCK_TOKENS)
        between = chunk_decays(own, PARTS)

    in_chunk = at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    grams_at = grams + key_tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk
    written_at = tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk
    store_parts(scores + written_at, tl.load(grams_at) * between, BLOCK_TOKENS * BLOCK_TOKENS)
    beta_chunk = tl.load(beta + token, mask=is_token, other=0.0)
    system = beta_chunk[:, None] * tl.load(grams_at + BLOCK_TOKENS * BLOCK_TOKENS) * between
    system = tl.where(at_c[:, None] > at_c[None, :], system, 0.0)
    store_parts(
        solutions + written_at, blocked_inverse(system, 16, PARTS) * beta_chunk[None, :], BLOCK_TOKENS * BLOCK_TOKENS
    )


@triton.jit(do_not_specialize=["first", "num_chunks"])
def updates_kernel(
    v,  # [B, L, Hv, V] float32
    keys,  # parts [B, Hk, chunks, 2, C, K']
    solutions,  # parts [B, Hv, chunks, 2, C, C]
    weights,  # parts [B, Hv, chunks, 2, C, K'], written: of the state before the chunk in updates
    updates,  # parts [B, Hv, chunks, 2, C, V'], written: those behind a state of zeros
    decays,  # [B, Hv, chunks, 2, C] float32; None: keys have them, by channel
    slots,  # [B] int64
    lengths,  # [B] int64
    first,  # token at which chunks begin
    num_chunks,
    v_row_stride,
    v_token_stride,
    v_head_stride,
    VALUE_DIM: tl.constexpr,
    GROUP: tl.constexpr,  # value heads of one key head
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_ROWS: tl.constexpr,  # of C, in one program
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    PADDED_VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What solutions T make of some rows of a chunk: with decays G from its start on, T diag(e^G) K, and updates T V.

    It is no part of ``systems_kernel``, and takes 32 rows: with 64, products are instructions that take operands by
    address, and ptxas (CUDA 12.8, sm_90) loses such addresses here.
    """
    num_parts: tl.constexpr = BLOCK_TOKENS // BLOCK_ROWS
    chunk, head, row = tl.program_id(0) // num_parts, tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    num_heads, at_c = tl.num_programs(1), tl.arange(0, BLOCK_TOKENS)
    at_r = (tl.program_id(0) % num_parts) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    at = first + chunk * BLOCK_TOKENS + at_c
    tile = (row * num_heads + head) * num_chunks + chunk
    key_tile = (row * (num_heads // GROUP) + head // GROUP) * num_chunks + chunk
    solutions_at = solutions + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS)
    solutions_at += at_r[:, None] * BLOCK_TOKENS + at_c[None, :]
    high, low = load_parts(solutions_at, BLOCK_TOKENS * BLOCK_TOKENS)
    v_at = v + row * v_row_stride + head * v_head_stride + at[:, None].to(tl.int64) * v_token_stride
    updates_at = updates + tile * (2 * BLOCK_TOKENS * PADDED_VALUES) + at_r[:, None] * PADDED_VALUES
    for first_value in range(0, PADDED_VALUES, BLOCK_VALUES):
        at_v = first_value + tl.arange(0, BLOCK_VALUES)
        in_values = (at < length)[:, None] & (at_v < VALUE_DIM)[None, :]
        v_high, v_low = split(tl.load(v_at + at_v[None, :], mask=in_values, other=0.0))
        u = product_of_parts(high, low, v_high, v_low, tl.zeros((BLOCK_ROWS, BLOCK_VALUES), tl.float32), PARTS)
        store_parts(updates_at + at_v[None, :], u, BLOCK_TOKENS * PADDED_VALUES)

    if decays is not None:
        up_to = tl.load(decays + tile * (2 * BLOCK_TOKENS) + at_c)
        high, low = split((high.to(tl.float32) + low.to(tl.float32)) * up_to[None, :])
    keys_at = keys + key_tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS
    weights_at = weights + tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_r[:, None] * PADDED_KEYS
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        k_high, k_low = load_parts(keys_at + at_k[None, :], BLOCK_TOKENS * PADDED_KEYS)
        w = product_of_parts(high, low, k_high, k_low, tl.zeros((BLOCK_ROWS, BLOCK_KEYS), tl.float32), PARTS)
        store_parts(weights_at + at_k[None, :], w, BLOCK_TOKENS * PADDED_KEYS)
