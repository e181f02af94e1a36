"""Chunks of long prompts through SSD in Triton: scores; the other kernels are in ``state_records``."""

import triton
import triton.language as tl

from specmamba.kernels.state_records.triton_prefill import chunk_decays, leave_decays, store_parts


@triton.jit(do_not_specialize=["first", "num_tokens", "num_chunks"])
def scores_kernel(
    u,  # [B, L, H, P] float32
    g,  # [B, L, H] float32, contiguous
    grams,  # [B, G, chunks, 2, C, C] float32: C B^T
    updates,  # parts [B, H, chunks, 2, C, P'], written: u
    scores,  # parts [B, H, chunks, 2, C, C], written: C B^T with the decays between tokens
    decays,  # [B, H, chunks, 2, C] float32, written: up to each token, and behind it
    slots,  # [B] int64
    lengths,  # [B] int64
    first,  # token at which chunks begin
    num_tokens,
    num_chunks,
    u_row_stride,
    u_token_stride,
    u_head_stride,
    VALUE_DIM: tl.constexpr,  # P
    GROUP: tl.constexpr,  # heads of a group
    BLOCK_TOKENS: tl.constexpr,  # C
    BLOCK_VALUES: tl.constexpr,
    PADDED_VALUES: tl.constexpr,  # P'
    PARTS: tl.constexpr,
):
    """All of a head's chunk that needs decays, and not the state."""
    chunk, head, row = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    length = tl.where(tl.load(slots + row) == 0, 0, tl.load(lengths + row)).to(tl.int32)
    if first + chunk * BLOCK_TOKENS >= length:
        return
    num_heads, at_c = tl.num_programs(1), tl.arange(0, BLOCK_TOKENS)
    at = first + chunk * BLOCK_TOKENS + at_c
    is_token, has_next = at < length, (at + 1 < length) & (at_c + 1 < BLOCK_TOKENS)
    token, tile = (row * num_tokens + at) * num_heads + head, (row * num_heads + head) * num_chunks + chunk
    of_decays = decays + tile * (2 * BLOCK_TOKENS)
    g_chunk = leave_decays(of_decays, g + token, num_heads, at_c, is_token, has_next, BLOCK_TOKENS)
    in_chunk = at_c[:, None] * BLOCK_TOKENS + at_c[None, :]
    group_tile = (row * (num_heads // GROUP) + head // GROUP) * num_chunks + chunk
    c_b = tl.load(grams + group_tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk)
    scores_at = scores + tile * (2 * BLOCK_TOKENS * BLOCK_TOKENS) + in_chunk
    store_parts(scores_at, c_b * chunk_decays(g_chunk, PARTS), BLOCK_TOKENS * BLOCK_TOKENS)

    u_at = u + row * u_row_stride + head * u_head_stride + at[:, None].to(tl.int64) * u_token_stride
    updates_at = updates + tile * (2 * BLOCK_TOKENS * PADDED_VALUES) + at_c[:, None] * PADDED_VALUES
    for first_value in range(0, PADDED_VALUES, BLOCK_VALUES):
        at_v = first_value + tl.arange(0, BLOCK_VALUES)
        in_values = is_token[:, None] & (at_v < VALUE_DIM)[None, :]
        u_part = tl.load(u_at + at_v[None, :], mask=in_values, other=0.0)
        store_parts(updates_at + at_v[None, :], u_part, BLOCK_TOKENS * PADDED_VALUES)
