"""Matrix products with weights laid out for the device."""

from __future__ import annotations

from torch import Tensor

from specmamba.kernels import linear
from specmamba.kernels.linear import WeightForm
from specmamba.kernels.native import library


class Linear:
    """y = x W^T + bias."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, form: WeightForm = "plain") -> None:
        """weight: [out, in]; not kept when a packed copy takes its place. bias: [out]. form: see ``linear.pack``."""
        if weight.device.type == "cpu":
            library.preload()
        self._product = linear.pack(weight, form)
        self._bias = bias
        self.nbytes = self._product.nbytes + (0 if bias is None else bias.nbytes)  # of what is kept

    def __call__(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]; the product is rounded to x's dtype before the bias is added."""
        y = self._product(x)
        return y if self._bias is None else y.add_(self._bias)
