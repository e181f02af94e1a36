"""Block sizes of the Triton kernels for long prompts, and the variants compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specmamba.kernels.gpu import Variant, Work
from specmamba.kernels.state_records import triton_kernels as folds
from specmamba.kernels.state_records import triton_prefill as kernels
from specmamba.kernels.state_records.triton_ops import Tile, block, fold_tile, variant

CHUNK = 64  # tokens of a long prompt whose products are made at once
NUM_LEVELS = (CHUNK // 2).bit_length() - 1  # of blocks of 1, 2, 4, ... tokens in half of them
COUNTED_TOKENS, GROUP = 512, 2  # of prompts in counts of instructions; value heads of a key head in variants


def chunks_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for all of a long prompt's chunk that does not need the state: with 64 keys sm_80 spills."""
    return Tile(block(key_dim, 32), block(value_dim, 32), num_warps=4)


def states_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for the recurrence over chunks: narrow blocks, so that the heads of one row fill a GPU.

    Not measured. With two stages it takes the shared memory of a multiprocessor on sm_90, and spills on sm_80.
    """
    return Tile(block(key_dim), block(value_dim, 32), num_warps=4)


def outputs_tile(key_dim: int, value_dim: int) -> Tile:
    """Choose the tile for outputs of a chunk."""
    return Tile(block(key_dim, 64), block(value_dim, 64), num_warps=4)


def chunk_constants(
    kernel: Any, tile: Tile, key_dim: int, value_dim: int, group: int, parts: str, **others: int
) -> dict[str, Any]:
    """Constants of a launch over chunks: those that ``kernel`` has as parameters."""
    values = {
        "KEY_DIM": key_dim,
        "VALUE_DIM": value_dim,
        "GROUP": group,
        "BLOCK_TOKENS": CHUNK,
        "BLOCK_KEYS": tile.keys,
        "BLOCK_VALUES": tile.values,
        "PADDED_KEYS": block(key_dim),
        "PADDED_VALUES": block(value_dim),
        "NUM_LEVELS": NUM_LEVELS,
        "PARTS": parts,
        **others,
    }
    return {name: value for name, value in values.items() if name in kernel.arg_names}


def variants() -> list[Variant]:
    """Folds, and prompts, of states in float32 and bfloat16, for the heads of the models there are."""
    return [
        _fold_variant("fold", "fp32", 128, 128),
        _fold_variant("fold", "bf16", 128, 128),
        _fold_variant("fold", "fp32", 64, 64),
        _fold_variant("fold by channel", "fp32", 128, 128, by_channel=True),
        *(_prefill_variant(*of) for of in PREFILLS),
    ]


def _fold_variant(what: str, dtype: str, key_dim: int, value_dim: int, by_channel: bool = False) -> Variant:
    pointers = {"state": dtype, "records_k": "fp32", "records_u": "fp32", "records_decay": "fp32"}
    pointers |= {"num_pending": "i64", "out": dtype}
    of_decay = {"decay_dim_stride": 1} if by_channel else {"decay_head_stride": 1, "decay_dim_stride": None}
    inner = dict.fromkeys(("state_value_stride", "keys_dim_stride", "updates_dim_stride", "out_value_stride"), 1)
    tile, name = fold_tile(key_dim, value_dim), f"{what} {dtype} K={key_dim} V={value_dim}"
    constants = {**tile.constexprs, **inner, **of_decay}
    return variant(name, folds.fold, pointers, constants, tile.num_warps, tile.num_stages)


KEPT_PARTS = ("keys", "solutions", "weights", "updates", "scores", "before", "queries", "state_queries", "state_keys")
POINTERS = {
    **dict.fromkeys(KEPT_PARTS, "bf16"),
    **dict.fromkeys(("q", "k", "v", "g", "beta", "c", "b", "u", "out", "work", "decays", "grams"), "fp32"),
    **dict.fromkeys(("slots", "lengths"), "i64"),
}
# kernel, dtype of the state, keys, values, and the operator
PREFILLS = [
    ("grams", "fp32", 128, 128, "delta rule"),
    ("grams", "fp32", 128, 64, "mamba2"),
    ("states", "fp32", 128, 128, "delta rule"),
    ("states", "bf16", 128, 128, "delta rule"),
    ("states", "fp32", 64, 128, "delta rule"),
    ("states", "fp32", 128, 64, "mamba2"),
    ("outputs", "fp32", 128, 128, "delta rule"),
    ("outputs", "fp32", 128, 64, "mamba2"),
    ("states", "fp32", 128, 128, "delta rule by channel"),
    ("states", "bf16", 128, 128, "delta rule by channel"),
    ("outputs", "fp32", 128, 128, "delta rule by channel"),
]


def _prefill_variant(what: str, dtype: str, key_dim: int, value_dim: int, kind: str) -> Variant:
    kernel = getattr(kernels, f"{what}_kernel")
    tile = {"grams": chunks_tile, "states": states_tile, "outputs": outputs_tile}[what](key_dim, value_dim)
    has_system, by_channel = kind != "mamba2", kind.endswith("by channel")
    group = 1 if by_channel and what == "states" else GROUP
    flags = {"HAS_SYSTEM": has_system, "BY_CHANNEL": by_channel}
    constants = chunk_constants(kernel, tile, key_dim, value_dim, group, "bf16", **flags)
    absent = ["weights"] * (not has_system) + ["work"] * (dtype == "fp32") + ["queries"] * (not by_channel)
    constants |= {name: None for name in absent if name in kernel.arg_names}
    num_chunks, num_parts = COUNTED_TOKENS // CHUNK, -(-value_dim // tile.values)
    # products of keys are made once for the value heads of a key head: counted is the part of one of them
    programs = {"grams": num_chunks // GROUP, "states": num_parts, "outputs": num_chunks * num_parts}[what]
    made = chunk_variant(f"prefill {what} {kind} {dtype} K={key_dim} V={value_dim}", kernel, tile, constants, dtype)
    return replace(made, work=Work(programs, {"num_own": num_chunks}))


def chunk_variant(name: str, kernel: Any, tile: Any, constants: dict[str, Any], dtype: str = "fp32") -> Variant:
    """A kernel over chunks, with states in ``dtype``."""
    known = {**POINTERS, "states": dtype}
    pointers = {x: of for x, of in known.items() if x in kernel.arg_names and x not in constants}
    return variant(name, kernel, pointers, constants, tile.num_warps, tile.num_stages)
