"""Attention over keys and values that are scattered over a pool."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.paged_attention import native_ops, torch_ops
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV

__all__ = ["Angles", "AttentionConfig", "AttentionMetadata", "LayerKV", "attend_layer", "takes_packed"]


def takes_packed(projected: Tensor, kv: LayerKV, metadata: AttentionMetadata) -> bool:
    """Whether ``attend_layer`` takes packed projections [1, T, ...], and its output is packed: the native form does."""
    if metadata.counts is None or gpu.can_launch_any(("paged_attention",), projected, kv.k_pool):
        return False
    return native_ops.can_take(projected, kv, metadata)


@operator(
    triton=lambda *given: not given[3].is_exact and gpu.can_launch(given[0], given[3].k_pool),
    native=lambda *given: native_ops.can_take(given[0], given[3], given[4]),
)
def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """All of an attention layer between its two products: new keys and values are stored, then attended to.

    Paged storage: arXiv 2309.06180, section 4.1; grouped query heads: arXiv 2305.13245, section 2.2; a tree as an
    attention mask: arXiv 2305.09781, section 4.

    Args:
        projected: [B, N, (Hq + 2 Hkv) D], with a gate Hq D more, in the order queries, keys, values, gates; or packed
            (``takes_packed``). Latent attention (``config.latent_dim``; MLA, arXiv 2405.04434, section 2.1) has values
            of V <= D numbers, the last ones of their keys: projections have none.
        config: heads, scale, norm, gate and window of this layer.
        angles: cosines and sines, see ``rowwise.rotate``; None: queries and keys are not rotated.
        kv: the pools, in which the tokens' keys and values are stored, numbers that are not finite as 0; with scales,
            as codes of 8 bits (``codes.py``). Query head h reads key head h // (Hq // Hkv).
        metadata: which keys each query sees; what is stored here may be among them. A query that sees none gets 0.

    Returns:
        [B, N, Hq D], or Hq V, in projected's dtype; zeros for rows of padding in the Triton form, and behind the last
        query where projections are packed.

    Raises:
        RuntimeError: ``kv.is_exact``, and native code does not take the operands.
        ValueError: shapes, dtypes or devices do not belong together (native form), or the numbers of a head, or the
            scales of a token, are not contiguous in a pool (Triton form).
    """
    if kv.is_exact and metadata.num_keys > 0:
        raise RuntimeError("exact attention needs native code, which does not take these operands")
    return torch_ops.attend_layer(projected, config, angles, kv, metadata)
