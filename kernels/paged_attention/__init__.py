"""Attention over keys and values that live anywhere in a pool."""

from torch import Tensor

from specmamba.kernels.paged_attention import native_ops, torch_ops
from specmamba.kernels.paged_attention.operands import Form

__all__ = ["Form", "attend_layer"]


def attend_layer(
    projected: Tensor,
    form: Form,
    cos: Tensor | None,
    sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    write_slots: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
) -> Tensor:
    """An attention layer between its two products; see ``torch_ops.attend_layer``."""
    if native_ops.can_take(projected, k_pool, v_pool, kv_indices):
        return native_ops.attend_layer(projected, form, cos, sin, k_pool, v_pool, write_slots, kv_indices, mask)
    return torch_ops.attend_layer(projected, form, cos, sin, k_pool, v_pool, write_slots, kv_indices, mask)
