"""Attention over keys and values that are scattered over a pool."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.paged_attention import native_ops, torch_ops
from specmamba.kernels.paged_attention.operands import AttentionConfig, AttentionMetadata

__all__ = ["AttentionConfig", "AttentionMetadata", "attend_layer"]


# Triton needs neither the indices nor the mask of the metadata: its condition comes first, so they are never computed.
@operator(
    triton=lambda *given: gpu.can_launch(given[0], given[4]),
    native=lambda *given: native_ops.can_take(given[0], given[4], given[5], given[7].indices),
)
def attend_layer(
    projected: Tensor,
    config: AttentionConfig,
    cos: Tensor | None,
    sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    write_slots: Tensor,
    metadata: AttentionMetadata,
) -> Tensor:
    """All of an attention layer between its two products: new keys and values are stored, then attended to.

    Paged storage: arXiv 2309.06180, section 4.1; grouped query heads: arXiv 2305.13245, section 2.2; a tree as an
    attention mask: arXiv 2305.09781, section 4.

    Args:
        projected: [B, N, (Hq + 2 Hkv) D], with a gate Hq D more, in the order queries, keys, values, gates.
        config: heads, scale, norm and gate of this layer.
        cos, sin: [B, N, 1, R], R <= D, see ``rowwise.rotate``; None: queries and keys are not rotated.
        k_pool, v_pool: [slots, Hkv, D], written at ``write_slots``; query head h reads key head h // (Hq // Hkv).
        write_slots: [B * N] int64, where the tokens' keys and values are stored, numbers that are not finite as 0.
            Slots are trusted. Several tokens may share a slot that is never read (padding).
        metadata: which keys each query sees; what is stored here may be among them. A query that sees none gets 0.

    Returns:
        [B, N, Hq D] in projected's dtype; zeros for rows of padding in the Triton form.

    Raises:
        ValueError: shapes, dtypes or devices do not belong together (native form), or the numbers of a head are not
            contiguous in a pool (Triton form).
    """
    return torch_ops.attend_layer(projected, config, cos, sin, k_pool, v_pool, write_slots, metadata)
