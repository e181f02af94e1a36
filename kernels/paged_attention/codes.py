"""Keys and values as codes of 8 bits: int8 or FP8 (e4m3), with a float32 scale for every token and key head.

    scale = max |x| (1 / c)     code = round(x (c / max |x|))     x ~ code scale     c = 127 (int8), 448 (FP8)

over the D numbers x of one head; every operation is rounded to float32. Scales are float32: a scale of 16 bits would
save 2 of D + 4 bytes, but would overflow or vanish where the model's own numbers do not, and would round every number
of the head once more.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

# Dtype of codes -> the largest of them.
LARGEST: Mapping[torch.dtype, float] = MappingProxyType({torch.int8: 127.0, torch.float8_e4m3fn: 448.0})
# Heads whose numbers are all smaller are stored as zeros: the inverse of their scale would not be finite.
SMALLEST = 2.0**-116


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of heads, and their scales. Every form of ``attend_layer`` stores the same codes, bit for bit.

    Args:
        x: [..., D] in any floating dtype; numbers that are not finite count as 0.
        dtype: of the codes, a key of ``LARGEST``.

    Returns:
        Codes [..., D] in ``dtype`` and scales [...] float32.
    """
    x = x.float().nan_to_num(0.0, 0.0, 0.0)
    most = x.abs().amax(-1)
    is_zero = most < SMALLEST
    inverse = torch.full_like(most, LARGEST[dtype]) / most  # PyTorch rounds the quotient of a Python number twice
    codes = torch.where(is_zero[..., None], 0.0, x * inverse[..., None])
    codes = codes.round().to(dtype) if dtype is torch.int8 else codes.to(dtype)
    return codes, torch.where(is_zero, 0.0, most * (1.0 / LARGEST[dtype]))


def dequantize(codes: Tensor, scales: Tensor) -> Tensor:
    """Return the numbers [..., D] float32 that codes [..., D] and scales [...] stand for."""
    return codes.float() * scales[..., None]


def as_bytes(x: Tensor) -> Tensor:
    """View FP8 as uint8, as PyTorch's indexed copies do not know FP8; other tensors are returned as they are."""
    return x.view(torch.uint8) if x.dtype is torch.float8_e4m3fn else x
