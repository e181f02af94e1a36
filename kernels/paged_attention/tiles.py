"""How the Triton kernels of this op are cut up, and which of them are compiled ahead of time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch

from specmamba.kernels.gpu import TYPE_NAMES, Registers, Variant, next_power_of_2

MAX_SPLIT_QUERIES = 64  # per row: a draft tree's. Longer runs fill a GPU by themselves
MAX_SPLITS = 128
KEYS_OF_A_SPLIT = 128  # fewer are not worth a part of their own
WANTED_PROGRAMS = 264  # two for each multiprocessor of a large GPU
STORE_HEADS = 4  # of one token, in one program
COMBINE_SPLITS = 16  # loaded at once
NUM_WARPS = 4  # of the kernels without a product
MIN_BLOCK = 16  # of a product
PIECE = 16  # of a head in float32
MOST_REGISTERS = 255  # of a thread, with which two blocks of four warps run on a multiprocessor
LATENT_PIECE = 128  # of a latent key in 16 bits; more pieces are loaded ahead, into registers that do not suffice


@dataclass(frozen=True, slots=True)
class Tile:
    """Blocks of the attention kernel: rows are (query, query head of one key head) pairs."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int
    piece: int = 0  # components of a head in one product with keys; 0: all
    registers: Registers | None = None


def tile_of(num_rows: int, head_dim: int, value_dim: int, dtype: torch.dtype, is_split: bool, is_coded: bool) -> Tile:
    """The tile for heads of these widths: latents have values that are narrower than their keys."""
    if value_dim != head_dim:
        return latent_tile(num_rows, dtype, is_coded)
    return attend_tile(num_rows, head_dim, dtype, is_split, is_coded)


def latent_tile(num_rows: int, dtype: torch.dtype, is_coded: bool = False) -> Tile:
    """For latents: heads of 576 numbers, values of 512. Chosen without spills, not measured."""
    if dtype is torch.float32:
        return Tile(MIN_BLOCK, MIN_BLOCK, 8, 1, PIECE)
    rows = MIN_BLOCK if is_coded else min(max(MIN_BLOCK, next_power_of_2(num_rows)), 32)
    return Tile(rows, 32, 8, 1, LATENT_PIECE)


def attend_tile(num_rows: int, head_dim: int, dtype: torch.dtype, is_split: bool, is_coded: bool = False) -> Tile:
    """For products of ``num_rows`` rows of one key head, with numbers of a pool or with codes, which are widened.

    For heads of 256 numbers whose keys are split: with 16 rows the fastest of 6 tiles on an H200. With 32 rows one of
    64 keys took 0.91 of its time, and for 64 rows one block of 64 about 0.8; both spill registers. The others are not
    measured: larger ones spill on sm_80, sm_90 or gfx942, and keys and values of two stages fit into the 64 KiB of a
    CDNA3 workgroup. float32 has no matrix units here (products are IEEE), so heads are multiplied in pieces; untold,
    ptxas of CUDA 12.8 spills registers of it for the sake of a third block.
    """
    width = max(MIN_BLOCK, next_power_of_2(head_dim))
    rows = max(MIN_BLOCK, next_power_of_2(num_rows))
    if dtype is torch.float32:
        return Tile(min(rows, 32), 32 if width <= 128 else 16, 4, 1, PIECE, Registers(MOST_REGISTERS))
    if is_coded:  # widening takes registers of its own
        rows = min(rows, 64 if width <= 128 else 32) if is_split else 64
        return Tile(rows, 32 if width <= 64 else 16, 8 if rows * width >= 64 * 128 else 4, 2)
    if is_split:
        rows = min(rows, 64 if width <= 128 else 32)
        if width > 128:
            return Tile(rows, 32, 4, 3)
        return Tile(rows, 64 if width <= 64 else 32, 8 if rows * width >= 64 * 128 else 4, 2)
    if width <= 128:
        return Tile(128, 64 if width <= 64 else 32, 8, 2)
    return Tile(64, 32, 8, 1)


def num_splits(num_programs: int, num_keys: int) -> int:
    """Into how many parts the keys of every row are cut: never by what the rows really hold, which the device knows.

    Args:
        num_programs: that one part of all rows and heads takes.
        num_keys: bound of the keys of a row.
    """
    wanted = -(-WANTED_PROGRAMS // num_programs)
    return max(1, min(wanted, -(-num_keys // KEYS_OF_A_SPLIT), MAX_SPLITS))


# What a pool holds, as kernels name it; see triton_codes.py.
CODES: Mapping[torch.dtype, int] = MappingProxyType({torch.int8: 1, torch.float8_e4m3fn: 2})


def store_constexprs(
    query_heads: int,
    key_heads: int,
    head_dim: int,
    rotated: int,
    has_norm: bool,
    codes: int = 0,
    is_latent: bool = False,
) -> dict[str, Any]:
    """Constants of ``store_kernel``; ``rotated`` 0: no rotation."""
    return {
        "QUERY_HEADS": query_heads,
        "KEY_HEADS": key_heads,
        "VALUE_HEADS": 0 if is_latent else key_heads,
        "D": head_dim,
        "ROTATED": rotated,
        "HAS_NORM": has_norm,
        "CODES": codes,
        "BLOCK_H": STORE_HEADS,
        "BLOCK_D": next_power_of_2(head_dim),
    }


def attend_constexprs(
    tile: Tile,
    key_heads: int,
    group: int,
    head_dim: int,
    has_tree: bool,
    is_split: bool,
    has_gate: bool,
    is_wide: bool = False,
    codes: int = 0,
    value_dim: int | None = None,
    window: int = 0,
) -> dict[str, Any]:
    """Constants of ``attend_kernel``; ``group`` query heads read a key head. ``is_wide``: for the interpreter.

    ``value_dim``: None where values are as wide as keys.
    """
    value_dim = head_dim if value_dim is None else value_dim
    return {
        "KEY_HEADS": key_heads,
        "GROUP": group,
        "D": head_dim,
        "V": value_dim,
        "HAS_TREE": has_tree,
        "IS_SPLIT": is_split,
        "HAS_GATE": has_gate and not is_split,
        "CODES": codes,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.keys,
        "BLOCK_T": MIN_BLOCK,
        "BLOCK_D": max(MIN_BLOCK, next_power_of_2(head_dim)),
        "BLOCK_V": max(MIN_BLOCK, next_power_of_2(value_dim)),
        "PIECE": tile.piece,
        "IS_WIDE": is_wide,
        "WINDOW": window,
    }


def combine_constexprs(query_heads: int, value_dim: int, has_gate: bool) -> dict[str, Any]:
    """Constants of ``combine_kernel``."""
    return {
        "QUERY_HEADS": query_heads,
        "V": value_dim,
        "HAS_GATE": has_gate,
        "BLOCK_S": COMBINE_SPLITS,
        "BLOCK_V": next_power_of_2(value_dim),
    }


# strides over queries and positions, which may be few
_FEW = {"table_stride", "last_stride_b", "seen_stride_b", "seen_stride_n"}
UNALIGNED = frozenset({*_FEW, "k_scales_stride_t", "v_scales_stride_t"})  # and over the scales of a token's heads


# Kimi-Linear and Ling-3: queries, their type and that of codes
LATENTS = (
    (8, torch.bfloat16, None),
    (8, torch.bfloat16, torch.int8),
    (8, torch.float32, None),
    (2048, torch.bfloat16, None),
)


def variants() -> list[Variant]:
    """Layers as the families have them: (query heads, key heads, head size) of Falcon-H1, Granite 4, Qwen3-Next.

    Those with a window are LFM3's.
    """
    return [
        store_variant(16, 2, 256, 64, torch.bfloat16),
        attend_variant(1, 8, 2, 64, torch.bfloat16, has_tree=False),
        attend_variant(16, 32, 8, 128, torch.bfloat16, has_tree=True),
        attend_variant(64, 16, 2, 256, torch.bfloat16, has_tree=True),
        attend_variant(8, 32, 8, 128, torch.float32, has_tree=True),
        attend_variant(2048, 32, 8, 128, torch.bfloat16, has_tree=False),
        attend_variant(2048, 16, 2, 256, torch.bfloat16, has_tree=False),
        combine_variant(16, 256, torch.bfloat16),
        store_variant(16, 2, 256, 64, torch.bfloat16, torch.int8),
        store_variant(16, 2, 256, 64, torch.bfloat16, torch.float8_e4m3fn),
        attend_variant(16, 32, 8, 128, torch.bfloat16, has_tree=True, stored=torch.int8),
        attend_variant(64, 16, 2, 256, torch.bfloat16, has_tree=True, stored=torch.float8_e4m3fn),
        attend_variant(8, 32, 8, 128, torch.float32, has_tree=True, stored=torch.int8),
        attend_variant(2048, 32, 8, 128, torch.bfloat16, has_tree=False, stored=torch.float8_e4m3fn),
        attend_variant(2048, 16, 2, 256, torch.bfloat16, has_tree=False, stored=torch.int8),
        *(
            attend_variant(num_queries, 32, 1, 576, dtype, has_tree=num_queries == 8, stored=stored, value_dim=512)
            for num_queries, dtype, stored in LATENTS
        ),
        attend_variant(16, 16, 4, 128, torch.bfloat16, has_tree=True, window=256),
        attend_variant(2048, 16, 4, 128, torch.bfloat16, has_tree=False, window=256),
    ]


def store_variant(
    query_heads: int, key_heads: int, head_dim: int, rotated: int, dtype: torch.dtype, stored: torch.dtype | None = None
) -> Variant:
    """With norm and rotation; ``stored``: dtype of the codes, None: there are none."""
    from specmamba.kernels.paged_attention import triton_kernels as kernels

    x = _pointer(dtype)
    types = {
        **dict.fromkeys(("projected", "cos", "sin", "q"), x),
        **_pool_types(dtype, stored),
        "norm": "*fp32",
        "write_slots": "*i64",
        "eps": "fp32",
    }
    codes = 0 if stored is None else CODES[stored]
    constexprs = store_constexprs(query_heads, key_heads, head_dim, rotated, has_norm=True, codes=codes)
    constexprs |= {} if codes else dict.fromkeys(SCALES)
    name = f"store {_form(dtype, stored)} D={head_dim}"
    return replace(_variant(name, kernels.store_kernel, types, constexprs, NUM_WARPS, 1), may_fuse=False)


def attend_variant(
    num_queries: int,
    query_heads: int,
    key_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    has_tree: bool,
    stored: torch.dtype | None = None,
    value_dim: int | None = None,
    window: int = 0,
) -> Variant:
    """The variant of a launch for so many queries; ``stored``: dtype of codes, None: there are none.

    With a gate where ``value_dim`` is None; else of latents.
    """
    from specmamba.kernels.paged_attention import triton_kernels as kernels

    group, is_split = query_heads // key_heads, num_queries <= MAX_SPLIT_QUERIES
    has_gate = value_dim is None
    widths = head_dim, head_dim if value_dim is None else value_dim
    tile = tile_of(num_queries * group, *widths, dtype, is_split, stored is not None)
    codes = 0 if stored is None else CODES[stored]
    constexprs = attend_constexprs(
        tile, key_heads, group, head_dim, has_tree, is_split, has_gate, codes=codes, value_dim=value_dim, window=window
    )
    types = {
        **dict.fromkeys(("q", "gate"), _pointer(dtype)),
        **_pool_types(dtype, stored),
        **dict.fromkeys(("table", "rows", "last", "roots"), "*i64"),
        **dict.fromkeys(("peaks", "sums"), "*fp32"),
        "out": "*fp32" if is_split else _pointer(dtype),
        "seen": "*u8",
        "scale": "fp32",
    }
    absent = ([] if has_tree else ["roots", "seen"]) + ([] if is_split else ["peaks", "sums"])
    absent += ["gate"] if is_split or not has_gate else []
    absent += [] if codes else SCALES
    name = f"{'tree' if has_tree else 'causal'} {_form(dtype, stored)} N={num_queries} group={group} D={head_dim}"
    name += "" if value_dim is None else f" V={value_dim}"
    name += f" window={window}" if window else ""
    constexprs |= dict.fromkeys(absent)
    # as callers have them: a column per query or one for all of a tree, a bool beside the next
    constexprs |= {"seen_stride_m": 1} if has_tree else {"last_stride_n": 1}
    made = _variant(name, kernels.attend_kernel, types, constexprs, tile.num_warps, tile.num_stages)
    return replace(made, registers=tile.registers)


def combine_variant(query_heads: int, head_dim: int, dtype: torch.dtype) -> Variant:
    """With a gate."""
    from specmamba.kernels.paged_attention import triton_kernels as kernels

    types = {
        **dict.fromkeys(("parts", "peaks", "sums"), "*fp32"),
        **dict.fromkeys(("gate", "out"), _pointer(dtype)),
        "rows": "*i64",
    }
    constexprs = combine_constexprs(query_heads, head_dim, has_gate=True)
    return _variant(
        f"combine {TYPE_NAMES[dtype]} D={head_dim}", kernels.combine_kernel, types, constexprs, NUM_WARPS, 1
    )


def _variant(
    name: str, kernel: Any, types: Mapping[str, str], constexprs: Mapping[str, Any], num_warps: int, num_stages: int
) -> Variant:
    """Arguments that are neither pointers nor constants are sizes and strides."""
    signature = {x: "constexpr" if x in constexprs else types.get(x, "i32") for x in kernel.arg_names}
    return Variant(name, kernel, signature, constexprs, num_warps, num_stages, UNALIGNED)


def _pointer(dtype: torch.dtype) -> str:
    return f"*{TYPE_NAMES[dtype]}"


SCALES = ["k_scales", "v_scales"]


def _pool_types(dtype: torch.dtype, stored: torch.dtype | None) -> dict[str, str]:
    """Of pools and of the scales of codes."""
    pool = _pointer(dtype) if stored is None else _pointer(torch.int8)
    return dict.fromkeys(("k_pool", "v_pool"), pool) | dict.fromkeys(SCALES, "*fp32")


def _form(dtype: torch.dtype, stored: torch.dtype | None) -> str:
    """For names: of projections, and of codes."""
    if stored is None:
        return TYPE_NAMES[dtype]
    return f"{TYPE_NAMES[dtype]} over {'int8' if stored is torch.int8 else 'fp8'}"
