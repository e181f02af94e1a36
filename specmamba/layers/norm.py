"""Root-mean-square normalisation, computed in float32."""

from torch import Tensor

from specmamba.kernels import rowwise


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the result has x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: [D], or [H, D] for heads; for families that store w - 1, the caller has added the 1."""
        self.weight = weight.float()
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] or [..., H, D] -> the same."""
        return rowwise.rms_norm(x, self.weight, self._eps)
