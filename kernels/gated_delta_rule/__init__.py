"""Gated delta rule: chunked prefill and tree verification from records or with snapshots."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.gated_delta_rule import torch_ops
from specmamba.kernels.state_records import StateOperands

__all__ = ["advance"]


@operator(triton=lambda *args: gpu.can_launch(args[0], args[-1].states))
def advance(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: StateOperands) -> Tensor:
    """Run tokens through the gated delta rule (arXiv 2412.06464), behind the states that they continue.

    S_t = e^(g_t) S_(t-1) + k_t u_t^T with u_t = beta_t (v_t - e^(g_t) S_(t-1)^T k_t), and o_t = S_t^T q_t. With a log
    decay for each key channel it is that of Kimi Delta Attention (arXiv 2510.26692).

    Args:
        q, k: [B, L, Hk, K] float32; k l2-normalised, q l2-normalised and scaled by K**-0.5.
        v: [B, L, Hv, V] float32, Hv a multiple of Hk.
        g: [B, L, Hv] float32, log decay <= 0; or [B, L, Hv, K].
        beta: [B, L, Hv] float32.
        state: known tokens advance the states in their slots; the L nodes of draft trees leave records, or snapshots.

    Returns:
        Outputs [B, L, Hv, V] float32, unspecified on padding. Of trees, what is not finite in a node is NaN for it and
        its descendants.
    """
    return state.run(torch_ops, (q, k, v, g, beta))
