"""Attention over keys and values that live anywhere in a pool."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.paged_attention import native_ops, torch_ops
from specmamba.kernels.paged_attention.operands import Form, Keys

__all__ = ["Form", "Keys", "attend_layer"]


def attend_layer(
    projected: Tensor,
    form: Form,
    cos: Tensor | None,
    sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    write_slots: Tensor,
    keys: Keys,
) -> Tensor:
    """An attention layer between its two products; see ``torch_ops.attend_layer`` and, for who sees whom, ``Keys``."""
    if gpu.can_launch(projected, k_pool):  # nothing of keys.indices and keys.mask is ever made
        from specmamba.kernels.paged_attention import triton_ops

        return triton_ops.attend_layer(projected, form, cos, sin, k_pool, v_pool, write_slots, keys)
    layer = projected, form, cos, sin, k_pool, v_pool, write_slots, keys.indices, keys.mask
    if native_ops.can_take(projected, k_pool, v_pool, keys.indices):
        return native_ops.attend_layer(*layer)
    return torch_ops.attend_layer(*layer)
