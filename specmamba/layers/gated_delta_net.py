"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import DeltaStateShape
from specmamba.kernels import rowwise
from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear
from specmamba.layers.norm import GatedRMSNorm


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

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        s = self._shape
        value_size = s.num_value_heads * s.value_dim
        sizes = [s.conv_channels, value_size, s.num_value_heads, s.num_value_heads]
        qkv, gate, b, a = torch.split_with_sizes(self._in(x), sizes, -1)
        mixed = context.state.convolve(self._state_layer, qkv, self._conv_weight)
        q, k, g, beta = rowwise.delta_inputs(mixed, a, b, self._negative_a, self._dt_bias, s.num_key_heads, s.key_dim)
        heads = (*x.shape[:2], s.num_value_heads, s.value_dim)
        v = mixed[..., s.conv_channels - value_size :].view(heads)
        out = context.state.delta_rule(self._state_layer, q, k, v, g, beta)
        gated = self._norm.gated(out, gate.view(heads))
        return self._out(gated.flatten(-2))
