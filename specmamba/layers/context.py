"""The context that one forward passes to all layers."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.cache.access import PagedKV
from specmamba.kernels.state_records import StateOperands
from specmamba.layers.primitives import RotaryAngles


class StateView(Protocol):
    """Recurrent states, as the layers of one forward use them."""

    def operands(self, layer: int) -> StateOperands:
        """Return the states that a layer reads and the buffers it writes; rows and tokens are those of all layers."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward over tokens [B, L]: their view of the cache, and their positions."""

    kv: PagedKV
    state: StateView | None  # None for draft heads, which have no recurrent layer
    positions: Tensor  # [B, L] int64


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A forward's context with what is computed once for all its attention layers."""

    kv: PagedKV
    state: StateView | None
    rotary: RotaryAngles | None  # None in models that do not rotate
