"""What one forward carries through all layers."""

from dataclasses import dataclass

from torch import Tensor

from specmamba.cache.access import PagedKV, StateAccess
from specmamba.layers.primitives import RotaryAngles


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One forward over tokens [B, L]: the cache as these tokens see it, and where they stand."""

    kv: PagedKV
    state: StateAccess | None  # None for draft heads, which have no recurrent layer
    positions: Tensor  # [B, L] int64


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A forward's context with what is computed once for all its attention layers."""

    kv: PagedKV
    state: StateAccess | None
    rotary: RotaryAngles | None  # None in models that do not rotate
