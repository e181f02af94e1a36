"""Gated short convolution (LFM2, arXiv 2511.23404, section 2)."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels import short_conv
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import RecurrentLayer


class ShortConv(RecurrentLayer[short_conv.Weights]):
    """One layer whose state is the window of its convolution.

    Its input projection gives 3 C numbers, in the order gate of the convolution's input, gate of its output, input; the
    output projection takes C.
    """

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        projected = self._in(x)
        inputs = short_conv.Inputs(*projected.chunk(3, -1))
        state = context.state.operands(self._state_layer)
        if short_conv.can_fuse(state, inputs, self._weights):
            out = short_conv.tree_verify(inputs, self._weights, state.buffers, state.trees)
        elif short_conv.can_extend(state, inputs, self._weights):
            out = short_conv.extend(inputs, self._weights, state)
        else:
            inputs = short_conv.Inputs(*context.unpack(projected).chunk(3, -1))
            out = context.pack(short_conv.advance(inputs, self._weights, state))
        return self._out(out)
