"""What a Mamba2 layer computes with between its projections, separated by how long it stays the same.

C = H P + 2 G N channels: x, B, C. Weights compare by identity, so that their native structure is made
once. Where records and trees are is in ``state_records.operands``.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the input projection says of tokens, in the model's dtype."""

    gate: Tensor  # [B, L, H P]
    mixed: Tensor  # [B, L, C], before the convolution: x, B, C
    dt: Tensor  # [B, L, H], before bias and softplus


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one layer."""

    conv: Tensor  # [C, W] float32, stored by tap
    conv_bias: Tensor | None  # [C] float32
    negative_a: Tensor  # [H] float32, -e^(A_log)
    dt_bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32, D
    norm: Tensor | None  # [H P] float32; None: the gate alone
    norm_eps: float
    norm_groups: int  # the H P channels are normed in so many parts
    norm_before_gate: bool
    num_groups: int
    state_dim: int
    head_dim: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def num_heads(self) -> int:
        return self.negative_a.shape[0]
