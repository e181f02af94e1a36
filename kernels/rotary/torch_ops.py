"""Cosines and sines of rotary position embedding in PyTorch. See README.md."""

import torch
from torch import Tensor


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Phases in float32, then cosines and sines of all tokens."""
    phase = positions[..., None, None].float() * inverse_frequencies
    cos, sin = phase.cos(), phase.sin()
    if scaling != 1.0:
        cos, sin = cos * scaling, sin * scaling
    return cos.to(dtype), sin.to(dtype)
