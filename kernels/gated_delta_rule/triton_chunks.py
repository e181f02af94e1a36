"""Chunks of long prompts through the gated delta rule in Triton: systems and what they solve. See README.md."""

import triton
import triton.language as tl

from specmamba.kernels.gated_delta_rule.triton_kernels import inverse
from specmamba.kernels.state_records.triton_prefill import (
    chunk_decays,
    leave_decays,
    load_parts,
    product_of_parts,
    split,
    store_parts,
)


@triton.jit(do_not_specialize=["first", "num_tokens", "num_chunks"])
def systems_kernel(
    g,  # [B, L, Hv] float32, contiguous
    beta,  # [B, L, Hv] float32, contiguous
    grams,  # [B, Hk, chunks, 2, C, C] float32: Q K^T, K K^T
    solutions,  # parts [B, Hv, chunks, 2, C, C], written: (I + L)^-1 diag(beta)
    scores,  # parts [B, Hv, chunks, 2, C, C], written: of updates in outputs
    decays,  # [B, Hv, chunks, 2, C] float32, written: up to each token, and behind it
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
    of_decays = decays + tile * (2 * BLOCK_TOKENS)
    between = chunk_decays(leave_decays(of_decays, g + token, num_heads, at_c, is_token, has_next, BLOCK_TOKENS), PARTS)

    in_chunk = at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    grams_at = grams + key_tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk
    written_at = tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk
    store_parts(scores + written_at, tl.load(grams_at) * between, BLOCK_TOKENS * BLOCK_TOKENS)
    beta_chunk = tl.load(beta + token, mask=is_token, other=0.0)
    system = beta_chunk[:, None] * tl.load(grams_at + BLOCK_TOKENS * BLOCK_TOKENS) * between
    system = tl.where(at_c[:, None] > at_c[None, :], system, 0.0)
    store_parts(solutions + written_at, inverse(system, PARTS) * beta_chunk[None, :], BLOCK_TOKENS * BLOCK_TOKENS)


@triton.jit(do_not_specialize=["first", "num_chunks"])
def updates_kernel(
    v,  # [B, L, Hv, V] float32
    keys,  # parts [B, Hk, chunks, 2, C, K']
    solutions,  # parts [B, Hv, chunks, 2, C, C]
    weights,  # parts [B, Hv, chunks, 2, C, K'], written: of the state before the chunk in updates
    updates,  # parts [B, Hv, chunks, 2, C, V'], written: those behind a state of zeros
    decays,  # [B, Hv, chunks, 2, C] float32
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
    BLOCK_KEYS: tl.constexpr,
    BLOCK_VALUES: tl.constexpr,
    PADDED_KEYS: tl.constexpr,  # K'
    PADDED_VALUES: tl.constexpr,
    PARTS: tl.constexpr,
):
    """What solutions T make of a chunk: with decays G from its start on, weights T diag(e^G) K, and updates T V.

    It is no part of ``systems_kernel``: of both in one, ptxas (CUDA 12.8, sm_90) loses addresses of shared memory.
    """
    chunk, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    num_heads, at_c = tl.num_programs(1), tl.arange(0, BLOCK_TOKENS)
    at = first + chunk * BLOCK_TOKENS + at_c
    tile = (row * num_heads + head) * num_chunks + chunk
    key_tile = (row * (num_heads // GROUP) + head // GROUP) * num_chunks + chunk
    solutions_at = solutions + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS)
    solutions_at += at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    high, low = load_parts(solutions_at, BLOCK_TOKENS * BLOCK_TOKENS)
    v_at = v + row * v_row_stride + head * v_head_stride + at[:, None].to(tl.int64) * v_token_stride
    updates_at = updates + tile * (2 * BLOCK_TOKENS * PADDED_VALUES) + at_c[:, None] * PADDED_VALUES
    for first_value in range(0, PADDED_VALUES, BLOCK_VALUES):
        at_v = first_value + tl.arange(0, BLOCK_VALUES)
        in_values = (at < length)[:, None] & (at_v < VALUE_DIM)[None, :]
        v_high, v_low = split(tl.load(v_at + at_v[None, :], mask=in_values, other=0.0))
        u = product_of_parts(high, low, v_high, v_low, tl.zeros((BLOCK_TOKENS, BLOCK_VALUES), tl.float32), PARTS)
        store_parts(updates_at + at_v[None, :], u, BLOCK_TOKENS * PADDED_VALUES)

    up_to = tl.load(decays + tile * (2 * BLOCK_TOKENS) + at_c)
    high, low = split((high.to(tl.float32) + low.to(tl.float32)) * up_to[None, :])
    keys_at = keys + key_tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS
    weights_at = weights + tile * (2 * BLOCK_TOKENS * PADDED_KEYS) + at_c[:, None] * PADDED_KEYS
    for first_key in range(0, PADDED_KEYS, BLOCK_KEYS):
        at_k = first_key + tl.arange(0, BLOCK_KEYS)
        k_high, k_low = load_parts(keys_at + at_k[None, :], BLOCK_TOKENS * PADDED_KEYS)
        w = product_of_parts(high, low, k_high, k_low, tl.zeros((BLOCK_TOKENS, BLOCK_KEYS), tl.float32), PARTS)
        store_parts(weights_at + at_k[None, :], w, BLOCK_TOKENS * PADDED_KEYS)
