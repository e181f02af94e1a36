"""Cosines and sines of rotary position embedding, one by one: the specification of this op.

Source: RoFormer, arXiv 2104.09864, section 3.4.
"""

import math

import torch
from torch import Tensor


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """positions [B, L] int64, inverse_frequencies [R] float32 -> cos and sin [B, L, 1, R] in ``dtype``.

    The phase is the product of the two in float32.
    """
    cos = torch.empty(*positions.shape, 1, len(inverse_frequencies), dtype=torch.float64)
    sin = torch.empty_like(cos)
    for b, row in enumerate(positions):
        for n, position in enumerate(row):
            for i, phase in enumerate((position.float() * inverse_frequencies).tolist()):
                cos[b, n, 0, i], sin[b, n, 0, i] = scaling * math.cos(phase), scaling * math.sin(phase)
    return cos.to(dtype), sin.to(dtype)
