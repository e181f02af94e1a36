"""Products with packed weights in Triton: block sizes, launches, variants compiled ahead of time. See README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import TYPE_NAMES, Variant, next_power_of_2
from specmamba.kernels.linear import torch_ops, triton_grouped, triton_scaled
from specmamba.kernels.linear.triton_grouped import pack_codes
from specmamba.kernels.linear.triton_kernels import multiply_int8
from specmamba.kernels.linear.triton_scaled import TritonScaledWeight

__all__ = [
    "Tile",
    "TritonInt8Weight",
    "TritonScaledWeight",
    "int8_tile",
    "multiply",
    "pack",
    "pack_codes",
    "variants",
]

MAX_TILE_ROWS = 64
MANY_ROWS = 256  # of 16 bits: more are a prompt's, and arithmetic takes longer than weights
# Float32 is multiplied without tensor cores: of more rows, PyTorch's product of a widened weight is faster by more than
# the widening takes. This was not measured.
MAX_ROWS_FP32 = 64


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
    by threads that hold their operands in registers: its tiles are small. Many rows have enough blocks of their own,
    which are as large as two tensors of 128 x 64 allow: every weight is read, and widened, once for 128 rows.
    """
    if num_rows > MANY_ROWS and dtype is not torch.float32:
        return Tile(128, 128 if num_outputs >= 2048 else 64, 64, 8, 3)
    rows = min(max(next_power_of_2(num_rows), 16), MAX_TILE_ROWS)
    if dtype is torch.float32:
        return Tile(min(rows, 32), 16 if num_outputs < 8192 else 32, 32, 4, 3)
    if num_outputs < 8192:
        return Tile(rows, 16, 128, 2, 4)
    return Tile(rows, 32 if num_outputs < 32768 else 64, 128 if rows < 64 else 64, 4, 4)


class TritonInt8Weight(torch_ops.Int8Weight):
    """An int8 weight that rows multiply as it is, a byte per weight; for many of float32 it is widened at every use."""

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]; 16 bits and few rows of float32 are rounded once, after the scale.

        Raises:
            ValueError: another width, or on another device.
        """
        n, k = self._weight.shape
        if not x.dim() or x.shape[-1] != k or x.device != self._weight.device:
            complaint = f"an int8 weight [{n}, {k}] on {self._weight.device} cannot multiply"
            raise ValueError(f"{complaint} {x.dtype} {list(x.shape)} on {x.device}")
        num_rows = x.numel() // k
        is_few_fp32 = x.dtype is torch.float32 and num_rows <= MAX_ROWS_FP32
        if not (is_few_fp32 or x.dtype in (torch.bfloat16, torch.float16)):
            return super().__call__(x)
        return multiply(x.reshape(num_rows, k), self._weight, self._scale).view(*x.shape[:-1], n)


def pack(weight: Tensor, form: str = "int8") -> TritonInt8Weight | TritonScaledWeight:
    """Round a weight [N, K], not empty, to int8, or to fp8-dynamic where its sizes allow."""
    if form == "fp8-dynamic":
        return TritonScaledWeight.rounded(weight)
    assert form == "int8"
    return TritonInt8Weight(weight)


def multiply(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """y[m, n] = scale[n] sum_k x[m, k] weight[n, k], summed in float32 and rounded once.

    Args:
        x: [M, K] float32, bfloat16 or float16.
        weight: [N, K] int8, contiguous.
        scale: [N] float32.

    Returns:
        [M, N] in x's dtype.
    """
    (m, k), n = x.shape, len(weight)
    y = x.new_empty(m, n)
    if not m:
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    tile = int8_tile(x.dtype, m, n)
    grid = -(-n // tile.outputs), -(-m // tile.rows)
    multiply_int8[grid](
        *(x, weight, scale, y, m, n, k, x.stride(0), k, n),
        **tile.constants(k, x.dtype, is_interpreted=x.is_cpu),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return y


def variants() -> list[Variant]:
    """A decode step, a verify of many rows and a prompt, at the widths of a layer and of an output head."""
    return [
        _int8_variant(dtype, rows, outputs)
        for dtype, rows, outputs in (
            (torch.bfloat16, 1, 2048),
            (torch.bfloat16, 16, 12288),
            (torch.bfloat16, 64, 151936),
            (torch.bfloat16, 1024, 1024),
            (torch.bfloat16, 1024, 12288),
            (torch.float16, 32, 4096),
            (torch.float16, 1024, 12288),
            (torch.float32, 16, 2048),
            (torch.float32, 64, 151936),
        )
    ] + [*triton_grouped.variants(), *triton_scaled.variants()]


def _int8_variant(dtype: torch.dtype, num_rows: int, num_outputs: int) -> Variant:
    tile, name = int8_tile(dtype, num_rows, num_outputs), TYPE_NAMES[dtype]
    constants = tile.constants(2048, dtype)
    sizes = ("M", "N", "K", "x_stride", "weight_stride", "y_stride")
    signature = {"x": f"*{name}", "weight": "*i8", "scale": "*fp32", "y": f"*{name}"}
    return Variant(
        name=f"multiply_int8 {name} M={num_rows} N={num_outputs}",
        kernel=multiply_int8,
        signature=signature | dict.fromkeys(sizes, "i32") | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
