"""Matrix product with a weight, one output at a time: the specification of this op.

Shapes: x [..., K], weight [N, K] -> [..., N]. ``linear``: sums are formed in float32 (float64 for float64 inputs), in
ascending order of k, and rounded once to x's dtype. ``quantize`` and ``linear_int8``: the int8 form; ``round_inputs``
and ``linear_grouped``: codes in groups.
"""

import torch
from torch import Tensor

from specmamba.kernels.linear.grouped import GroupedMatrix

BLOCK = 512  # neighbouring k whose products a signed 32-bit integer can hold the sum of: 512 * 127 * 2**15 < 2**31


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """y[..., n] = sum_k x[..., k] weight[n, k]."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    rows = x.reshape(-1, x.shape[-1]).to(dtype)
    y = torch.zeros(rows.shape[0], weight.shape[0], dtype=dtype)
    for m in range(rows.shape[0]):
        for n in range(weight.shape[0]):
            for k in range(weight.shape[1]):
                y[m, n] += rows[m, k] * weight[n, k].to(dtype)
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] ~ q[n, k] scale[n]: q int8 in -127..127, scale [N] float32 = max_k |weight[n, k]| / 127.

    q is weight / scale, rounded to the nearest whole number, half to even; 0 where that is none: in an output of
    zeros, and for NaN and infinity, which the scale then hands to every result of the output as NaN.
    """
    q = torch.zeros(weight.shape, dtype=torch.int8)
    scale = torch.zeros(weight.shape[0])
    for n, row in enumerate(weight.float()):
        scale[n] = row.abs().max() / 127
        for k, value in enumerate(row):
            ratio = value / scale[n]
            if ratio.isfinite():
                q[n, k] = int(ratio.round().clamp(-127, 127))
    return q, scale


def quantize_row(x: Tensor) -> tuple[Tensor, Tensor]:
    """A row of inputs x [K] ~ q[k] scale: q int64 in -2**15..2**15 - 1, scale float32, a power of two.

    2**14 scale is the largest power of two that is not above max_k |x[k]|; but the scale is at least 2**-126. So the
    inputs from 1/128 of the largest on keep all their bits when they are bf16. NaN where x holds NaN or infinity.
    """
    x = x.float()
    if not x.isfinite().all():
        return torch.zeros(x.shape, dtype=torch.int64), torch.tensor(float("nan"))
    largest = x.abs().max()
    exponent = int(torch.frexp(largest).exponent) - 1 - 14 if largest > 0 else -126  # frexp: 1/2 <= mantissa < 1
    scale = torch.tensor(2.0 ** max(exponent, -126))
    return (x / scale).round().clamp(-(2**15), 2**15 - 1).long(), scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """y[..., n] = scale[n] sum_k x[..., k] weight[n, k] with weight and scale of ``quantize``; x bf16 or float32.

    Native code rounds inputs too, to 16 bits by ``quantize_row``. Sums over blocks of 512 k are exact; they are rounded
    to float32 and added in ascending order, multiplied by the scale of the output, then by that of the row, and rounded
    to x's dtype. PyTorch's fallbacks take inputs as they are: ``linear`` of x and weight * scale, up to roundings.
    """
    rows = x.reshape(-1, x.shape[-1])
    y = torch.zeros(rows.shape[0], weight.shape[0])
    for m, row in enumerate(rows):
        q, row_scale = quantize_row(row)
        for n in range(weight.shape[0]):
            products = q * weight[n].long()
            for block in products.split(BLOCK):
                y[m, n] += block.sum().float()
            y[m, n] = y[m, n] * scale[n] * row_scale
    return y.to(x.dtype).view(*x.shape[:-1], -1)


def round_inputs(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Inputs x [K] ~ q[k] scale[k // group]: q int64 in -127..127, scale [ceil(K / group)] float32.

    q is x * (127 / largest), rounded to the nearest whole number, half to even, with the largest magnitude of the
    group; scale is largest / 127. Groups below 2^-100 are zeros; the scale of one with NaN or infinity is NaN.
    """
    q, scales = torch.zeros(x.shape, dtype=torch.int64), torch.zeros(-(-len(x) // group))
    for g, part in enumerate(x.float().split(group)):
        largest = part.abs().max()
        if not part.isfinite().all():
            scales[g] = float("nan")
        elif largest >= 2.0**-100:
            scales[g] = largest / 127
            q[g * group : (g + 1) * group] = (part * (torch.tensor(127.0) / largest)).round().long()
    return q, scales


def linear_grouped(x: Tensor, matrix: GroupedMatrix) -> Tensor:
    """y[..., n] = sum_k x[..., k] W[n, k] with inputs that ``round_inputs`` has rounded; x bf16 or float32.

    Sums of products within a group are exact. They are multiplied by both scales, those of inputs by the minimum, and
    added group by group in ascending order in float32; the sum is multiplied by the factor and rounded to x's dtype.
    """
    rows = x.reshape(-1, x.shape[-1])
    codes = matrix.codes if matrix.table is None else matrix.table[matrix.codes.int()]
    values, y = codes.long() - matrix.offset, torch.zeros(rows.shape[0], len(codes))
    for m, row in enumerate(rows):
        q, scales = round_inputs(row, matrix.group)
        for g, scale in enumerate(scales):
            part = slice(g * matrix.group, (g + 1) * matrix.group)
            products = (values[:, part] * q[part]).sum(1).float()
            y[m] += products * (matrix.scale[:, g].float() * scale)
            if matrix.minimum is not None:
                y[m] += matrix.minimum[:, g].float() * (scale * q[part].sum().float())
    return (y * matrix.factor).to(x.dtype).view(*x.shape[:-1], -1)
