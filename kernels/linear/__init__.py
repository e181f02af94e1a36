"""Matrix product with a weight that is laid out once for its device."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specmamba.kernels.linear import native_ops, torch_ops

__all__ = ["PackedWeight", "pack"]


class PackedWeight(Protocol):
    """y = x W^T without bias, in x's dtype."""

    def __call__(self, x: Tensor, /) -> Tensor:
        """[..., K] -> [..., N]."""


def pack(weight: Tensor) -> PackedWeight:
    """Lay out a weight [N, K] for multiplying.

    bf16 on a CPU is copied into native panels, or oneDNN's blocks where native code cannot be had; everything else
    stays as it is. Where a copy takes its place, the weight is not kept.
    """
    if weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and weight.numel():
        code = native_ops.code()
        if code is not None:
            return native_ops.NativeWeight(weight, code)
    return torch_ops.pack(weight)
