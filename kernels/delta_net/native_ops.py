"""A gated delta net layer between its projections in native code (native.cpp); README.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.delta_net.operands import Inputs, Weights
from specmamba.kernels.native.tensors import is_native, require, struct, tokens_of
from specmamba.kernels.rowwise.torch_ops import L2_EPS
from specmamba.kernels.state_records.native_layers import NativeLayer
from specmamba.kernels.state_records.native_ops import Heads

_Inputs = struct("Inputs", ["mixed", "gate", "b", "a", "out"], ["mixed_token", "gate_token", "b_token", "a_token"])
_Weights = struct(
    "Weights",
    ["conv", "negative_a", "dt_bias", "norm"],
    ["width", *Heads._fields, "has_sigmoid_gate", "has_bound"],
    ["norm_eps", "unit_eps", "step_scale", "bound"],
)


def _check_inputs(inputs: Inputs, weights: Weights) -> None:
    heads, width = (*inputs.mixed.shape[:2], weights.num_value_heads), weights.value_dim
    require(inputs.gate.shape == (*heads, width), "the gate has another shape than the values")
    decays = heads if weights.dt_bias.dim() == 1 else (*heads, weights.key_dim)
    are_fitting = inputs.a.shape == decays and inputs.b.shape == heads
    require(are_fitting, "a and b need one value per value head, or a one per key channel of it")


def _marshal_inputs(inputs: Inputs) -> tuple[Any, Tensor, tuple[Tensor, ...]]:
    """The native structure, the tensor that it has outputs written to, and the tensors that it reads."""
    out = torch.empty(inputs.gate.shape, dtype=inputs.gate.dtype)
    (mixed, of_mixed), (gate, of_gate) = tokens_of(inputs.mixed, 1), tokens_of(inputs.gate, 2)
    (b, of_b), (a, of_a) = tokens_of(inputs.b, 1), tokens_of(inputs.a, inputs.a.dim() - 2)
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
    decay_dim = 1 if w.dt_bias.dim() == 1 else w.key_dim
    return Heads(w.num_key_heads, w.num_value_heads, w.key_dim, w.value_dim, decay_dim)


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
    of_heads = (heads.value_heads,)
    require(w.negative_a.shape == of_heads, "decays have another shape")
    require(w.dt_bias.shape in (of_heads, (*of_heads, heads.key_dim)), "decays have another shape")
    if w.lower_bound is not None and heads.decay_dim == 1:
        return None
    require(w.norm.shape == (heads.value_dim,), "the norm has another shape")
    pointers = (x.data_ptr() for x in (w.conv, *of_head))
    return _Weights(
        *pointers,
        *(w.conv.shape[1], *heads, w.has_sigmoid_gate, w.lower_bound is not None),
        *(w.norm_eps, L2_EPS, w.step_scale, w.lower_bound or 0.0),
    )


LAYER = NativeLayer(
    "delta_net",
    Path(__file__).parent / "native.cpp",
    _Inputs,
    _Weights,
    _are_alike,
    _marshal_inputs,
    _marshal_weights,
    _heads,
    _check_inputs,
)
can_take, can_take_runs = LAYER.can_take, LAYER.can_take_runs
tree_verify, extend = LAYER.tree_verify, LAYER.extend
