"""Attention of a few queries over scattered keys, in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, is_contiguous_from, is_native, struct

SOURCE = Path(__file__).parent / "native.cpp"
MAX_QUERIES = 64  # per row: a draft tree's. Longer runs are matrix products, which PyTorch does better

_Attend = struct(
    "Attend",
    ["q", "k", "v", "indices", "mask", "out"],
    [
        *("batch", "queries", "query_heads", "key_heads", "width", "length"),
        *("q_batch", "q_query", "k_row", "v_row", "indices_batch", "mask_batch", "mask_query"),
    ],
    ["scale"],
)


def can_take(q: Tensor, k_pool: Tensor, v_pool: Tensor, kv_indices: Tensor) -> bool:
    """Whether native code computes this: float32 or bfloat16 on the CPU, as many queries per row as a tree has."""
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
    key_heads, length = k_pool.shape[1], kv_indices.shape[1]
    if k_pool.shape[1:] != (key_heads, width) or v_pool.shape[1:] != (key_heads, width) or query_heads % key_heads:
        raise ValueError("keys and values do not fit the queries")
    if kv_indices.shape[0] != batch or kv_indices.dtype is not torch.int64:
        raise ValueError("kv_indices need one row of int64 per row of queries")
    if mask is not None and (mask.shape != (batch, queries, length) or mask.dtype is not torch.bool):
        raise ValueError("the mask needs a bool for every query and key")
    q, kv_indices = contiguous_from(q, 2), contiguous_from(kv_indices, 1)
    mask = None if mask is None else contiguous_from(mask, 2)
    out = torch.empty(q.shape, dtype=q.dtype)
    arguments = _Attend(
        *(x.data_ptr() for x in (q, k_pool, v_pool, kv_indices)),
        None if mask is None else mask.data_ptr(),
        out.data_ptr(),
        *(batch, queries, query_heads, key_heads, width, length),
        *(q.stride(0), q.stride(1), k_pool.stride(0), v_pool.stride(0), kv_indices.stride(0)),
        *((0, 0) if mask is None else (mask.stride(0), mask.stride(1))),
        width**-0.5,
    )
    native.paged_attend(arguments, q.dtype is torch.bfloat16, torch.get_num_threads())
    return out


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    return library.load_functions(SOURCE, {"paged_attend": [POINTER(_Attend), c_int, c_int]})
