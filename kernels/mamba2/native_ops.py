"""A Mamba2 layer between its projections in native code (native.cpp); README.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.mamba2.operands import Inputs, Weights
from specmamba.kernels.native.tensors import is_native, require, struct, tokens_of
from specmamba.kernels.state_records.native_layers import NativeLayer
from specmamba.kernels.state_records.native_ops import Heads

_Inputs = struct("Inputs", ["mixed", "gate", "dt", "out", "before_norm"], ["mixed_token", "gate_token", "dt_token"])
_Weights = struct(
    "Weights",
    ["conv", "conv_bias", "negative_a", "dt_bias", "skip", "norm"],
    ["width", *Heads._fields, "norm_groups", "norm_before_gate"],
    ["norm_eps", "dt_min", "dt_max"],
)


def _check_inputs(inputs: Inputs, weights: Weights) -> None:
    batch, nodes = inputs.mixed.shape[:2]
    shape = batch, nodes, weights.num_heads * weights.head_dim
    require(inputs.gate.shape == shape, "the gate has another shape than the heads")
    require(inputs.dt.shape == (batch, nodes, weights.num_heads), "dt needs one value per head")


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


LAYER = NativeLayer(
    "mamba2",
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
