"""Block sizes of the rotary Triton kernel, and what of it is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass

from specmamba.kernels.gpu import Variant, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """Tokens and components in one block."""

    tokens: int
    columns: int
    num_warps: int = 4
    num_stages: int = 1  # there are no loops to run ahead of


def tile_for(rotary_width: int) -> Tile:
    """Chosen, not measured: a thread has 4 angles of a head of 64 to 256 components."""
    columns = next_power_of_2(rotary_width)
    return Tile(max(1, 512 // columns), columns)


def constexprs(tile: Tile) -> dict[str, int]:
    """Of a launch."""
    return {"BLOCK_T": tile.tokens, "BLOCK_R": tile.columns}


def variants() -> list[Variant]:
    """Angles in both dtypes."""
    return [_angles("bf16", 64), _angles("fp32", 128)]


def _angles(dtype: str, width: int) -> Variant:
    from specmamba.kernels.rotary.triton_kernels import angles_kernel

    types = {"positions": "*i64", "frequencies": "*fp32", "cos": f"*{dtype}", "sin": f"*{dtype}", "scaling": "fp32"}
    tile = tile_for(width)
    sizes = constexprs(tile)
    signature = {x: "constexpr" if x in sizes else types.get(x, "i32") for x in angles_kernel.arg_names}
    return Variant(f"angles {dtype} R={width}", angles_kernel, signature, sizes, tile.num_warps, tile.num_stages)
