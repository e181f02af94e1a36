"""Cosines and sines of rotary position embedding in native code (native.cpp): one call for seven. See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import FLOATS, require

SOURCE = Path(__file__).parent / "native.cpp"


def can_take(positions: Tensor, inverse_frequencies: Tensor, dtype: torch.dtype) -> bool:
    """Whether native code computes this: on the CPU, in float32 or bfloat16."""
    return positions.is_cpu and inverse_frequencies.is_cpu and dtype in FLOATS and code() is not None


def angles(positions: Tensor, inverse_frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One call; the second half of the frequencies is assumed to repeat the first."""
    native, size = code(), inverse_frequencies.numel()
    assert native is not None
    require(positions.dtype is torch.int64 and inverse_frequencies.dtype is torch.float32, "wrong dtypes")
    require(size % 2 == 0, "so many components cannot rotate")
    positions, inverse_frequencies = positions.contiguous(), inverse_frequencies.contiguous()
    cos, sin = (torch.empty(*positions.shape, 1, size, dtype=dtype) for _ in range(2))
    native.rotary_angles(
        *(x.data_ptr() for x in (positions, inverse_frequencies, cos, sin)),
        *(positions.numel(), size, scaling, dtype is torch.bfloat16, torch.get_num_threads()),
    )
    return cos, sin


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    signature = [*[c_void_p] * 4, c_int64, c_int64, c_double, c_int, c_int]
    return library.load_functions(SOURCE, {"rotary_angles": signature})
