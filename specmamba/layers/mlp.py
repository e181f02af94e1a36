"""Gated feed-forward layer (SwiGLU, arXiv 2002.05202)."""

from torch import Tensor

from specmamba.kernels import rowwise
from specmamba.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: [2 I, H], gate rows first; down: [H, I]."""
        self._gate_up = Linear(gate_up)
        self._down = Linear(down)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        return self._down(rowwise.silu_mul(self._gate_up(x)))
