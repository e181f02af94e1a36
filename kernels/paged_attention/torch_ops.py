"""Paged attention through PyTorch's own attention. See README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import rowwise
from specmamba.kernels.paged_attention.operands import Form


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
    """All of an attention layer between its two products: new keys and values are stored, then attended to.

    Args:
        projected: [B, N, (Hq + 2 Hkv) D], with a gate Hq D more, in the order queries, keys, values, gates.
        form: heads, scale, norm and gate of this layer.
        cos, sin: [B, N, 1, R], R <= D; see ``rowwise.rotate``. None: positions are not told.
        k_pool, v_pool: [T, Hkv, D], written at ``write_slots``.
        write_slots: [B * N] int64, where the tokens' keys and values go. Several may share a slot that nobody reads.
        kv_indices, mask: as for ``attend``; what is stored here may be among them.

    Returns:
        [B, N, Hq D].
    """
    batch, length, _ = projected.shape
    query_heads, key_heads, dim = form.num_query_heads, form.num_key_heads, form.head_dim
    q_dim, kv_dim = query_heads * dim, key_heads * dim
    sizes = [q_dim + kv_dim, kv_dim, q_dim if form.has_gate else 0]
    qk, v, gate = torch.split_with_sizes(projected, sizes, -1)
    qk = qk.reshape(batch, length, -1, dim)
    if form.norm is not None:
        qk = rowwise.rms_norm(qk, form.norm, form.norm_eps)
    if cos is not None and sin is not None:
        qk = rowwise.rotate(qk, cos, sin)
    q, k = torch.split_with_sizes(qk, [query_heads, key_heads], 2)
    write(k_pool, v_pool, write_slots, k.flatten(0, 1), v.reshape(-1, key_heads, dim))
    out = attend(q, k_pool, v_pool, kv_indices, mask, form.scale).flatten(2)
    return out * gate.sigmoid() if form.has_gate else out


def write(k_pool: Tensor, v_pool: Tensor, slots: Tensor, k: Tensor, v: Tensor) -> None:
    """Store k, v [T, Hkv, D] at slots [T] of the pools; what is not finite as 0.

    A hidden key still meets a query in some forms of attention, and what is not a number survives any mask: it would
    spoil whoever shares the padding slot, or gets the slot next. A request whose numbers are not finite is found out
    by its own hidden states.
    """
    k_pool.index_copy_(0, slots, k.nan_to_num(0.0, 0.0, 0.0))
    v_pool.index_copy_(0, slots, v.nan_to_num(0.0, 0.0, 0.0))
