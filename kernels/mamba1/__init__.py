"""A Mamba1 layer around its inner projections over draft trees, in native code alone; folds of its rows in place."""

from typing import TypeGuard

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.mamba1 import native_ops
from specmamba.kernels.mamba1.native_ops import can_fold_rows, convolve, fold_rows, scan
from specmamba.kernels.mamba1.operands import Steps, Weights
from specmamba.kernels.state_records import RecordOperands, StateOperands

__all__ = ["Steps", "Weights", "can_fold_rows", "can_fuse", "convolve", "fold_rows", "scan"]


def can_fuse(state: StateOperands, mixed: Tensor, weights: Weights) -> TypeGuard[RecordOperands]:
    """Whether ``convolve`` and ``scan`` take these operands: draft trees with records that native code reads."""
    if not isinstance(state, RecordOperands) or gpu.can_launch_any(
        ("causal_conv1d", "selective_scan"), mixed, state.states
    ):
        return False  # Triton runs the layer operator by operator, and folds in the same launches
    return native_ops.can_take(mixed, weights, state.buffers)
