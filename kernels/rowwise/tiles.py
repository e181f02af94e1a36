"""Block sizes of the row-wise Triton kernels, and what of them is compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specmamba.kernels.gpu import Variant, next_power_of_2


@dataclass(frozen=True)
class Tile:
    """Rows (heads, or whole tokens) and their columns in one block."""

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # there are no loops to run ahead of


SILU_COLUMNS = 1024


def row_tile(width: int, num_rows: int = 1 << 30) -> Tile:
    """For whole rows; chosen, not measured: a warp has a head, a thread at most 32 numbers of a row of up to 16384."""
    columns = next_power_of_2(width)
    rows = min(max(1, 512 // columns), next_power_of_2(num_rows))
    return Tile(rows, columns, num_warps=min(16, max(1, rows * columns // 512 if rows == 1 else 4)))


def silu_tile(width: int) -> Tile:
    """For parts of one row; chosen, not measured: a thread has 8 numbers of either half."""
    columns = min(SILU_COLUMNS, next_power_of_2(width))
    return Tile(1, columns, num_warps=max(1, columns // 256))


def variants() -> list[Variant]:
    """Norms of hidden states, heads and states, and one of each of the others, at the sizes of a 4096-wide model."""
    return [
        _norm("rms_norm bf16 D=4096", 4096, x="bf16", y="bf16"),
        _norm("rms_norm bf16 D=128", 128, x="bf16", y="bf16"),
        _norm("rms_norm fp32 D=4096", 4096, x="fp32", y="fp32"),
        _norm("gated_rms_norm bf16 D=128", 128, x="fp32", gate="bf16", y="bf16"),
        _silu("silu_mul bf16", 12288, "bf16"),
        _rotate("rotate bf16 D=256", 256, "bf16"),
        _delta("delta_inputs bf16 K=128", 128, 32, 32),
    ]


def _norm(name: str, width: int, **pointers: str) -> Variant:
    from specmamba.kernels.rowwise.triton_kernels import norm_kernel

    return _variant(name, norm_kernel, {**pointers, "weight": "fp32"}, row_tile(width), ("BLOCK_ROWS", "BLOCK_D"))


def _silu(name: str, width: int, dtype: str) -> Variant:
    from specmamba.kernels.rowwise.triton_kernels import silu_mul_kernel

    return _variant(name, silu_mul_kernel, {"gate_up": dtype, "y": dtype}, silu_tile(width), ("", "BLOCK"))


def _rotate(name: str, width: int, dtype: str) -> Variant:
    from specmamba.kernels.rowwise.triton_kernels import rotate_kernel

    pointers = dict.fromkeys(("x", "cos", "sin", "y"), dtype)
    return _variant(name, rotate_kernel, pointers, row_tile(width), ("BLOCK_ROWS", "BLOCK_D"))


def _delta(name: str, key_dim: int, num_heads: int, num_value_heads: int) -> Variant:
    from specmamba.kernels.rowwise.triton_kernels import delta_inputs_kernel

    pointers = {"mixed": "fp32", "a": "bf16", "b": "bf16", **dict.fromkeys(("negative_a", "dt_bias"), "fp32")}
    results, blocks = dict.fromkeys(("q", "k", "g", "beta"), "fp32"), ("BLOCK_HEADS", "BLOCK_K")
    more = {"BLOCK_V": next_power_of_2(num_value_heads)}
    return _variant(name, delta_inputs_kernel, {**pointers, **results}, row_tile(key_dim, num_heads), blocks, more)


def _variant(
    name: str,
    kernel: Any,
    pointers: Mapping[str, str],
    tile: Tile,
    blocks: tuple[str, str],
    more: Mapping[str, int] | None = None,
) -> Variant:
    """``blocks`` are the kernel's names for the rows and the columns of a tile."""
    sizes = {name: size for name, size in zip(blocks, (tile.rows, tile.columns), strict=True) if name}
    constants: dict[str, Any] = {**sizes, **(more or {})}
    if "gate" in kernel.arg_names and "gate" not in pointers:
        constants["gate"] = None
    types = {x: f"*{pointers[x]}" if x in pointers else "i32" for x in kernel.arg_names}
    types.update({x: "fp32" for x in ("eps", "query_scale") if x in types})
    signature = {x: "constexpr" if x in constants else of for x, of in types.items()}
    return Variant(name, kernel, signature, constants, tile.num_warps, tile.num_stages)
