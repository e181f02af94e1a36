"""A gated delta net layer between its projections in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from specmamba.kernels.delta_net.operands import Buffers, Inputs, Trees, Weights
from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_contiguous_from, is_native, require, struct, tokens_of
from specmamba.kernels.rowwise.torch_ops import L2_EPS

SOURCE = Path(__file__).parent / "native.cpp"

_Inputs = struct("Inputs", ["mixed", "gate", "b", "a", "out"], ["mixed_token", "gate_token", "b_token", "a_token"])
_Weights = struct(
    "Weights",
    ["conv", "negative_a", "dt_bias", "norm"],
    ["width", "key_heads", "value_heads", "key_dim", "value_dim"],
    ["norm_eps", "unit_eps"],
)
_Buffers = struct(
    "Buffers",
    ["states", "conv_inputs", "k", "u", "decay"],
    ["states_slot", "conv_inputs_row", "k_row", "u_row", "decay_row"],
)
_Trees = struct(
    "Trees",
    ["rows", "slots", "conv_index", "num_pending", "ancestors"],
    ["batch", "nodes", "node_offset", "ancestors_batch"],
)


def can_take(inputs: Inputs, weights: Weights, buffers: Buffers) -> bool:
    """Whether native code computes on these: activations float32 or bfloat16 on the CPU, rows of buffers contiguous."""
    return (
        _are_alike(inputs, buffers)
        and _told(weights, _tell_weights) is not None
        and _told(buffers, _tell_buffers) is not None
        and code() is not None
    )


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """``reference.tree_verify`` where ``can_take`` allows it; all of a key head's work is one task of a thread.

    Raises:
        ValueError: ``can_take`` does not, or shapes do not fit. Indices are trusted.
    """
    native, told_weights, told_buffers = code(), _told(weights, _tell_weights), _told(buffers, _tell_buffers)
    assert native is not None
    require(_are_alike(inputs, buffers), "inputs and conv_inputs need one dtype, float32 or bfloat16, on the CPU")
    is_told = told_weights is not None and told_buffers is not None
    require(is_told, "weights or buffers have a dtype, device or layout that native code does not take")
    batch, nodes = inputs.mixed.shape[:2]
    heads, width = (batch, nodes, weights.num_value_heads), weights.value_dim
    require(inputs.mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    require(inputs.gate.shape == (*heads, width), "the gate has another shape than the values")
    require(inputs.a.shape == inputs.b.shape == heads, "a and b need one value per value head")
    require(trees.ancestors.shape == (batch, nodes, nodes), "there are other trees than inputs")
    _check_places(weights, buffers, trees)
    out = torch.empty(*heads, width, dtype=inputs.gate.dtype)
    (mixed, of_mixed), (gate, of_gate) = tokens_of(inputs.mixed, 1), tokens_of(inputs.gate, 2)
    (b, of_b), (a, of_a) = tokens_of(inputs.b, 1), tokens_of(inputs.a, 1)
    pointers = (x.data_ptr() for x in (mixed, gate, b, a, out))
    native.delta_net_tree_verify(
        _Inputs(*pointers, of_mixed, of_gate, of_b, of_a),
        told_weights,
        told_buffers,
        _told(trees, _tell_trees),
        mixed.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


def _are_alike(inputs: Inputs, buffers: Buffers) -> bool:
    """Whether all activations have one dtype, of those that native code reads, where it reaches them."""
    x, kept, dtype = inputs, buffers.conv_inputs, inputs.mixed.dtype  # spelt out: this runs in every layer and step
    return (
        is_native(x.mixed)
        and x.gate.dtype is x.a.dtype is x.b.dtype is kept.dtype is dtype
        and (x.gate.is_cpu and x.a.is_cpu and x.b.is_cpu and kept.is_cpu)
    )


T = TypeVar("T", Weights, Buffers, Trees)
_TOLD: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_FITTING: WeakKeyDictionary[Buffers, Weights] = WeakKeyDictionary()  # the weights that buffers were last checked with


def _told(operand: T, tell: Callable[[T], Any]) -> Any:
    """What native code is told of an operand, worked out once."""
    try:
        return _TOLD[operand]
    except KeyError:
        return _TOLD.setdefault(operand, tell(operand))


def _tell_weights(w: Weights) -> Any:
    """None where native code cannot take them.

    Raises:
        ValueError: they do not fit each other.
    """
    of_head = w.negative_a, w.dt_bias, w.norm
    laid_out = w.conv.t(), *of_head
    if not all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in laid_out):
        return None
    hk, hv, key_dim, value_dim = w.num_key_heads, w.num_value_heads, w.key_dim, w.value_dim
    require(hv % hk == 0, "value heads are no multiple of key heads")
    require(w.conv.shape[0] == 2 * hk * key_dim + hv * value_dim, "the convolution has other channels than the heads")
    require(w.negative_a.shape == w.dt_bias.shape == (hv,), "decays have another shape")
    require(w.norm.shape == (value_dim,), "the norm has another shape")
    pointers = (x.data_ptr() for x in (w.conv, *of_head))
    return _Weights(*pointers, w.conv.shape[1], hk, hv, key_dim, value_dim, w.norm_eps, L2_EPS)


def _tell_buffers(x: Buffers) -> Any:
    """None where native code cannot take them."""
    tensors = x.states, x.conv_inputs, x.k, x.u, x.decay
    is_float = all(y.dtype is torch.float32 for y in (x.states, x.k, x.u, x.decay))
    if not is_float or not all(y.is_cpu and is_contiguous_from(y, 1) for y in tensors):
        return None
    return _Buffers(*(y.data_ptr() for y in tensors), *(y.stride(0) for y in tensors))


def _tell_trees(x: Trees) -> Any:
    integers = x.rows, x.slots, x.conv_index, *(() if x.num_pending is None else (x.num_pending,))
    are_places = all(y.dtype is torch.int64 and y.is_cpu and y.is_contiguous() for y in integers)
    require(are_places, "places need contiguous int64 on the CPU")
    is_mask = x.ancestors.is_cpu and x.ancestors.dtype is torch.bool and is_contiguous_from(x.ancestors, 1)
    require(is_mask, "ancestors need rows of bool on the CPU")
    batch, nodes, _ = x.conv_index.shape
    require(x.rows.shape == x.slots.shape == (batch,), "rows and slots need one entry per tree")
    require(x.num_pending is None or x.num_pending.shape == (batch,), "num_pending needs one entry per tree")
    require(x.ancestors.shape == (batch, nodes, nodes), "ancestors need one row and column per node")
    pending = None if x.num_pending is None else x.num_pending.data_ptr()
    pointers = x.rows.data_ptr(), x.slots.data_ptr(), x.conv_index.data_ptr(), pending, x.ancestors.data_ptr()
    return _Trees(*pointers, batch, nodes, x.node_offset, x.ancestors.stride(0))


def _check_places(weights: Weights, buffers: Buffers, trees: Trees) -> None:
    """Native code trusts these shapes; outside of them there is other memory."""
    capacity = buffers.k.shape[1]
    require(trees.node_offset + trees.ancestors.shape[1] <= capacity, "the records have no room for the nodes")
    require(trees.conv_index.shape[2] == weights.conv.shape[1], "the convolution's index has another width")
    if _FITTING.get(buffers) is weights:
        return
    w, rows, (channels, width) = weights, buffers.k.shape[0], weights.conv.shape
    require(buffers.states.shape[1:] == (w.num_value_heads, w.key_dim, w.value_dim), "the states have another shape")
    require(buffers.conv_inputs.shape == (rows, width - 1 + capacity, channels), "conv_inputs have another shape")
    require(buffers.k.shape[2:] == (w.num_key_heads, w.key_dim), "k has another shape")
    require(buffers.u.shape == (rows, capacity, w.num_value_heads, w.value_dim), "u has another shape")
    require(buffers.decay.shape == (rows, capacity, w.num_value_heads), "decay has another shape")
    _FITTING[buffers] = weights


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    arguments = [POINTER(_Inputs), POINTER(_Weights), POINTER(_Buffers), POINTER(_Trees), c_int, c_int]
    return library.load_functions(SOURCE, {"delta_net_tree_verify": arguments})
