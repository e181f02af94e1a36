"""Block sizes of Triton's kernels, which calls Triton takes, and the variants that are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, can_launch, next_power_of_2
from specmamba.kernels.linear.tiles import DTYPES, TYPE_NAMES, Tile
from specmamba.kernels.moe import torch_ops
from specmamba.kernels.moe.reference import Groups

MAX_RANKED_PAIRS = 4096  # each pair compares itself with all the others: beyond, PyTorch's sort does less
NUM_WARPS, NUM_STAGES = 4, 3  # of sorting and summing
DISPATCH_BLOCKS = {"BLOCK_P": 512, "BLOCK_K": 1024}
MANY_ROWS = 64  # of an expert, on average


def can_multiply(weight: Tensor) -> bool:
    """Whether Triton takes products with these experts."""
    return weight.numel() > 0 and weight.dtype in DTYPES and can_launch(weight)


def can_dispatch(x: Tensor, experts: Tensor) -> bool:
    """Whether Triton sorts rows of x: not too many pairs, for each is compared with all the others."""
    return x.dtype in DTYPES and experts.numel() <= MAX_RANKED_PAIRS and can_launch(x, experts)


def can_combine(y: Tensor, groups: Groups, weights: Tensor) -> bool:
    """Whether Triton sums rows of y."""
    return y.dtype in DTYPES and can_launch(y, groups.places, weights)


def takes_grouped_mm(weight: Tensor, num_pairs: int) -> bool:
    """Whether torch._grouped_mm rather than Triton multiplies num_pairs rows by a weight [E, N, K].

    With many rows per expert arithmetic counts, which CUTLASS schedules better than blocks of pointers; with few the
    bytes of weights do, and its tiles of 64 rows and more are nearly empty. Neither is measured. Both can be captured:
    where PyTorch would ask the device where groups end, Triton does everything.
    """
    has_many = num_pairs >= MANY_ROWS * len(weight)
    return has_many and torch_ops.can_group(weight) and torch_ops.is_grouped_on_device(weight)


def product_tile(dtype: torch.dtype, num_pairs: int, num_experts: int) -> Tile:
    """For num_pairs rows of a dtype in unknown groups; the same for int8 weights, which are widened in registers.

    Chosen from what fits into registers and 64 KiB of shared memory, not measured. What can be known without asking the
    device is how many rows an expert has on average. Few: the least height there is, for weights are read once for
    every block of rows. Float32 is multiplied without tensor cores, by threads that hold their operands in registers.
    """
    has_few = num_pairs <= 16 * num_experts
    if dtype is torch.float32:
        return Tile(16 if has_few else 32, 32, 32, 4, 3)
    return Tile(16, 64, 128, 4, 3) if has_few else Tile(64, 128, 64, 4, 3)


def product_constants(
    tile: Tile, width: int, dtype: torch.dtype, num_experts: int, is_interpreted: bool = False
) -> dict[str, Any]:
    """Constants of a product for inputs of this width and dtype."""
    return {"BLOCK_E": next_power_of_2(num_experts), **tile.constants(width, dtype, is_interpreted)}


def num_row_blocks(num_pairs: int, num_experts: int, rows: int) -> int:
    """The most blocks of so many rows that num_pairs pairs can need: sum of ceil(pairs of e / rows) over active e."""
    num_active = min(num_pairs, num_experts)
    return (num_pairs + num_active * (rows - 1)) // rows


def combine_block(num_tokens: int, width: int) -> int:
    """Columns of a program: few where there are few tokens, so that many programs share the reading."""
    return min(next_power_of_2(width), 256 if num_tokens <= 64 else 1024)


def variants() -> list[Variant]:
    """Products of a decode step and of a long extend, in each form that has a tile of its own; sorting and summing."""
    return [
        _product(torch.bfloat16, torch.bfloat16, 64),
        _product(torch.bfloat16, torch.bfloat16, 16384),
        _product(torch.bfloat16, torch.int8, 64),
        _product(torch.bfloat16, torch.int8, 16384),
        _product(torch.float32, torch.float32, 64),
        _product(torch.float32, torch.float32, 16384),
        _dispatch(),
        _combine(),
    ]


def _product(dtype: torch.dtype, stored: torch.dtype, num_pairs: int, num_experts: int = 128) -> Variant:
    from specmamba.kernels.moe import triton_kernels

    tile, name = product_tile(dtype, num_pairs, num_experts), TYPE_NAMES[dtype]
    is_int8 = stored is torch.int8
    pointers = {"x": name, "weight": TYPE_NAMES[stored], "scale": "fp32", "ends": "i32", "y": name}
    constants = product_constants(tile, 2048, dtype, num_experts) | ({} if is_int8 else {"scale": None})
    form = f"multiply {name}{' int8' if is_int8 else ''} P={num_pairs}"
    return _variant(form, triton_kernels.multiply, pointers, constants, tile.num_warps, tile.num_stages)


def _dispatch() -> Variant:
    from specmamba.kernels.moe import triton_kernels

    pointers = {"x": "bf16", "experts": "i64", "rows": "bf16", "places": "i64", "ends": "i32"}
    return _variant("dispatch bf16", triton_kernels.dispatch, pointers, DISPATCH_BLOCKS)


def _combine() -> Variant:
    from specmamba.kernels.moe import triton_kernels

    pointers = {"y": "bf16", "places": "i64", "weights": "fp32", "out": "bf16"}
    constants = {"NUM_CHOSEN": 8, "BLOCK_N": combine_block(16384, 2048)}
    return _variant("combine bf16 k=8", triton_kernels.combine, pointers, constants)


def _variant(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = NUM_WARPS,
    num_stages: int = NUM_STAGES,
) -> Variant:
    """All arguments that are neither pointers nor constants are 32-bit integers."""
    signature = {
        argument: "constexpr" if argument in constants else f"*{pointers[argument]}" if argument in pointers else "i32"
        for argument in kernel.arg_names
    }
    # the weights of a token's experts are few
    return Variant(name, kernel, signature, constants, num_warps, num_stages, frozenset({"weights_stride"}))
