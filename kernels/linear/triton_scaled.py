"""FP8 weights whose inputs are rounded to FP8 in one launch; the product is PyTorch's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels.gpu import TYPE_NAMES, Variant, launch, next_power_of_2
from specmamba.kernels.linear import torch_ops
from specmamba.kernels.linear.triton_kernels import round_rows

MAX_BLOCK = 4096  # inputs of a row that a program has in registers at once


@dataclass(frozen=True)
class RowTile:
    """A program rounds one row, a block at a time, which it reads twice: the second time from a cache."""

    block: int
    num_warps: int
    num_stages: int = 1


def row_tile(width: int) -> RowTile:
    """Choose the block for rows of a width: a thread has 16 numbers. Not measured."""
    block = min(next_power_of_2(width), MAX_BLOCK)
    return RowTile(block, num_warps=max(1, block // 512))


class TritonScaledWeight(torch_ops.ScaledWeight):
    """As its base; the eleven operators that round inputs are one launch."""

    def round_rows(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Round rows [M, K] to e4m3: codes [M, K] and scales [M, 1] float32; NaN where a row is not finite."""
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        codes = torch.empty(rows.shape, dtype=torch.uint8, device=rows.device)
        scale = torch.empty(len(rows), 1, dtype=torch.float32, device=rows.device)
        tile = row_tile(rows.shape[1])
        arguments = rows, codes, scale, rows.shape[1], rows.stride(0)
        launch(round_rows, (len(rows),), tile, {"LARGEST": torch_ops.LARGEST_E4M3, "BLOCK_K": tile.block}, *arguments)
        return codes.view(torch.float8_e4m3fn), scale


def variants() -> list[Variant]:
    """Rows of a layer's and of an MLP's width, in bf16."""
    return [_variant(torch.bfloat16, width) for width in (2560, 9216)]


def _variant(dtype: torch.dtype, width: int) -> Variant:
    tile, name = row_tile(width), TYPE_NAMES[dtype]
    types = {"x": f"*{name}", "codes": "*u8", "scale": "*fp32"}
    constants = {"LARGEST": torch_ops.LARGEST_E4M3, "BLOCK_K": tile.block}
    return Variant.of(f"round_rows {name} K={width}", round_rows, types, constants, tile)
