"""Matrix product with a weight in PyTorch: what runs where there is no native code. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


class PlainWeight:
    """The weight as it is; for every device and dtype."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [N, K]."""
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        return F.linear(x, self._weight)


class OneDNNWeight:
    """A bf16 weight in oneDNN's blocked layout.

    The plain call repacks the weight at every use, which costs more than the product itself at decode sizes.
    """

    def __init__(self, weight: Tensor) -> None:
        """weight: [N, K] bfloat16 on a CPU that ``can_pack``; not kept."""
        self._multiply = torch.ops.mkldnn._linear_pointwise.default
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] bfloat16 -> [..., N]."""
        y: Tensor = self._multiply(x, self._weight, None, "none", [], "")
        return y


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN can hold this weight packed: bf16, on a CPU that multiplies bf16."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(weight: Tensor) -> PlainWeight | OneDNNWeight:
    """The fastest form that PyTorch has for a weight [N, K]."""
    return OneDNNWeight(weight) if can_pack(weight) else PlainWeight(weight)
