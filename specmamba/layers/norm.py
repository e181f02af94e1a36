"""Root-mean-square normalisation, computed in float32."""

import torch
from torch import Tensor
from torch.nn import functional as F


class RMSNorm:
    """x / rms(x) * weight over the last dimension; the result has x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        """weight: float32, broadcast against x; for families that store w - 1, the caller has added the 1."""
        self.weight = weight.float()
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * self.weight).to(x.dtype)


class GatedRMSNorm(RMSNorm):
    """RMSNorm(x) * silu(gate), in the gate's dtype: the norm comes before the gate."""

    def gated(self, x: Tensor, gate: Tensor) -> Tensor:
        """x, gate: [..., D]; x float32."""
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        return (x * scale * self.weight * F.silu(gate.float())).to(gate.dtype)
