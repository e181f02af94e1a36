"""A gated attention layer of a few queries over scattered keys in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, is_contiguous_from, is_native, require, struct

SOURCE = Path(__file__).parent / "native.cpp"
MAX_QUERIES = 64  # per row: a draft tree's. Longer runs are matrix products, which PyTorch does better

_GatedAttend = struct(
    "GatedAttend",
    ["projected", "cos", "sin", "weight", "write_slots", "indices", "mask", "k", "v", "out"],
    [
        *("batch", "queries", "query_heads", "key_heads", "width", "length", "rotated"),
        *("k_row", "v_row", "indices_batch", "mask_batch", "mask_query"),
    ],
    ["scale", "eps"],
)


def can_take(projected: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor) -> bool:
    """Whether native code computes this: float32 or bfloat16 on the CPU, as many queries per row as a tree has."""
    pools = k_pool, v_pool
    return (
        is_native(projected)
        and projected.shape[1] <= MAX_QUERIES
        and all(pool.dtype is projected.dtype and is_contiguous_from(pool, 1) for pool in pools)
        and kv_indices.shape[1] > 0
        and code() is not None
    )


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
    """``torch_ops.gated_attend`` where ``can_take`` allows it, in one call.

    Raises:
        ValueError: shapes or dtypes do not belong together. Entries of ``write_slots`` and ``kv_indices`` are trusted.
    """
    native = code()
    assert native is not None
    _check_layer(projected, weight, cos, sin, k_pool, v_pool, write_slots)
    batch, queries = projected.shape[:2]
    key_heads, width = k_pool.shape[1:]
    query_heads, rotated = weight.shape[0] - key_heads, cos.shape[-1]
    kv_indices, mask, strides = _keys(batch, queries, kv_indices, mask)
    inputs = [x.contiguous() for x in (projected, cos, sin, weight, write_slots)]
    out = torch.empty(batch, queries, query_heads * width, dtype=projected.dtype)
    arguments = _GatedAttend(
        *(x.data_ptr() for x in (*inputs, kv_indices)),
        None if mask is None else mask.data_ptr(),
        *(x.data_ptr() for x in (k_pool, v_pool, out)),
        *(batch, queries, query_heads, key_heads, width, kv_indices.shape[1], rotated),
        *(k_pool.stride(0), v_pool.stride(0), *strides),
        *(width**-0.5, eps),
    )
    native.paged_gated_attend(arguments, projected.dtype is torch.bfloat16, torch.get_num_threads())
    return out


def _check_layer(
    projected: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, k_pool: Tensor, v_pool: Tensor, write_slots: Tensor
) -> None:
    """Native code trusts these; outside of them there is other memory."""
    batch, queries, projected_width = projected.shape
    key_heads, width = k_pool.shape[1:]
    query_heads, rotated = weight.shape[0] - key_heads, cos.shape[-1]
    fits = v_pool.shape[1:] == (key_heads, width) and weight.shape[1] == width and query_heads % key_heads == 0
    require(fits and weight.dtype is torch.float32, "keys, values and norms do not fit each other")
    require(projected_width == 2 * (query_heads + key_heads) * width, "the projections have another width")
    require(cos.dtype is sin.dtype is projected.dtype, "projections, cos and sin differ in dtype")
    require(cos.shape == sin.shape == (batch, queries, 1, rotated), "cos and sin have another shape")
    require(rotated <= width and rotated % 2 == 0, "so many components cannot rotate")
    is_list = write_slots.shape == (batch * queries,) and write_slots.dtype is torch.int64
    require(is_list, "every token needs an int64 slot")


def _keys(
    batch: int, queries: int, kv_indices: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor | None, tuple[int, int, int]]:
    """Which keys are read and seen, as native code takes them, and the strides of both."""
    is_table = kv_indices.shape[0] == batch and kv_indices.dtype is torch.int64
    require(is_table, "kv_indices need one row of int64 per row of queries")
    kv_indices = contiguous_from(kv_indices, 1)
    if mask is None:
        return kv_indices, None, (kv_indices.stride(0), 0, 0)
    fits = mask.shape == (batch, queries, kv_indices.shape[1]) and mask.dtype is torch.bool
    require(fits, "the mask needs a bool for every query and key")
    mask = contiguous_from(mask, 2)
    return kv_indices, mask, (kv_indices.stride(0), mask.stride(0), mask.stride(1))


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    return library.load_functions(SOURCE, {"paged_gated_attend": [POINTER(_GatedAttend), c_int, c_int]})
