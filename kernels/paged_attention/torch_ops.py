"""Paged attention through PyTorch's own attention. See README.md."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import rowwise
from specmamba.kernels.paged_attention.codes import as_bytes, quantize
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV

QUERIES_AT_ONCE = 256  # that attend to codes, whose scores are kept
GATHERED_BYTES = 256 << 20  # of keys and values that ``attend_spans`` gathers at once


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
        k_pool, v_pool: [T, Hkv, D] and [T, Hkv, V], Hq a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
        kv_indices: [B, L] int64 rows of the pool; entries that no query may see may point anywhere.
        mask: [B, N, L] bool, True where a query sees a key; None when everything is visible. One that sees none gets 0.
        scale: of the scores; None: D**-0.5.

    Returns:
        Output [B, N, Hq, V].
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
        batch, num_kv_heads, -1, num_queries, v_pool.shape[2]
    )
    return out.permute(0, 3, 1, 2, 4).reshape(batch, num_queries, num_q_heads, -1)


def attend_spans(q: Tensor, kv: LayerKV, metadata: AttentionMetadata, scale: float, gate: Tensor | None) -> Tensor:
    """Causal attention of long runs, row by row: on a GPU by PyTorch's FlashAttention (arXiv 2307.08691), with no mask.

    So many key heads are gathered at once as ``GATHERED_BYTES`` holds, one at least.

    Args:
        q: [B, N, Hq, D].
        kv: has no scales.
        metadata: has spans, none of which begins in front of ``metadata.first``.
        scale: of the scores.
        gate: [B, N, Hq V], by whose sigmoid the output is multiplied; None: it is not.

    Returns:
        Output [B, N, Hq, V]; 0 behind a row's last query.
    """
    key_heads, group = kv.k_pool.shape[1], q.shape[2] // kv.k_pool.shape[1]
    out = q.new_empty(*q.shape[:3], kv.v_pool.shape[2])
    assert metadata.spans is not None
    for row, (begin, end) in enumerate(metadata.spans):
        slots = metadata.indices[row, metadata.first : end]
        at_once = max(1, GATHERED_BYTES // max(1, gathered_bytes(kv, len(slots))))
        for head in range(0, key_heads, at_once):
            keys, queries = slice(head, head + at_once), slice(head * group, (head + at_once) * group)
            k, v = (pool[:, keys].index_select(0, slots) for pool in (kv.k_pool, kv.v_pool))
            out[row, : end - begin, queries] = _attend_causally(q[row, : end - begin, queries], k, v, scale)
        out[row, end - begin :] = 0
    return out if gate is None else out.mul_(gate.sigmoid().view(out.shape))


def _attend_causally(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [N, Hq, D], k and v [L, Hkv, D]; the last query sees all keys, each one before it a key less: [N, Hq, D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if q.is_cpu:
        is_seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=is_seen, scale=scale, enable_gqa=True)
    else:
        # by `scaled_dot_product_attention` where N = L, and `causal_lower_right` where not, other kernels of PyTorch's
        # would take a part of the runs, and all of torch.compile would be imported; causal is lower right here
        found = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]
    return found[0].transpose(0, 1)


def gathered_bytes(kv: LayerKV, num_keys: int) -> int:
    """Bytes of the keys and values of one key head that ``attend_spans`` gathers for a row."""
    return num_keys * (kv.k_pool.shape[2] + kv.v_pool.shape[2]) * kv.k_pool.element_size()


def attend_to_codes(q: Tensor, kv: LayerKV, kv_indices: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """``attend`` over pools of codes, in float32: scales of keys go to scores, those of values to weights.

    Query rows are dealt with some at a time, so that memory does not grow with queries times keys.

    Args:
        q, kv_indices, mask, scale: as of ``attend``.
        kv: has scales.

    Returns:
        Output [B, N, Hq, D] in the dtype of q.
    """
    k, v, k_scales, v_scales = _gathered(kv, kv_indices)
    grouped = q.unflatten(2, (k.shape[1], -1)).permute(0, 2, 1, 3, 4).float()
    parts = []
    for first in range(0, q.shape[1], QUERIES_AT_ONCE):
        some = slice(first, first + QUERIES_AT_ONCE)
        scores = (grouped[:, :, some].flatten(2, 3) @ k.mT).unflatten(2, (-1, grouped.shape[3]))
        scores = scores * (k_scales * scale)[:, :, None, None]
        if mask is None:
            weights = scores.softmax(-1)
        else:
            seen = mask[:, None, some, None]
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            weights = torch.where(seen.any(-1, keepdim=True), weights, 0.0)  # a query that sees no key
        means = (weights * v_scales[:, :, None, None]).flatten(2, 3) @ v
        parts.append(means.unflatten(2, (-1, grouped.shape[3])).permute(0, 2, 1, 3, 4).flatten(2, 3))
    return torch.cat(parts, 1).to(q.dtype)


def _gathered(kv: LayerKV, kv_indices: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes [B, Hkv, L, D] of keys and of values, widened to float32, and their scales [B, Hkv, L]."""
    flat = kv_indices.reshape(-1)
    assert kv.k_scales is not None
    assert kv.v_scales is not None

    def rows(x: Tensor) -> Tensor:
        chosen = as_bytes(x).index_select(0, flat).view(x.dtype)
        return chosen.view(*kv_indices.shape, *x.shape[1:]).float().transpose(1, 2)

    return rows(kv.k_pool), rows(kv.v_pool), rows(kv.k_scales), rows(kv.v_scales)


def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """Norm and rotation by ``rowwise``, keys and values gathered, then PyTorch's attention."""
    batch, length, _ = projected.shape
    query_heads, key_heads, dim = config.num_query_heads, config.num_key_heads, config.head_dim
    kv_dim = 0 if config.latent_dim is not None else key_heads * dim
    sizes = [(query_heads + key_heads) * dim, kv_dim, query_heads * config.value_dim if config.has_gate else 0]
    qk, v, gate = torch.split_with_sizes(projected, sizes, -1)
    qk = qk.reshape(batch, length, -1, dim)
    if config.norm is not None:
        qk = rowwise.rms_norm(qk, config.norm, config.norm_eps)
    if angles is not None:
        qk = rowwise.rotate(qk, *angles)
    q, k = torch.split_with_sizes(qk, [query_heads, key_heads], 2)
    write(kv, k.flatten(0, 1), v.reshape(-1, key_heads, dim) if kv_dim else None)
    if kv.k_scales is None:
        out = attend(q, kv.k_pool, kv.v_pool, *metadata.within(config.window), config.scale).flatten(2)
    else:
        out = attend_to_codes(q, kv, *metadata.within(config.window), config.scale).flatten(2)
    return out * gate.sigmoid() if config.has_gate else out


def write(kv: LayerKV, k: Tensor, v: Tensor | None) -> None:
    """Store k, v [T, Hkv, D] at the T slots of the pools, as codes where there are scales; what is not finite as 0.

    v None: values are a part of their keys.

    Some forms of attention multiply masked keys too, and NaN survives any mask: it would spoil other requests that
    share the padding slot, or get the slot next. A request with such numbers is detected by its own hidden states.
    """
    for new, pool, scales in ((k, kv.k_pool, kv.k_scales), (v, kv.v_pool, kv.v_scales)):
        if new is None:
            continue
        if scales is None:
            pool.index_copy_(0, kv.write_slots, new.nan_to_num(0.0, 0.0, 0.0))
            continue
        codes, of_heads = quantize(new, pool.dtype)
        as_bytes(pool).index_copy_(0, kv.write_slots, as_bytes(codes))
        scales.index_copy_(0, kv.write_slots, of_heads)
