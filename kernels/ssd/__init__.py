"""State space duality, the recurrence of Mamba2: chunked prefill and tree verification from records or snapshots."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.ssd import torch_ops
from specmamba.kernels.state_records import StateOperands

__all__ = ["advance"]


@operator(triton=lambda *args: gpu.can_launch(args[0], args[-1].states))
def advance(c: Tensor, b: Tensor, u: Tensor, g: Tensor, state: StateOperands) -> Tensor:
    """Run tokens through the recurrence of Mamba2 (arXiv 2405.21060), behind the states that they continue.

    S_t = e^(g_t) S_(t-1) + b_t u_t^T, and o_t = S_t^T c_t.

    Args:
        c, b: [B, L, G, S] float32, of state size S.
        u: [B, L, H, P] float32, dt x; H a multiple of G.
        g: [B, L, H] float32, log decay dt A <= 0.
        state: known tokens advance the states in their slots; the L nodes of draft trees leave records, or snapshots.

    Returns:
        Outputs [B, L, H, P] float32, unspecified on padding. Of trees, what is not finite in a node is NaN for it and
        its descendants.
    """
    return state.run(torch_ops, (c, b, u, g))
