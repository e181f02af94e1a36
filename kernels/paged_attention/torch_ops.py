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
    num_queries, num_q_heads, dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    # the query heads of a group become rows of one head: PyTorch's own grouping copies keys and values on a CPU
    q = q.view(batch, num_queries, num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, num_q_heads // num_kv_heads, 1)
    flat = kv_indices.reshape(-1)
    k, v = (pool.index_select(0, flat).unflatten(0, (batch, length)).transpose(1, 2) for pool in (k_pool, v_pool))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).view(batch, num_kv_heads, -1, num_queries, dim)
    return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_q_heads, dim)
