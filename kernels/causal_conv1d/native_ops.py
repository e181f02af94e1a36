"""Causal convolution over draft trees in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import contiguous_from, is_native

SOURCE = Path(__file__).parent / "native.cpp"


def can_take(inputs: Tensor, weight: Tensor) -> bool:
    """Whether ``tree_verify`` computes on these: on the CPU, inputs float32 or bfloat16, weight float32."""
    return is_native(inputs) and weight.dtype is torch.float32 and code() is not None


def tree_verify(inputs: Tensor, index: Tensor, weight: Tensor) -> Tensor:
    """``torch_ops.tree_verify`` where ``can_take`` allows it."""
    native = code()
    assert native is not None
    batch, num_nodes, width = index.shape
    inputs, index, taps = contiguous_from(inputs, 1), index.contiguous(), weight.t().contiguous()
    channels = inputs.shape[2]
    if weight.shape != (channels, width) or inputs.shape[0] != batch or index.dtype is not torch.int64:
        raise ValueError(
            f"inputs {list(inputs.shape)}, weight {list(weight.shape)}, index {list(index.shape)} do not fit"
        )
    y = torch.empty(batch, num_nodes, channels)
    native.conv_tree_verify(
        inputs.data_ptr(),
        inputs.dtype is torch.bfloat16,
        index.data_ptr(),
        taps.data_ptr(),
        y.data_ptr(),
        batch,
        inputs.stride(0),
        num_nodes,
        width,
        channels,
        torch.get_num_threads(),
    )
    return y


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    arguments = [c_void_p, c_int, *[c_void_p] * 3, *[c_int64] * 5, c_int]
    return library.load_functions(SOURCE, {"conv_tree_verify": arguments})
