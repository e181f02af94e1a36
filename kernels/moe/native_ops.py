"""Products with experts in native code (native.cpp). See README.md."""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.linear.grouped import GroupedMatrix
from specmamba.kernels.linear.native_ops import regrouped
from specmamba.kernels.linear.quantized import QuantizedMatrix
from specmamba.kernels.linear.torch_ops import quantize
from specmamba.kernels.moe import torch_ops
from specmamba.kernels.moe.reference import Groups, Routing
from specmamba.kernels.native import library
from specmamba.kernels.native.live import is_partial, live_count
from specmamba.kernels.native.packed_memory import packed_memory
from specmamba.kernels.native.tensors import is_native, require

SOURCE = Path(__file__).parent / "native.cpp"
NO_PARTS = "the groups' ends do not part the rows among the experts"


class NativeRouter:
    """The weight of a router in panels. Scores of a token do not depend on other tokens, bit for bit."""

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [E, H] on the CPU, not empty, not kept; kept as bf16 if that loses nothing."""
        self._size = weight.shape
        narrow = weight.bfloat16()
        self._is_bf16 = torch.equal(narrow.to(weight.dtype), weight)
        kept = (narrow if self._is_bf16 else weight.float()).contiguous()
        self._panels = packed_memory(code.moe_packed_size(*kept.shape), kept.dtype)
        threads = torch.get_num_threads()
        code.moe_pack_router(kept.data_ptr(), self._panels.data_ptr(), *kept.shape, self._is_bf16, threads)
        self._multiply = code.moe_scores

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, E] float32."""
        x = x.float().contiguous()
        n, k = self._size
        require(x.is_cpu and x.dim() == 2 and x.shape[1] == k, f"a router [{n}, {k}] cannot take {list(x.shape)}")
        y = x.new_empty(x.shape[0], n)
        if len(x):
            weight = self._panels.data_ptr()
            threads = torch.get_num_threads()
            operands = x.data_ptr(), len(x), live_count(x.shape, len(x)), weight, y.data_ptr()
            self._multiply(*operands, n, k, self._is_bf16, threads)
        return y


class NativeExperts:
    """The experts' bf16 or float32 matrices in panels. Only those of experts that have tokens are read.

    The result of a row does not depend on the other rows, bit for bit.
    """

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [E, N, K] bfloat16 or float32 on the CPU, not empty, not kept."""
        self._size, self._dtype, self.nbytes = tuple(weight.shape), weight.dtype, weight.nbytes
        self._packed = _packed(weight.contiguous(), code)
        self._multiply = code.moe_multiply

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the weight's dtype, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        _require_fit(x, groups, self._size, self._dtype)
        x, ends = x.contiguous(), groups.ends.contiguous()
        y = x.new_empty(x.shape[0], self._size[1])
        pointers = (t.data_ptr() for t in (ends, self._packed, y))
        kind = is_partial() or groups.is_part, x.dtype is torch.bfloat16
        arguments = x.data_ptr(), len(x), *pointers, *self._size, *kind, torch.get_num_threads()
        require(bool(self._multiply(*arguments)), NO_PARTS)
        return y


class NativeInt8Experts:
    """The experts' matrices rounded to int8, in panels, and a scale per output; inputs are rounded to 16 bits.

    As ``linear``'s native int8 weight, for many experts: the result of a row does not depend on the other rows.
    """

    def __init__(self, weight: Tensor, code: ctypes.CDLL) -> None:
        """weight: [E, N, K] bfloat16 or float32 on the CPU, not empty, not kept."""
        self._size, self._dtype = tuple(weight.shape), weight.dtype
        quantized, self._scale = quantize(weight.flatten(0, 1))
        self.nbytes = quantized.nbytes + self._scale.nbytes
        self._packed = _packed(quantized.view(weight.shape), code)
        self._multiply = code.moe_multiply_int8

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the weight's dtype, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        _require_fit(x, groups, self._size, self._dtype)
        x, ends = x.contiguous(), groups.ends.contiguous()
        y = x.new_empty(x.shape[0], self._size[1])
        pointers = (t.data_ptr() for t in (ends, self._packed, self._scale, y))
        kind = is_partial() or groups.is_part, x.dtype is torch.bfloat16
        arguments = x.data_ptr(), len(x), *pointers, *self._size, *kind, torch.get_num_threads()
        require(bool(self._multiply(*arguments)), NO_PARTS)
        return y


class NativeGroupedExperts:
    """The experts' codes of 4, 6 or 8 bits in panels, as ``linear``'s ``NativeGroupedWeight``.

    The result of a row does not depend on the other rows, bit for bit.
    """

    def __init__(self, matrix: GroupedMatrix, dtype: torch.dtype, code: ctypes.CDLL) -> None:
        """matrix: [E, N, K], not empty, not kept; dtype: bfloat16 or float32, of inputs; code: the native.cpp."""
        self._size, self._dtype, self.nbytes = tuple(matrix.codes.shape), dtype, matrix.nbytes
        kind, has_minimum = (*self._size[1:], matrix.group, matrix.bits), matrix.minimum is not None
        experts = self._size[0]
        self._packed = packed_memory(experts * code.moe_grouped_size(*kind, has_minimum), torch.uint8)
        parts = [x if x is None else x.contiguous() for x in (matrix.codes, matrix.scale, matrix.minimum)]
        pointers = (None if x is None else x.data_ptr() for x in (*parts, self._packed))
        code.moe_pack_grouped(*pointers, experts, *kind, torch.get_num_threads())
        self._factor, self._table = matrix.factor.contiguous(), matrix.table
        self._multiply, self._kind = code.moe_multiply_grouped, (experts, *kind, matrix.offset, has_minimum)

    def __call__(self, x: Tensor, groups: Groups) -> Tensor:
        """[P, K] of the dtype of inputs, sorted by expert -> [P, N]. Raises ValueError: what does not fit."""
        _require_fit(x, groups, self._size, self._dtype)
        x, ends = x.contiguous(), groups.ends.contiguous()
        y = x.new_empty(x.shape[0], self._size[1])
        operands = (ends, self._packed, self._factor, self._table, y)
        pointers = (None if t is None else t.data_ptr() for t in operands)
        kind = is_partial() or groups.is_part, x.dtype is torch.bfloat16
        arguments = x.data_ptr(), len(x), *pointers, *self._kind, *kind, torch.get_num_threads()
        require(bool(self._multiply(*arguments)), NO_PARTS)
        return y


def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> NativeGroupedExperts:
    """Copy the experts' codes into panels, for inputs of a dtype that ``linear``'s native code takes."""
    return NativeGroupedExperts(regrouped(matrix), dtype, library.required(code()))


def can_pack(weight: Tensor, form: str) -> bool:
    """Whether native code multiplies by these experts: not empty, on the CPU, of a dtype that the form takes."""
    return form in ("plain", "int8") and is_native(weight) and weight.numel() > 0 and code() is not None


def pack(weight: Tensor, form: str = "plain") -> NativeExperts | NativeInt8Experts:
    """Copy experts that ``can_pack`` into panels."""
    return (
        NativeInt8Experts(weight, library.required(code()))
        if form == "int8"
        else NativeExperts(weight, library.required(code()))
    )


def pack_router(weight: Tensor) -> NativeRouter:
    """Copy a router's weight, which is on the CPU and not empty, into panels."""
    return NativeRouter(weight, library.required(code()))


def can_route(logits: Tensor, *_: object) -> bool:
    """Whether native code makes shares of logits: some, float32, on the CPU."""
    return logits.is_cpu and logits.dtype is torch.float32 and logits.numel() > 0 and code() is not None


def softmax_routing(logits: Tensor, k: int, renormalise: bool) -> Routing:
    """Softmax and sums in a call each, which a captured step does not leave native code for."""
    weights, experts = _shares(logits).topk(k, -1)
    return Routing(experts, _normalised(weights, 0.0) if renormalise else weights)


def topk_softmax_routing(logits: Tensor, k: int) -> Routing:
    """Topk, then softmax in one call."""
    weights, experts = logits.topk(k, -1)
    return Routing(experts, _shares(weights))


def sigmoid_routing(
    logits: Tensor, bias: Tensor, k: int, num_groups: int, topk_groups: int, renormalise: bool, scale: float
) -> Routing:
    """Operators that a captured step has, and weights over their sum in one call."""
    rule = k, num_groups, topk_groups, renormalise, scale
    return torch_ops.sigmoid_routing(logits, bias, *rule, partial(_normalised, tiny=torch_ops.TINY))


def _normalised(x: Tensor, tiny: float) -> Tensor:
    """Each row of [T, N] float32 over its sum and ``tiny``."""
    x = x.contiguous()
    y, rows = torch.empty_like(x), len(x)
    operands = x.data_ptr(), rows, live_count(x.shape, rows), y.data_ptr(), x.shape[1], tiny
    library.required(code()).moe_normalise(*operands)
    return y


def _shares(x: Tensor) -> Tensor:
    """Softmax of each row of [T, N] float32."""
    x = x.contiguous()
    y, rows = torch.empty_like(x), len(x)
    operands = x.data_ptr(), rows, live_count(x.shape, rows), y.data_ptr(), x.shape[1], torch.get_num_threads()
    library.required(code()).moe_shares(*operands)
    return y


def can_dispatch(x: Tensor) -> bool:
    """Whether native code sorts and sums rows of x: float32 or bfloat16 on the CPU."""
    return is_native(x) and code() is not None


def dispatch(x: Tensor, experts: Tensor, num_experts: int) -> tuple[Tensor, Groups]:
    """A counting sort in one call."""
    are_matrices = x.dim() == 2 and experts.dim() == 2 and len(x) == len(experts)
    require(
        are_matrices and x.is_cpu and experts.is_cpu and experts.dtype is torch.int64,
        f"tokens {list(x.shape)} do not fit experts {list(experts.shape)} {experts.dtype}",
    )
    x, experts = x.contiguous(), experts.contiguous()
    tokens, k = experts.shape
    ordered = x.new_empty(tokens * k, x.shape[1])
    places = torch.empty(tokens * k, dtype=torch.int64)
    ends = torch.empty(num_experts, dtype=torch.int32)
    is_valid = library.required(code()).moe_dispatch(
        *(
            x.data_ptr(),
            x.shape[1] * x.element_size(),
            experts.data_ptr(),
            tokens,
            live_count(x.shape, tokens),
            k,
            num_experts,
        ),
        *(ordered.data_ptr(), places.data_ptr(), ends.data_ptr(), torch.get_num_threads()),
    )
    require(bool(is_valid), f"a token goes to an expert that is none of 0 to {num_experts - 1}")
    return ordered, Groups(places, ends)


def combine(y: Tensor, groups: Groups, weights: Tensor) -> Tensor:
    """One call; a place that y does not have raises ValueError."""
    places = groups.places
    is_weighted = weights.dim() == 2 and weights.dtype is torch.float32 and weights.is_cpu
    are_rows = is_native(y) and y.dim() == 2 and len(y) == len(places) == weights.numel()
    are_places = places.dim() == 1 and places.dtype is torch.int64 and places.is_cpu
    complaint = f"{list(y.shape)} rows are not those of weights {list(weights.shape)} {weights.dtype}"
    require(is_weighted and are_rows, complaint)
    require(are_places, f"places need a list of int64 on the CPU, not {places.dtype} {list(places.shape)}")
    tokens, k = weights.shape
    y, weights, places = y.contiguous(), weights.contiguous(), places.contiguous()
    out = y.new_empty(tokens, y.shape[1])
    is_valid = library.required(code()).moe_combine(
        *(t.data_ptr() for t in (y, places, weights, out)),
        *(tokens, live_count(weights.shape, tokens), k, y.shape[1], y.dtype is torch.bfloat16, torch.get_num_threads()),
    )
    require(bool(is_valid), "a token's rows are at places that there are not")
    return out


def _packed(weight: Tensor, code: ctypes.CDLL) -> Tensor:
    experts, n, k = weight.shape
    packed = packed_memory(experts * code.moe_packed_size(n, k), weight.dtype)
    operands = weight.data_ptr(), packed.data_ptr(), experts, n, k
    if weight.dtype is torch.int8:
        code.moe_pack_int8(*operands, torch.get_num_threads())
    else:
        code.moe_pack(*operands, weight.dtype is torch.bfloat16, torch.get_num_threads())
    return packed


def _require_fit(x: Tensor, groups: Groups, size: tuple[int, ...], dtype: torch.dtype) -> None:
    """Check shapes, dtypes and devices; native code itself checks the values of the ends."""
    ends = groups.ends
    fits = x.dtype is dtype and x.is_cpu and x.dim() == 2 and x.shape[1] == size[2] and len(x) == len(groups.places)
    are_ends = ends.dtype is torch.int32 and ends.is_cpu and ends.shape == (size[0],)
    require(fits and are_ends, f"experts {list(size)} {dtype} cannot multiply {x.dtype} {list(x.shape)}")


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    arguments: dict[str, list[Any]] = {
        "packed_size": [c_int64, c_int64],
        "pack": [c_void_p, c_void_p, *[c_int64] * 3, c_int, c_int],
        "pack_router": [c_void_p, c_void_p, c_int64, c_int64, c_int, c_int],
        "pack_int8": [c_void_p, c_void_p, *[c_int64] * 3, c_int],
        "scores": [c_void_p, c_int64, *[c_void_p] * 3, c_int64, c_int64, c_int, c_int],
        "shares": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int],
        "normalise": [c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_double],
        "dispatch": [c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64, *[c_void_p] * 3, c_int],
        "multiply": [c_void_p, c_int64, *[c_void_p] * 3, *[c_int64] * 3, *[c_int] * 3],
        "multiply_int8": [c_void_p, c_int64, *[c_void_p] * 4, *[c_int64] * 3, *[c_int] * 3],
        "grouped_size": [*[c_int64] * 3, c_int, c_int],
        "pack_grouped": [*[c_void_p] * 4, *[c_int64] * 4, c_int, c_int],
        "multiply_grouped": [c_void_p, c_int64, *[c_void_p] * 5, *[c_int64] * 4, *[c_int] * 6],
        "combine": [*[c_void_p] * 4, c_int64, c_void_p, c_int64, c_int64, c_int, c_int],
    }
    sizes, checked = (
        ("packed_size", "grouped_size"),
        ("dispatch", "multiply", "multiply_int8", "multiply_grouped", "combine"),
    )
    results = dict.fromkeys(sizes, c_int64) | dict.fromkeys(checked, c_int)
    signatures = {f"moe_{name}": of for name, of in arguments.items()}
    return library.load_functions(SOURCE, signatures, {f"moe_{name}": of for name, of in results.items()})
