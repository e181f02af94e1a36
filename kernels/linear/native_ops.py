"""Matrix product with a packed weight, plain, int8 or codes in groups, in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.linear.grouped import BYTE_GROUP, GroupedMatrix, is_kept, regroup
from specmamba.kernels.linear.quantized import QuantizedMatrix
from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.native import library
from specmamba.kernels.native.live import live_count
from specmamba.kernels.native.packed_memory import packed_memory
from specmamba.kernels.native.tensors import is_native

SOURCE = Path(__file__).parent / "native.cpp"


class _Product:
    """A weight [N, K] that is laid out for native code."""

    def __init__(self, n: int, k: int, dtype: torch.dtype) -> None:
        """dtype: of inputs."""
        self._n, self._k, self._dtype = n, k, dtype

    def _in_and_out(self, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """x contiguous, the result's memory, and the number of rows.

        Raises:
            ValueError: another dtype, device or width.
        """
        shape = x.shape
        if x.dtype is not self._dtype or not shape or shape[-1] != self._k or x.device.type != "cpu":
            name, size = str(self._dtype).removeprefix("torch."), [self._n, self._k]
            complaint = f"a {name} weight {size} on the CPU cannot multiply"
            raise ValueError(f"{complaint} {x.dtype} {list(shape)} on {x.device}")
        return x.contiguous(), x.new_empty(*shape[:-1], self._n), x.numel() // self._k


class _Panels(_Product):
    """A weight in panels of some outputs. The result of a row does not depend on the other rows, bit for bit."""

    def __init__(self, weight: Tensor, dtype: torch.dtype, code: ctypes.CDLL, pack: Callable[..., None]) -> None:
        """weight: [N, K] as it is packed, not kept; dtype: of inputs; pack: the function of ``code`` that packs it."""
        n, k = weight.shape
        super().__init__(n, k, dtype)
        self._packed = packed_memory(code.linear_packed_size(n, k), weight.dtype)
        pack(weight.data_ptr(), self._packed.data_ptr(), n, k, torch.get_num_threads())


class NativeWeight(_Panels):
    """A bf16 or float32 weight in panels."""

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [N, K] bfloat16 or float32 on the CPU, not empty, not kept; code: the loaded native.cpp."""
        is_bf16 = weight.dtype is torch.bfloat16
        pack = code.linear_pack if is_bf16 else code.linear_pack_float
        super().__init__(weight.contiguous(), weight.dtype, code, pack)
        self.nbytes = weight.nbytes
        self._multiply = code.linear_multiply if is_bf16 else code.linear_multiply_float
        self._pointer = c_void_p(self._packed.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] of the weight's dtype on the CPU -> [..., N]; ValueError for anything else."""
        x, y, rows = self._in_and_out(x)
        operands = x.data_ptr(), rows, live_count(x.shape, rows), self._pointer, y.data_ptr()
        self._multiply(*operands, self._n, self._k, torch.get_num_threads())
        return y


class NativeInt8Weight(_Panels):
    """An int8 weight in panels, and a scale per output: ``reference.linear_int8``, bit for bit."""

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [N, K] bfloat16 or float32 on the CPU, not empty, not kept; code: the loaded native.cpp."""
        quantized, self._scale = quantize(weight)
        super().__init__(quantized, weight.dtype, code, code.linear_pack_int8)
        self.nbytes = quantized.nbytes + self._scale.nbytes
        self._multiply = code.linear_multiply_int8
        self._pointers = c_void_p(self._packed.data_ptr()), c_void_p(self._scale.data_ptr())

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] of the weight's dtype on the CPU -> [..., N]; ValueError for anything else."""
        x, y, rows = self._in_and_out(x)
        is_bf16 = x.dtype is torch.bfloat16
        self._multiply(
            *(x.data_ptr(), rows, live_count(x.shape, rows), *self._pointers, y.data_ptr()),
            *(self._n, self._k, is_bf16, torch.get_num_threads()),
        )
        return y


class NativeGroupedWeight(_Product):
    """Codes of 4, 6 or 8 bits in panels, with their scales: ``reference.linear_grouped``, but for the last bit of sums.

    The result of a row does not depend on the other rows, bit for bit.
    """

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype, code: ctypes.CDLL) -> None:
        """matrix: [N, K], not empty, not kept; dtype: bfloat16 or float32, of inputs; code: the loaded native.cpp."""
        n, k = matrix.codes.shape
        super().__init__(n, k, dtype)
        self.nbytes, self._multiply = matrix.nbytes, code.linear_multiply_grouped
        self._take_rows = code.linear_rows_grouped
        kind, has_minimum = (n, k, matrix.group, matrix.bits), matrix.minimum is not None
        self._packed = packed_memory(code.linear_grouped_size(*kind, has_minimum), torch.uint8)
        parts = [x if x is None else x.contiguous() for x in (matrix.codes, matrix.scale, matrix.minimum)]
        code.linear_pack_grouped(*map(_address, (*parts, self._packed)), *kind, torch.get_num_threads())
        self._kept = self._packed, matrix.factor.contiguous(), matrix.table
        self._pointers = tuple(c_void_p(_address(x)) for x in self._kept)
        self._kind = (*kind, matrix.offset, has_minimum, dtype is torch.bfloat16)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] of the dtype of inputs on the CPU -> [..., N]; ValueError for anything else."""
        x, y, rows = self._in_and_out(x)
        operands = x.data_ptr(), rows, live_count(x.shape, rows), *self._pointers, y.data_ptr()
        self._multiply(*operands, *self._kind, torch.get_num_threads())
        return y

    def rows(self, index: Tensor) -> Tensor:
        """Rows ``index`` [...] int64 of the matrix, rounded once: [..., K]; NaN for a row that there is not.

        Raises:
            ValueError: indices of another type or device.
        """
        if index.dtype is not torch.int64 or not index.is_cpu:
            raise ValueError(f"rows are taken by int64 on the CPU, not by {index.dtype} on {index.device}")
        index = index.contiguous()
        out = torch.empty(*index.shape, self._k, dtype=self._dtype)
        count = index.numel()
        operands = index.data_ptr(), count, live_count(out.shape, count), *self._pointers, out.data_ptr()
        self._take_rows(*operands, *self._kind, torch.get_num_threads())
        return out


def can_pack_codes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether native code multiplies inputs of this dtype by codes."""
    return device.type == "cpu" and dtype in (torch.bfloat16, torch.float32) and code() is not None


def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> NativeGroupedWeight:
    """Copy codes into panels, for inputs of a dtype that ``can_pack_codes``."""
    return NativeGroupedWeight(regrouped(matrix), dtype, library.required(code()))


def regrouped(matrix: QuantizedMatrix) -> GroupedMatrix:
    """``grouped.regroup`` of a matrix on the CPU."""
    return regroup(matrix if is_kept(matrix) else to_bytes(matrix))


def to_bytes(matrix: QuantizedMatrix) -> QuantizedMatrix:
    """``grouped.to_bytes`` of a matrix [..., N, K] on the CPU, bit for bit."""
    width = matrix.shape[-1]
    codes = torch.empty(matrix.shape, dtype=torch.int8)
    scale = torch.empty(*matrix.shape[:-1], -(-width // BYTE_GROUP))
    table = matrix.table
    if table is not None:
        table = F.pad(table, (0, 256 - len(table)), value=float("nan"))
    taken = [x if x is None else x.contiguous() for x in (matrix.codes, table, matrix.scale, matrix.minimum)]
    group = width if matrix.scale.shape[-1] == 1 else matrix.group
    sizes = matrix.numel() // width, width, group, matrix.codes.dtype is torch.int8
    native = library.required(code())
    native.linear_to_bytes(*map(_address, (*taken, codes, scale)), *sizes, torch.get_num_threads())
    return QuantizedMatrix(codes, scale, BYTE_GROUP)


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def can_pack(weight: Tensor, form: str) -> bool:
    """Whether native code multiplies by this weight [N, K]: not empty, on the CPU, of a dtype that the form takes."""
    return form in ("plain", "int8") and is_native(weight) and weight.numel() > 0 and code() is not None


def pack(weight: Tensor, form: str = "plain") -> NativeWeight | NativeInt8Weight:
    """Copy a weight that ``can_pack`` into panels."""
    native = library.required(code())
    return NativeInt8Weight(weight, native) if form == "int8" else NativeWeight(weight, native)


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    signatures: dict[str, list[Any]] = {
        "linear_packed_size": [c_int64, c_int64],
        "linear_pack": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_pack_float": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_pack_int8": [c_void_p, c_void_p, c_int64, c_int64, c_int],
        "linear_multiply": [c_void_p, c_int64, *3 * [c_void_p], c_int64, c_int64, c_int],
        "linear_multiply_float": [c_void_p, c_int64, *3 * [c_void_p], c_int64, c_int64, c_int],
        "linear_multiply_int8": [c_void_p, c_int64, *4 * [c_void_p], c_int64, c_int64, c_int, c_int],
        "linear_to_bytes": [*6 * [c_void_p], *3 * [c_int64], c_int, c_int],
        "linear_grouped_size": [*3 * [c_int64], c_int, c_int],
        "linear_pack_grouped": [*4 * [c_void_p], *3 * [c_int64], c_int, c_int],
        "linear_multiply_grouped": [c_void_p, c_int64, *5 * [c_void_p], *3 * [c_int64], *5 * [c_int]],
        "linear_rows_grouped": [c_void_p, c_int64, *5 * [c_void_p], *3 * [c_int64], *5 * [c_int]],
    }
    results = dict.fromkeys(("linear_packed_size", "linear_grouped_size"), c_int64)
    return library.load_functions(SOURCE, signatures, results)
