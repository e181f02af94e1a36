"""PyTorch's operators between the kernels of a step, as calls of a tape.

Results are those of PyTorch bit for bit: integers, copies, and single operations of float32 that IEEE 754 rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.replay.arrays import (
    Number,
    Operation,
    Reduction,
    UnsupportedError,
    map_call,
    move_call,
    reduce_call,
    sort_call,
)
from specmamba.kernels.replay.tape import NativeCall

Lowering = Callable[..., list[NativeCall]]  # (result, *arguments of the operator) -> its calls
_LOWERINGS: dict[str, Lowering] = {}


def lower(name: str, result: Any, arguments: Sequence[Any], options: Mapping[str, Any]) -> list[NativeCall] | None:
    """The native calls of an operator, or None where only PyTorch has it.

    Args:
        name: as "aten::add.Tensor".
        result: what it returned: tensors that its calls write.
        arguments, options: that it was called with.
    """
    lowering = _LOWERINGS.get(name)
    if lowering is None:
        return None
    try:
        return lowering(result, *arguments, **options)
    except UnsupportedError:
        return None


def _lowers(*names: str) -> Callable[[Lowering], Lowering]:
    def declare(lowering: Lowering) -> Lowering:
        _LOWERINGS.update({f"aten::{name}": lowering for name in names})
        return lowering

    return declare


def _overloads(*names: str) -> list[str]:
    return [f"{name}.{overload}" for name in names for overload in ("Tensor", "Scalar")]


# ---- numbers --------------------------------------------------------------------------------------------------------

_ON_BOOLS = {Operation.ADD: Operation.OR, Operation.MULTIPLY: Operation.AND}


def _binary(operation: Operation, out: Tensor, a: Tensor | Number, b: Tensor | Number, *, alpha: Number = 1) -> Any:
    if alpha != 1:
        raise UnsupportedError
    if out.dtype is torch.bool:
        operation = _ON_BOOLS.get(operation, operation)
    return [map_call(operation, out, a, b)]


for _operation, _names in {
    Operation.ADD: ("add", "add_"),
    Operation.SUBTRACT: ("sub", "sub_"),
    Operation.MULTIPLY: ("mul", "mul_"),
    Operation.AND: ("__and__", "__iand__", "bitwise_and", "bitwise_and_"),
    Operation.OR: ("__or__", "__ior__", "bitwise_or", "bitwise_or_"),
    Operation.XOR: ("__xor__", "__ixor__", "bitwise_xor", "bitwise_xor_"),
    Operation.EQUAL: ("eq",),
    Operation.NOT_EQUAL: ("ne",),
    Operation.LESS: ("lt",),
    Operation.LESS_EQUAL: ("le",),
    Operation.GREATER: ("gt",),
    Operation.GREATER_EQUAL: ("ge",),
    Operation.SHIFT_LEFT: ("__lshift__", "bitwise_left_shift"),
    Operation.SHIFT_RIGHT: ("__rshift__", "bitwise_right_shift"),
}.items():
    _lowers(*_overloads(*_names))(partial(_binary, _operation))
_lowers("minimum")(partial(_binary, Operation.LEAST))
_lowers("maximum")(partial(_binary, Operation.MOST))


@_lowers(*_overloads("rsub"))
def _reversed_subtract(out: Tensor, a: Tensor, b: Tensor | Number, alpha: Number = 1) -> list[NativeCall]:
    return list(_binary(Operation.SUBTRACT, out, b, a, alpha=alpha))


@_lowers("floor_divide", "floor_divide.Scalar")
def _floor_divide(out: Tensor, a: Tensor, b: Tensor | Number) -> list[NativeCall]:
    if out.is_floating_point():
        raise UnsupportedError  # PyTorch corrects the quotient's rounding
    return [map_call(Operation.FLOOR_DIVIDE, out, a, b)]


@_lowers("div.Tensor", "div_.Tensor", "div.Scalar")
def _divide(out: Tensor, a: Tensor, b: Tensor | Number) -> list[NativeCall]:
    return [map_call(Operation.DIVIDE, out, a, b)]


@_lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(out: Tensor, condition: Tensor, a: Tensor | Number, b: Tensor | Number) -> list[NativeCall]:
    return [map_call(Operation.CHOOSE, out, condition, a, b)]


@_lowers(*_overloads("masked_fill", "masked_fill_"))
def _masked_fill(out: Tensor, a: Tensor, mask: Tensor, value: Tensor | Number) -> list[NativeCall]:
    return [map_call(Operation.CHOOSE, out, mask, value, a)]


@_lowers("clamp", "clamp_", "clamp.Tensor")
def _clamp(out: Tensor, a: Tensor, min: Any = None, max: Any = None) -> list[NativeCall]:  # noqa: A002 - PyTorch's
    calls = [map_call(Operation.MOST, out, a, min)] if min is not None else []
    return calls if max is None else [*calls, map_call(Operation.LEAST, out, out if calls else a, max)]


@_lowers("relu")
def _relu(out: Tensor, a: Tensor) -> list[NativeCall]:
    return [map_call(Operation.MOST, out, 0, a)]  # of two zeros the second one: relu keeps the sign of -0.0


@_lowers("pow.Tensor_Scalar")
def _square(out: Tensor, a: Tensor, exponent: Number) -> list[NativeCall]:
    if exponent != 2:
        raise UnsupportedError
    return [map_call(Operation.MULTIPLY, out, a, a)]


@_lowers("logical_not", "bitwise_not")
def _not(out: Tensor, a: Tensor) -> list[NativeCall]:
    if out.dtype is not torch.bool:
        raise UnsupportedError
    return [map_call(Operation.NOT, out, a)]


@_lowers("neg")
def _negative(out: Tensor, a: Tensor) -> list[NativeCall]:
    return [map_call(Operation.NEGATIVE, out, a)]


# ---- copies ---------------------------------------------------------------------------------------------------------


def _copied(out: Tensor, a: Tensor) -> NativeCall:
    if out.dtype is a.dtype:
        return move_call(out, a.expand(out.shape))
    return map_call(Operation.COPY, out, a)


@_lowers("clone", "_to_copy", "copy_", "contiguous")
def _copy(out: Tensor, a: Tensor, source: Any = None, *_: Any, **__: Any) -> list[NativeCall]:
    return [_copied(out, source if isinstance(source, Tensor) else a)]


@_lowers("fill_.Scalar", "fill_.Tensor", "zero_")
def _fill(out: Tensor, _: Tensor, value: Tensor | Number = 0) -> list[NativeCall]:
    return [map_call(Operation.COPY, out, value)]


@_lowers("cat")
def _cat(out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> list[NativeCall]:
    calls, begin = [], 0
    for part in parts:
        if part.dim() != out.dim():
            raise UnsupportedError  # an empty list, which PyTorch ignores
        size = part.shape[dim]
        calls.append(_copied(out.narrow(dim, begin, size), part))
        begin += size
    return calls


@_lowers("stack")
def _stack(out: Tensor, parts: Sequence[Tensor], dim: int = 0) -> list[NativeCall]:
    return [_copied(out.select(dim, place), part) for place, part in enumerate(parts)]


@_lowers("repeat")
def _repeat(out: Tensor, a: Tensor, repeats: Sequence[int]) -> list[NativeCall]:
    shape = [1] * (len(repeats) - a.dim()) + list(a.shape)
    pairs = [n for pair in zip(repeats, shape, strict=True) for n in pair]
    return [_copied(out.view(pairs), a.view([n for size in shape for n in (1, size)]))]


@_lowers("constant_pad_nd")
def _pad(out: Tensor, a: Tensor, pad: Sequence[int], value: Number = 0) -> list[NativeCall]:
    inner = out
    for place in range(len(pad) // 2):
        dim, before = a.dim() - 1 - place, pad[2 * place]
        if before < 0 or pad[2 * place + 1] < 0:
            raise UnsupportedError
        inner = inner.narrow(dim, before, a.shape[dim])
    return [map_call(Operation.COPY, out, value), _copied(inner, a)]


# ---- indices --------------------------------------------------------------------------------------------------------


def _indexed(x: Tensor, indices: Sequence[Tensor | None], shape: Sequence[int]) -> tuple[Tensor, list[Any]]:
    """x[indices] as a loop over its shape: x with stride 0 where indices choose, and the indices in that shape."""
    dims = [dim for dim, index in enumerate(indices) if index is not None]
    found = torch.broadcast_tensors(*(index for index in indices if index is not None))
    first = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0  # else the indices' dimensions come first
    size, plain = found[0].dim(), [dim for dim in range(x.dim()) if dim not in dims]
    strides = [x.stride(dim) for dim in plain]
    strides[first:first] = [0] * size
    behind = len(shape) - first - size
    wide = [index.reshape(*index.shape, *[1] * behind).expand(shape) for index in found]
    places = [(index, x.stride(dim), x.shape[dim]) for index, dim in zip(wide, dims, strict=True)]
    return x.as_strided(shape, strides, x.storage_offset()), places


@_lowers("index.Tensor")
def _index(out: Tensor, a: Tensor, indices: Sequence[Tensor | None]) -> list[NativeCall]:
    source, places = _indexed(a, indices, out.shape)
    return [move_call(out, source, places)]


@_lowers("index_put_")
def _index_put(
    _: Tensor, a: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> list[NativeCall]:
    if accumulate or values.dtype is not a.dtype:
        raise UnsupportedError
    with torch._C._DisableTorchDispatch():  # a meta tensor would tell the shape too, but torch imports sympy for that
        given = tuple(slice(None) if i is None else i for i in indices)
        shape = torch.empty(1, dtype=torch.bool).expand(a.shape)[given].shape
    target, places = _indexed(a, indices, shape)
    return [move_call(target, values.expand(shape), places, writes_indexed=True)]


def _along(x: Tensor, dim: int, index: Tensor) -> tuple[Tensor, list[tuple[Tensor, int, int]]]:
    """x as a loop over the shape of an index, which chooses along one dimension."""
    strides = [0 if d == dim % x.dim() else stride for d, stride in enumerate(x.stride())]
    return x.as_strided(index.shape, strides, x.storage_offset()), [(index, x.stride(dim), x.shape[dim])]


@_lowers("gather")
def _gather(out: Tensor, a: Tensor, dim: int, index: Tensor, **_: bool) -> list[NativeCall]:
    source, places = _along(a, dim, index)
    return [move_call(out, source, places)]


@_lowers("scatter_.src", "scatter_.value")
def _scatter(_: Tensor, a: Tensor, dim: int, index: Tensor, source: Tensor | Number) -> list[NativeCall]:
    if isinstance(source, Tensor):
        source = source[tuple(slice(size) for size in index.shape)]
    else:
        source = torch.tensor(source, dtype=a.dtype).expand(index.shape)
    target, places = _along(a, dim, index)
    return [move_call(target, source, places, writes_indexed=True)]


def _of_rows(index: Tensor, dim: int, shape: Sequence[int]) -> Tensor:
    sizes = [1] * len(shape)
    sizes[dim] = index.numel()
    return index.reshape(sizes).expand(shape)


@_lowers("index_select")
def _index_select(out: Tensor, a: Tensor, dim: int, index: Tensor) -> list[NativeCall]:
    source, places = _along(a, dim, _of_rows(index, dim, out.shape))
    return [move_call(out, source, places)]


@_lowers("index_copy_")
def _index_copy(_: Tensor, a: Tensor, dim: int, index: Tensor, source: Tensor) -> list[NativeCall]:
    target, places = _along(a, dim, _of_rows(index, dim, source.shape))
    return [move_call(target, source, places, writes_indexed=True)]


@_lowers("embedding")
def _embedding(out: Tensor, weight: Tensor, index: Tensor, *_: Any, **__: Any) -> list[NativeCall]:
    return _index(out, weight, [index])


# ---- rows -----------------------------------------------------------------------------------------------------------


def _reduced(reduction: Reduction, out: Tensor, a: Tensor, dim: Any = None, *_: Any, **__: Any) -> list[NativeCall]:
    dims = range(a.dim()) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    return [reduce_call(reduction, out, a, [*dims])]


_lowers("sum", "sum.dim_IntList")(partial(_reduced, Reduction.SUM))
_lowers("all", "all.dim", "all.dims")(partial(_reduced, Reduction.ALL))
_lowers("any", "any.dim", "any.dims")(partial(_reduced, Reduction.ANY))
_lowers("amax")(partial(_reduced, Reduction.MOST))
_lowers("amin")(partial(_reduced, Reduction.LEAST))
_lowers("cumsum")(partial(_reduced, Reduction.RUNNING_SUM))


def _sorted(out: Sequence[Tensor], a: Tensor, dim: int, descends: bool) -> list[NativeCall]:
    values, places = (x.transpose(dim, -1) for x in out)
    return [sort_call(values, places, a.transpose(dim, -1), descends)]


@_lowers("sort.stable")
def _stable_sort(
    out: Sequence[Tensor], a: Tensor, *, dim: int = -1, descending: bool = False, **_: Any
) -> list[NativeCall]:
    return _sorted(out, a, dim, descending)


@_lowers("sort")
def _sort(out: Sequence[Tensor], a: Tensor, dim: int = -1, descending: bool = False) -> list[NativeCall]:
    return _sorted(out, a, dim, descending)


@_lowers("topk")
def _topk(out: Sequence[Tensor], a: Tensor, _: int, dim: int = -1, largest: bool = True, *__: bool) -> list[NativeCall]:
    return _sorted(out, a, dim, largest)
