"""Paged attention in Triton, for GPUs. See README.md, "On a GPU"."""

import math

import torch
from torch import Tensor

from specmamba.kernels.paged_attention import tiles, torch_ops
from specmamba.kernels.paged_attention import triton_kernels as kernels
from specmamba.kernels.paged_attention.operands import Form, Keys


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
    """See ``torch_ops.attend_layer``; rows of padding (``keys.rows`` 0) get zeros, and nothing is stored in slot 0."""
    q = store(projected, form, cos, sin, k_pool, v_pool, write_slots)
    gate = projected[..., -form.num_query_heads * form.head_dim :] if form.has_gate else None
    return _attend(q, k_pool, v_pool, keys, form.scale, gate).flatten(2)


def store(
    projected: Tensor,
    form: Form,
    cos: Tensor | None,
    sin: Tensor | None,
    k_pool: Tensor,
    v_pool: Tensor,
    write_slots: Tensor,
) -> Tensor:
    """What ``torch_ops.attend_layer`` does before it attends, in one launch.

    Args:
        projected, form, cos, sin, k_pool, v_pool, write_slots: see ``torch_ops.attend_layer``. Nothing is stored in
            slot 0, and 0 where a number is not finite.

    Returns:
        Queries, normalised and rotated, [B, N, Hq, D].

    Raises:
        ValueError: the numbers of a head do not lie side by side in a pool.
    """
    _check_pools(k_pool, v_pool)
    projected, write_slots = _dense(projected), write_slots.contiguous()
    batch, num_queries, _ = projected.shape
    rotated, angles = 0, [0, 0, 0, 0]
    if cos is not None and sin is not None:
        cos, sin, rotated = _dense(cos), _dense(sin), cos.shape[-1]
        angles = [cos.stride(0), cos.stride(1), sin.stride(0), sin.stride(1)]
    norm = None if form.norm is None else form.norm.contiguous()
    q = torch.empty(
        *(batch, num_queries, form.num_query_heads, form.head_dim), dtype=projected.dtype, device=projected.device
    )
    if q.numel() == 0:
        return q
    num_heads = form.num_query_heads + 2 * form.num_key_heads
    kernels.store_kernel[batch * num_queries, -(-num_heads // tiles.STORE_HEADS)](
        *(projected, norm, cos, sin, write_slots, q, k_pool, v_pool),
        *(form.norm_eps, num_queries),
        *(projected.stride(0), projected.stride(1), *angles),
        *(k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1)),
        **tiles.store_constexprs(form.num_query_heads, form.num_key_heads, form.head_dim, rotated, norm is not None),
        num_warps=tiles.NUM_WARPS,
        num_stages=1,
    )
    return q


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: Keys, scale: float | None = None) -> Tensor:
    """Attention of N queries per row over the keys that they see.

    Args:
        q: [B, N, Hq, D].
        k_pool, v_pool: [T, Hkv, D], Hq a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
        keys: who sees what. Slots of keys that nobody sees may hold anything. A query that sees none gets 0, and so do
            rows of padding.
        scale: of the scores; None: D**-0.5.

    Returns:
        Output [B, N, Hq, D].

    Raises:
        ValueError: the numbers of a head do not lie side by side in a pool.
    """
    return _attend(q, k_pool, v_pool, keys, scale, None)


def _attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: Keys, scale: float | None, gate: Tensor | None) -> Tensor:
    """``attend``, then times the sigmoid of the gate [B, N, Hq D]."""
    _check_pools(k_pool, v_pool)
    if q.numel() == 0:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    num_queries, dim = q.shape[1], q.shape[3]
    num_keys = min(keys.num_keys, keys.table.shape[1])
    if num_queries > tiles.MAX_SPLIT_QUERIES and tiles.prefers_torch(num_queries, num_keys, dim, q.dtype):
        return _attend_in_torch(q, k_pool, v_pool, keys, scale, gate)
    q, gate = _dense(q), None if gate is None else _dense(gate)
    scale = dim**-0.5 if scale is None else scale
    if num_queries <= tiles.MAX_SPLIT_QUERIES:
        return _attend_in_parts(q, k_pool, v_pool, keys, num_keys, scale, gate)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    _launch(q, k_pool, v_pool, keys, num_keys, scale, gate, out)
    return out


def _attend_in_parts(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: Keys, num_keys: int, scale: float, gate: Tensor | None
) -> Tensor:
    """Few queries: many programs share the keys of a row."""
    batch, num_queries, query_heads, dim = q.shape
    key_heads = k_pool.shape[1]
    num_rows = num_queries * query_heads // key_heads
    tile = tiles.attend_tile(num_rows, dim, q.dtype, is_split=True)
    splits = tiles.num_splits(batch * key_heads * -(-num_rows // tile.rows), num_keys)
    parts = torch.empty(splits, *q.shape, dtype=torch.float32, device=q.device)
    peaks, sums = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    _launch(q, k_pool, v_pool, keys, num_keys, scale, None, parts, peaks, sums)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    kernels.combine_kernel[batch * num_queries, query_heads](
        *(parts, peaks, sums, keys.rows.contiguous(), gate, out, num_queries, splits),
        *((0, 0) if gate is None else (gate.stride(0), gate.stride(1))),
        **tiles.combine_constexprs(query_heads, dim, gate is not None),
        num_warps=tiles.NUM_WARPS,
        num_stages=1,
    )
    return out


def _launch(
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    keys: Keys,
    num_keys: int,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
    peaks: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """All rows, heads and parts; parts are the first dimension of ``out`` where there are peaks and sums."""
    batch, num_queries, query_heads, dim = q.shape
    key_heads, is_split = k_pool.shape[1], sums is not None
    group = query_heads // key_heads
    tile = tiles.attend_tile(num_queries * group, dim, q.dtype, is_split)
    roots = seen = None
    seen_b = seen_n = seen_m = num_entries = 0
    if keys.roots is not None and keys.seen is not None:
        roots, seen, num_entries = keys.roots.contiguous(), keys.seen.view(torch.uint8), keys.seen.shape[2]
        seen_b, seen_n, seen_m = seen.stride()
    table = _dense(keys.table)
    grid = -(-num_queries * group // tile.rows) * key_heads, out.shape[0] if is_split else 1, batch
    kernels.attend_kernel[grid](
        *(q, k_pool, v_pool, table, keys.rows.contiguous(), keys.last, roots, seen, gate),
        *(out, peaks, sums),
        *(scale * math.log2(math.e), num_queries, num_keys, keys.first, num_entries),
        *(*q.stride()[:3], k_pool.stride(0), k_pool.stride(1), v_pool.stride(0), v_pool.stride(1)),
        *(table.stride(0), *keys.last.stride(), seen_b, seen_n, seen_m),
        *((0, 0) if gate is None else gate.stride()[:2]),
        **tiles.attend_constexprs(tile, key_heads, group, dim, seen is not None, is_split, gate is not None, q.is_cpu),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _attend_in_torch(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, keys: Keys, scale: float | None, gate: Tensor | None
) -> Tensor:
    """The same through PyTorch's own attention, over keys that are gathered first."""
    out = torch_ops.attend(q, k_pool, v_pool, keys.indices, keys.mask, scale)
    if gate is not None:
        out = out * gate.sigmoid().view(out.shape)
    return torch.where((keys.rows == 0)[:, None, None, None], 0.0, out)


def _dense(x: Tensor) -> Tensor:
    """With a last dimension whose numbers lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_pools(k_pool: Tensor, v_pool: Tensor) -> None:
    if k_pool.stride(2) != 1 or v_pool.stride(2) != 1:
        raise ValueError("the numbers of a head need to lie side by side in the pools")
