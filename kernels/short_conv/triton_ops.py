"""A gated short convolution in Triton: the launches of the causal convolution, with gates."""

from torch import Tensor

from specmamba.kernels.causal_conv1d.triton_ops import advance_gated
from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records.operands import StateOperands


def advance(inputs: Inputs, weights: Weights, state: StateOperands) -> Tensor:
    """One launch of a verify, two of an extend, on the pools in place."""
    gates = inputs.in_gate, inputs.gate
    return advance_gated(inputs.mixed, weights.conv, weights.conv_bias, state, gates)
