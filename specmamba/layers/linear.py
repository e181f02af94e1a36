"""Matrix products with weights laid out for the device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class Linear:
    """y = x W^T without bias.

    On a CPU with bf16 arithmetic the weight is packed once into oneDNN's blocked layout: the plain call repacks it at
    every use, which costs more than the product itself at decode sizes.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in]; not kept when a packed copy takes its place."""
        self._packed: Any = None  # the product with a packed weight
        self._weight = weight
        if can_pack(weight):
            self._packed = torch.ops.mkldnn._linear_pointwise.default
            self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self._packed is not None:
            y: Tensor = self._packed(x, self._weight, None, "none", [], "")
            return y
        return F.linear(x, self._weight)


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: bf16, on a CPU that multiplies bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
