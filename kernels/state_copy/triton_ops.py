"""Row moves in Triton: one launch for all layers and rows. See README.md."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, launch, next_power_of_2, num_blocks
from specmamba.kernels.state_copy.triton_kernels import compact_kernel

_SAME_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # bits are moved, whatever they mean


@dataclass(frozen=True)
class Tile:
    """One program holds ``moves`` entries of ``elements`` elements each in registers."""

    moves: int
    elements: int
    num_warps: int = 4
    num_stages: int = 1  # everything is read before anything is written


def tile_for(num_moves: int, size: int, itemsize: int) -> Tile:
    """For moves of entries of ``size`` elements of ``itemsize`` bytes each.

    Chosen so that a thread holds at most 128 bytes, 32 registers, and reads up to 16 of them at once; not measured.
    """
    moves = max(next_power_of_2(num_moves), 2)
    most = max(128 * 128 // (moves * itemsize), 32)
    return Tile(moves, min(max(next_power_of_2(size), 32), most, 1024))


def constexprs(tile: Tile) -> dict[str, int]:
    """Constants of a launch."""
    return {"BLOCK_J": tile.moves, "BLOCK_E": tile.elements}


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
    launch(
        *(compact_kernel, (num_blocks(size, tile.elements), batch, layers), tile, constexprs(tile)),
        *(entries, rows.contiguous(), source.contiguous(), target.contiguous(), moves, size, *entries.stride()[:3]),
    )


def _as_integers(buffer: Tensor) -> Tensor:
    """The same memory as [layers, rows, R, size] of integers."""
    flat = buffer.flatten(3) if buffer.dim() > 3 else buffer[..., None]
    is_view = flat.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    if not is_view or (flat.stride(3) != 1 and flat.shape[3] > 1) or flat.element_size() not in _SAME_SIZE:
        raise ValueError(f"entries of {tuple(buffer.shape[3:])} {buffer.dtype} are not contiguous")
    return flat.view(_SAME_SIZE[flat.element_size()])


def variants() -> list[Variant]:
    """Keys and updates in float32, decays of a few heads, convolution inputs in bfloat16."""
    cases = [(2, 4096, 32), (8, 4096, 32), (16, 4096, 32), (64, 4096, 32), (16, 32, 32), (16, 8192, 16), (64, 8192, 16)]
    return [_variant(*case) for case in cases]


def _variant(num_moves: int, size: int, bits: int) -> Variant:
    tile = tile_for(num_moves, size, bits // 8)
    types = {"buffer": f"*i{bits}", **dict.fromkeys(("rows", "source", "target"), "*i64")}
    return Variant.of(f"compact {bits} bits J={num_moves} E={size}", compact_kernel, types, constexprs(tile), tile)
