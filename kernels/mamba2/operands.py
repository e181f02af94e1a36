"""Inputs and weights of a Mamba2 layer between its projections. Records and trees: ``state_records.operands``.

H heads of size P, G groups, state size S; C = H P + 2 G S channels in the order x, B, C.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Parts of the input projection's output, in the model's dtype."""

    gate: Tensor  # [B, L, H P]
    mixed: Tensor  # [B, L, C], before the convolution: x, B, C
    dt: Tensor  # [B, L, H], before bias and softplus


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of one layer. They compare by identity, so that their native structure is made once."""

    conv: Tensor  # [C, W] float32, stored by tap
    conv_bias: Tensor | None  # [C] float32
    negative_a: Tensor  # [H] float32, -e^(A_log)
    dt_bias: Tensor  # [H] float32
    skip: Tensor  # [H] float32, D
    norm: Tensor | None  # [H P] float32; None: only the gate
    norm_eps: float
    norm_groups: int  # the number of parts of the H P channels that are normed separately
    norm_before_gate: bool
    num_groups: int
    state_dim: int
    head_dim: int
    dt_limit: tuple[float, float] = (0.0, float("inf"))

    @property
    def num_heads(self) -> int:
        return self.negative_a.shape[0]

    def groups_of(self, mixed: Tensor) -> tuple[Tensor, Tensor]:
        """B and C [B, L, G, S] among the convolved channels [B, L, C]."""
        shape, inner, size = (self.num_groups, self.state_dim), self.num_heads * self.head_dim, mixed.shape[-1]
        middle = (inner + size) // 2
        return mixed[..., inner:middle].unflatten(-1, shape), mixed[..., middle:].unflatten(-1, shape)
