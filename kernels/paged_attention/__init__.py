"""Attention over keys and values that live anywhere in a pool."""

from torch import Tensor

from specmamba.kernels.paged_attention import native_ops, torch_ops

__all__ = ["attend"]


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of N queries per row over L gathered keys; see ``torch_ops.attend``."""
    if native_ops.can_take(q, k_pool, v_pool, kv_indices):
        return native_ops.attend(q, k_pool, v_pool, kv_indices, mask)
    return torch_ops.attend(q, k_pool, v_pool, kv_indices, mask)
