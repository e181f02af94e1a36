"""Weights and inputs of a Mamba1 layer around its inner projections. Records and trees: ``state_records.operands``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of one layer of C channels and state size M. They compare by identity, for their native structure."""

    conv: Tensor  # [C, W] float32, stored by tap
    conv_bias: Tensor | None  # [C] float32
    dt_bias: Tensor  # [C] float32
    rates: Tensor  # [M, C] float32, A
    skip: Tensor  # [C] float32, D


class Steps(NamedTuple):
    """What the inner projections say of tokens, in the model's dtype; parts of one product are read in place."""

    dt: Tensor  # [B, L, C], before bias and softplus
    b: Tensor  # [B, L, M]
    c: Tensor  # [B, L, M]
