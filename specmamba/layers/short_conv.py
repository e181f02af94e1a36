"""Gated short convolution (LFM2, arXiv 2511.23404, section 2)."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels import short_conv
from specmamba.layers.context import LayerContext
from specmamba.layers.primitives import RecurrentLayer


class ShortConv(RecurrentLayer[short_conv.Weights]):
    """One layer whose state is the window of its convolution.

    Its input projection gives 3 C numbers, in the order gate before the convolution, gate behind it, input; the output
    projection takes C.
    """

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[B, L, H] -> [B, L, H]."""
        assert context.state is not None
        projected = self._in(x)
        state = context.state.operands(self._state_layer)
        return self._out(context.pack(short_conv.advance(context.unpack(projected), self._weights, state)))
