"""Matrix product with a weight, one output at a time: the specification of this op.

Shapes: x [..., K], weight [N, K] -> [..., N]. Sums are formed in float32 (float64 for float64 inputs), in ascending
order of k, and rounded once to x's dtype.
"""

import torch
from torch import Tensor


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
