"""Matrix product with a packed bf16 weight in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library

SOURCE = Path(__file__).parent / "native.cpp"


class NativeWeight:
    """A bf16 weight in panels of 32 outputs. The result of a row does not depend on the other rows, bit for bit."""

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [N, K] bfloat16 on the CPU, not empty, not kept; code: the loaded native.cpp."""
        n, k = weight.shape
        weight = weight.contiguous()
        self._packed = torch.empty(code.linear_packed_size(n, k), dtype=torch.bfloat16)
        code.linear_pack(weight.data_ptr(), self._packed.data_ptr(), n, k, torch.get_num_threads())
        self._multiply = code.linear_multiply
        self._n, self._k = n, k
        self._pointer = c_void_p(self._packed.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 on the CPU -> [..., N].

        Raises:
            ValueError: another dtype, device or width.
        """
        shape = x.shape
        if x.dtype is not torch.bfloat16 or not shape or shape[-1] != self._k or x.device.type != "cpu":
            raise ValueError(
                f"a bfloat16 weight [{self._n}, {self._k}] on the CPU cannot multiply "
                f"{x.dtype} {list(shape)} on {x.device}"
            )
        x = x.contiguous()
        y = x.new_empty(*shape[:-1], self._n)
        rows = x.numel() // self._k
        self._multiply(x.data_ptr(), rows, self._pointer, y.data_ptr(), self._n, self._k, torch.get_num_threads())
        return y


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    signatures = {
        "linear_pack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_multiply": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int],
    }
    loaded = library.load_functions(SOURCE, signatures)
    if loaded is not None:
        loaded.linear_packed_size.restype = c_int64
        loaded.linear_packed_size.argtypes = [c_int64, c_int64]
    return loaded
