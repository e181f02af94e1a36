"""A gated short convolution: the whole of a layer of LFM2 between its projections."""

from torch import Tensor

from specmamba.kernels.dispatch import operator
from specmamba.kernels.short_conv import torch_ops
from specmamba.kernels.short_conv.operands import Weights
from specmamba.kernels.state_records.operands import StateOperands

__all__ = ["Weights", "advance"]


@operator()
def advance(projected: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """Gate tokens, convolve them with the W - 1 tokens before each, on a tree along its own path, and gate the sums.

    Args:
        projected: [B, L, 3 C], any float dtype: the gate before the convolution, the gate behind it, its input.
        weights: of the layer.
        state: known tokens leave the window after them in their slots; the L nodes of draft trees leave their gated
            inputs in the buffers, or a window after each. The recurrent parts are not read.

    Returns:
        [B, L, C] in the dtype of ``projected``; unspecified on padding.
    """
    return torch_ops.advance(projected, weights, state)
