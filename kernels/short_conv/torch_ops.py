"""A gated short convolution in vectorised PyTorch. See README.md."""

from torch import Tensor

from specmamba.kernels.causal_conv1d import torch_ops as causal_conv1d
from specmamba.kernels.short_conv.operands import Weights
from specmamba.kernels.state_records.operands import StateOperands


def advance(projected: Tensor, weights: Weights, state: StateOperands) -> Tensor:
    """The causal convolution without SiLU, between two products."""
    before, after, x = projected.chunk(3, -1)
    sums = causal_conv1d.advance(before * x, weights.conv, weights.conv_bias, state, has_silu=False)
    return (after * sums).to(projected.dtype)
