"""Row moves in Triton: one launch for all layers and rows. See README.md."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.state_copy.tiles import constexprs, tile_for
from specmamba.kernels.state_copy.triton_kernels import compact_kernel

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits are moved, whatever they mean


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """One launch for all layers and rows; at most 64 moves of a row.

    Raises:
        ValueError: the elements of an entry are not contiguous, or have more than 8 bytes.
    """
    entries = _as_integers(buffer)
    (layers, _, _, size), (batch, moves) = entries.shape, source.shape
    if layers * size * batch * moves == 0:
        return
    tile = tile_for(moves, size, entries.element_size())
    compact_kernel[(-(-size // tile.elements), batch, layers)](
        *(entries, rows.contiguous(), source.contiguous(), target.contiguous(), moves, size, *entries.stride()[:3]),
        **constexprs(tile),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )


def _as_integers(buffer: Tensor) -> Tensor:
    """The same memory as [layers, rows, R, size] of integers."""
    flat = buffer.flatten(3) if buffer.dim() > 3 else buffer[..., None]
    is_view = flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    if not is_view or (flat.stride(3) != 1 and flat.shape[3] > 1) or flat.element_size() not in _SAME_SIZE:
        raise ValueError(f"entries of {tuple(buffer.shape[3:])} {buffer.dtype} do not lie side by side")
    return flat.view(_SAME_SIZE[flat.element_size()])
