"""Block sizes of Triton's int8 product, and its variants that are compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specmamba.kernels.gpu import Variant, next_power_of_2

MAX_ROWS = 64  # beyond, the weight is widened once and multiplied by PyTorch: arithmetic counts more than bytes
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of inputs
TYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8"}


@dataclass(frozen=True)
class Tile:
    """A program's share of a product, and how it is run."""

    rows: int
    outputs: int
    inputs: int  # read at once
    num_warps: int
    num_stages: int  # the most blocks of inputs and weights that are loading or in use

    def constants(self, width: int, dtype: torch.dtype, is_interpreted: bool = False) -> dict[str, Any]:
        """Constants of ``dot_rows`` for inputs of this width and dtype."""
        return {
            "BLOCK_M": self.rows,
            "BLOCK_N": self.outputs,
            "BLOCK_K": self.inputs,
            "IS_EVEN": width % self.inputs == 0,
            "IS_WIDE": is_interpreted and dtype is torch.bfloat16,
        }


def int8_tile(dtype: torch.dtype, num_rows: int, num_outputs: int) -> Tile:
    """For inputs [num_rows, K] of a dtype and a weight [num_outputs, K].

    Chosen from what fits into registers and 64 KiB of shared memory, not measured. A GPU has 80 to 300 processors, and
    weights should flow into all of them, so few outputs make narrow tiles. Float32 is multiplied without tensor cores,
    by threads that hold their operands in registers: its tiles are small.
    """
    rows = min(max(next_power_of_2(num_rows), 16), MAX_ROWS)
    if dtype is torch.float32:
        return Tile(min(rows, 32), 16 if num_outputs < 8192 else 32, 32, 4, 3)
    if num_outputs < 8192:
        return Tile(rows, 16, 128, 2, 4)
    return Tile(rows, 32 if num_outputs < 32768 else 64, 128 if rows < 64 else 64, 4, 4)


def variants() -> list[Variant]:
    """A decode step and a verify of many rows, at the widths of a layer and of an output head."""
    return [
        _int8_variant(dtype, rows, outputs)
        for dtype, rows, outputs in (
            (torch.bfloat16, 1, 2048),
            (torch.bfloat16, 16, 12288),
            (torch.bfloat16, 64, 151936),
            (torch.float16, 32, 4096),
            (torch.float32, 16, 2048),
            (torch.float32, 64, 151936),
        )
    ]


def _int8_variant(dtype: torch.dtype, num_rows: int, num_outputs: int) -> Variant:
    from specmamba.kernels.linear import triton_kernels

    tile, name = int8_tile(dtype, num_rows, num_outputs), TYPE_NAMES[dtype]
    constants = tile.constants(2048, dtype)
    sizes = ("M", "N", "K", "x_stride", "weight_stride", "y_stride")
    signature = {"x": f"*{name}", "weight": "*i8", "scale": "*fp32", "y": f"*{name}"}
    return Variant(
        name=f"multiply_int8 {name} M={num_rows} N={num_outputs}",
        kernel=triton_kernels.multiply_int8,
        signature=signature | dict.fromkeys(sizes, "i32") | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
