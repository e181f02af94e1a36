"""A gated delta net layer between its projections in native code (native.cpp); README.md describes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_native, marshalled, require, struct, tokens_of
from specmamba.kernels.rowwise.torch_ops import L2_EPS
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

_Inputs = struct("Inputs", ["mixed", "gate", "b", "a", "out"], ["mixed_token", "gate_token", "b_token", "a_token"])
_Weights = struct(
    "Weights",
    ["conv", "negative_a", "dt_bias", "norm"],
    ["width", *Heads._fields],
    ["norm_eps", "unit_eps"],
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

    One native call per layer: all work of a key head is one task of a thread.
    ``reference.tree_verify`` is the specification.

    Args:
        inputs: of N nodes per tree [B, N, ...], or packed [1, T, ...] (``Trees``), float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        buffers: of the layer; node i writes entry W - 1 + node_offset + i of conv_inputs and record node_offset + i.
        trees: of this verify. Indices are not checked.

    Returns:
        [B, N, Hv, V] in the gate's dtype, or packed [1, T, Hv, V] with zeros behind the last node.

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
    native.delta_net_tree_verify(
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

    One native call per layer, 64 tokens at a time: all work of a key head is one task of a thread.
    ``reference.extend`` is the specification.

    Args:
        inputs: of L tokens per row, float32 or bfloat16 on the CPU.
        weights: of the layer, float32.
        state: states of any float dtype, windows in the inputs' dtype. Slots and lengths are not checked.

    Returns:
        [B, L, Hv, V] in the gate's dtype; 0 on padding.

    Raises:
        ValueError: ``can_take_runs`` is false for these operands, or shapes do not fit.
    """
    native = library.required(code())
    require(can_extend(state, inputs.mixed.dtype), "windows need the inputs' dtype, and whole rows on the CPU")
    weights_struct = _checked_weights(inputs, weights, state.windows)
    inputs_struct, out, _kept = _marshal_inputs(inputs)

    def run(runs: Any) -> None:
        is_bfloat16 = inputs.mixed.dtype is torch.bfloat16
        native.delta_net_extend(inputs_struct, weights_struct, runs, is_bfloat16, torch.get_num_threads())

    extend_states(run, state, weights.conv, _heads(weights), *inputs.mixed.shape[:2])
    return out


def _checked_weights(inputs: Inputs, weights: Weights, kept: Tensor) -> Any:
    """The native structure of the weights, which inputs [B, N] fit; ``kept`` are inputs of earlier tokens."""
    weights_struct = marshalled(weights, _marshal_weights)
    require(_are_alike(inputs, kept), "inputs, new and kept, need one dtype, float32 or bfloat16, on the CPU")
    require(weights_struct is not None, "weights have a dtype, device or layout that native code does not take")
    heads, width = (*inputs.mixed.shape[:2], weights.num_value_heads), weights.value_dim
    require(inputs.mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    require(inputs.gate.shape == (*heads, width), "the gate has another shape than the values")
    require(inputs.a.shape == inputs.b.shape == heads, "a and b need one value per value head")
    return weights_struct


def _marshal_inputs(inputs: Inputs) -> tuple[Any, Tensor, tuple[Tensor, ...]]:
    """The native structure, the tensor that it has outputs written to, and the tensors that it reads."""
    out = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype)
    (mixed, of_mixed), (gate, of_gate) = tokens_of(inputs.mixed, 1), tokens_of(inputs.gate, 2)
    (b, of_b), (a, of_a) = tokens_of(inputs.b, 1), tokens_of(inputs.a, 1)
    pointers = (x.data_ptr() for x in (mixed, gate, b, a, out))
    return _Inputs(*pointers, of_mixed, of_gate, of_b, of_a), out, (mixed, gate, b, a)


def _are_alike(inputs: Inputs, kept: Tensor) -> bool:
    """Whether all activations are on the CPU and have the same dtype, one that native code reads."""
    x, dtype = inputs, inputs.mixed.dtype  # no loop: this runs in every layer and step
    return (
        is_native(x.mixed)
        and x.gate.dtype is x.a.dtype is x.b.dtype is kept.dtype is dtype
        and (x.gate.is_cpu and x.a.is_cpu and x.b.is_cpu and kept.is_cpu)
    )


def _heads(w: Weights) -> Heads:
    return Heads(w.num_key_heads, w.num_value_heads, w.key_dim, w.value_dim)


def _marshal_weights(w: Weights) -> Any:
    """Make the native structure of the weights; None where native code cannot read them.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    of_head = w.negative_a, w.dt_bias, w.norm
    laid_out = w.conv.t(), *of_head
    if not all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in laid_out):
        return None
    heads = _heads(w)
    heads.check(w.conv)
    require(w.negative_a.shape == w.dt_bias.shape == (heads.value_heads,), "decays have another shape")
    require(w.norm.shape == (heads.value_dim,), "the norm has another shape")
    pointers = (x.data_ptr() for x in (w.conv, *of_head))
    return _Weights(*pointers, w.conv.shape[1], *heads, w.norm_eps, L2_EPS)


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    arguments = [POINTER(_Inputs), POINTER(_Weights), POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int]
    runs = [*arguments[:2], POINTER(RunsStruct), c_int, c_int]
    return library.load_functions(SOURCE, {"delta_net_tree_verify": arguments, "delta_net_extend": runs})
