"""Paged attention through PyTorch's own attention. See README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import rowwise
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
) -> Tensor:
    """Attention of N queries per row over L gathered keys.

    Args:
        q: [B, N, Hq, D].
        k_pool, v_pool: [T, Hkv, D], Hq a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
        kv_indices: [B, L] int64 rows of the pool; entries that no query may see may point anywhere.
        mask: [B, N, L] bool, True where a query sees a key; None when everything is visible. One that sees none gets 0.
        scale: of the scores; None: D**-0.5.

    Returns:
        Output [B, N, Hq, D].
    """
    batch, length = kv_indices.shape
    num_queries, num_q_heads, dim = q.shape[1:]
    num_kv_heads = k_pool.shape[1]
    # the query heads of a group become rows of one head: PyTorch's own grouping copies keys and values on a CPU
    q = q.reshape(batch, num_queries, num_kv_heads, -1, dim).permute(0, 2, 3, 1, 4).flatten(2, 3)
    if mask is not None:
        mask = mask[:, None].repeat(1, 1, num_q_heads // num_kv_heads, 1)
    flat = kv_indices.reshape(-1)
    k, v = (pool.index_select(0, flat).unflatten(0, (batch, length)).transpose(1, 2) for pool in (k_pool, v_pool))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).view(
        batch, num_kv_heads, -1, num_queries, dim
    )
    return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_q_heads, dim)


def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """Norm and rotation by ``rowwise``, keys and values gathered, then PyTorch's attention."""
    batch, length, _ = projected.shape
    query_heads, key_heads, dim = config.num_query_heads, config.num_key_heads, config.head_dim
    q_dim, kv_dim = query_heads * dim, key_heads * dim
    sizes = [q_dim + kv_dim, kv_dim, q_dim if config.has_gate else 0]
    qk, v, gate = torch.split_with_sizes(projected, sizes, -1)
    qk = qk.reshape(batch, length, -1, dim)
    if config.norm is not None:
        qk = rowwise.rms_norm(qk, config.norm, config.norm_eps)
    if angles is not None:
        qk = rowwise.rotate(qk, *angles)
    q, k = torch.split_with_sizes(qk, [query_heads, key_heads], 2)
    write(kv, k.flatten(0, 1), v.reshape(-1, key_heads, dim))
    out = attend(q, kv.k_pool, kv.v_pool, metadata.indices, metadata.mask, config.scale).flatten(2)
    return out * gate.sigmoid() if config.has_gate else out


def write(kv: LayerKV, k: Tensor, v: Tensor) -> None:
    """Store k, v [T, Hkv, D] at the T slots of the pools; numbers that are not finite as 0.

    Some forms of attention multiply masked keys too, and NaN survives any mask: it would spoil other requests that
    share the padding slot, or get the slot next. A request with such numbers is detected by its own hidden states.
    """
    kv.k_pool.index_copy_(0, kv.write_slots, k.nan_to_num(0.0, 0.0, 0.0))
    kv.v_pool.index_copy_(0, kv.write_slots, v.nan_to_num(0.0, 0.0, 0.0))
