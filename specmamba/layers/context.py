"""What one forward carries through all layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.cache.access import PagedKV
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.primitives import RotaryAngles


class StateView(Protocol):
    """Recurrent states as one forward sees them."""

    def operands(self, layer: int) -> StateOperands:
        """Where a state layer finds its states, and what it leaves there; the same rows and tokens in every layer."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward over tokens [B, L]: the cache as these tokens see it, and their positions."""

    kv: PagedKV
    state: StateView | None  # None for draft heads, which have no recurrent layer
    positions: Tensor  # [B, L] int64


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A forward's context with what is computed once for all its attention layers."""

    kv: PagedKV
    state: StateView | None
    rotary: RotaryAngles | None  # None in models that do not rotate
