"""A gated short convolution in native code (native.cpp); README.md describes it."""

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
from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records.native_ops import (
    BuffersStruct,
    Heads,
    RunsStruct,
    TreesStruct,
    can_extend,
    check_places,
    check_tokens,
    extend_states,
    marshal_buffers,
    marshal_trees,
)
from specmamba.kernels.state_records.operands import Buffers, ExtendOperands, Trees

SOURCE = Path(__file__).parent / "native.cpp"
NO_HEADS = Heads(0, 0, 0, 0)  # the state is a window alone

_Inputs = struct("Inputs", ["in_gate", "gate", "mixed", "out"], ["in_gate_token", "gate_token", "mixed_token"])
_Weights = struct("Weights", ["conv", "conv_bias"], ["width", "channels"])


def can_take(inputs: Inputs, weights: Weights, buffers: Buffers) -> bool:
    """Whether native code computes on these: activations float32 or bfloat16 on the CPU, rows of buffers contiguous."""
    return (
        _are_alike(inputs, buffers.conv_inputs)
        and marshalled(weights, _marshal_weights) is not None
        and marshalled(buffers, marshal_buffers) is not None
        and code() is not None
    )


def can_take_runs(inputs: Inputs, weights: Weights, state: ExtendOperands) -> bool:
    """Whether native code extends these: activations and windows in one dtype, float32 or bfloat16, on the CPU."""
    return (
        _are_alike(inputs, state.windows)
        and can_extend(state, inputs.mixed.dtype)
        and marshalled(weights, _marshal_weights) is not None
        and code() is not None
    )


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Compute the outputs of all nodes of draft trees; write their gated inputs, never the windows.

    One native call per layer: a task of a thread is some channels of one row, or several where they are little work.
    ``reference.tree_verify`` is the specification.

    Args:
        inputs: of N nodes per tree [B, N, C], or packed [1, T, C] (``Trees``), float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        buffers: of the layer, without heads; node i writes entry W - 1 + node_offset + i of conv_inputs.
        trees: of this verify. Indices are not checked.

    Returns:
        [B, N, C] in the inputs' dtype, or packed [1, T, C] with zeros behind the last node.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    buffers_struct = marshalled(buffers, marshal_buffers)
    require(buffers_struct is not None, "buffers have a dtype, device or layout that native code does not take")
    weights_struct = _checked_weights(inputs, weights, buffers.conv_inputs)
    check_tokens(inputs.mixed.shape[:2], trees)
    check_places(weights, weights.conv, NO_HEADS, buffers, trees)
    inputs_struct, out, _kept = _marshal_inputs(inputs)
    native.short_conv_tree_verify(
        inputs_struct,
        weights_struct,
        buffers_struct,
        marshalled(trees, marshal_trees),
        inputs.mixed.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def extend(inputs: Inputs, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of known tokens; advance the windows behind which they stand.

    One native call per layer, in the tasks of ``tree_verify``. ``reference.extend`` is the specification.

    Args:
        inputs: of L tokens per row, float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        state: windows in the inputs' dtype, states without heads. Slots and lengths are not checked.

    Returns:
        [B, L, C] in the inputs' dtype; 0 on padding.

    Raises:
        ValueError: ``can_take_runs`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    require(can_extend(state, inputs.mixed.dtype), "windows need the inputs' dtype, and whole rows on the CPU")
    weights_struct = _checked_weights(inputs, weights, state.windows)
    inputs_struct, out, _kept = _marshal_inputs(inputs)

    def run(runs: Any) -> None:
        is_bfloat16 = inputs.mixed.dtype is torch.bfloat16
        native.short_conv_extend(inputs_struct, weights_struct, runs, is_bfloat16, torch.get_num_threads())

    extend_states(run, state, weights.conv, NO_HEADS, *inputs.mixed.shape[:2])
    return out


def _checked_weights(inputs: Inputs, weights: Weights, kept: Tensor) -> Any:
    """The native structure of the weights, which inputs [B, N, C] fit; ``kept`` are inputs of earlier tokens."""
    weights_struct = marshalled(weights, _marshal_weights)
    require(_are_alike(inputs, kept), "inputs, new and kept, need one dtype, float32 or bfloat16, on the CPU")
    require(weights_struct is not None, "weights have a dtype, device or layout that native code does not take")
    require(inputs.mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    is_gated = inputs.in_gate.shape == inputs.gate.shape == inputs.mixed.shape
    require(is_gated, "the gates have another shape than the inputs")
    return weights_struct


def _marshal_inputs(inputs: Inputs) -> tuple[Any, Tensor, tuple[Tensor, ...]]:
    """The native structure, the tensor that it has outputs written to, and the tensors that it reads."""
    out = torch.empty(inputs.mixed.shape, dtype=inputs.mixed.dtype)
    tensors, strides = zip(*(tokens_of(x, 1) for x in (inputs.in_gate, inputs.gate, inputs.mixed)), strict=True)
    return _Inputs(*(x.data_ptr() for x in (*tensors, out)), *strides), out, tensors


def _are_alike(inputs: Inputs, kept: Tensor) -> bool:
    """Whether all activations are on the CPU and have the same dtype, one that native code reads."""
    x, dtype = inputs, inputs.mixed.dtype
    is_on_cpu = x.in_gate.is_cpu and x.gate.is_cpu and kept.is_cpu
    return is_native(x.mixed) and is_on_cpu and x.in_gate.dtype is x.gate.dtype is kept.dtype is dtype


def _marshal_weights(w: Weights) -> Any:
    """Make the native structure of the weights; None where native code cannot read them.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    laid_out = (w.conv.t(), *(() if w.conv_bias is None else (w.conv_bias,)))
    if not all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in laid_out):
        return None
    channels, width = w.conv.shape
    require(w.conv_bias is None or w.conv_bias.shape == (channels,), "the bias has another shape")
    return _Weights(w.conv.data_ptr(), None if w.conv_bias is None else w.conv_bias.data_ptr(), width, channels)


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    arguments = [POINTER(_Inputs), POINTER(_Weights), POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int]
    runs = [*arguments[:2], POINTER(RunsStruct), c_int, c_int]
    return library.load_functions(SOURCE, {"short_conv_tree_verify": arguments, "short_conv_extend": runs})
