"""Paged attention in Triton, for GPUs. See README.md, "On a GPU"."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels.gpu import register_options
from specmamba.kernels.paged_attention import crossover, tiles, torch_ops
from specmamba.kernels.paged_attention import triton_kernels as kernels
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV


def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """Three launches for trees; rows of padding (``metadata.rows`` 0) get zeros, and nothing is stored in slot 0."""
    q = store(projected, config, angles, kv)
    gate = projected[..., -config.num_query_heads * config.value_dim :] if config.has_gate else None
    return _attend(q, kv, metadata, config.scale, gate, config.window).flatten(2)


def store(projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV) -> Tensor:
    """What a layer does before it attends, in one launch.

    Args:
        projected, config, angles, kv: see the entry. Nothing is stored in slot 0, and 0 where a number is not finite.

    Returns:
        Queries, normalised and rotated, [B, N, Hq, D].

    Raises:
        ValueError: the numbers of a head, or the scales of a token's heads, do not lie side by side in a pool.
    """
    pools = _Pools.of(kv)
    projected, write_slots = _dense(projected), kv.write_slots.contiguous()
    batch, num_queries, _ = projected.shape
    cos = sin = None
    rotated, angle_strides = 0, [0, 0, 0, 0]
    if angles is not None:
        cos, sin = _dense(angles[0]), _dense(angles[1])
        rotated, angle_strides = cos.shape[-1], [cos.stride(0), cos.stride(1), sin.stride(0), sin.stride(1)]
    norm = None if config.norm is None else config.norm.contiguous()
    q = torch.empty(
        *(batch, num_queries, config.num_query_heads, config.head_dim), dtype=projected.dtype, device=projected.device
    )
    if q.numel() == 0:
        return q
    is_latent = config.latent_dim is not None
    num_heads = config.num_query_heads + (1 if is_latent else 2) * config.num_key_heads
    kernels.store_kernel[batch * num_queries, -(-num_heads // tiles.STORE_HEADS)](
        *(projected, norm, cos, sin, write_slots, q, *pools.tensors),
        *(config.norm_eps, num_queries),
        *(projected.stride(0), projected.stride(1), *angle_strides, *pools.strides),
        **tiles.store_constexprs(
            config.num_query_heads,
            config.num_key_heads,
            config.head_dim,
            rotated,
            norm is not None,
            pools.codes,
            is_latent,
        ),
        num_warps=tiles.NUM_WARPS,
        num_stages=1,
        enable_fp_fusion=False,  # what is stored is rounded after each operation, as everywhere
    )
    return q


def attend(
    q: Tensor, k_pool: Tensor, v_pool: Tensor, metadata: AttentionMetadata, scale: float | None = None
) -> Tensor:
    """Attention of N queries per row over the keys that they see.

    Args:
        q: [B, N, Hq, D].
        k_pool, v_pool: [T, Hkv, D] and [T, Hkv, V], Hq a multiple of Hkv; query head h reads key head h // (Hq // Hkv).
        metadata: which keys each query sees. Slots of keys that no query sees may hold anything. A query that sees none
            gets 0, and so do rows of padding.
        scale: of the scores; None: D**-0.5.

    Returns:
        Output [B, N, Hq, V].

    Raises:
        ValueError: the numbers of a head do not lie side by side in a pool.
    """
    nothing = metadata.rows[:0]
    return _attend(q, LayerKV(k_pool, v_pool, nothing), metadata, q.shape[3] ** -0.5 if scale is None else scale, None)


@dataclass(frozen=True, slots=True)
class _Pools:
    """The pools as kernels take them: FP8 as int8, whose bits they take apart."""

    tensors: tuple[Tensor | None, ...]  # keys, values, scales of either
    strides: tuple[int, ...]
    key_heads: int
    value_dim: int
    codes: int  # see ``tiles.CODES``; 0: none

    @classmethod
    def of(cls, kv: LayerKV) -> _Pools:
        _check_pools(kv)
        k, v, scales = kv.k_pool, kv.v_pool, (kv.k_scales, kv.v_scales)
        strides = k.stride(0), k.stride(1), v.stride(0), v.stride(1), *(0 if x is None else x.stride(0) for x in scales)
        sizes = k.shape[1], v.shape[2]
        if kv.k_scales is None:
            return cls((k, v, *scales), strides, *sizes, 0)
        return cls((k.view(torch.int8), v.view(torch.int8), *scales), strides, *sizes, tiles.CODES[k.dtype])


def _attend(
    q: Tensor, kv: LayerKV, metadata: AttentionMetadata, scale: float, gate: Tensor | None, window: int = 0
) -> Tensor:
    """``attend``, then times the sigmoid of the gate [B, N, Hq V]."""
    # what is gathered is seen up to each query: a layer that sees less of it stays in the kernels
    if not window and crossover.is_gathered(q, kv, metadata, gate is not None):
        return torch_ops.attend_spans(q, kv, metadata, scale, gate)
    return attend_in_kernels(q, kv, metadata, scale, gate, window)


def attend_in_kernels(
    q: Tensor, kv: LayerKV, metadata: AttentionMetadata, scale: float, gate: Tensor | None, window: int = 0
) -> Tensor:
    """As ``attend``, whatever the size; then times the sigmoid of the gate [B, N, Hq V]."""
    pools = _Pools.of(kv)
    if q.numel() == 0:
        return _empty_outputs(q, pools)
    num_keys = min(metadata.num_keys, metadata.table.shape[1])
    q, gate = _dense(q), None if gate is None else _dense(gate)
    if q.shape[1] <= tiles.MAX_SPLIT_QUERIES:
        return _attend_in_parts(q, pools, metadata, num_keys, scale, gate, window)
    out = _empty_outputs(q, pools)
    _launch(q, pools, metadata, num_keys, scale, gate, out, window=window)
    return out


def _empty_outputs(q: Tensor, pools: _Pools) -> Tensor:
    return torch.empty(*q.shape[:3], pools.value_dim, dtype=q.dtype, device=q.device)


def _attend_in_parts(
    q: Tensor,
    pools: _Pools,
    metadata: AttentionMetadata,
    num_keys: int,
    scale: float,
    gate: Tensor | None,
    window: int,
) -> Tensor:
    """Few queries: many programs share the keys of a row."""
    batch, num_queries, query_heads, dim = q.shape
    key_heads = pools.key_heads
    num_rows = num_queries * query_heads // key_heads
    tile = tiles.tile_of(num_rows, dim, pools.value_dim, q.dtype, is_split=True, is_coded=pools.codes > 0)
    most_keys = min(num_keys, window + num_queries) if window else num_keys
    splits = tiles.num_splits(batch * key_heads * -(-num_rows // tile.rows), most_keys)
    parts = torch.empty(splits, *q.shape[:3], pools.value_dim, dtype=torch.float32, device=q.device)
    peaks, sums = (torch.empty(parts.shape[:-1], dtype=torch.float32, device=q.device) for _ in range(2))
    _launch(q, pools, metadata, num_keys, scale, None, parts, peaks, sums, window)
    out = _empty_outputs(q, pools)
    kernels.combine_kernel[batch * num_queries, query_heads](
        *(parts, peaks, sums, metadata.rows.contiguous(), gate, out, num_queries, splits),
        *((0, 0) if gate is None else (gate.stride(0), gate.stride(1))),
        **tiles.combine_constexprs(query_heads, pools.value_dim, gate is not None),
        num_warps=tiles.NUM_WARPS,
        num_stages=1,
    )
    return out


def _launch(
    q: Tensor,
    pools: _Pools,
    metadata: AttentionMetadata,
    num_keys: int,
    scale: float,
    gate: Tensor | None,
    out: Tensor,
    peaks: Tensor | None = None,
    sums: Tensor | None = None,
    window: int = 0,
) -> None:
    """All rows, heads and parts; parts are the first dimension of ``out`` where there are peaks and sums."""
    batch, num_queries, query_heads, dim = q.shape
    key_heads, is_split = pools.key_heads, sums is not None
    group = query_heads // key_heads
    tile = tiles.tile_of(num_queries * group, dim, pools.value_dim, q.dtype, is_split, pools.codes > 0)
    roots = seen = None
    seen_b = seen_n = seen_m = num_entries = 0
    if metadata.roots is not None and metadata.seen is not None:
        roots, seen, num_entries = metadata.roots.contiguous(), metadata.seen.view(torch.uint8), metadata.seen.shape[2]
        seen_b, seen_n, seen_m = seen.stride()
    table = _dense(metadata.table)
    grid = -(-num_queries * group // tile.rows) * key_heads, out.shape[0] if is_split else 1, batch
    kernels.attend_kernel[grid](
        *(q, *pools.tensors, table, metadata.rows.contiguous(), metadata.last, roots, seen, gate),
        *(out, peaks, sums),
        *(scale * math.log2(math.e), num_queries, num_keys, metadata.first, num_entries),
        *(*q.stride()[:3], *pools.strides),
        *(table.stride(0), *metadata.last.stride(), seen_b, seen_n, seen_m),
        *((0, 0) if gate is None else gate.stride()[:2]),
        **tiles.attend_constexprs(
            *(tile, key_heads, group, dim, seen is not None, is_split, gate is not None, q.is_cpu, pools.codes),
            value_dim=pools.value_dim,
            window=window,
        ),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **register_options(tile.registers, q.device),
    )


def _dense(x: Tensor) -> Tensor:
    """With a last dimension whose numbers lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_pools(kv: LayerKV) -> None:
    if kv.k_pool.stride(2) != 1 or kv.v_pool.stride(2) != 1:
        raise ValueError("the numbers of a head need to lie side by side in the pools")
    for pool, scales in ((kv.k_pool, kv.k_scales), (kv.v_pool, kv.v_scales)):
        if (scales is not None) != (pool.dtype in tiles.CODES):
            raise ValueError("pools of codes need scales, and others have none")
        if scales is not None and (scales.shape != pool.shape[:2] or (scales.stride(1) != 1 and scales.shape[1] > 1)):
            raise ValueError("the scales of a token's heads need to lie side by side, one for each head")
