"""The fold of pending records in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, is_contiguous_from, require, struct

SOURCE = Path(__file__).parent / "native.cpp"

_Fold = struct(
    "Fold",
    ["state", "records_k", "records_u", "records_decay", "num_pending", "folded"],
    [
        *("batch", "key_heads", "value_heads", "key_dim", "value_dim"),
        *("state_batch", "k_batch", "u_batch", "decay_batch", "folded_batch"),
    ],
)


def can_take(state: Tensor, *written: Tensor) -> bool:
    """Whether native code computes on these: float32 on the CPU, and every row of what it writes contiguous.

    A fold into a state is in place, so that it cannot be copied into another layout.
    """
    return (
        all(x.dtype is torch.float32 and x.is_cpu for x in (state, *written))
        and all(is_contiguous_from(x, 1) for x in written)
        and code() is not None
    )


def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """One call for all rows and heads."""
    native = library.required(code())
    batch, value_heads, key_dim, value_dim = state.shape
    sizes = batch, k.shape[2], value_heads, key_dim, value_dim
    _check_shapes(state, k, u, decay, num_pending, sizes)
    state, num_pending = contiguous_from(state, 1), num_pending.contiguous()
    out = torch.empty(state.shape) if out is None else out
    require(out.shape == state.shape, "out has another shape than the state")
    arguments = _Fold(
        *(x.data_ptr() for x in (state, k, u, decay, num_pending, out)),
        *sizes,
        *(x.stride(0) for x in (state, k, u, decay, out)),
    )
    native.fold_records(arguments, torch.get_num_threads())
    return out


def _check_shapes(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, sizes: tuple[int, int, int, int, int]
) -> None:
    """Native code trusts these: wrong shapes would make it read other memory."""
    batch, key_heads, value_heads, key_dim, value_dim = sizes
    capacity = k.shape[1]
    require(key_heads > 0 and value_heads % key_heads == 0, "value heads are no multiple of key heads")
    require(state.shape == (batch, value_heads, key_dim, value_dim), "the state has another shape")
    require(k.shape == (batch, capacity, key_heads, key_dim), "k has another shape")
    require(u.shape == (batch, capacity, value_heads, value_dim), "u has another shape")
    require(decay.shape == (batch, capacity, value_heads), "decay has another shape")
    require(num_pending.shape == (batch,) and num_pending.dtype is torch.int64, "num_pending needs [B] int64")


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    return library.load_functions(SOURCE, {"fold_records": [POINTER(_Fold), c_int]})
