"""Feed-forward layers."""

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from specmamba.kernels import rowwise
from specmamba.layers.context import LayerContext
from specmamba.layers.linear import Linear


class GatedMLP:
    """down(silu(gate(x)) * up(x)), gate and up as one product (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        """gate_up: H -> 2 I, gates first; down: I -> H."""
        self._gate_up = gate_up
        self._down = down

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[..., H] -> [..., H]; asks for nothing of the context."""
        return self._down(rowwise.silu_mul(self._gate_up(x)))


class MLP:
    """down(activation(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: Callable[[Tensor], Tensor]) -> None:
        """up: H -> I; down: I -> H."""
        self._up, self._down, self._activation = up, down, activation

    def __call__(self, x: Tensor, context: LayerContext) -> Tensor:
        """[..., H] -> [..., H]; asks for nothing of the context."""
        return self._down(self._activation(self._up(x)))


def squared_relu(x: Tensor) -> Tensor:
    """relu(x)^2 (Primer, arXiv 2109.08668)."""
    return F.relu(x).square()
