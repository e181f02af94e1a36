"""Mamba2: short convolution, selective state space, gated norm (arXiv 2405.21060, section 7)."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels import causal_conv1d, mamba2
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import RecurrentLayer


class Mamba2(RecurrentLayer[mamba2.Weights]):
    """One recurrent layer; groups and state size are the keys of its state, heads and head size the values.

    Its input projection gives inner + C + heads numbers, in the order gate, convolution's input (x, B, C), step size;
    the output projection takes the inner channels, heads times head size.
    """

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        projected = self._in(x)
        inputs = self._parts(projected)
        state = context.state.operands(self._state_layer)
        w = self._weights
        if mamba2.can_fuse(state, inputs, w):
            out = mamba2.tree_verify(inputs, w, state.buffers, state.trees)
        elif mamba2.can_extend(state, inputs, w):
            out = mamba2.extend(inputs, w, state)
        else:
            out = context.pack(mix(self._parts(context.unpack(projected)), w, state))
        return self._out(out)

    def _parts(self, projected: Tensor) -> mamba2.Inputs:
        s = self._shape
        sizes = [s.num_value_heads * s.value_dim, s.conv_channels, s.num_value_heads]
        return mamba2.Inputs(*torch.split_with_sizes(projected, sizes, -1))


def mix(inputs: mamba2.Inputs, weights: mamba2.Weights, state: StateOperands) -> Tensor:
    """The layer between its projections: convolution, step sizes, recurrence, skip and gated norm, one by one.

    Args:
        inputs: of tokens [B, L].
        weights: of the layer.
        state: the states that are read, and the buffers that are written.

    Returns:
        [B, L, H P] in the gate's dtype.
    """
    w = weights
    mixed = causal_conv1d.advance(inputs.mixed, w.conv, w.conv_bias, state)
    recurred = mamba2.step_and_advance(inputs.dt, mixed, w, state)
    return mamba2.gate_and_norm(recurred, mixed, inputs.gate, w, state.slots)
