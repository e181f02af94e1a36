"""Gated delta net: short convolution, gated delta rule, gated norm (arXiv 2412.06464, section 3.4)."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.shapes import StateShape
from specmamba.kernels import causal_conv1d, delta_net, rowwise
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import Linear, RecurrentLayer


class GatedDeltaNet(RecurrentLayer[delta_net.Weights]):
    """One recurrent layer.

    Its input projection gives C + Hv V + 2 Hv numbers, in the order q, k, v, output gate, beta, decay, of which
    C = 2 Hk K + Hv V are convolved; the output projection takes Hv V.
    """

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        inputs = self._inputs(x)
        state = context.state.operands(self._state_layer)
        if delta_net.can_fuse(state, inputs, self._weights):
            out = delta_net.tree_verify(inputs, self._weights, state.buffers, state.trees)
        elif delta_net.can_extend(state, inputs, self._weights):
            out = delta_net.extend(inputs, self._weights, state)
        else:
            parts = (context.unpack(part) for part in (inputs.mixed, inputs.gate, inputs.b, inputs.a))
            out = context.pack(mix(delta_net.Inputs(*parts), self._weights, state))
        return self._out(out.flatten(-2))

    def _inputs(self, x: Tensor) -> delta_net.Inputs:
        projected, s, heads = self._in(x), self._shape, self._shape.num_value_heads
        sizes = [s.conv_channels, heads * s.value_dim, heads, heads]
        mixed, gate, b, a = torch.split_with_sizes(projected, sizes, -1)
        return delta_net.Inputs(mixed, gate.unflatten(-1, (heads, -1)), b, a)


class KimiDeltaAttention(GatedDeltaNet):
    """A gated delta net with a decay for each key channel, and a sigmoid gate (KDA, arXiv 2510.26692, section 3).

    Its input projection gives C + F + G + Hv numbers, in the order q, k, v, decay, output gate, beta. Decays and gates
    have Hv K and Hv V numbers, or fewer that a second projection takes to so many.
    """

    def __init__(
        self,
        state_layer: int,
        shape: StateShape,
        project: Linear,
        out: Linear,
        weights: delta_net.Weights,
        widths: tuple[int, int],
        expand: tuple[Linear, Linear] | None,
    ) -> None:
        """Make the layer from its projections and weights.

        Args:
            state_layer, shape, project, out, weights: as for ``RecurrentLayer``.
            widths: F and G.
            expand: F -> Hv K and G -> Hv V; None: they are these already.
        """
        super().__init__(state_layer, shape, project, out, weights)
        self._widths, self._expand = widths, expand

    def _inputs(self, x: Tensor) -> delta_net.Inputs:
        heads = self._shape.num_value_heads
        sizes = [self._shape.conv_channels, *self._widths, heads]
        mixed, a, gate, b = torch.split_with_sizes(self._in(x), sizes, -1)
        if self._expand is not None:
            a, gate = (product(part) for product, part in zip(self._expand, (a, gate), strict=True))
        return delta_net.Inputs(mixed, gate.unflatten(-1, (heads, -1)), b, a.unflatten(-1, (heads, -1)))


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
    out = delta_net.gate_and_advance(mixed, inputs.a, inputs.b, w, state)
    return rowwise.gated_rms_norm(out, inputs.gate, w.norm, w.norm_eps, w.has_sigmoid_gate)
