"""Gated delta rule: chunked prefill, tree verification from records, and the fold of pending records."""

from torch import Tensor

from specmamba.kernels.gated_delta_rule import native_ops, torch_ops
from specmamba.kernels.gated_delta_rule.torch_ops import extend, tree_verify, tree_verify_snapshots

__all__ = ["extend", "fold", "tree_verify", "tree_verify_snapshots"]


def fold(
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Checkpoints advanced over their pending records, in place where ``out`` is state; see ``torch_ops.fold``."""
    records = records_k, records_u, records_decay
    if native_ops.can_take(state, *records, *(() if out is None else (out,))):
        return native_ops.fold(state, *records, num_pending, out)
    return torch_ops.fold(state, *records, num_pending, out)
