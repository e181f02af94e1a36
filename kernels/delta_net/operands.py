"""Inputs and weights of a gated delta net layer between its projections. Records and trees: ``state_records.operands``.

Hk key heads of size K, Hv value heads of size V; C = 2 Hk K + Hv V channels in the order queries, keys, values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Inputs:
    """Parts of the input projection's output, in the model's dtype."""

    mixed: Tensor  # [B, L, C], before the convolution
    gate: Tensor  # [B, L, Hv, V]
    b: Tensor  # [B, L, Hv]: beta before its sigmoid
    a: Tensor  # [B, L, Hv]: decay before its softplus; [B, L, Hv, K]: one for each key channel


@dataclass(frozen=True, eq=False)
class Weights:
    """Weights of one layer. They compare by identity, so that their native structure is made once."""

    conv: Tensor  # [C, W] float32, stored by tap
    negative_a: Tensor  # [Hv] float32, -e^(A_log)
    dt_bias: Tensor  # [Hv] or, where a is, by key channel [Hv, K] float32
    norm: Tensor  # [V] float32
    norm_eps: float
    num_key_heads: int
    key_dim: int
    step_scale: float = 1.0  # of beta: with 2 a step may turn the state's part along a key around (arXiv 2411.12537)
    lower_bound: float | None = None  # of log decays, see ``rowwise.delta_inputs``
    has_sigmoid_gate: bool = False  # the output is multiplied by sigmoid(gate) in place of silu(gate)

    @property
    def num_value_heads(self) -> int:
        return self.negative_a.shape[0]

    @property
    def value_dim(self) -> int:
        return self.norm.shape[0]
