"""A gated short convolution, a whole layer between its projections: one native call, or operators one by one."""

from typing import TypeGuard

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.short_conv import native_ops, torch_ops
from specmamba.kernels.short_conv.native_ops import extend, tree_verify
from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records import ExtendOperands, RecordOperands, StateOperands

__all__ = ["Inputs", "Weights", "advance", "can_extend", "can_fuse", "extend", "tree_verify"]


def can_fuse(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[RecordOperands]:
    """Whether ``tree_verify`` takes these operands: draft trees with records, in memory that native code reads."""
    if not isinstance(state, RecordOperands) or gpu.can_launch_any(("short_conv",), inputs.mixed, state.states):
        return False  # Triton also moves the windows of rows that fold
    return native_ops.can_take(inputs, weights, state.buffers)


def can_extend(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[ExtendOperands]:
    """Whether ``extend`` takes these operands: known tokens, in memory that native code reads."""
    return isinstance(state, ExtendOperands) and native_ops.can_take_runs(inputs, weights, state)


@operator(triton=lambda inputs, _, state: gpu.can_launch(inputs.mixed, state.states))
def advance(inputs: Inputs, weights: Weights, state: StateOperands) -> Tensor:
    """Gate tokens, convolve them with the W - 1 tokens before each, on a tree along its own path, and gate the sums.

    Args:
        inputs: of tokens [B, L], any float dtype.
        weights: of the layer.
        state: known tokens leave the window after them in their slots; the L nodes of draft trees leave their gated
            inputs in the buffers, or a window after each. Recurrent states are not read.

    Returns:
        [B, L, C] in the dtype of the inputs; unspecified on padding.
    """
    return torch_ops.advance(inputs, weights, state)
