"""Matrix product with a packed weight, bf16 or int8, in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.native import library

SOURCE = Path(__file__).parent / "native.cpp"


class NativeWeight:
    """A bf16 weight in panels of 32 outputs. The result of a row does not depend on the other rows, bit for bit."""

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [N, K] bfloat16 on the CPU, not empty, not kept; code: the loaded native.cpp."""
        n, k = weight.shape
        weight = weight.contiguous()
        self.nbytes = weight.nbytes
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
            raise _misfit(self._n, self._k, torch.bfloat16, x)
        x = x.contiguous()
        y = x.new_empty(*shape[:-1], self._n)
        rows = x.numel() // self._k
        self._multiply(x.data_ptr(), rows, self._pointer, y.data_ptr(), self._n, self._k, torch.get_num_threads())
        return y


class NativeInt8Weight:
    """An int8 weight in panels of 32 outputs, and a scale per output: ``reference.linear_int8``, bit for bit.

    The result of a row does not depend on the other rows.
    """

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [N, K] bfloat16 or float32 on the CPU, not empty, not kept; code: the loaded native.cpp."""
        n, k = weight.shape
        quantized, self._scale = quantize(weight)
        self.nbytes = quantized.nbytes + self._scale.nbytes
        self._packed = torch.empty(code.linear_packed_size(n, k), dtype=torch.int8)
        code.linear_pack_int8(quantized.data_ptr(), self._packed.data_ptr(), n, k, torch.get_num_threads())
        self._multiply = code.linear_multiply_int8
        self._n, self._k, self._dtype = n, k, weight.dtype
        self._pointers = c_void_p(self._packed.data_ptr()), c_void_p(self._scale.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] of the weight's dtype on the CPU -> [..., N].

        Raises:
            ValueError: another dtype, device or width.
        """
        shape = x.shape
        if x.dtype is not self._dtype or not shape or shape[-1] != self._k or x.device.type != "cpu":
            raise _misfit(self._n, self._k, self._dtype, x)
        x = x.contiguous()
        y = x.new_empty(*shape[:-1], self._n)
        is_bf16 = x.dtype is torch.bfloat16
        self._multiply(
            *(x.data_ptr(), x.numel() // self._k, *self._pointers, y.data_ptr()),
            *(self._n, self._k, is_bf16, torch.get_num_threads()),
        )
        return y


def can_pack(weight: Tensor, form: str) -> bool:
    """Whether native code multiplies by this weight [N, K]: not empty, on the CPU, of a dtype that the form takes."""
    dtypes = {"plain": (torch.bfloat16,), "int8": (torch.bfloat16, torch.float32)}.get(form, ())
    return weight.is_cpu and weight.dtype in dtypes and weight.numel() > 0 and code() is not None


def pack(weight: Tensor, form: str = "plain") -> NativeWeight | NativeInt8Weight:
    """Copy a weight that ``can_pack`` into panels."""
    native = code()
    assert native is not None
    return NativeInt8Weight(weight, native) if form == "int8" else NativeWeight(weight, native)


def _misfit(n: int, k: int, dtype: torch.dtype, x: Tensor) -> ValueError:
    name = str(dtype).removeprefix("torch.")
    return ValueError(f"a {name} weight [{n}, {k}] on the CPU cannot multiply {x.dtype} {list(x.shape)} on {x.device}")


@cache
def code() -> ctypes.CDLL | None:
    """The native code of this op; None where there is none."""
    signatures = {
        "linear_pack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_pack_int8": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_multiply": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_multiply_int8": [c_void_p, c_int64, *3 * [c_void_p], c_int64, c_int64, c_int, c_int],
    }
    loaded = library.load_functions(SOURCE, signatures)
    if loaded is not None:
        loaded.linear_packed_size.restype = c_int64
        loaded.linear_packed_size.argtypes = [c_int64, c_int64]
    return loaded
