"""Matrix products with weights laid out for the device."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.native import library


class Linear:
    """y = x W^T without bias."""

    def __init__(self, weight: Tensor) -> None:
        """weight: [out, in]; not kept when a packed copy takes its place."""
        if weight.device.type == "cpu":
            library.preload()
        self._product = linear.pack(weight)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        return self._product(x)
