"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.cache.shapes import DeltaStateShape
from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.norm import GatedRMSNorm, InverseRoot

L2_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class DeltaNetWeights:
    """Weights of one layer; C = 2 Hk K + Hv V convolution channels."""

    projection: Tensor  # [C + Hv V + 2 Hv, H]: rows in the order q, k, v, output gate, beta, decay
    conv: Tensor  # [C, W]
    a_log: Tensor  # [Hv] float32
    dt_bias: Tensor  # [Hv]
    norm: Tensor  # [V]
    out: Tensor  # [H, Hv V]


class GatedDeltaNet:
    """One recurrent layer; its state lives at ``state_layer`` of the state pool."""

    def __init__(self, state_layer: int, shape: DeltaStateShape, weights: DeltaNetWeights, eps: float) -> None:
        self._state_layer = state_layer
        self._shape = shape
        self._in = Linear(weights.projection)
        self._out = Linear(weights.out)
        self._conv_weight = weights.conv.float().t().contiguous().t()  # the kernel reads it by tap
        self._negative_a = -weights.a_log.float().exp()
        self._dt_bias = weights.dt_bias.float()
        self._norm = GatedRMSNorm(weights.norm, eps)
        self._inverse_length = InverseRoot(1.0, L2_EPS, weights.norm.device)

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        s = self._shape
        value_size = s.num_value_heads * s.value_dim
        sizes = [s.conv_channels, value_size, s.num_value_heads, s.num_value_heads]
        qkv, gate, b, a = torch.split_with_sizes(self._in(x), sizes, -1)
        mixed = context.state.convolve(self._state_layer, qkv, self._conv_weight)
        qk, v = torch.split_with_sizes(mixed, [s.conv_channels - value_size, value_size], -1)
        q, k = self._normalize(qk)
        g = self._negative_a * F.softplus(a + self._dt_bias)
        heads = (*x.shape[:2], s.num_value_heads, s.value_dim)
        out = context.state.delta_rule(self._state_layer, q, k, v.view(heads), g, b.sigmoid())
        gated = self._norm.gated(out, gate.view(heads))
        return self._out(gated.flatten(-2))

    def _normalize(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Unit queries (scaled by K**-0.5) and keys [B, L, Hk, K] from [B, L, 2 Hk K]."""
        qk = qk.view(*qk.shape[:2], 2, self._shape.num_key_heads, self._shape.key_dim)
        qk = qk * self._inverse_length(qk)
        q, k = qk.unbind(2)
        return q * self._shape.key_dim**-0.5, k
