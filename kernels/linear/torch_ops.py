"""Matrix product with a weight in PyTorch, where there is no native code. See README.md."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels.linear.rounding import round_matrix


class _Product(Protocol):
    nbytes: int

    def __call__(self, x: Tensor, /) -> Tensor: ...


SCALED_SIZES = 16  # what N and K of PyTorch's product in FP8 are multiples of
LARGEST_E4M3 = 448.0
_ROWS_AT_ONCE = 4096  # of a weight that is quantized: float32 copies of all rows would need several times its memory


class PlainWeight:
    """The weight as it is; for every device and dtype."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [N, K]."""
        self._weight, self.nbytes = weight, weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return F.linear(x, self._weight)

    def rows(self, index: Tensor) -> Tensor:
        """[...] int64 -> [..., K]."""
        return F.embedding(index, self._weight)


class OneDNNWeight:
    """A bf16 weight in oneDNN's blocked layout.

    The plain call repacks the weight at every use, which costs more than the product itself at decode sizes.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: [N, K] bfloat16 on a CPU that ``can_pack``; not kept."""
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.nbytes = weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 -> [..., N]."""
        y: Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return y


class Int8Weight:
    """An int8 weight as ``quantize`` gives it, for every device and dtype.

    bf16 and float32 on a CPU take PyTorch's own product with int8, which reads one byte per weight. Elsewhere the
    weight is widened at every use: that saves memory, not time.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: [N, K], not empty, not kept."""
        self._weight, self._scale = quantize(weight)
        self.nbytes = self._weight.nbytes + self._scale.nbytes
        # a width that PyTorch's product takes; with others it reads beyond the weight
        self._can_multiply = weight.device.type == "cpu" and weight.shape[1] % 32 == 0

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]; bf16 and float32 are rounded once before the scale and once after."""
        if x.dtype not in (torch.bfloat16, torch.float32):  # in float16, sums without their scale could overflow
            return F.linear(x, (self._weight * self._scale[:, None]).to(x.dtype))
        if self._can_multiply and x.numel():
            ones = x.new_ones(len(self._scale))
            y = torch._weight_int8pack_mm(x.reshape(-1, x.shape[-1]).contiguous(), self._weight, ones)
            return y.mul_(self._scale).view(*x.shape[:-1], -1)
        return F.linear(x, self._weight.to(x.dtype)).mul_(self._scale)


class ScaledWeight:
    """A weight in float8 e4m3 that inputs are rounded to FP8 for as well: PyTorch's own product of the two.

    Its sums depend on how many rows there are, in the last bits of float32.
    """

    def __init__(self, codes: Tensor, scale: Tensor) -> None:
        """codes: [N, K] float8 e4m3, both multiples of ``SCALED_SIZES``; scale: [N, 1] float32."""
        self._weight, self._scale = codes.contiguous().t(), scale.t().contiguous()
        self.nbytes = codes.nbytes + scale.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 -> [..., N]; a row with NaN or infinity gives NaN."""
        if not x.numel():
            return x.new_empty(*x.shape[:-1], self._weight.shape[1])
        codes, scale = self.round_rows(x.reshape(-1, x.shape[-1]))
        y: Tensor = torch._scaled_mm(codes, self._weight, scale, self._scale, out_dtype=x.dtype)
        return y.view(*x.shape[:-1], -1)

    @classmethod
    def rounded(cls, weight: Tensor) -> Self:
        """Round a weight [N, K] that ``can_scale``."""
        matrix = round_matrix(weight, "fp8")
        return cls(matrix.codes.view(torch.float8_e4m3fn), matrix.scale)

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows [M, K] to e4m3: codes [M, K] and scales [M, 1] float32; NaN where a row is not finite."""
        largest = rows.abs().amax(1, keepdim=True).float()
        divisor = torch.full_like(largest, LARGEST_E4M3)  # by a Python number, a GPU multiplies by its reciprocal
        scale = torch.where(largest == 0, torch.ones_like(largest), largest / divisor)
        return (rows.float() / scale).to(torch.float8_e4m3fn), scale


class ShapeOfCodes:
    """What stands for a weight in codes, or those of experts, where there are shapes without values."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def __call__(self, *_: object) -> Tensor:
        """Raise ValueError."""
        raise ValueError("a weight without values cannot multiply")

    def rows(self, index: Tensor) -> Tensor:
        """Raise ValueError."""
        raise ValueError("a weight without values has no rows")


class JoinedWeight:
    """Products of the same inputs, whose outputs lie side by side."""

    def __init__(self, products: Sequence[_Product]) -> None:
        """products: each from ``pack`` or ``pack_codes``."""
        self._products = tuple(products)
        self.nbytes = sum(product.nbytes for product in products)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return torch.cat([product(x) for product in self._products], -1)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a weight [N, K] to int8 as ``reference.quantize`` does; not empty, on any device."""
    q = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scale = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for part, q_part, scale_part in zip(*(t.split(_ROWS_AT_ONCE) for t in (weight, q, scale)), strict=True):
        values = part.float()
        scale_part.copy_(values.abs().amax(-1) / 127)
        ratio = (values / scale_part[:, None]).nan_to_num_(0.0, 0.0, 0.0)
        q_part.copy_(ratio.round_().clamp_(-127, 127))
    return q, scale


def can_scale(weight: Tensor) -> bool:
    """Whether ``ScaledWeight`` takes a weight of this shape."""
    return weight.numel() > 0 and not any(size % SCALED_SIZES for size in weight.shape)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: bf16, on a CPU that multiplies bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not weight.numel():
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> PlainWeight | OneDNNWeight:
    """The fastest form that PyTorch has for a weight [N, K]."""
    return OneDNNWeight(weight) if can_pack(weight) else PlainWeight(weight)
