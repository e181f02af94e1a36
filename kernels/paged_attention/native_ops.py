"""Attention of a few queries over scattered keys, in native code (native.cpp). See README.md."""

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

_Attend = struct(
    "Attend",
    ["q", "k", "v", "indices", "mask", "gate", "out"],
    [
        *("batch", "queries", "query_heads", "key_heads", "width", "length"),
        *("q_batch", "q_query", "k_row", "v_row", "indices_batch", "mask_batch", "mask_query", "gate_query"),
    ],
    ["scale"],
)
_GatedAttend = struct(
    "GatedAttend",
    ["projected", "cos", "sin", "weight", "write_slots", "indices", "mask", "k", "v", "out"],
    [
        *("batch", "queries", "query_heads", "key_heads", "width", "length", "rotated"),
        *("k_row", "v_row", "indices_batch", "mask_batch", "mask_query"),
    ],
    ["scale", "eps"],
)


def can_take(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor) -> bool:
    """Whether native code computes this: float32 or bfloat16 on the CPU, as many queries per row as a tree has.

    ``q`` [B, N, ...] may also be the projections that ``gated_attend`` takes.
    """
    pools = k_pool, v_pool
    return (
        is_native(q)
        and q.shape[1] <= MAX_QUERIES
        and all(pool.dtype is q.dtype and is_contiguous_from(pool, 1) for pool in pools)
        and kv_indices.shape[1] > 0
        and code() is not None
    )


def attend(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor, mask: Tensor | None) -> Tensor:
    """``torch_ops.attend`` where ``can_take`` allows it; keys are read where they lie, and none that nobody sees.

    Raises:
        ValueError: shapes or dtypes do not belong together. Entries of ``kv_indices`` are trusted.
    """
    native = code()
    assert native is not None
    batch, queries, query_heads, width = q.shape
    key_heads = k_pool.shape[1]
    fits = k_pool.shape[1:] == v_pool.shape[1:] == (key_heads, width) and query_heads % key_heads == 0
    require(fits, "keys and values do not fit the queries")
    kv_indices, mask, strides = _keys(batch, queries, kv_indices, mask)
    q = contiguous_from(q, 2)
    out = torch.empty(q.shape, dtype=q.dtype)
    arguments = _Attend(
        *(q.data_ptr(), k_pool.data_ptr(), v_pool.data_ptr(), kv_indices.data_ptr()),
        *(None if mask is None else mask.data_ptr(), None, out.data_ptr()),
        *(batch, queries, query_heads, key_heads, width, kv_indices.shape[1]),
        *(q.stride(0), q.stride(1), k_pool.stride(0), v_pool.stride(0), *strides, 0),
        width**-0.5,
    )
    native.paged_attend(arguments, q.dtype is torch.bfloat16, torch.get_num_threads())
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
    """``torch_ops.gated_attend`` where ``can_take`` allows it, in one call.

    Raises:
        ValueError: shapes or dtypes do not belong together. Entries of ``write_slots`` and ``kv_indices`` are trusted.
    """
    native = code()
    assert native is not None
    batch, queries = projected.shape[:2]
    key_heads, width = k_pool.shape[1:]
    query_heads, rotated = weight.shape[0] - key_heads, cos.shape[-1]
    fits = v_pool.shape[1:] == (key_heads, width) and weight.shape[1] == width and query_heads % key_heads == 0
    require(fits and weight.dtype is torch.float32, "keys, values and norms do not fit each other")
    require(projected.shape[2] == 2 * (query_heads + key_heads) * width, "the projections have another width")
    require(cos.dtype is sin.dtype is projected.dtype, "projections, cos and sin differ in dtype")
    require(cos.shape == sin.shape == (batch, queries, 1, rotated), "cos and sin have another shape")
    require(rotated <= width and rotated % 2 == 0, "so many components cannot rotate")
    is_list = write_slots.shape == (batch * queries,) and write_slots.dtype is torch.int64
    require(is_list, "every token needs an int64 slot")
    kv_indices, mask, strides = _keys(batch, queries, kv_indices, mask)
    projected, weight, write_slots = projected.contiguous(), weight.contiguous(), write_slots.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    out = torch.empty(batch, queries, query_heads * width, dtype=projected.dtype)
    arguments = _GatedAttend(
        *(projected.data_ptr(), cos.data_ptr(), sin.data_ptr(), weight.data_ptr(), write_slots.data_ptr()),
        *(kv_indices.data_ptr(), None if mask is None else mask.data_ptr()),
        *(k_pool.data_ptr(), v_pool.data_ptr(), out.data_ptr()),
        *(batch, queries, query_heads, key_heads, width, kv_indices.shape[1], rotated),
        *(k_pool.stride(0), v_pool.stride(0), *strides),
        *(width**-0.5, eps),
    )
    native.paged_gated_attend(arguments, projected.dtype is torch.bfloat16, torch.get_num_threads())
    return out


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
    signatures = {
        "paged_attend": [POINTER(_Attend), c_int, c_int],
        "paged_gated_attend": [POINTER(_GatedAttend), c_int, c_int],
    }
    return library.load_functions(SOURCE, signatures)
