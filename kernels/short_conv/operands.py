"""Weights of a gated short convolution. Windows, records and trees: ``state_records.operands``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of one layer. They compare by identity, so that their native structure is made once."""

    conv: Tensor  # [C, W] float32, stored by tap
    conv_bias: Tensor | None  # [C] float32
