"""A gated short convolution in native code (native.cpp); README.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native.tensors import is_native, require, struct, tokens_of
from specmamba.kernels.short_conv.operands import Inputs, Weights
from specmamba.kernels.state_records.native_layers import NativeLayer
from specmamba.kernels.state_records.native_ops import Heads

NO_HEADS = Heads(0, 0, 0, 0)  # the state is a window alone

_Inputs = struct("Inputs", ["in_gate", "gate", "mixed", "out"], ["in_gate_token", "gate_token", "mixed_token"])
_Weights = struct("Weights", ["conv", "conv_bias"], ["width", "channels"])


def _check_inputs(inputs: Inputs, _: Weights) -> None:
    is_gated = inputs.in_gate.shape == inputs.gate.shape == inputs.mixed.shape
    require(is_gated, "the gates have another shape than the inputs")


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


LAYER = NativeLayer(
    "short_conv",
    Path(__file__).parent / "native.cpp",
    _Inputs,
    _Weights,
    _are_alike,
    _marshal_inputs,
    _marshal_weights,
    lambda _: NO_HEADS,
    _check_inputs,
)
can_take, can_take_runs = LAYER.can_take, LAYER.can_take_runs
tree_verify, extend = LAYER.tree_verify, LAYER.extend
