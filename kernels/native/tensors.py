"""Operands of native code: which tensors it can read, and the ctypes structures that describe them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

Operand = TypeVar("Operand")
_MARSHALLED: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
FLOATS = (torch.float32, torch.bfloat16)  # the dtypes of activations that kernels read


def is_native(x: Tensor) -> bool:
    """Whether x is on the CPU, in a dtype that native code reads."""
    return x.is_cpu and x.dtype in FLOATS


def is_contiguous_from(x: Tensor, dim: int) -> bool:
    """Whether the dimensions of x from ``dim`` on are contiguous, as in a slice of the rows of a buffer."""
    if x.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(reversed(x.shape[dim:]), reversed(x.stride()[dim:]), strict=True):
        if stride != expected and size != 1:
            return False
        expected *= size
    return True


def require(condition: bool, complaint: str) -> None:
    """Raise ValueError with this complaint unless the condition holds; native code trusts shapes."""
    if not condition:
        raise ValueError(complaint)


def contiguous_from(x: Tensor, dim: int) -> Tensor:
    """x, copied if its dimensions from ``dim`` on are not contiguous."""
    return x if is_contiguous_from(x, dim) else x.contiguous()


def tokens_of(x: Tensor, dims: int) -> tuple[Tensor, int]:
    """x as tokens of ``dims`` contiguous dimensions with one stride, copied if necessary; and this stride."""
    first = x.dim() - dims
    if not x.is_contiguous() and first in (1, 2) and is_contiguous_from(x, first):
        shape, strides = x.shape, x.stride()
        if first == 1 or shape[1] == 1:
            return x, strides[0]
        if shape[0] == 1 or strides[0] == shape[1] * strides[1]:
            return x, strides[1]
    return x.contiguous(), x.shape[-1] if dims == 1 else x.shape[-1] * x.shape[-2]


def struct(
    name: str,
    pointers: Sequence[str | tuple[str, type[Any]]],
    integers: Sequence[str],
    doubles: Sequence[str] = (),
) -> type[Any]:
    """A ctypes structure with these fields in this order: pointers, int64, double. Made by position.

    A pointer with a type is a structure instead, which is a part of this one.
    """
    fields = [
        *(field if isinstance(field, tuple) else (field, ctypes.c_void_p) for field in pointers),
        *((field, ctypes.c_int64) for field in integers),
        *((field, ctypes.c_double) for field in doubles),
    ]
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def marshalled(operand: Operand, marshal: Callable[[Operand], Any]) -> Any:
    """The ctypes structure of an operand: ``marshal(operand)``, made once and kept while the operand lives.

    Operands compare by identity, and each has one ``marshal``. What ``marshal`` raises is raised again by the next
    call.
    """
    try:
        return _MARSHALLED[operand]
    except KeyError:
        return _MARSHALLED.setdefault(operand, marshal(operand))
