"""Products with rows of weights in Triton. See README.md."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["M"])
def multiply_int8(
    x,  # [M, K]
    weight,  # [N, K] int8
    scale,  # [N] float32
    y,  # [M, N]
    M,
    N,
    K,
    x_stride,
    weight_stride,
    y_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """y = scale (x W^T): a program has BLOCK_N outputs of BLOCK_M rows."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_output, has_row = outputs < N, rows < M
    inputs = x + rows.to(tl.int64)[:, None] * x_stride
    weights = weight + outputs.to(tl.int64)[:, None] * weight_stride
    sums = dot_rows(inputs, has_row, weights, has_output, K, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN, IS_WIDE)
    store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, scale)


@triton.jit
def dot_rows(
    inputs,  # [BLOCK_M, 1] pointers to rows of K contiguous numbers
    has_row,  # [BLOCK_M]; rows that there are not are taken for zeros
    weights,  # [BLOCK_N, 1] pointers, the same
    has_output,  # [BLOCK_N]
    K,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] float32 sums over k; an int8 is exact in every type that inputs may have.

    IS_EVEN: K is a multiple of BLOCK_K. IS_WIDE: multiply in float32, in which products of bf16 are exact; the
    interpreter cannot multiply bf16.
    """
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for first in range(0, K, BLOCK_K):
        k = (first + tl.arange(0, BLOCK_K))[None, :]
        is_row, is_output = has_row[:, None], has_output[:, None]
        if not IS_EVEN:
            is_row, is_output = is_row & (k < K), is_output & (k < K)
        a = tl.load(inputs + k, mask=is_row, other=0)
        b = tl.load(weights + k, mask=is_output, other=0)
        if IS_WIDE:
            a = a.to(tl.float32)
        sums = tl.dot(a, tl.trans(b.to(a.dtype)), sums, input_precision="ieee")
    return sums


@triton.jit
def store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, scale):
    """Round sums [rows, outputs], times the outputs' scales where there are any, once to y's type."""
    if scale is not None:
        sums *= tl.load(scale + outputs, mask=has_output, other=0.0)[None, :]
    to = y + rows.to(tl.int64)[:, None] * y_stride + outputs[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
