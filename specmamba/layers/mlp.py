"""Gated feed-forward layer (SwiGLU, arXiv 2002.05202)."""

import torch
from torch import Tensor
from torch.nn import functional as F

from specmamba.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up: [2 I, H], gate rows first; down: [H, I]."""
        self._gate_up = Linear(gate_up)
        self._down = Linear(down)

    def __call__(self, x: Tensor) -> Tensor:
        gate_up = self._gate_up(x)
        gate, up = torch.split_with_sizes(gate_up, [gate_up.shape[-1] // 2] * 2, -1)
        return self._down(F.silu(gate) * up)
