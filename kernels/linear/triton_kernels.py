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
def e4m3_codes(x):
    """Codes of finite float32 numbers of up to 448, rounded to the nearest, ties to even; 127, NaN, for what is NaN.

    Made from bits, since not every device converts to this format.
    """
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20  # exponent and three bits behind the point
    of_normal = rounded - ((127 - 7) << 3)
    of_small = (size * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF  # in steps of 2^-9: 2^23 rounds to wholes
    codes = tl.where(size < 0.015625, of_small, of_normal)
    codes = tl.where(x == x, codes, 0x7F)
    return (codes | tl.where(x < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def round_rows(
    x,  # [M, K]
    codes,  # [M, K] uint8, contiguous
    scale,  # [M] float32
    width,  # K
    x_stride,
    LARGEST: tl.constexpr,  # number of the format
    BLOCK_K: tl.constexpr,
):
    """Each row as multiples of its scale, with which its largest number becomes the format's."""
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    codes += row * width
    largest, flaws = 0.0, 0
    for first in range(0, width, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        part = tl.abs(tl.load(x + at, mask=at < width, other=0.0).to(tl.float32))
        is_finite = part < float("inf")
        flaws += tl.max(tl.where(is_finite, 0, 1), 0)
        largest = tl.maximum(largest, tl.max(tl.where(is_finite, part, 0.0), 0))
    factor = tl.where(largest == 0, 1.0, tl.div_rn(largest, LARGEST))
    factor = tl.where(flaws == 0, factor, float("nan"))
    tl.store(scale + row, factor)
    for first in range(0, width, BLOCK_K):
        at = first + tl.arange(0, BLOCK_K)
        part = tl.load(x + at, mask=at < width, other=0.0).to(tl.float32)
        tl.store(codes + at, e4m3_codes(tl.div_rn(part, tl.zeros_like(part) + factor)), mask=at < width)


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


@triton.jit(do_not_specialize=["M", "offset"])
def multiply_codes(
    x,  # [M, K]
    codes,  # [steps, N, BLOCK_K] uint8
    scale,  # [groups, N] float16
    minimum,  # [groups, N] float16 or None
    factor,  # [N] float32
    table,  # [2] int64, the bytes of 16 codes; or None
    y,  # [M, N]
    M,
    N,
    K,
    offset,
    x_stride,
    step_stride,
    group_stride,
    y_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """y = x W^T with W in codes: a program has BLOCK_N outputs of BLOCK_M rows."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    has_output, has_row = outputs < N, rows < M
    inputs = x + rows.to(tl.int64)[:, None] * x_stride
    sums = dot_codes(
        inputs, has_row, codes, scale, minimum, table, outputs, has_output, K, offset, step_stride, group_stride,
        BITS, GROUP, IS_E4M3, BLOCK_M, BLOCK_N, BLOCK_K, IS_EVEN, IS_WIDE,
    )  # fmt: skip
    store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, factor)


@triton.jit
def dot_codes(
    inputs,  # [BLOCK_M, 1] pointers to rows of K contiguous numbers
    has_row,  # [BLOCK_M]; rows that there are not are taken for zeros
    codes,  # pointer to [steps, N, BLOCK_K] uint8: a block of inputs in a byte each, or two in halves of bytes
    scale,  # pointer to [groups, N] float16
    minimum,  # the same, or None
    table,  # pointer to [2] int64, or None
    outputs,  # [BLOCK_N]
    has_output,  # [BLOCK_N]
    K,
    offset,
    step_stride,
    group_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_EVEN: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] float32 sums over k, without the factors of outputs.

    Sums of a block are multiplied by its scales: codes themselves are exact in every type that inputs may have.
    """
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    low, high = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if table is not None:
        low, high = tl.load(table), tl.load(table + 1)
    at = codes + outputs[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    per_step: tl.constexpr = 8 // BITS
    for step in range(tl.cdiv(K, BLOCK_K * per_step)):
        found = tl.load(at, mask=has_output[:, None], other=0)
        for half in tl.static_range(per_step):
            block = step * per_step + half
            a = load_inputs(inputs, has_row, K, block * BLOCK_K, BLOCK_K, IS_EVEN, IS_WIDE)
            b = code_values(found, half, low, high, offset, table is not None, BITS, IS_E4M3)
            place = block // (GROUP // BLOCK_K) * group_stride + outputs
            scales = tl.load(scale + place, mask=has_output, other=0).to(tl.float32)
            sums += tl.dot(a, tl.trans(b.to(a.dtype)), input_precision="ieee") * scales[None, :]
            if minimum is not None:
                least = tl.load(minimum + place, mask=has_output, other=0).to(tl.float32)
                sums += tl.sum(a.to(tl.float32), 1)[:, None] * least[None, :]
        at += step_stride
    return sums


@triton.jit(do_not_specialize=["N", "offset"])
def take_rows(
    index,  # [M] int64
    codes,  # [steps, N, BLOCK_K] uint8
    scale,  # [groups, N] float16
    minimum,  # [groups, N] float16 or None
    factor,  # [N] float32
    table,  # [2] int64, the bytes of 16 codes; or None
    y,  # [M, K]
    N,
    K,
    offset,
    step_stride,
    group_stride,
    y_stride,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    IS_E4M3: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """y[m] = W[index[m]] with W in codes; NaN for a row that there is not. A program has one step of one row."""
    m, step = tl.program_id(0), tl.program_id(1)
    row = tl.load(index + m)
    is_there = (row >= 0) & (row < N)
    row = tl.where(is_there, row, 0)
    low, high = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    if table is not None:
        low, high = tl.load(table), tl.load(table + 1)
    place = tl.arange(0, BLOCK_K)
    found = tl.load(codes + step.to(tl.int64) * step_stride + row * BLOCK_K + place)
    of_row = tl.where(is_there, tl.load(factor + row), float("nan"))
    per_step: tl.constexpr = 8 // BITS
    for half in tl.static_range(per_step):
        block = step * per_step + half
        group = block // (GROUP // BLOCK_K) * group_stride + row
        value = code_values(found, half, low, high, offset, table is not None, BITS, IS_E4M3)
        weight = value * tl.load(scale + group).to(tl.float32)
        if minimum is not None:
            weight += tl.load(minimum + group).to(tl.float32)
        k = block * BLOCK_K + place
        tl.store(y + m.to(tl.int64) * y_stride + k, (weight * of_row).to(y.dtype.element_ty), mask=k < K)


@triton.jit
def load_inputs(inputs, has_row, K, first, BLOCK_K: tl.constexpr, IS_EVEN: tl.constexpr, IS_WIDE: tl.constexpr):
    """[BLOCK_M, BLOCK_K] inputs from ``first`` on, zeros beyond K; the constants are those of ``dot_rows``."""
    k = (first + tl.arange(0, BLOCK_K))[None, :]
    is_there = has_row[:, None]
    if not IS_EVEN:
        is_there = is_there & (k < K)
    a = tl.load(inputs + k, mask=is_there, other=0)
    if IS_WIDE:
        a = a.to(tl.float32)
    return a


@triton.jit
def code_values(
    found, half: tl.constexpr, low, high, offset, HAS_TABLE: tl.constexpr, BITS: tl.constexpr, IS_E4M3: tl.constexpr
):
    """What bytes, or one half of each, mean: float32, not yet times their scales.

    float8 e4m3 moves to the bits of float32, whose exponents are 120 larger; not all GPUs convert it. A table is two
    integers of eight bytes, so that no code reads memory.
    """
    code = found.to(tl.int32)
    if BITS == 4:
        code = (code >> (4 * half)) & 15
    if IS_E4M3:
        bits = ((code & 127) << 20) | ((code & 128) << 24)
        value = bits.to(tl.float32, bitcast=True) * (2.0**120)
    else:
        if HAS_TABLE:
            word = tl.where(code < 8, low, high)
            code = ((word >> ((code & 7) * 8).to(tl.int64)) & 255).to(tl.int32)
        value = (code - offset).to(tl.float32)
    return value


@triton.jit
def store_rows(y, rows, has_row, y_stride, outputs, has_output, sums, scale):
    """Round sums [rows, outputs], times the outputs' scales where there are any, once to y's type."""
    if scale is not None:
        sums *= tl.load(scale + outputs, mask=has_output, other=0.0)[None, :]
    to = y + rows.to(tl.int64)[:, None] * y_stride + outputs[None, :]
    tl.store(to, sums.to(y.dtype.element_ty), mask=has_row[:, None] & has_output[None, :])
