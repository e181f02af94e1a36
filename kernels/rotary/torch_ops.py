"""Cosines and sines of rotary position embedding in PyTorch. See README.md."""

import torch
from torch import Tensor


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines at positions, computed in float32.

    Args:
        positions: [B, L] int64.
        inverse_frequencies: [R] float32, first and second half alike.
        scaling: of the results.
        dtype: of the results.

    Returns:
        cos and sin, [B, L, 1, R] each.
    """
    phase = positions[..., None, None].float() * inverse_frequencies
    cos, sin = phase.cos(), phase.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)
