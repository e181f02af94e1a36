"""The operations of arrays.h on tensors, as calls of a tape."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.replay.tape import NativeCall, code

DIMS, INDICES = 6, 3  # as in arrays.h
TYPES = {torch.bool: 0, torch.int32: 1, torch.int64: 2, torch.float32: 3, torch.bfloat16: 4}
Number = float | int | bool


class Operation(IntEnum):
    """What ``map_call`` computes of a, b and c."""

    COPY = 0
    ADD = 1
    SUBTRACT = 2
    MULTIPLY = 3
    FLOOR_DIVIDE = 4
    AND = 5
    OR = 6
    XOR = 7
    NOT = 8
    EQUAL = 9
    NOT_EQUAL = 10
    LESS = 11
    LESS_EQUAL = 12
    GREATER = 13
    GREATER_EQUAL = 14
    LEAST = 15
    MOST = 16
    CHOOSE = 17
    NEGATIVE = 18
    SHIFT_LEFT = 19
    SHIFT_RIGHT = 20
    DIVIDE = 21


class Reduction(IntEnum):
    """What ``reduce_call`` computes of the reduced dimensions; RUNNING_SUM: along the last one."""

    SUM = 0
    ALL = 1
    ANY = 2
    LEAST = 3
    MOST = 4
    RUNNING_SUM = 5


class _Array(ctypes.Structure):
    _fields_ = [("data", c_void_p), ("type", c_int64), ("strides", c_int64 * DIMS)]


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, _Array) for name in ("out", "a", "b", "c")),
        *((name, c_int64) for name in ("operation", "is_float", "dims")),
        ("sizes", c_int64 * DIMS),
    ]


class _Index(ctypes.Structure):
    _fields_ = [
        ("data", c_void_p),
        ("is_int32", c_int64),
        ("strides", c_int64 * DIMS),
        ("step", c_int64),
        ("size", c_int64),
    ]


class _Move(ctypes.Structure):
    _fields_ = [
        ("out", c_void_p),
        ("in", c_void_p),
        *((name, c_int64) for name in ("element", "writes_indexed", "count", "dims")),
        *((name, c_int64 * DIMS) for name in ("sizes", "out_strides", "in_strides")),
        ("index", _Index * INDICES),
    ]


class _Reduce(ctypes.Structure):
    _fields_ = [
        ("out", _Array),
        ("a", _Array),
        *((name, c_int64) for name in ("reduction", "reduced", "dims")),
        ("sizes", c_int64 * DIMS),
    ]


class _Sort(ctypes.Structure):
    _fields_ = [
        *((name, _Array) for name in ("values", "places", "a")),
        *((name, c_int64) for name in ("descends", "is_float", "kept", "dims")),
        ("sizes", c_int64 * DIMS),
    ]


class UnsupportedError(Exception):
    """Native code does not compute this; PyTorch does."""


def map_call(operation: Operation, out: Tensor, *inputs: Tensor | Number) -> NativeCall:
    """out[i] = operation(a[i], b[i], c[i]); inputs are broadcast to out.

    Raises:
        UnsupportedError: a dtype that native code does not read, or too many dimensions.
    """
    tensors = [x if isinstance(x, Tensor) else torch.tensor(_typed(x)) for x in inputs]
    given = [out, *tensors]
    is_float = any(x.is_floating_point() for x in given)
    sizes, strides = _layout(out.shape, [_strides(x, out.shape) for x in given])
    arrays = [_array(x, of_x) for x, of_x in zip(given, strides, strict=True)]
    arrays += [_Array()] * (4 - len(arrays))
    structure = _Map(*arrays, int(operation), is_float, len(sizes), _padded(sizes))
    return _call("replay_map", structure, *given)


def move_call(
    out: Tensor, source: Tensor, indices: Sequence[tuple[Tensor, int, int]] = (), writes_indexed: bool = False
) -> NativeCall:
    """out[i] = source[i, indices], or out[i, indices] = source[i] where the write is the indexed one.

    Args:
        out, source: of one dtype. The one that is not indexed, and the indices, have the shape of the loop; the other
            has stride 0 in the dimensions that indices choose.
        indices: each with the stride, in elements, and the number of the places that it chooses from.
        writes_indexed: which of the two is indexed.

    Raises:
        UnsupportedError: too many indices or dimensions, or other dtypes.
    """
    if len(indices) > INDICES or out.dtype is not source.dtype:
        raise UnsupportedError
    if any(index.dtype not in (torch.int64, torch.int32) for index, *_ in indices):
        raise UnsupportedError
    shape = (source if writes_indexed else out).shape
    given = [out, source, *(index for index, *_ in indices)]
    sizes, strides = _layout(shape, [_strides(x, shape) for x in given])
    size = out.element_size()
    found = [
        _Index(index.data_ptr(), index.dtype is torch.int32, _padded(of_index), step * size, count)
        for (index, step, count), of_index in zip(indices, strides[2:], strict=True)
    ]
    numbers = size, writes_indexed, len(indices), len(sizes)
    lists = _padded(sizes), _padded(strides[0]), _padded(strides[1])
    structure = _Move(out.data_ptr(), source.data_ptr(), *numbers, *lists, (_Index * INDICES)(*found))
    return _call("replay_move", structure, *given)


def reduce_call(reduction: Reduction, out: Tensor, a: Tensor, dims: Sequence[int]) -> NativeCall:
    """Reduce integers or bools over some dimensions; ``out`` lacks them, but for a running sum.

    Raises:
        UnsupportedError: a dtype of another kind, nothing to reduce, or too many dimensions.
    """
    dims = sorted({dim % a.dim() for dim in dims}) if a.dim() else []
    if a.is_floating_point() or not dims or 0 in a.shape or a.dim() > DIMS:
        raise UnsupportedError
    order = [d for d in range(a.dim()) if d not in dims] + [*dims]
    if reduction is Reduction.RUNNING_SUM:
        wide = out.permute(order)
    else:
        kept = [d for d in range(a.dim()) if d not in dims]
        wide = out.reshape([a.shape[d] for d in kept])
        if wide.numel() and wide.data_ptr() != out.data_ptr():
            raise UnsupportedError
        wide = wide.view(*wide.shape, *[1] * len(dims)).expand([a.shape[d] for d in order])
    a = a.permute(order)
    arrays = _array(wide, _bytes(wide)), _array(a, _bytes(a))
    structure = _Reduce(*arrays, int(reduction), len(dims), a.dim(), _padded(a.shape))
    return _call("replay_reduce", structure, out, a)


def sort_call(values: Tensor | None, places: Tensor | None, a: Tensor, descends: bool) -> NativeCall:
    """Sort along the last dimension, equal numbers in their order; of each row as many as results have room for.

    Raises:
        UnsupportedError: another dtype, no numbers, or too many dimensions.
    """
    results = [x for x in (values, places) if x is not None]
    if a.dim() == 0 or a.dim() > DIMS or not results or 0 in a.shape:
        raise UnsupportedError
    arrays = (_Array() if x is None else _array(x, _bytes(x)) for x in (values, places, a))
    numbers = descends, a.is_floating_point(), results[0].shape[-1], a.dim()
    return _call("replay_sort", _Sort(*arrays, *numbers, _padded(a.shape)), *results, a)


def _call(name: str, structure: ctypes.Structure, *operands: Tensor) -> NativeCall:
    function = getattr(library.required(code()), name)
    return NativeCall(function, [ctypes.addressof(structure)], (structure, *operands))


def _typed(number: Number) -> Number:
    return int(number) if isinstance(number, bool) else number


def _strides(x: Tensor, shape: Sequence[int]) -> list[int]:
    return _bytes(x.expand(shape)) if x.shape != shape else _bytes(x)


def _bytes(x: Tensor) -> list[int]:
    return [stride * x.element_size() for stride in x.stride()]


def _array(x: Tensor, strides: Sequence[int]) -> _Array:
    if x.dtype not in TYPES:
        raise UnsupportedError
    return _Array(x.data_ptr(), TYPES[x.dtype], _padded(strides))


def _padded(numbers: Sequence[int]) -> Any:
    if len(numbers) > DIMS:
        raise UnsupportedError
    return (c_int64 * DIMS)(*numbers)


def _layout(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[list[int], list[list[int]]]:
    """The loop over a shape with as few dimensions as possible: neighbours that all arrays walk in one are merged."""
    sizes: list[int] = []
    merged: list[list[int]] = [[] for _ in strides]
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        steps = [of_x[dim] for of_x in strides]
        if sizes and all(of_x[-1] == step * size for of_x, step in zip(merged, steps, strict=True)):
            sizes[-1] *= size
            for of_x, step in zip(merged, steps, strict=True):
                of_x[-1] = step
        else:
            sizes.append(size)
            for of_x, step in zip(merged, steps, strict=True):
                of_x.append(step)
    return sizes, merged
