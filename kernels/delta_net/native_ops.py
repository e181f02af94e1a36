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
from specmamba.kernels.native.tensors import is_contiguous_from, is_native, require, struct
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
    dtype = inputs.mixed.dtype
    return (
        is_native(inputs.mixed)
        and inputs.gate.dtype is dtype
        and inputs.a.dtype is dtype
        and inputs.b.dtype is dtype
        and _told(weights, _tell_weights) is not None
        and buffers.conv_inputs.dtype is dtype
        and _told(buffers, _tell_buffers) is not None
        and code() is not None
    )


def tree_verify(inputs: Inputs, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """``reference.tree_verify`` where ``can_take`` allows it; all of a key head's work is one task of a thread."""
    native, told_weights = code(), _told(weights, _tell_weights)
    assert native is not None
    batch, nodes = inputs.mixed.shape[:2]
    heads, width = (batch, nodes, weights.num_value_heads), weights.value_dim
    require(inputs.mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    require(inputs.gate.shape == (*heads, width), "the gate has another shape than the values")
    require(inputs.a.shape == inputs.b.shape == heads, "a and b need one value per value head")
    require(trees.ancestors.shape == (batch, nodes, nodes), "there are other trees than inputs")
    _check_places(weights, buffers, trees)
    out = torch.empty(*heads, width, dtype=inputs.gate.dtype)
    (mixed, of_mixed), (gate, of_gate) = _tokens(inputs.mixed), _tokens(inputs.gate)
    (b, of_b), (a, of_a) = _tokens(inputs.b), _tokens(inputs.a)
    pointers = (x.data_ptr() for x in (mixed, gate, b, a, out))
    native.delta_net_tree_verify(
        _Inputs(*pointers, of_mixed, of_gate, of_b, of_a),
        told_weights,
        _told(buffers, _tell_buffers),
        _told(trees, _tell_trees),
        mixed.dtype is torch.bfloat16,
        torch.get_num_threads(),
    )
    return out


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
    if not all(x.is_cpu and x.dtype is torch.float32 for x in (w.conv, *of_head)) or not w.conv.t().is_contiguous():
        return None
    hk, hv, key_dim, value_dim = w.num_key_heads, w.num_value_heads, w.key_dim, w.value_dim
    require(hv % hk == 0, "value heads are no multiple of key heads")
    require(w.conv.shape[0] == 2 * hk * key_dim + hv * value_dim, "the convolution has other channels than the heads")
    require(w.dt_bias.shape == (hv,) and all(x.is_contiguous() for x in of_head), "decays have another shape")
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
    require(all(y.dtype is torch.int64 and y.is_contiguous() for y in integers), "places need contiguous int64")
    require(x.ancestors.dtype is torch.bool and is_contiguous_from(x.ancestors, 1), "ancestors need rows of bool")
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


def _tokens(x: Tensor) -> tuple[Tensor, int]:
    """x [B, N, ...] with its tokens at one distance, copied if they are not, and this distance."""
    (batch, nodes), strides = x.shape[:2], x.stride()
    if is_contiguous_from(x, 2) and (batch == 1 or nodes == 1 or strides[0] == nodes * strides[1]):
        return x, strides[0] if nodes == 1 else strides[1]
    x = x.contiguous()
    return x, x.stride(1)


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    arguments = [POINTER(_Inputs), POINTER(_Weights), POINTER(_Buffers), POINTER(_Trees), c_int, c_int]
    return library.load_functions(SOURCE, {"delta_net_tree_verify": arguments})
