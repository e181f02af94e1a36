"""An attention layer over scattered keys in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_contiguous_from, is_native, marshalled, require, struct
from specmamba.kernels.paged_attention.operands import Angles, AttentionConfig, AttentionMetadata, LayerKV

SOURCE = Path(__file__).parent / "native.cpp"
MAX_QUERIES = 64  # of a draft tree; runs without a tree may have any number

_CONFIG_SIZES = ["query_heads", "key_heads", "width", "value_width", "has_gate", "is_latent", "window"]
_Config = struct("Config", ["norm"], _CONFIG_SIZES, ["scale", "eps"])
_VISIBLE = ["table", "rows", "last", "roots", "seen"]
_STRIDES = ["last_batch", "last_query", "seen_batch", "seen_query"]
_VISIBLE_SIZES = ["table_row", "num_keys", "first", "sees_all", "entries", *_STRIDES]
_VisibleKeys = struct("VisibleKeys", _VISIBLE, _VISIBLE_SIZES)
_LAYER = ["projected", "cos", "sin", "write_slots", "k", "v", "out"]
_OF_CODES = ["k_scales", "v_scales"]
_PARTS: list[str | tuple[str, type[Any]]] = [*_LAYER, ("visible", _VisibleKeys), "firsts", "counts", *_OF_CODES]
_SIZES = [
    "batch",
    "queries",
    "rotated",
    "k_row",
    "v_row",
    "tokens",
    "k_scales_row",
    "v_scales_row",
    "codes",
    "is_exact",
]
_Layer = struct("Layer", _PARTS, _SIZES)
_PLAIN = (None, None), (0, 0, 0)  # pointers and sizes of pools that hold the numbers themselves
_CODES = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as native code names the types of codes


def can_take(projected: Tensor, kv: LayerKV, metadata: AttentionMetadata) -> bool:
    """Whether native code computes this: float32 or bfloat16 on the CPU, and no tree of very many queries.

    Pools have the same dtype, or are codes.
    """
    is_tree = metadata.roots is not None
    return (
        _are_alike(projected, kv)
        and (metadata.last.shape[1] <= MAX_QUERIES or not is_tree)
        and metadata.num_keys > 0
        and code() is not None
    )


def _are_alike(projected: Tensor, kv: LayerKV) -> bool:
    """Whether dtypes are those that native code reads, all is on the CPU, and rows of pools are contiguous."""
    if kv.k_scales is not None or kv.v_scales is not None:
        return is_native(projected) and _are_codes(kv)
    return is_native(projected) and all(
        pool.dtype is projected.dtype and pool.is_cpu and is_contiguous_from(pool, 1) for pool in (kv.k_pool, kv.v_pool)
    )


def _are_codes(kv: LayerKV) -> bool:
    """Whether both pools hold codes of one dtype that native code reads, and float32 scales."""
    dtype = kv.k_pool.dtype
    return dtype in _CODES and all(
        scales is not None
        and pool.dtype is dtype
        and scales.dtype is torch.float32
        and all(x.is_cpu and is_contiguous_from(x, 1) for x in (pool, scales))
        for pool, scales in ((kv.k_pool, kv.k_scales), (kv.v_pool, kv.v_scales))
    )


def attend_layer(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, kv: LayerKV, metadata: AttentionMetadata
) -> Tensor:
    """One call; shapes, dtypes and devices that do not belong together raise ValueError.

    Entries of ``kv.write_slots`` and ``metadata`` are trusted.
    """
    native, marshalled_config = library.required(code()), marshalled(config, _marshal)
    batch, queries = metadata.last.shape
    _check_layer(projected, config, kv, batch * queries)
    cos, sin, rotated = _angles(projected, config, angles, (batch, queries))
    visible = marshalled(metadata, _marshal_visible)
    is_packed = metadata.counts is not None
    fits = projected.shape[0] == 1 if is_packed else projected.shape[:2] == (batch, queries)
    require(fits, "every query needs the last position that it sees")
    of_packing = _packing(metadata)
    scales, sizes_of_codes = _PLAIN if kv.k_scales is None else _scales(kv)
    projected, write_slots = projected.contiguous(), kv.write_slots.contiguous()
    out = torch.empty(*projected.shape[:2], config.num_query_heads * config.value_dim, dtype=projected.dtype)
    layer = _Layer(
        projected.data_ptr(),
        None if cos is None else cos.data_ptr(),
        None if sin is None else sin.data_ptr(),
        *(write_slots.data_ptr(), kv.k_pool.data_ptr(), kv.v_pool.data_ptr(), out.data_ptr()),
        visible,
        *of_packing,
        *scales,
        *(batch, queries, rotated, kv.k_pool.stride(0), kv.v_pool.stride(0), projected.shape[0] * projected.shape[1]),
        *sizes_of_codes,
        kv.is_exact,
    )
    native.paged_attend_layer(marshalled_config, layer, projected.dtype is torch.bfloat16, torch.get_num_threads())
    return out


def _marshal(config: AttentionConfig) -> Any:
    """The structure that native code reads.

    Raises:
        ValueError: the parts of the configuration do not fit each other, or native code cannot read the norm.
    """
    heads, width, norm = (config.num_query_heads, config.num_key_heads), config.head_dim, config.norm
    require(heads[1] > 0 and heads[0] % heads[1] == 0, "query heads and key heads do not fit each other")
    is_latent = config.latent_dim is not None
    require(not is_latent or (heads[1] == 1 and config.value_dim <= width), "a latent is a part of one head of keys")
    if norm is not None:
        require(norm.shape == (sum(heads), width), "the norm has another shape than the heads")
        is_read = norm.dtype is torch.float32 and norm.is_cpu and norm.is_contiguous()
        require(is_read, "the norm's dtype, device or layout is none that native code reads")
    return _Config(
        None if norm is None else norm.data_ptr(),
        *(*heads, width, config.value_dim, config.has_gate, config.latent_dim is not None, config.window),
        *(config.scale, config.norm_eps),
    )


def _scales(kv: LayerKV) -> tuple[tuple[int, int], tuple[int, int, int]]:
    """Addresses of the scales of codes; their strides, and the type of the codes.

    Raises:
        ValueError: a head of a token has no scale.
    """
    k_scales, v_scales = kv.k_scales, kv.v_scales
    assert k_scales is not None
    assert v_scales is not None
    for pool, scales in ((kv.k_pool, k_scales), (kv.v_pool, v_scales)):
        require(scales.shape == pool.shape[:2], "every head of a token needs a scale")
    strides = k_scales.stride(0), v_scales.stride(0)
    return (k_scales.data_ptr(), v_scales.data_ptr()), (*strides, _CODES[kv.k_pool.dtype])


def _packing(metadata: AttentionMetadata) -> tuple[int | None, int | None]:
    """Addresses of the packing, or None where queries are not packed."""
    firsts, counts = metadata.firsts, metadata.counts
    if firsts is None or counts is None:
        return None, None
    for x in (firsts, counts):
        fits = x.shape == metadata.rows.shape and x.dtype is torch.int64 and x.is_cpu and x.is_contiguous()
        require(fits, "a packing needs contiguous int64 on the CPU for every row")
    return firsts.data_ptr(), counts.data_ptr()


def _check_layer(projected: Tensor, config: AttentionConfig, kv: LayerKV, num_queries: int) -> None:
    """Native code trusts these: wrong shapes would make it read other memory."""
    k_pool, v_pool, write_slots = kv.k_pool, kv.v_pool, kv.write_slots
    require(
        _are_alike(projected, kv), "projections and pools need one dtype, or pools of codes, and whole rows on the CPU"
    )
    width = projected.shape[2]
    value_shape = config.num_key_heads, config.value_dim
    are_fitting = k_pool.shape[1:] == config.key_shape and v_pool.shape[1:] == value_shape
    require(are_fitting and len(k_pool) == len(v_pool), "keys and values do not fit the heads")
    require(width == config.projected_width, "the projections have another width")
    is_list = write_slots.shape == (num_queries,) and write_slots.dtype is torch.int64 and write_slots.is_cpu
    require(is_list, "every token needs an int64 slot on the CPU")


def _angles(
    projected: Tensor, config: AttentionConfig, angles: Angles | None, shape: tuple[int, int]
) -> tuple[Tensor | None, Tensor | None, int]:
    """Cosines and sines as native code takes them, and how many components of a head turn."""
    if angles is None:
        return None, None, 0
    cos, sin = angles
    rotated = cos.shape[-1]
    require(cos.dtype is sin.dtype is projected.dtype, "projections, cos and sin differ in dtype")
    require(cos.is_cpu and sin.is_cpu, "cos and sin need to be on the CPU")
    require(cos.shape == sin.shape == (*shape, 1, rotated), "cos and sin have another shape")
    require(rotated <= config.head_dim and rotated % 2 == 0, "so many components cannot rotate")
    return cos.contiguous(), sin.contiguous(), rotated


def _marshal_visible(metadata: AttentionMetadata) -> Any:
    """The structure that native code reads, once for all layers. Slots, rows and positions are not checked.

    Raises:
        ValueError: native code cannot read a dtype, device or layout, or shapes do not fit each other.
    """
    table, rows, last, roots, seen = (getattr(metadata, name) for name in _VISIBLE)
    integers = [x for x in (table, rows, last, roots) if x is not None]
    require(all(x.dtype is torch.int64 and x.is_cpu for x in integers), "places of keys need int64 on the CPU")
    are_lists = rows.is_contiguous() and (roots is None or roots.is_contiguous())
    require(table.dim() == 2 and table.stride(1) == 1 and are_lists, "places of keys need contiguous rows")
    require(
        last.shape[:1] == rows.shape and metadata.num_keys <= table.shape[1], "rows, positions and the table do not fit"
    )
    entries, strides = 0, (0, 0)
    if roots is not None and seen is not None:
        is_mask = seen.dtype is torch.bool and seen.is_cpu and seen.stride(2) == 1
        require(is_mask and seen.shape[:2] == last.shape, "a tree needs a bool for every query and entry")
        require(roots.shape == rows.shape, "a tree needs a root for every row")
        entries, strides = seen.shape[2], seen.stride()[:2]
    else:
        roots = seen = None
    pointers = (None if x is None else x.data_ptr() for x in (table, rows, last, roots, seen))
    sizes = table.stride(0), metadata.num_keys, metadata.first, metadata.sees_all, entries
    return _VisibleKeys(*pointers, *sizes, *last.stride(), *strides)


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    arguments = [POINTER(_Config), POINTER(_Layer), c_int, c_int]
    return library.load_functions(SOURCE, {"paged_attend_layer": arguments})
