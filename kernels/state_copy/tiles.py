"""Block sizes of the record moves, and what of them is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

from specmamba.kernels.gpu import Variant, next_power_of_2


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
    """Of a launch."""
    return {"BLOCK_J": tile.moves, "BLOCK_E": tile.elements}


def variants() -> list[Variant]:
    """Keys and updates in float32, decays of a few heads, convolution inputs in bfloat16."""
    cases = [(2, 4096, 32), (8, 4096, 32), (16, 4096, 32), (64, 4096, 32), (16, 32, 32), (16, 8192, 16), (64, 8192, 16)]
    return [_variant(*case) for case in cases]


def _variant(num_moves: int, size: int, bits: int) -> Variant:
    from specmamba.kernels.state_copy.triton_kernels import compact_kernel

    tile = tile_for(num_moves, size, bits // 8)
    sizes = constexprs(tile)
    types = {"buffer": f"*i{bits}", **dict.fromkeys(("rows", "source", "target"), "*i64")}
    types |= dict.fromkeys(sizes, "constexpr")
    signature = {x: types.get(x, "i32") for x in compact_kernel.arg_names}
    name = f"compact {bits} bits J={num_moves} E={size}"
    return Variant(name, compact_kernel, signature, sizes, tile.num_warps, tile.num_stages)
