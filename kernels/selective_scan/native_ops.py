"""The selective scan in native code (native.cpp); README.md describes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, marshalled, require, struct, tokens_of
from specmamba.kernels.state_records.native_ops import (
    BuffersStruct,
    Heads,
    RunsStruct,
    TreesStruct,
    extend_states,
    marshal_buffers,
    marshal_trees,
)
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, RecordOperands, StateOperands, Trees

SOURCE = Path(__file__).parent / "native.cpp"

_Inputs = struct(
    "Inputs",
    ["c", "b", "u", "dt", "rates", "out"],
    ["c_token", "b_token", "u_token", "dt_token", "state_dim", "channels"],
)
_Fold = struct(
    "Fold",
    ["state", "records_b", "records_u", "records_dt", "rates", "num_pending", "folded"],
    [
        *("batch", "state_dim", "channels"),
        *("state_batch", "b_batch", "u_batch", "dt_batch", "rates_batch", "folded_batch"),
    ],
)


def can_take(c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: StateOperands) -> bool:
    """Whether native code computes on these: float32 on the CPU; known tokens, or draft trees with records."""
    if not are_floats(c, b, u, dt, rates) or u.numel() == 0 or code() is None:
        return False
    if isinstance(state, RecordOperands):
        return marshalled(state.buffers, marshal_buffers) is not None
    return isinstance(state, ExtendOperands) and state.states.is_cpu and state.lengths.is_cpu


def are_floats(*tensors: Tensor) -> bool:
    """Whether all are float32 on the CPU."""
    return all(x.dtype is torch.float32 and x.is_cpu for x in tensors)


def can_fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, _: Tensor) -> bool:
    """Whether native code folds these: float32 on the CPU."""
    return are_floats(state, b, u, dt, rates) and state.numel() > 0 and code() is not None


def advance(c: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, state: StateOperands) -> Tensor:
    """One call for all rows and channels. Outputs on padding are 0.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    require(are_floats(c, b, u, dt, rates), "the inputs need float32 on the CPU")
    batch, tokens, _, channels = u.shape
    size, num_threads = rates.shape[0], torch.get_num_threads()
    require(c.shape == b.shape == (batch, tokens, 1, size), "c and b have another shape")
    require(dt.shape == u.shape and u.shape[2] == 1, "u and dt have other shapes")
    require(rates.shape == (size, channels), "the rates have another shape")
    out = torch.empty(u.shape)
    given, distances = zip(*(tokens_of(x, 2) for x in (c, b, u, dt)), strict=True)
    operands = *given, rates.contiguous()
    inputs = _Inputs(*(x.data_ptr() for x in (*operands, out)), *distances, size, channels)
    if isinstance(state, RecordOperands):
        buffers = marshalled(state.buffers, marshal_buffers)
        require(buffers is not None, "buffers have a dtype, device or layout that native code does not take")
        _check_places(state.buffers, state.trees, (batch, tokens, size, channels))
        native.selective_scan_tree_verify(inputs, buffers, marshalled(state.trees, marshal_trees), num_threads)
        return out
    require(isinstance(state, ExtendOperands), "native code has no snapshots")
    assert isinstance(state, ExtendOperands)

    def run(runs: Any) -> None:
        native.selective_scan_extend(inputs, runs, num_threads)

    extend_states(run, state, None, Heads(1, 1, size, channels), batch, tokens)
    return out


def _check_places(buffers: Buffers, trees: Trees, sizes: tuple[int, int, int, int]) -> None:
    """Native code trusts these: wrong shapes would make it read and write other memory."""
    batch, nodes, size, channels = sizes
    of_rows, of_channels = buffers.k.shape[:2], (*buffers.k.shape[:2], 1, channels)
    require(trees.ancestors.shape[:2] == (batch, nodes), "there are other trees than inputs")
    require(trees.node_offset + nodes <= of_rows[1], "the records have no room for the nodes")
    require(buffers.states.shape[1:] == (1, size, channels), "the states have another shape")
    require(buffers.k.shape[2:] == (1, size), "the records of b have another shape")
    require(buffers.u.shape == buffers.decay.shape == of_channels, "the records of u and dt have another shape")


def fold(state: Tensor, b: Tensor, u: Tensor, dt: Tensor, rates: Tensor, num_pending: Tensor) -> Tensor:
    """One call for all rows and channels.

    Raises:
        ValueError: shapes do not fit each other, or num_pending is not int64.
    """
    native = library.required(code())
    batch, _, size, channels = state.shape
    capacity, has_own = u.shape[1], rates.dim() == 3
    require(state.shape[1] == 1 and b.shape == (batch, capacity, 1, size), "b has another shape than the state")
    require(u.shape == dt.shape == (batch, capacity, 1, channels), "u and dt have another shape than the state")
    require(rates.shape == ((batch, size, channels) if has_own else (size, channels)), "the rates have another shape")
    require(num_pending.shape == (batch,) and num_pending.dtype is torch.int64, "num_pending needs [B] int64")
    state, b, u, dt = (contiguous_from(x, 1) for x in (state, b, u, dt))
    rates, num_pending, folded = rates.contiguous(), num_pending.contiguous(), torch.empty(state.shape)
    arguments = _Fold(
        *(x.data_ptr() for x in (state, b, u, dt, rates, num_pending, folded)),
        *(batch, size, channels),
        *(x.stride(0) for x in (state, b, u, dt)),
        *(rates.stride(0) if has_own else 0, folded.stride(0)),
    )
    native.selective_scan_fold(arguments, torch.get_num_threads())
    return folded


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    inputs = POINTER(_Inputs)
    return library.load_functions(
        SOURCE,
        {
            "selective_scan_tree_verify": [inputs, POINTER(BuffersStruct), POINTER(TreesStruct), c_int],
            "selective_scan_extend": [inputs, POINTER(RunsStruct), c_int],
            "selective_scan_fold": [POINTER(_Fold), c_int],
        },
    )
