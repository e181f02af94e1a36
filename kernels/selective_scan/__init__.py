"""Mamba1's selective scan: known tokens, tree verification from records or with snapshots, and the fold of records."""

from torch import Tensor

from specmamba.kernels.selective_scan import torch_ops
from specmamba.kernels.selective_scan.torch_ops import fold
from specmamba.kernels.state_records import StateOperands

__all__ = ["advance", "fold"]


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
    """
    return state.run(torch_ops, (c, b, u, dt, rates))
