"""A gated delta net layer between its projections, over draft trees or known tokens, in one native call."""

from typing import TypeGuard

from specmamba.kernels import gpu
from specmamba.kernels.delta_net import native_ops
from specmamba.kernels.delta_net.native_ops import extend, tree_verify
from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.state_records import ExtendOperands, RecordOperands, StateOperands

__all__ = ["Inputs", "Weights", "can_extend", "can_fuse", "extend", "tree_verify"]


def can_fuse(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[RecordOperands]:
    """Whether ``tree_verify`` takes these operands: draft trees with records, in memory that native code reads."""
    if not isinstance(state, RecordOperands) or gpu.can_launch_any(
        ("causal_conv1d", "gated_delta_rule"), inputs.mixed, state.states
    ):
        return False  # Triton runs the layer operator by operator, and folds in the same launches
    return native_ops.can_take(inputs, weights, state.buffers)


def can_extend(state: StateOperands, inputs: Inputs, weights: Weights) -> TypeGuard[ExtendOperands]:
    """Whether ``extend`` takes these operands: known tokens, in memory that native code reads."""
    return isinstance(state, ExtendOperands) and native_ops.can_take_runs(inputs, weights, state)
