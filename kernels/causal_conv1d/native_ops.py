"""The causal convolution in native code (native.cpp); README.md describes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_native, marshalled, require, struct, tokens_of
from specmamba.kernels.state_records.native_ops import (
    BuffersStruct,
    RunsStruct,
    TreesStruct,
    can_extend,
    extend_states,
    marshal_buffers,
    marshal_trees,
)
from specmamba.kernels.state_records.operands import ExtendOperands, RecordOperands, StateOperands

SOURCE = Path(__file__).parent / "native.cpp"

_Inputs = struct("Inputs", ["x", "conv", "conv_bias", "out"], ["x_token", "width", "channels"])


def can_take(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands) -> bool:
    """Whether native code computes on these: float32 or bfloat16 on the CPU, weights float32 and laid out by tap."""
    if not is_native(x) or x.numel() == 0 or code() is None:
        return False
    laid_out = (weight.t(), *(() if bias is None else (bias,)))
    if not all(w.is_cpu and w.dtype is torch.float32 and w.is_contiguous() for w in laid_out):
        return False
    if isinstance(state, RecordOperands):
        is_alike = state.buffers.conv_inputs.dtype is x.dtype
        return is_alike and marshalled(state.buffers, marshal_buffers) is not None
    return isinstance(state, ExtendOperands) and can_extend(state, x.dtype)


def advance(x: Tensor, weight: Tensor, bias: Tensor | None, state: StateOperands) -> Tensor:
    """One call for all rows and channels. Outputs on padding are 0.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    require(can_take(x, weight, bias, state), "operands have a dtype, device or layout that native code does not take")
    batch, tokens, channels = x.shape
    width = weight.shape[1]
    require(weight.shape[0] == channels, "the weight has another shape")
    require(bias is None or bias.shape == (channels,), "the bias has another shape")
    out, (x, distance) = torch.empty(x.shape), tokens_of(x, 1)
    pointers = x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr()
    inputs, is_bfloat16 = _Inputs(*pointers, distance, width, channels), x.dtype is torch.bfloat16
    num_threads = torch.get_num_threads()
    if isinstance(state, RecordOperands):
        _check_places(state, batch, tokens, weight)
        operands = marshalled(state.buffers, marshal_buffers), marshalled(state.trees, marshal_trees)
        native.causal_conv1d_tree_verify(inputs, *operands, is_bfloat16, num_threads)
        return out
    assert isinstance(state, ExtendOperands)

    def run(runs: Any) -> None:
        native.causal_conv1d_extend(inputs, runs, is_bfloat16, num_threads)

    extend_states(run, state, weight, None, batch, tokens)
    return out


def _check_places(state: RecordOperands, batch: int, nodes: int, weight: Tensor) -> None:
    """Native code trusts these: wrong shapes would make it read and write other memory."""
    kept, trees, (channels, width) = state.buffers.conv_inputs, state.trees, weight.shape
    require(trees.ancestors.shape[:2] == (batch, nodes), "there are other trees than inputs")
    require(trees.conv_index.shape == (batch, nodes, width), "the convolution's index has another shape")
    require(kept.shape[2] == channels, "conv_inputs have another shape")
    require(width - 1 + trees.node_offset + nodes <= kept.shape[1], "conv_inputs have no room for the nodes")


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    inputs = POINTER(_Inputs)
    return library.load_functions(
        SOURCE,
        {
            "causal_conv1d_tree_verify": [inputs, POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int],
            "causal_conv1d_extend": [inputs, POINTER(RunsStruct), c_int, c_int],
        },
    )
