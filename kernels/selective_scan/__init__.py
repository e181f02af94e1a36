"""Mamba1's selective scan: known tokens, tree verification from records or with snapshots, and the fold of records."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.selective_scan import native_ops, torch_ops
from specmamba.kernels.state_records import StateOperands
from specmamba.kernels.state_records.operands import refuse_exact

__all__ = ["advance", "fold", "fold_exactly"]


@operator(triton=lambda *args: gpu.can_launch(args[0], args[-1].states), native=native_ops.can_take)
def advance(c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: StateOperands) -> Tensor:
    """Run tokens through the selective scan (arXiv 2312.00752), behind the states that they continue.

    S_t = e^(A dt_t) S_(t-1) + b_t u_t^T by channel and state entry, and y_t = S_t^T c_t. The skip D x is not in it.

    Args:
        c, b: [B, L, 1, M] float32.
        u: [B, L, 1, C] float32, dt x.
        dt: [B, L, 1, C] float32, time steps >= 0.
        rates: [M, C] float32, A <= 0.
        state: known tokens advance the states in their slots; the L nodes of draft trees leave records, or snapshots.

    Returns:
        Outputs [B, L, 1, C] float32, unspecified on padding. Of trees, what is not finite in a node reaches that node
        and its descendants alone.

    Raises:
        ValueError: shapes do not fit each other (native form).
    """
    return state.run(torch_ops, (c, b, u, dt, rates))


@operator(triton=gpu.can_launch, native=native_ops.can_fold)
def fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """Advance checkpoints over their pending records.

    Args:
        state: [B, 1, M, C] float32, not modified.
        b: records [B, R, 1, M] float32.
        u, dt: records [B, R, 1, C] float32.
        rates: [M, C] float32, or [B, M, C] where the states are those of B layers.
        num_pending: [B] int64; rows with 0 keep their state.

    Returns:
        New states [B, 1, M, C].

    Raises:
        ValueError: shapes do not fit each other, or num_pending is not int64 (native form).
    """
    return torch_ops.fold(state, b, u, dt, rates, num_pending)


def fold_exactly(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """As ``fold``, with the bits that native verifies and extends give a state in any case (README.md).

    Raises:
        ValueError: as ``fold``.
        RuntimeError: native code does not take the operands.
    """
    refuse_exact(not native_ops.can_fold(state, b, u, dt, rates, num_pending))
    return native_ops.fold(state, b, u, dt, rates, num_pending)
