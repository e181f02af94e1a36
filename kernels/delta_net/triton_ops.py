"""A gated delta net layer between its projections on a GPU, over draft trees: four launches. See README.md."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels.causal_conv1d import triton_ops as conv
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.delta_net.torch_ops import compose
from specmamba.kernels.gated_delta_rule import triton_ops as delta
from specmamba.kernels.state_records.operands import Buffers, Trees


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """See ``reference.tree_verify``; besides, states may be of any float dtype, and rows may fold (see ``Trees``).

    Nothing is read or written for rows of slot 0; their outputs are zeros.
    """

    def convolve(mixed: Tensor, weight: Tensor) -> Tensor:
        return conv.tree_verify_in_place(mixed, buffers, trees, weight)

    def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
        return delta.tree_verify_in_place(q, k, v, g, beta, buffers, trees)

    return compose(inputs, weights, convolve, delta_rule)
