"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.shapes import DeltaStateShape
from specmamba.kernels import delta_net
from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear


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
        self._weights = delta_net.Weights(
            conv=weights.conv.float().t().contiguous().t(),  # the kernel reads it by tap
            negative_a=-weights.a_log.float().exp(),
            dt_bias=weights.dt_bias.float(),
            norm=weights.norm.float(),
            norm_eps=eps,
            num_key_heads=shape.num_key_heads,
            key_dim=shape.key_dim,
        )

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        s = self._shape
        sizes = [s.conv_channels, s.num_value_heads * s.value_dim, s.num_value_heads, s.num_value_heads]
        mixed, gate, b, a = torch.split_with_sizes(self._in(x), sizes, -1)
        gate = gate.view(*x.shape[:2], s.num_value_heads, s.value_dim)
        out = context.state.delta_net(self._state_layer, delta_net.Inputs(mixed, gate, b, a), self._weights)
        return self._out(out.flatten(-2))
