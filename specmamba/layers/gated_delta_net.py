"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, rowwise
from specmamba.kernels.state_records import StateOperands
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
            weights: of the operators between the two.
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
        inputs = delta_net.Inputs(mixed, gate.unflatten(-1, (self._num_heads, -1)), b, a)
        state = context.state.operands(self._state_layer)
        if delta_net.can_fuse(state, inputs, self._weights):
            out = delta_net.tree_verify(inputs, self._weights, state.buffers, state.trees)
        else:
            out = mix(inputs, self._weights, state)
        return self._out(out.flatten(-2))


def mix(inputs: delta_net.Inputs, weights: delta_net.Weights, state: StateOperands) -> Tensor:
    """The layer between its projections: convolution, gates, delta rule and gated norm, one operator after the other.

    Args:
        inputs: of tokens [B, L].
        weights: of the layer.
        state: the states that are read, and the buffers that are written.

    Returns:
        [B, L, Hv, V] in the gate's dtype.
    """
    w = weights
    mixed = causal_conv1d.advance(inputs.mixed, w.conv, None, state)
    q, k, g, beta = rowwise.delta_inputs(mixed, inputs.a, inputs.b, w.negative_a, w.dt_bias, w.num_key_heads, w.key_dim)
    v = mixed[..., 2 * w.num_key_heads * w.key_dim :].unflatten(-1, (w.num_value_heads, w.value_dim))
    out = gated_delta_rule.advance(q, k, v, g, beta, state)
    return rowwise.gated_rms_norm(out, inputs.gate, w.norm, w.norm_eps)
