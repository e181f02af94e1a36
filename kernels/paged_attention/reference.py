"""Attention over scattered key-value rows, one query and one head at a time: the specification of this op.

    out = softmax(D**-0.5 * q K^T, over the visible keys) V

Sources: paged key-value storage, arXiv 2309.06180, section 4.1; grouped query heads, arXiv 2305.13245,
section 2.2; a tree as an attention mask, arXiv 2305.09781, section 4. See README.md.
"""

import torch
from torch import Tensor

from specmamba.kernels.rowwise import reference as rowwise


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from N queries per row to L rows of the key-value pool of one layer.

    q [B, N, Hq, D], k_pool and v_pool [T, Hkv, D] (query head h reads key-value head h // (Hq // Hkv)),
    kv_indices [B, L] int64 rows of the pool, mask [B, N, L] bool, True where a query sees a key, or None when
    everything is visible. An entry of kv_indices that no query sees may name any row of the pool. Every query
    must see at least one key; the output of one that sees none is not defined.

    Returns out [B, N, Hq, D] in the dtype of q; sums are formed in float32 (float64 for float64 inputs). Raises
    IndexError from torch when an entry of kv_indices lies outside the pool.
    """
    batch, nodes, query_heads, width = q.shape
    group = query_heads // k_pool.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty_like(q)
    for b in range(batch):
        for n in range(nodes):
            visible = kv_indices[b] if mask is None else kv_indices[b][mask[b, n]]
            for h in range(query_heads):
                keys = k_pool[visible, h // group].to(dtype)
                values = v_pool[visible, h // group].to(dtype)
                scores = keys @ q[b, n, h].to(dtype) * width**-0.5
                out[b, n, h] = torch.softmax(scores, dim=0) @ values
    return out


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
    """Normalise and rotate queries and keys, store keys and values, attend, gate.

    projected [B, N, 2 (Hq + Hkv) D]: queries, keys, values, gates; weight [Hq + Hkv, D] float32; cos and sin
    [B, N, 1, R]; write_slots [B * N] int64, rows of the pools, which are written: numbers that are not finite become 0.
    The rest as for ``attend``. Normalised and rotated values are rounded to the dtype of ``projected``.

    Returns attend(q) * sigmoid(gate) [B, N, Hq D].
    """
    batch, nodes, _ = projected.shape
    key_heads, width = k_pool.shape[1:]
    heads = projected.view(batch, nodes, -1, width)
    query_heads = weight.shape[0] - key_heads
    qk = rowwise.rotate(rowwise.rms_norm(heads[:, :, : query_heads + key_heads], weight, eps), cos, sin)
    v, gate = heads[:, :, query_heads + key_heads : -query_heads], heads[:, :, -query_heads:]
    for b in range(batch):
        for n in range(nodes):
            slot = write_slots[b * nodes + n]
            for pool, new in ((k_pool, qk[b, n, query_heads:]), (v_pool, v[b, n])):
                pool[slot] = torch.where(new.isfinite(), new, 0)
    dtype = torch.promote_types(projected.dtype, torch.float32)
    out = attend(qk[:, :, :query_heads], k_pool, v_pool, kv_indices, mask).to(dtype)
    return (out / (1 + torch.exp(-gate.to(dtype)))).to(projected.dtype).flatten(2)
