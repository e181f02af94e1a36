"""Inputs and weights of a gated short convolution. Windows, records and trees: ``state_records.operands``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Parts of the input projection's output, in the model's dtype."""

    in_gate: Tensor  # [B, L, C], factor of ``mixed``
    gate: Tensor  # [B, L, C], factor of the outputs
    mixed: Tensor  # [B, L, C], before the convolution


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of one layer. They compare by identity, so that their native structure is made once."""

    conv: Tensor  # [C, W] float32, stored by tap
    conv_bias: Tensor | None  # [C] float32
