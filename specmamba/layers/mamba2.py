"""Mamba2: short convolution, selective state space, gated norm (arXiv 2405.21060)."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.kernels import mamba2
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear


class Mamba2:
    """One recurrent layer; its state lives at ``state_layer`` of the state pool."""

    def __init__(
        self, state_layer: int, shape: StateShape, project: Linear, out: Linear, weights: mamba2.Weights
    ) -> None:
        """Make the layer from its projections and weights.

        Args:
            state_layer: where this layer's state lives in the state pool.
            shape: of the state: groups and state size as keys, heads and head size as values; C convolution channels.
            project: H -> inner + C + heads, in the order gate, convolution's input (x, B, C), step size.
            out: inner -> H.
            weights: of what is between the two.
        """
        self._state_layer = state_layer
        inner = shape.num_value_heads * shape.value_dim
        self._sizes = [inner, shape.conv_channels, shape.num_value_heads]
        self._in, self._out = project, out
        self._weights = weights

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        gate, mixed, dt = torch.split_with_sizes(self._in(x), self._sizes, -1)
        return self._out(context.state.mamba2(self._state_layer, mamba2.Inputs(gate, mixed, dt), self._weights))
