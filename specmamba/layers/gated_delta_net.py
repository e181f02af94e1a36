"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464)."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.kernels import delta_net
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear


class GatedDeltaNet:
    """One recurrent layer; its state lives at ``state_layer`` of the state pool."""

    def __init__(
        self, state_layer: int, shape: StateShape, project: Linear, out: Linear, weights: delta_net.Weights
    ) -> None:
        """Make the layer from its projections and weights.

        Args:
            state_layer: where this layer's state lives in the state pool.
            shape: of the state; C = 2 Hk K + Hv V convolution channels.
            project: H -> C + Hv V + 2 Hv, in the order q, k, v, output gate, beta, decay.
            out: Hv V -> H.
            weights: of what is between the two.
        """
        self._state_layer = state_layer
        self._num_heads = shape.num_value_heads
        value_size = shape.num_value_heads * shape.value_dim
        self._sizes = [shape.conv_channels, value_size, shape.num_value_heads, shape.num_value_heads]
        self._in, self._out = project, out
        self._weights = weights

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        mixed, gate, b, a = torch.split_with_sizes(self._in(x), self._sizes, -1)
        gate = gate.unflatten(-1, (self._num_heads, -1))
        out = context.state.delta_net(self._state_layer, delta_net.Inputs(mixed, gate, b, a), self._weights)
        return self._out(out.flatten(-2))
