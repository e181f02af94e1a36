"""Heads of keys and values as codes of 8 bits in Triton: see codes.py, whose results these are.

CODES says what a pool holds: 0 the numbers themselves, 1 int8, 2 FP8 (e4m3), viewed as int8. FP8 is taken apart by its
bits, so that GPUs without such numbers run it too.
"""

import triton
import triton.language as tl


@triton.jit
def coded(x, CODES: tl.constexpr):
    """Codes [H, D] int8 of heads [H, D] float32, and their scales [H]."""
    most = tl.max(tl.abs(x), axis=1)
    is_zero = most < 1.2037062152420224e-35  # codes.SMALLEST
    largest: tl.constexpr = 127.0 if CODES == 1 else 448.0
    inverse = tl.div_rn(tl.full(most.shape, largest, tl.float32), tl.where(is_zero, 1.0, most))
    y = tl.where(is_zero[:, None], 0.0, x * inverse[:, None])
    codes = _int8(y) if CODES == 1 else _float8(y)
    return codes, tl.where(is_zero, 0.0, most * (1.0 / largest))


@triton.jit
def _int8(y):
    """Rounded to nearest even, by a sum of which one unit in the last place is 1."""
    return ((y + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000).to(tl.int8)


@triton.jit
def _float8(y):
    """The bits of FP8, rounded to nearest even: three digits, or steps of 2^-9 below 2^-6."""
    bits = y.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    small = (tl.abs(y) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    large = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - 960
    return (((bits >> 24) & 0x80) | tl.where(magnitude < 0x3C800000, small, large)).to(tl.int8)


@triton.jit
def widened(codes, CODES: tl.constexpr):
    """What a pool holds, as numbers: float32 for codes, in units of ``loads_of_a_unit``."""
    if CODES == 0:
        numbers = codes
    elif CODES == 1:
        numbers = codes.to(tl.float32)
    else:  # a float16 with a smaller exponent
        halves = (codes.to(tl.int16) << 7) & -16385
        numbers = halves.to(tl.float16, bitcast=True).to(tl.float32)
    return numbers


@triton.jit
def loads_of_a_unit(CODES: tl.constexpr):
    """By what ``widened`` codes are multiplied."""
    return 256.0 if CODES == 2 else 1.0
