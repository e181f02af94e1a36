"""A gated short convolution in vectorised PyTorch. See README.md."""

from torch import Tensor

from specmamba.kernels.causal_conv1d import torch_ops as causal_conv1d
from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records.operands import StateOperands


def advance(inputs: Inputs, weights: Weights, state: StateOperands) -> Tensor:
    """The causal convolution without SiLU, between two products."""
    w, gated = weights, inputs.in_gate * inputs.mixed
    sums = causal_conv1d.advance(gated, w.conv, w.conv_bias, state, has_silu=False)
    return (inputs.gate * sums).to(gated.dtype)
