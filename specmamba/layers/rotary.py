"""Rotary position embedding over the first part of each head (RoFormer, arXiv 2104.09864, section 3.4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels import rowwise


@dataclass(frozen=True, slots=True)
class RotaryAngles:
    """Cosines and sines of one forward's positions, [B, L, 1, rotary_dim]."""

    cos: Tensor
    sin: Tensor


class Rotary:
    """The frequencies of a model."""

    def __init__(self, inverse_frequencies: Tensor, scaling: float = 1.0) -> None:
        """inverse_frequencies: [rotary_dim / 2] float32."""
        self._inverse_frequencies = torch.cat([inverse_frequencies, inverse_frequencies]).float()
        self._scaling = scaling

    def angles(self, positions: Tensor, dtype: torch.dtype) -> RotaryAngles:
        """Angles at positions [B, L], computed in float32 and rounded to ``dtype``."""
        return RotaryAngles(*rowwise.rotary_angles(positions, self._inverse_frequencies, self._scaling, dtype))
