"""Root-mean-square normalisation, computed in float32."""

import torch
from torch import Tensor
from torch.nn import functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the result has x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: float32, broadcast against x; for families that store w - 1, the caller has added the 1."""
        self.weight = weight.float()
        self._scale = InverseRoot(1.0 / weight.shape[-1], eps, weight.device)

    def __call__(self, x: Tensor) -> Tensor:
        return (x * self._scale(x)).mul_(self.weight).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * silu(gate), in the gate's dtype: the norm comes before the gate."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., D]; x float32."""
        return (x * self._scale(x)).mul_(self.weight).mul_(F.silu(gate.float())).to(gate.dtype)


class InverseRoot:
    """1 / sqrt(factor * sum(x^2) + eps) over the last dimension, in float32.

    At decode sizes a step is bound by the number of operators: one norm and one fused multiply-add take the place of
    square, sum, scale and add.
    """

    def __init__(self, factor: float, eps: float, device: torch.device) -> None:
        self._factor = factor
        self._eps = torch.tensor(eps, dtype=torch.float32, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., D] -> [..., 1]."""
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        return torch.addcmul(self._eps, norm, norm, value=self._factor).rsqrt_()
