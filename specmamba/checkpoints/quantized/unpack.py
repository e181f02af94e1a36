"""Whole numbers of 4 and 8 bits out of the words that checkpoints pack them into, and the values of code tables.

Shapes: a word of 32 bits holds P = 32 / bits numbers, the first one in its lowest bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where the numbers 0, 1, 2 ... of eight lie in a word


def from_words(words: Tensor, bits: int) -> Tensor:
    """Unpack words [..., W] int32 to numbers [..., W P] uint8."""
    as_bytes = words.contiguous().view(torch.uint8)
    return as_bytes if bits == 8 else from_bytes(as_bytes)


def from_bytes(pairs: Tensor) -> Tensor:
    """Unpack bytes [..., B] uint8 to numbers of 4 bits [..., 2 B] uint8, the one in the low bits first."""
    return torch.stack([pairs & 15, pairs >> 4], -1).flatten(-2)


def from_awq_words(words: Tensor) -> Tensor:
    """Unpack words [..., W] int32, in AWQ's order, to numbers of 4 bits [..., 8 W] uint8."""
    numbers: Tensor = from_words(words, 4).unflatten(-1, (-1, 8))
    return numbers[..., list(AWQ_ORDER)].flatten(-2)


def e2m1_values() -> Tensor:
    """What the codes 0 ... 15 of float4 e2m1 mean: [16] float32 (Open Compute Project, MX 1.0, section 5.3.3)."""
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    return torch.cat([positive, -positive])


def from_e8m0(exponents: Tensor) -> Tensor:
    """Powers of two from 2**-127 on, as float32: exponents uint8; NaN at 255 (MX 1.0, section 5.4.1)."""
    powers = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int() - 127)
    return powers.masked_fill(exponents == 255, torch.nan)
