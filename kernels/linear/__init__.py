"""Matrix product with a weight that is laid out once for its device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, cast, get_args, runtime_checkable

import torch
from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.linear import native_ops, torch_ops
from specmamba.kernels.linear.grouped import is_kept, packed_bytes
from specmamba.kernels.linear.quantized import QuantizedMatrix
from specmamba.kernels.linear.rounding import CodeForm, round_matrix

__all__ = [
    "Matrix",
    "PackedCodes",
    "PackedWeight",
    "QuantizedMatrix",
    "WeightForm",
    "copies",
    "has_fast_int8",
    "keeps_rows",
    "pack",
    "pack_codes",
    "packed",
    "packed_codes",
    "round_to_form",
    "runs_codes",
    "runs_scaled",
]

# As stored; a signed byte per weight and a scale per output; codes with a scale per group of inputs, or per output; FP8
# for inputs that are rounded to FP8 too.
WeightForm = Literal["plain", "int8", "int4-g32", "int4-g64", "int4-g128", "fp8", "fp8-dynamic"]
Matrix = Tensor | QuantizedMatrix


class PackedWeight(Protocol):
    """A weight laid out for its device: y = x W^T without bias, in x's dtype."""

    nbytes: int  # of the tensors that are kept, without the padding of panels

    def __call__(self, x: Tensor, /) -> Tensor:
        """Multiply x [..., K] on the weight's device; the result is [..., N].

        Raises:
            ValueError: another dtype, device or width (native and Triton forms).
        """


@runtime_checkable
class PackedCodes(PackedWeight, Protocol):
    """A quantized matrix laid out for its device, of which rows can be read too."""

    def rows(self, index: Tensor, /) -> Tensor:
        """Dequantize rows ``index`` [...] int64 of the matrix: [..., K], rounded once to the dtype of inputs."""


@operator(
    triton=lambda weight, form: (
        (form == "int8" or (form == "fp8-dynamic" and torch_ops.can_scale(weight)))
        and weight.numel() > 0
        and gpu.can_launch(weight)
    ),
    native=native_ops.can_pack,
)
def pack(weight: Tensor, form: WeightForm = "plain") -> PackedWeight:
    """Lay out a weight for multiplying inputs of its dtype.

    ``plain``: bf16 and float32 on a CPU are copied into native panels, bf16 into oneDNN's blocks where there is no
    native code; every other weight is kept unchanged. ``int8``: rounded as ``reference.quantize`` says; on a GPU few
    rows multiply in Triton, bf16 and float32 on a CPU multiply in native code, every other weight in PyTorch.
    ``int4-g32`` and others of its kind, ``fp8``: rounded as ``rounding.round_matrix`` says, then ``pack_codes``. An
    empty weight stays plain. ``fp8-dynamic``: rounded to e4m3 with a scale per output, and inputs at every use with one
    per row; a weight whose sizes PyTorch's product does not take stays plain.

    Args:
        weight: [N, K]; not kept where it is copied.
        form: how the weight is stored.

    Returns:
        A product that takes x [..., K] to [..., N].

    Raises:
        ValueError: there is no such form.
    """
    require_form(form)
    if form == "fp8-dynamic":
        return torch_ops.ScaledWeight.rounded(weight) if torch_ops.can_scale(weight) else pack(weight)
    if weight.numel() > 0 and form not in ("plain", "int8"):
        return packed_codes(round_to_form(weight, form), weight.dtype)
    return torch_ops.Int8Weight(weight) if form == "int8" and weight.numel() > 0 else torch_ops.pack(weight)


@operator(
    triton=lambda matrix, dtype: dtype in gpu.FLOAT_DTYPES and gpu.can_launch(matrix.codes),
    native=lambda matrix, dtype: native_ops.can_pack_codes(dtype, matrix.codes.device),
)
def pack_codes(matrix: QuantizedMatrix, dtype: torch.dtype) -> PackedCodes:
    """Lay out a quantized matrix for multiplying inputs of a dtype.

    Native code and Triton multiply by its codes, as ``grouped.regroup`` brings them into groups; elsewhere the matrix
    is dequantized once, and is plain.

    Args:
        matrix: [N, K], not empty; not kept.
        dtype: of inputs.

    Returns:
        A product that takes x [..., K] to [..., N].
    """
    return torch_ops.PlainWeight(matrix.dequantize(dtype))


def packed(
    parts: Sequence[Matrix],
    form: WeightForm = "plain",
    dtype: torch.dtype | None = None,
    layout: torch.device | None = None,
    gates: Sequence[Matrix] = (),
) -> PackedWeight:
    """Lay out matrices of the same inputs, whose outputs lie side by side.

    Args:
        parts: [n, K] each.
        form: of those that are not quantized.
        dtype: of inputs, for those that are; None: float32.
        layout: the device whose sizes are meant where matrices have no values.
        gates: further matrices, behind the parts, that forms of codes do not round.
    """

    def product(x: Matrix, of_form: WeightForm) -> PackedWeight:
        return packed_codes(x, dtype or torch.float32, layout) if isinstance(x, QuantizedMatrix) else pack(x, of_form)

    if form in ("plain", "int8"):
        parts, gates = (*parts, *gates), ()
    products = [product(x, form) for x in _joined(parts)] + [product(x, "plain") for x in _joined(gates)]
    return products[0] if len(products) == 1 else torch_ops.JoinedWeight(products)


def packed_codes(matrix: QuantizedMatrix, dtype: torch.dtype, layout: torch.device | None = None) -> PackedCodes:
    """``pack_codes``, or what stands for it where the matrix has no values; ``layout``: as for ``packed``."""
    return shape_of_codes(matrix, layout) if matrix.codes.is_meta else pack_codes(matrix, dtype)


def runs_scaled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether PyTorch multiplies FP8 by FP8 there with a scale per row: bfloat16 on GPUs from capability 8.9 on."""
    return dtype is torch.bfloat16 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def keeps_rows(matrix: QuantizedMatrix, layout: torch.device) -> bool:
    """Whether the codes laid out for a device mean what those of the matrix do, but for 11 bits of scales."""
    return is_kept(matrix, gpu.multiplies_codes(layout))


def shape_of_codes(matrix: QuantizedMatrix, layout: torch.device | None) -> torch_ops.ShapeOfCodes:
    """What stands for a matrix without values, as ``pack_codes`` would lay it out on a device; None: on a CPU."""
    return torch_ops.ShapeOfCodes(packed_bytes(matrix, layout is not None and gpu.multiplies_codes(layout)))


def round_to_form(weight: Tensor, form: WeightForm) -> QuantizedMatrix:
    """Round a weight [..., N, K] to the codes of a form that has them: int4 and fp8. Raises ValueError."""
    name, _, group = form.partition("-g")
    codes = {"int4": "int4", "fp8": "fp8"}.get(name)
    if codes is None:
        raise ValueError(f"the form {form!r} has no codes in groups")
    return round_matrix(weight, cast("CodeForm", codes), int(group or 32))


def require_form(form: str) -> None:
    """Raise ValueError where there is no such form."""
    if form not in get_args(WeightForm):
        raise ValueError(f"a weight has no form {form!r}, only {', '.join(get_args(WeightForm))}")


def _joined(parts: Sequence[Matrix]) -> list[Matrix]:
    """Neighbours that are alike as one matrix each."""
    found: list[list[Matrix]] = []
    for part in parts:
        last = found[-1][-1] if found else None
        if isinstance(part, QuantizedMatrix):
            is_alike = isinstance(last, QuantizedMatrix) and part.is_like(last)
        else:
            is_alike = isinstance(last, Tensor)
        if is_alike:
            found[-1].append(part)
        else:
            found.append([part])
    return [join_rows(alike) for alike in found]


def join_rows(parts: Sequence[Matrix]) -> Matrix:
    """Join matrices that are alike, or all not quantized, along their outputs."""
    if len(parts) == 1:
        return parts[0]
    quantized = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if quantized:
        return QuantizedMatrix.cat(quantized, -2)
    return torch.cat([part for part in parts if isinstance(part, Tensor)], -2)


def runs_codes(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products multiply by codes there, rather than by weights that are dequantized once."""
    return native_ops.can_pack_codes(dtype, device) or (dtype in gpu.FLOAT_DTYPES and gpu.multiplies_codes(device))


def copies(device: torch.device, dtype: torch.dtype, form: WeightForm = "plain") -> bool:
    """Whether ``pack`` keeps a copy of a weight rather than the weight."""
    if form != "plain":
        return True
    if device.type != "cpu":  # nothing is allocated there to find out
        return False
    weight = torch.empty(1, 1, dtype=dtype)
    return native_ops.can_pack(weight, form) or torch_ops.can_pack(weight)


def has_fast_int8(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the int8 form is known to multiply a few rows of this dtype faster than the plain one; see README.md.

    On a GPU it reads half the bytes, but its speed there has not been measured, so it does not count as faster.
    """
    return device.type == "cpu" and dtype is torch.bfloat16 and native_ops.code() is not None
