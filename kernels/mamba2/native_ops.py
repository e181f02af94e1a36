"""A Mamba2 layer between its projections in native code (native.cpp); README.md describes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_native, marshalled, require, struct, tokens_of
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

_Inputs = struct("Inputs", ["mixed", "gate", "dt", "out", "before_norm"], ["mixed_token", "gate_token", "dt_token"])
_Weights = struct(
    "Weights",
    ["conv", "conv_bias", "negative_a", "dt_bias", "skip", "norm"],
    ["width", *Heads._fields, "norm_groups", "norm_before_gate"],
    ["norm_eps", "dt_min", "dt_max"],
)


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
    """Compute the outputs of all nodes of draft trees; write their inputs and records, never the states.

    One native call per layer: threads share the heads of all rows.
    ``reference.tree_verify`` is the specification.

    Args:
        inputs: of N nodes per tree [B, N, ...], or packed [1, T, ...] (``Trees``), float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        buffers: of the layer; node i writes entry W - 1 + node_offset + i of conv_inputs and record node_offset + i.
        trees: of this verify. Indices are not checked.

    Returns:
        [B, N, H P] in the gate's dtype, or packed [1, T, H P] with zeros behind the last node.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    buffers_struct = marshalled(buffers, marshal_buffers)
    require(buffers_struct is not None, "buffers have a dtype, device or layout that native code does not take")
    weights_struct = _checked_weights(inputs, weights, buffers.conv_inputs)
    check_tokens(inputs.mixed.shape[:2], trees)
    check_places(weights, weights.conv, _heads(weights), buffers, trees)
    inputs_struct, out, _kept = _marshal_inputs(inputs)
    native.mamba2_tree_verify(
        inputs_struct,
        weights_struct,
        buffers_struct,
        marshalled(trees, marshal_trees),
        inputs.mixed.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def extend(inputs: Inputs, weights: Weights, state: ExtendOperands) -> Tensor:
    """Compute the outputs of known tokens; advance the states and windows behind which they stand.

    One native call per layer, 64 tokens at a time: threads share the heads of all rows.
    ``reference.extend`` is the specification.

    Args:
        inputs: of L tokens per row, float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        state: states of any float dtype, windows in the inputs' dtype. Slots and lengths are not checked.

    Returns:
        [B, L, H P] in the gate's dtype; 0 on padding.

    Raises:
        ValueError: ``can_take_runs`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    require(can_extend(state, inputs.mixed.dtype), "windows need the inputs' dtype, and whole rows on the CPU")
    weights_struct = _checked_weights(inputs, weights, state.windows)
    inputs_struct, out, _kept = _marshal_inputs(inputs)

    def run(runs: Any) -> None:
        is_bfloat16 = inputs.mixed.dtype is torch.bfloat16
        native.mamba2_extend(inputs_struct, weights_struct, runs, is_bfloat16, torch.get_num_threads())

    extend_states(run, state, weights.conv, _heads(weights), *inputs.mixed.shape[:2])
    return out


def _checked_weights(inputs: Inputs, weights: Weights, kept: Tensor) -> Any:
    """The native structure of the weights, which inputs [B, N] fit; ``kept`` are inputs of earlier tokens."""
    weights_struct = marshalled(weights, _marshal_weights)
    require(_are_alike(inputs, kept), "inputs, new and kept, need one dtype, float32 or bfloat16, on the CPU")
    require(weights_struct is not None, "weights have a dtype, device or layout that native code does not take")
    batch, nodes = inputs.mixed.shape[:2]
    require(inputs.mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    shape = batch, nodes, weights.num_heads * weights.head_dim
    require(inputs.gate.shape == shape, "the gate has another shape than the heads")
    require(inputs.dt.shape == (batch, nodes, weights.num_heads), "dt needs one value per head")
    return weights_struct


def _marshal_inputs(inputs: Inputs) -> tuple[Any, Tensor, tuple[Tensor, ...]]:
    """The native structure, the tensor that it has outputs written to, and the others that it points to."""
    out = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype)
    before_norm = out if out.dtype is torch.float32 else torch.empty(inputs.gate.shape)
    (mixed, of_mixed), (gate, of_gate) = tokens_of(inputs.mixed, 1), tokens_of(inputs.gate, 1)
    dt, of_dt = tokens_of(inputs.dt, 1)
    pointers = (x.data_ptr() for x in (mixed, gate, dt, out, before_norm))
    return _Inputs(*pointers, of_mixed, of_gate, of_dt), out, (mixed, gate, dt, before_norm)


def _are_alike(inputs: Inputs, kept: Tensor) -> bool:
    """Whether all activations are on the CPU and have the same dtype, one that native code reads."""
    x, dtype = inputs, inputs.mixed.dtype  # no loop: this runs in every layer and step
    return (
        is_native(x.mixed)
        and x.gate.dtype is x.dt.dtype is kept.dtype is dtype
        and (x.gate.is_cpu and x.dt.is_cpu and kept.is_cpu)
    )


def _heads(w: Weights) -> Heads:
    return Heads(w.num_groups, w.num_heads, w.state_dim, w.head_dim)


def _marshal_weights(w: Weights) -> Any:
    """Make the native structure of the weights; None where native code cannot read them.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    given = w.conv_bias, w.negative_a, w.dt_bias, w.skip, w.norm
    laid_out = w.conv.t(), *(x for x in given if x is not None)
    if not all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in laid_out):
        return None
    heads, (channels, width) = _heads(w), w.conv.shape
    heads.check(w.conv)
    inner = w.num_heads * w.head_dim
    require(w.conv_bias is None or w.conv_bias.shape == (channels,), "the convolution's bias has another shape")
    of_head = (x.shape == (w.num_heads,) for x in (w.negative_a, w.dt_bias, w.skip))
    require(all(of_head), "decays, step sizes and skips need one value per head")
    require(w.norm is None or w.norm.shape == (inner,), "the norm has another shape")
    require(w.dt_limit[0] <= w.dt_limit[1], "the limits of the step size are in no order")
    require(w.norm_groups > 0 and inner % w.norm_groups == 0, "the norm's groups do not divide the channels")
    pointers = (None if x is None else x.data_ptr() for x in (w.conv, *given))
    return _Weights(*pointers, width, *heads, w.norm_groups, w.norm_before_gate, w.norm_eps, *w.dt_limit)


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    arguments = [POINTER(_Inputs), POINTER(_Weights), POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int]
    runs = [*arguments[:2], POINTER(RunsStruct), c_int, c_int]
    return library.load_functions(SOURCE, {"mamba2_tree_verify": arguments, "mamba2_extend": runs})
