"""Gated delta rule: chunked prefill and tree verification from records or with snapshots."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.gated_delta_rule import torch_ops
from specmamba.kernels.gated_delta_rule.torch_ops import extend, tree_verify
from specmamba.kernels.state_records import as_stored

__all__ = ["extend", "extend_in_place", "tree_verify", "tree_verify_snapshots"]


def extend_in_place(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor, lengths: Tensor
) -> Tensor:
    """Known tokens through the states in slots, which are left advanced.

    Args:
        q, k, v, g, beta: as for ``torch_ops.extend``.
        states: [slots, Hv, K, V] of any float dtype; computed in float32, and rounded when all tokens are done.
        slots: [B] int64, distinct but for 0: rows of slot 0 leave it as it is.
        lengths: [B] int64; tokens from lengths[b] on are padding.

    Returns:
        Output [B, L, Hv, V], unspecified on padding.
    """
    if gpu.can_launch(q, states, slots, lengths):
        from specmamba.kernels.gated_delta_rule import triton_ops

        return triton_ops.extend_in_place(q, k, v, g, beta, states, slots, lengths)
    lengths = lengths.masked_fill(slots == 0, 0)
    out, after = torch_ops.extend(q, k, v, g, beta, states[slots].float(), lengths)
    states[slots] = as_stored(after, states.dtype)
    return out


def tree_verify_snapshots(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    snapshots: Tensor,
    parents: Tensor | None,
) -> Tensor:
    """Outputs of all tree nodes, and the state after each of them; see ``torch_ops.tree_verify_snapshots``."""
    operands = q, k, v, g, beta, state, snapshots, parents
    if gpu.can_launch(q, state, snapshots, parents):
        from specmamba.kernels.gated_delta_rule import triton_ops

        return triton_ops.tree_verify_snapshots(*operands)
    return torch_ops.tree_verify_snapshots(*operands)
