"""What is around the scan of a Mamba1 layer, in Triton. See README.md; shapes are in ``triton_ops.py``."""

import triton
import triton.language as tl

from specmamba.kernels.rowwise.triton_kernels import silu, softplus


@triton.jit
def _place(token, length, stride_b, stride_t):
    """Offset of a token [B, L] of any strides."""
    return token // length * stride_b + token % length * stride_t


@triton.jit(do_not_specialize=["length", "raw_stride_b", "x_stride_b"])
def time_steps_kernel(
    raw,  # [B, L, C]
    bias,  # [C]
    x,  # [B, L, C]
    steps,  # [B, L, C] contiguous
    weighted,  # [B, L, C] contiguous
    length,
    channels,
    raw_stride_b,
    raw_stride_t,
    x_stride_b,
    x_stride_t,
    BLOCK: tl.constexpr,
):
    """softplus(raw + bias), and that times x, of some channels of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < channels
    wide = tl.load(raw + _place(token, length, raw_stride_b, raw_stride_t) + columns, mask=mask, other=0.0)
    step = softplus(wide.to(tl.float32) + tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32))
    at = token * channels + columns
    tl.store(steps + at, step, mask=mask)
    of_x = tl.load(x + _place(token, length, x_stride_b, x_stride_t) + columns, mask=mask, other=0.0)
    tl.store(weighted + at, step * of_x.to(tl.float32), mask=mask)


@triton.jit(do_not_specialize=["length", "y_stride_b", "x_stride_b", "gate_stride_b"])
def skip_gate_kernel(
    y,  # [B, L, C]
    x,  # [B, L, C]
    skip,  # [C]
    gate,  # [B, L, C]
    out,  # [B, L, C] contiguous
    length,
    channels,
    y_stride_b,
    y_stride_t,
    x_stride_b,
    x_stride_t,
    gate_stride_b,
    gate_stride_t,
    BLOCK: tl.constexpr,
):
    """(y + skip x) silu(gate), of some channels of a token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < channels
    of_y = tl.load(y + _place(token, length, y_stride_b, y_stride_t) + columns, mask=mask, other=0.0)
    of_x = tl.load(x + _place(token, length, x_stride_b, x_stride_t) + columns, mask=mask, other=0.0)
    factor = tl.load(skip + columns, mask=mask, other=0.0).to(tl.float32)
    wide = tl.load(gate + _place(token, length, gate_stride_b, gate_stride_t) + columns, mask=mask, other=0.0)
    gated = (of_y.to(tl.float32) + factor * of_x.to(tl.float32)) * silu(wide.to(tl.float32))
    tl.store(out + token * channels + columns, gated.to(out.dtype.element_ty), mask=mask)
