"""Paged attention through PyTorch's own attention. See README.md."""

from torch import Tensor
from torch.nn import functional as F


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor, mask: Tensor | None) -> Tensor:
    """Attention of N queries per row over L gathered keys, scaled by D**-0.5.

    Args:
        q: [B, N, Hq, D].
        k_pool, v_pool: [T, Hkv, D], Hq a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
        kv_indices: [B, L] int64 rows of the pool; entries that no query may see may point anywhere.
        mask: [B, N, L] bool, True where a query sees a key (at least one each); None when everything is visible.

    Returns:
        Output [B, N, Hq, D].
    """
    batch, length = kv_indices.shape
    flat = kv_indices.reshape(-1)
    k, v = (pool.index_select(0, flat).unflatten(0, (batch, length)).transpose(1, 2) for pool in (k_pool, v_pool))
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=None if mask is None else mask[:, None],
        enable_gqa=q.shape[2] != k_pool.shape[1],
    )
    return out.transpose(1, 2)
