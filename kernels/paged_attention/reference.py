"""Attention over scattered key-value rows, one query and one head at a time: the specification of this op.

    out = softmax(scale * q K^T, over the visible keys) V

With a window W the visible keys are the last W of those that the mask shows (sliding windows: arXiv 2310.06825).

Sources: paged key-value storage, arXiv 2309.06180, section 4.1; grouped query heads, arXiv 2305.13245,
section 2.2; a tree as an attention mask, arXiv 2305.09781, section 4. See README.md.
"""

import torch
from torch import Tensor

from specmamba.kernels.paged_attention.codes import dequantize, quantize
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV
from specmamba.kernels.rowwise import reference as rowwise


def attend(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    kv_indices: Tensor,
    mask: Tensor | None,
    scale: float | None = None,
    window: int = 0,
) -> Tensor:
    """Attend from N queries per row to L rows of the key-value pool of one layer.

    q [B, N, Hq, D], k_pool [T, Hkv, D] and v_pool [T, Hkv, V] (query head h reads key-value head h // (Hq // Hkv)),
    kv_indices [B, L] int64 rows of the pool, mask [B, N, L] bool, True where a query sees a key, or None when
    everything is visible. An entry of kv_indices that no query sees may name any row of the pool. A query that sees no
    key gets 0. scale None: D**-0.5. window: of the keys that a query sees, so many last ones count; 0: all.

    Returns out [B, N, Hq, V] in the dtype of q; sums are formed in float32 (float64 for float64 inputs). Raises
    IndexError from torch when an entry of kv_indices lies outside the pool.
    """
    batch, nodes, query_heads, width = q.shape
    group, scale = query_heads // k_pool.shape[1], width**-0.5 if scale is None else scale
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_empty(batch, nodes, query_heads, v_pool.shape[2])
    for b in range(batch):
        for n in range(nodes):
            visible = kv_indices[b] if mask is None else kv_indices[b][mask[b, n]]
            visible = visible[-window:] if window else visible
            for h in range(query_heads):
                keys = k_pool[visible, h // group].to(dtype)
                values = v_pool[visible, h // group].to(dtype)
                scores = keys @ q[b, n, h].to(dtype) * scale
                out[b, n, h] = torch.softmax(scores, dim=0) @ values
    return out


def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """Normalise and rotate queries and keys, store keys and values, attend, gate: the parts that the layer has.

    projected [B, N, (Hq + 2 Hkv) D], with gates Hq D more: queries, keys, values, gates; angles cosines and sines
    or None; of ``kv``, the rows ``write_slots`` of the pools are written: numbers that are not finite become 0. Pools
    with scales hold codes: what is attended to is what these stand for, that of this call's tokens too. The
    metadata gives ``kv_indices`` and ``mask`` of ``attend``. Normalised and rotated values are rounded to the dtype of
    ``projected``.

    In latent attention ``projected`` has no values: a value is the last ``latent_dim`` numbers of its key, as the pools
    have it.

    Returns attend(q), with a gate times its sigmoid, [B, N, Hq D], or Hq V.
    """
    batch, nodes, _ = projected.shape
    query_heads, num_qk = config.num_query_heads, config.num_query_heads + config.num_key_heads
    kv_dim = 0 if config.latent_dim is not None else config.num_key_heads * config.head_dim
    sizes = [num_qk * config.head_dim, kv_dim, query_heads * config.value_dim if config.has_gate else 0]
    qk, v, gate = projected.split(sizes, -1)
    qk, v = (x.unflatten(-1, (-1, config.head_dim)) for x in (qk, v))
    gate = gate.unflatten(-1, (-1, config.value_dim))
    if config.norm is not None:
        qk = rowwise.rms_norm(qk, config.norm, config.norm_eps)
    if angles is not None:
        qk = rowwise.rotate(qk, *angles)
    for b in range(batch):
        for n in range(nodes):
            slot = kv.write_slots[b * nodes + n]
            store(qk[b, n, query_heads:], kv.k_pool, kv.k_scales, slot)
            if config.latent_dim is None:
                store(v[b, n], kv.v_pool, kv.v_scales, slot)
    pools = (kv.k_pool, kv.k_scales), (kv.v_pool, kv.v_scales)
    k_pool, v_pool = (pool if scales is None else dequantize(pool, scales) for pool, scales in pools)
    q, keys = qk[:, :, :query_heads], (metadata.indices, metadata.mask)
    out = attend(q, k_pool, v_pool, *keys, config.scale, config.window)
    if config.has_gate:
        dtype = torch.promote_types(projected.dtype, torch.float32)
        out = (out.to(dtype) / (1 + torch.exp(-gate.to(dtype)))).to(projected.dtype)
    return out.flatten(2)


def store(new: Tensor, pool: Tensor, scales: Tensor | None, slot: Tensor) -> None:
    """Store the heads [Hkv, D] of one token in a pool, as codes where there are scales."""
    if scales is None:
        pool[slot] = torch.where(new.isfinite(), new, 0)
        return
    for head in range(len(new)):
        codes, scales[slot, head] = quantize(new[head], pool.dtype)
        pool[slot, head].copy_(codes)
