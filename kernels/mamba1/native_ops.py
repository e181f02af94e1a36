"""A Mamba1 layer around its inner projections in native code (native.cpp); README.md describes it."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.mamba1.operands import Steps, Weights
from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_native, marshalled, require, struct, tokens_of
from specmamba.kernels.state_records.native_ops import (
    BuffersStruct,
    Heads,
    TreesStruct,
    check_places,
    check_tokens,
    marshal_buffers,
    marshal_trees,
    pointers_of_rows,
)
from specmamba.kernels.state_records.operands import Buffers, Trees

SOURCE = Path(__file__).parent / "native.cpp"

_Convolved = struct("Convolved", ["mixed", "x", "rounded"], ["mixed_token"])
_Inputs = struct("Inputs", ["x", "dt", "b", "c", "gate", "out"], ["dt_token", "b_token", "c_token", "gate_token"])
_Weights = struct("Weights", ["conv", "conv_bias", "dt_bias", "rates", "skip"], ["width", "state_dim", "channels"])
_RowFolds = struct(
    "RowFolds",
    [
        *("states", "conv_inputs", "windows", "records_b", "records_u", "records_dt", "rates"),
        *("rows_of_batch", "slots_of_batch", "num_pending", "folds"),
    ],
    ["batch", "layers", "slots", "rows", "capacity", "window", "input_bytes", "state_dim", "channels"],
)


def can_take(mixed: Tensor, weights: Weights, buffers: Buffers) -> bool:
    """Whether native code computes on these: activations float32 or bfloat16 on the CPU, rows contiguous."""
    return (
        is_native(mixed)
        and mixed.dtype is buffers.conv_inputs.dtype
        and mixed.numel() > 0
        and not buffers.is_exact
        and marshalled(weights, _marshal_weights) is not None
        and marshalled(buffers, marshal_buffers) is not None
        and code() is not None
    )


def convolve(mixed: Tensor, weights: Weights, buffers: Buffers, trees: Trees) -> tuple[Tensor, Tensor]:
    """Convolve all nodes of draft trees along their paths, with bias and SiLU; keep their inputs for later verifies.

    Args:
        mixed: [B, N, C], or packed [1, T, C] (``Trees``), float32 or bfloat16; a part of a projection is read in place.
        weights: of the layer.
        buffers: of the layer; node i writes entry node_offset + i of conv_inputs behind the window.
        trees: of this verify. Indices are not checked.

    Returns:
        The results in float32, and rounded to mixed's dtype; both have its shape and are unspecified on padding.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native, of_weights, of_buffers = _checked(mixed, weights, buffers, trees)
    x = torch.empty(mixed.shape)
    rounded = x if mixed.dtype is torch.float32 else torch.empty(mixed.shape, dtype=mixed.dtype)
    given, distance = tokens_of(mixed, 1)
    operands = _Convolved(given.data_ptr(), x.data_ptr(), rounded.data_ptr(), distance)
    is_bfloat16, places = mixed.dtype is torch.bfloat16, marshalled(trees, marshal_trees)
    native.mamba1_convolve(operands, of_weights, of_buffers, places, is_bfloat16, torch.get_num_threads())
    return x, rounded


def scan(x: Tensor, steps: Steps, gate: Tensor, weights: Weights, buffers: Buffers, trees: Trees) -> Tensor:
    """Run the selective scan over draft trees, add D x and multiply by silu(gate); write a record of every node.

    Args:
        x: [B, N, C], or packed [1, T, C], float32, contiguous: the first result of ``convolve``.
        steps: of the same tokens.
        gate: [B, N, C] or [1, T, C] in the dtype of ``steps``.
        weights: of the layer.
        buffers: of the layer; node i writes record node_offset + i, and no state is written.
        trees: of this verify. Indices are not checked.

    Returns:
        Outputs in the gate's dtype and shape; 0 on padding. What is not finite in a node reaches that node and its
        descendants alone.

    Raises:
        ValueError: ``can_take`` is false for these operands, or shapes do not fit.
    """
    native, of_weights, of_buffers = _checked(gate, weights, buffers, trees)
    size = weights.rates.shape[0]
    require(x.dtype is torch.float32 and x.is_contiguous() and x.shape == gate.shape, "x needs the gate's shape")
    require(steps.dt.shape == gate.shape, "dt has another shape than the gate")
    require(steps.b.shape == steps.c.shape == (*gate.shape[:2], size), "b and c have another shape")
    require(all(part.dtype is gate.dtype and part.is_cpu for part in steps), "the steps need the gate's dtype")
    out = torch.empty(gate.shape, dtype=gate.dtype)
    given, distances = zip(*(tokens_of(part, 1) for part in (*steps, gate)), strict=True)
    inputs = _Inputs(x.data_ptr(), *(part.data_ptr() for part in given), out.data_ptr(), *distances)
    is_bfloat16, places = gate.dtype is torch.bfloat16, marshalled(trees, marshal_trees)
    native.mamba1_scan(inputs, of_weights, of_buffers, places, is_bfloat16, torch.get_num_threads())
    return out


def _checked(mixed: Tensor, weights: Weights, buffers: Buffers, trees: Trees) -> tuple[ctypes.CDLL, Any, Any]:
    """The library and native structures, after checks: wrong shapes would make it read and write other memory."""
    native = library.required(code())
    of_weights, of_buffers = marshalled(weights, _marshal_weights), marshalled(buffers, marshal_buffers)
    require(of_weights is not None, "weights have a dtype, device or layout that native code does not take")
    require(of_buffers is not None, "buffers have a dtype, device or layout that native code does not take")
    is_alike = is_native(mixed) and mixed.dtype is buffers.conv_inputs.dtype
    require(is_alike, "inputs, new and kept, need one dtype, float32 or bfloat16, on the CPU")
    require(mixed.shape[2] == weights.conv.shape[0], "the inputs have other channels than the convolution")
    check_tokens(mixed.shape[:2], trees)
    size, channels = weights.rates.shape
    check_places(weights, weights.conv, Heads(1, 1, size, channels, channels), buffers, trees)
    return native, of_weights, of_buffers


def _marshal_weights(w: Weights) -> Any:
    """Make the native structure of the weights; None where native code cannot read them.

    Raises:
        ValueError: the shapes do not fit each other.
    """
    given = w.conv_bias, w.dt_bias, w.rates, w.skip
    laid_out = w.conv.t(), *(x for x in given if x is not None)
    if not all(x.is_cpu and x.dtype is torch.float32 and x.is_contiguous() for x in laid_out):
        return None
    (channels, width), size = w.conv.shape, w.rates.shape[0]
    require(w.rates.shape == (size, channels), "the rates have other channels than the convolution")
    of_channels = (x is None or x.shape == (channels,) for x in (w.conv_bias, w.dt_bias, w.skip))
    require(all(of_channels), "biases and skip need one value per channel")
    return _Weights(*(None if x is None else x.data_ptr() for x in (w.conv, *given)), width, size, channels)


def can_fold_rows(x: Buffers, rates: Tensor | None) -> bool:
    """Whether ``fold_rows`` takes the buffers of all layers: float32 states and contiguous memory on the CPU."""
    if rates is None or x.windows is None or x.is_exact or x.states.numel() == 0:
        return False
    is_float = all(y.dtype is torch.float32 for y in (x.states, x.k, x.u, x.decay, rates))
    memory = x.states, x.conv_inputs, x.windows, x.k, x.u, x.decay, rates
    return is_float and all(y.is_cpu and y.is_contiguous() for y in memory) and code() is not None


def fold_rows(
    buffers: Buffers, rates: Tensor, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None
) -> None:
    """Advance checkpoints and windows over pending records, in place, in one call for all layers and rows.

    Args:
        buffers: of all layers: every tensor has one dimension more in front, [layers, ...].
        rates: [layers, M, C] float32, A of every layer.
        rows, slots: [B] int64, not checked.
        num_pending: [B] int64; 0 afterwards where a row folds.
        folds: [B] bool; None: all rows fold.

    Raises:
        ValueError: shapes or dtypes do not fit, or ``can_fold_rows`` is false.
    """
    native, batch = library.required(code()), len(rows)
    require(can_fold_rows(buffers, rates), "buffers have a dtype, device or layout that native code does not take")
    assert buffers.windows is not None
    of_batch = pointers_of_rows(rows, slots, num_pending, folds)
    require(buffers.windows.dtype is buffers.conv_inputs.dtype, "windows and kept inputs need one dtype")
    (layers, num_slots, _, size, channels), (_, num_rows, capacity, _) = buffers.states.shape, buffers.u.shape[:4]
    window = buffers.windows.shape[2]
    records = layers, num_rows, capacity, 1
    require(buffers.k.shape == (*records, size), "the records of b have another shape")
    require(buffers.u.shape == buffers.decay.shape == (*records, channels), "the records of u and dt differ")
    require(rates.shape == (layers, size, channels), "the rates have another shape")
    require(buffers.windows.shape == (layers, num_slots, window, channels), "the windows have another shape")
    require(buffers.conv_inputs.shape == (layers, num_rows, window + capacity, channels), "conv_inputs do not fit")
    memory = buffers.states, buffers.conv_inputs, buffers.windows, buffers.k, buffers.u, buffers.decay, rates
    pointers = *(x.data_ptr() for x in memory), *of_batch
    input_bytes = channels * buffers.conv_inputs.element_size()
    sizes = batch, layers, num_slots, num_rows, capacity, window, input_bytes, size, channels
    native.mamba1_fold_rows(_RowFolds(*pointers, *sizes), torch.get_num_threads())


@cache
def code() -> ctypes.CDLL | None:
    """The loaded native library of this operator; None where there is none."""
    of_trees = [POINTER(_Weights), POINTER(BuffersStruct), POINTER(TreesStruct), c_int, c_int]
    return library.load_functions(
        SOURCE,
        {
            "mamba1_convolve": [POINTER(_Convolved), *of_trees],
            "mamba1_scan": [POINTER(_Inputs), *of_trees],
            "mamba1_fold_rows": [POINTER(_RowFolds), c_int],
        },
    )
