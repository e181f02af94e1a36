"""Cosines and sines of rotary position embedding in Triton. See README.md, "On a GPU"."""

import triton
import triton.language as tl


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
