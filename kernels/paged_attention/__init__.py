"""Attention over keys and values that live anywhere in a pool."""

from torch import Tensor

from specmamba.kernels.paged_attention import native_ops, torch_ops

__all__ = ["gated_attend"]


def gated_attend(
    projected: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    write_slots: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """A gated attention layer between its two products; see ``torch_ops.gated_attend``."""
    if native_ops.can_take(projected, k_pool, v_pool, kv_indices):
        return native_ops.gated_attend(projected, weight, eps, cos, sin, k_pool, v_pool, write_slots, kv_indices, mask)
    return torch_ops.gated_attend(projected, weight, eps, cos, sin, k_pool, v_pool, write_slots, kv_indices, mask)
