"""Block sizes of the sampling kernels, and what of them is compiled ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from specmamba.kernels.gpu import Variant, next_power_of_2

_TYPES = {
    "logits": "*fp32",
    **dict.fromkeys(("temperature", "top_p", "min_p", "uniforms", "levels", "peaks"), "*fp32"),
    **dict.fromkeys(("presence", "frequency", "repetition", "probs", "out"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "tokens", "top_k"), "*i64"),
    **dict.fromkeys(("cuts", "firsts", "counts"), "*i32"),
    **dict.fromkeys(("prompt_mask", "mask", "is_finite"), "*i1"),
    "masses": "*fp64",
    "key": "i64",
}


@dataclass(frozen=True)
class Tile:
    """One program takes ``block`` tokens at a time. All choices are made from the number of registers: not measured."""

    block: int
    num_warps: int
    num_stages: int = 1  # no loop loads anything ahead


UNIFORM_TILE = Tile(256, 2)
PENALTY_TILE = Tile(1024, 4)
PEAKS_TILE = Tile(64, 1)  # its block is the chunks of a row


def chunk_tile(size: int) -> Tile:
    """Of a vocabulary in chunks: about 64 of them, so that one row makes a GPU busy; at most 16 tokens a thread."""
    block = min(max(next_power_of_2(-(-size // 64)), 512), 4096)
    return Tile(block, num_warps=8 if block > 2048 else 4)


def cutoff_tile(size: int) -> Tile:
    """Of the search for a cutoff: one program goes over a row again and again, with 512 threads of up to 8 tokens.

    More would need more than the 128 registers that a thread of so many can have.
    """
    return Tile(min(max(next_power_of_2(-(-size // 4)), 256), 4096), num_warps=16)


def chunks_of(size: int) -> int:
    """How many chunks a vocabulary has."""
    return -(-size // chunk_tile(size).block)


def chunk_constexprs(size: int) -> dict[str, int]:
    """Of launches with a program for every chunk."""
    return {"BLOCK": chunk_tile(size).block}


def row_constexprs(size: int) -> dict[str, int]:
    """Of launches that look at the chunks of a whole row."""
    return {"CHUNKS": max(next_power_of_2(chunks_of(size)), 16)}


def key_constexprs(dtype: torch.dtype) -> dict[str, int]:
    """Of launches that compare logits by integers: those of bfloat16 have 16 bits."""
    return {"SHIFT": 16 if dtype is torch.bfloat16 else 0}


def variants() -> list[Variant]:
    """Of a vocabulary of 151,936 tokens: greedy in bfloat16, sampled in float32, with filters and without."""
    from specmamba.kernels.sampling import triton_kernels as kernels

    size, tile, search = 151_936, chunk_tile(151_936), cutoff_tile(151_936)
    chunk, row, key = chunk_constexprs(size), row_constexprs(size), key_constexprs(torch.float32)
    key_bf16, drawn = key_constexprs(torch.bfloat16), {**key, **chunk, **row}
    no_filters = {"levels": None, "cuts": None}
    return [
        _variant("uniform", kernels.uniform_kernel, {"BLOCK": UNIFORM_TILE.block}, UNIFORM_TILE),
        _variant("chunk_peaks bf16", kernels.chunk_peaks_kernel, chunk, tile, "*bf16"),
        _variant("row_peaks", kernels.row_peaks_kernel, row, PEAKS_TILE),
        _variant("row_cutoffs fp32", kernels.row_cutoffs_kernel, {**key, "BLOCK": search.block}, search),
        _variant("row_cutoffs bf16", kernels.row_cutoffs_kernel, {**key_bf16, "BLOCK": search.block}, search, "*bf16"),
        _variant("chunk_masses fp32", kernels.chunk_masses_kernel, {**key, **chunk}, tile),
        _variant("draw fp32", kernels.draw_kernel, drawn, tile),
        _variant("draw bf16 no filters", kernels.draw_kernel, {**drawn, **key_bf16, **no_filters}, tile, "*bf16"),
        _variant("probabilities fp32", kernels.probabilities_kernel, drawn, tile),
        _variant("penalize bf16", kernels.penalize_kernel, {"BLOCK": PENALTY_TILE.block}, PENALTY_TILE, "*bf16"),
    ]


def _variant(name: str, kernel: Any, constants: dict[str, Any], tile: Tile, logits: str = "*fp32") -> Variant:
    known = _TYPES | {"logits": logits} | dict.fromkeys(constants, "constexpr")
    signature = {x: known.get(x, "i32") for x in kernel.arg_names}
    of_nodes = frozenset({"row_stride", "position_stride", "tokens_stride", "tree_stride"})
    return Variant(name, kernel, signature, constants, tile.num_warps, tile.num_stages, of_nodes)
