"""The context that one forward passes to all layers."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specmamba.cache.access import PagedKV
from specmamba.core import Packing
from specmamba.kernels.native.live import live_rows
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
    packing: Packing | None = None  # None: products run on all B * L tokens


@dataclass(frozen=True, slots=True)
class LayerContext:
    """A forward's context with what is computed once for all its attention layers."""

    kv: PagedKV
    state: StateView | None
    rotary: RotaryAngles | None  # None in models that do not rotate
    packing: Packing | None = None
    window_rotary: RotaryAngles | None = None  # of attention with a window; None: as of other attention

    def pack(self, x: Tensor) -> Tensor:
        """[B, L, ...] -> what products run on: [1, T, ...], or x itself."""
        return x if self.packing is None else self.packing.pack(x)

    def unpack(self, x: Tensor) -> Tensor:
        """Invert ``pack``; what was padding gets values of some token."""
        return x if self.packing is None else self.packing.unpack(x, self.kv.batch_size)


def without_padding(packing: Packing | None) -> AbstractContextManager[None]:
    """Inside, native products leave out what is behind the last packed token."""
    return nullcontext() if packing is None else live_rows(packing.num_packed, packing.num_live)
