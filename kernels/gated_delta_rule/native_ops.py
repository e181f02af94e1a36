"""Gated delta rule over draft trees, and the fold of records, in native code (native.cpp). See README.md."""

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

_INPUTS = ("q", "k", "v", "g", "beta", "state")
_RECORDS = ("records_k", "records_u", "records_decay", "num_pending")
_HEADS = ("key_heads", "value_heads", "key_dim", "value_dim")
_DISTANCES = ("state_batch", "k_batch", "u_batch", "decay_batch")
_Verify = struct(
    "Verify",
    [*_INPUTS, *_RECORDS, "ancestors", "out"],
    ["batch", "nodes", *_HEADS, "node_offset", "v_batch", "v_node", *_DISTANCES, "ancestors_batch"],
)
_Fold = struct("Fold", ["state", *_RECORDS, "folded"], ["batch", *_HEADS, *_DISTANCES, "folded_batch"])


def can_take(state: Tensor, *written: Tensor) -> bool:
    """Whether native code computes on these: float32 on the CPU, and every row of what it writes contiguous.

    Records, and the states of a fold, are written in place, so they cannot be copied into another layout.
    """
    return (
        all(x.dtype is torch.float32 and x.is_cpu for x in (state, *written))
        and all(is_contiguous_from(x, 1) for x in written)
        and code() is not None
    )


def tree_verify(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor | None,
    node_offset: int,
    ancestors: Tensor,
) -> Tensor:
    """``torch_ops.tree_verify`` where ``can_take`` allows it; all of a key head's work is one task of a thread."""
    native = code()
    assert native is not None
    batch, nodes, key_heads, key_dim = k.shape
    value_heads, value_dim = v.shape[2:]
    end = node_offset + nodes
    require(q.shape == k.shape and v.shape[:2] == k.shape[:2], "q, k and v do not belong together")
    require(g.shape == beta.shape == v.shape[:3], "g and beta need one value per value head of v")
    require(ancestors.shape == (batch, nodes, nodes), "ancestors need one row and column per node")
    require(ancestors.dtype is torch.bool, "ancestors need dtype bool")
    _check_buffers(state, records_k, records_u, records_decay, (batch, key_heads, value_heads, key_dim, value_dim), end)
    _check_pending(num_pending, batch)
    q, k, g, beta = (x.float().contiguous() for x in (q, k, g, beta))
    v, state = contiguous_from(v.float(), 2), contiguous_from(state, 1)
    ancestors = contiguous_from(ancestors, 1)
    num_pending = None if num_pending is None else num_pending.contiguous()
    out = torch.empty(batch, nodes, value_heads, value_dim)
    arguments = _Verify(
        *(x.data_ptr() for x in (q, k, v, g, beta, state, records_k, records_u, records_decay)),
        None if num_pending is None else num_pending.data_ptr(),
        ancestors.data_ptr(),
        out.data_ptr(),
        batch,
        nodes,
        *(key_heads, value_heads, key_dim, value_dim),
        node_offset,
        v.stride(0),
        v.stride(1),
        *(x.stride(0) for x in (state, records_k, records_u, records_decay)),
        ancestors.stride(0),
    )
    native.delta_tree_verify(arguments, torch.get_num_threads())
    return out


def fold(
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """``torch_ops.fold`` where ``can_take`` allows it, of ``out`` too."""
    native = code()
    assert native is not None
    batch, value_heads, key_dim, value_dim = state.shape
    sizes = batch, records_k.shape[2], value_heads, key_dim, value_dim
    _check_buffers(state, records_k, records_u, records_decay, sizes, 0)
    _check_pending(num_pending, batch)
    state, num_pending = contiguous_from(state, 1), num_pending.contiguous()
    out = torch.empty(state.shape) if out is None else out
    require(out.shape == state.shape, "out has another shape than the state")
    arguments = _Fold(
        *(x.data_ptr() for x in (state, records_k, records_u, records_decay, num_pending, out)),
        *sizes,
        *(x.stride(0) for x in (state, records_k, records_u, records_decay, out)),
    )
    native.delta_fold(arguments, torch.get_num_threads())
    return out


def _check_pending(num_pending: Tensor | None, batch: int) -> None:
    if num_pending is not None:
        require(num_pending.shape == (batch,) and num_pending.dtype is torch.int64, "num_pending needs [B] int64")


def _check_buffers(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, sizes: tuple[int, int, int, int, int], num_records: int
) -> None:
    """Native code trusts these shapes; outside of them there is other memory."""
    batch, key_heads, value_heads, key_dim, value_dim = sizes
    capacity = k.shape[1]
    require(capacity >= num_records, f"records have room for {capacity}, not for {num_records}")
    require(value_heads % key_heads == 0, "value heads are no multiple of key heads")
    require(state.shape == (batch, value_heads, key_dim, value_dim), "the state has another shape")
    require(k.shape == (batch, capacity, key_heads, key_dim), "records_k have another shape")
    require(u.shape == (batch, capacity, value_heads, value_dim), "records_u have another shape")
    require(decay.shape == (batch, capacity, value_heads), "records_decay have another shape")


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    signatures = {"delta_tree_verify": [POINTER(_Verify), c_int], "delta_fold": [POINTER(_Fold), c_int]}
    return library.load_functions(SOURCE, signatures)
