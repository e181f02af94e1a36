"""Launches that find what the filters of rows keep, without sorting. See README.md, "On a GPU"."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.kernels.gpu import launch
from specmamba.kernels.sampling import triton_cutoffs as kernels
from specmamba.kernels.sampling.reference import Filter
from specmamba.kernels.sampling.triton_rows import Rows, Tile, chunk_tile, key_constexprs, row_constexprs

GROUPS = 8  # parts of a chunk whose peaks bound what top-k keeps: k up to 8 times the number of chunks
LISTED = 4  # a chunk's list has room for a fourth of its tokens
BOUNDS_TILE = Tile(0, 4)  # its block is the groups of a row


def search_tile(size: int) -> Tile:
    """For the search among a row's candidates: 512 threads of 8 tokens, as many of each chunk.

    More tokens would need more than the 128 registers that each of 512 threads can have.
    """
    return Tile(max(4096 // row_constexprs(size)["CHUNKS"], 1), num_warps=16)


def list_constexprs(size: int) -> dict[str, int]:
    """Constants of launches that write or read the lists of chunks."""
    block = chunk_tile(size).block
    return {"BLOCK": block, "CAPACITY": block // LISTED}


def bounds_constexprs(size: int) -> dict[str, int]:
    """Constants of the launch that reads the peaks of a row's groups."""
    return {"GROUPS": GROUPS, **row_constexprs(size)}


def search_constexprs(size: int) -> dict[str, int]:
    """Constants of the search."""
    return {**list_constexprs(size), **row_constexprs(size), "WIDTH": search_tile(size).block}


def cutoffs(
    rows: Rows, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The bounds of what filters keep: levels [R, 2] float32, cuts [R, 2] int32 (see the kernel); None: no filters.

    Two launches; two more with top-k or top-p.
    """
    if top_k is top_p is min_p is None:
        return None, None
    top_k, top_p, min_p = (x if x is None else x.contiguous() for x in (top_k, top_p, min_p))
    peaks = rows.per_chunk(torch.float32, GROUPS)
    masses, tile, key = rows.per_chunk(torch.float64), chunk_tile(rows.size), key_constexprs(rows.logits.dtype)
    arguments = rows.logits, temperature, peaks, masses, *rows.sizes
    launch(kernels.chunk_bounds_kernel, rows.grid, tile, {"BLOCK": tile.block, "GROUPS": GROUPS}, *arguments)
    lows, totals = rows.per_row(torch.int32), rows.per_row(torch.float64)
    levels, cuts = rows.per_row(torch.float32, 2), rows.per_row(torch.int32, 2)
    found = peaks, masses, temperature, top_k, top_p, min_p, lows, totals, levels, cuts
    numbers = rows.nodes, rows.size, rows.num_chunks
    launch(kernels.row_bounds_kernel, (rows.count,), BOUNDS_TILE, key | bounds_constexprs(rows.size), *found, *numbers)
    if top_k is not None or top_p is not None:
        _search(rows, temperature, top_k, top_p, (lows, totals), (levels, cuts))
    return levels, cuts


def _search(
    rows: Rows,
    temperature: Tensor,
    top_k: Filter,
    top_p: Filter,
    bounds: tuple[Tensor, Tensor],
    found: tuple[Tensor, Tensor],
) -> None:
    """Gather the candidates of all rows, and find the cuts among them."""
    of_lists, key = list_constexprs(rows.size), key_constexprs(rows.logits.dtype)
    values = rows.per_chunk(rows.logits.dtype, of_lists["CAPACITY"])
    places, counts = rows.per_chunk(torch.int16, of_lists["CAPACITY"]), rows.per_chunk(torch.int32)
    lists, tile = (values, places, counts), chunk_tile(rows.size)
    arguments = rows.logits, bounds[0], *lists, *rows.sizes[1:]
    launch(kernels.candidates_kernel, rows.grid, tile, key | of_lists, *arguments)
    launch(
        *(kernels.row_cutoffs_kernel, (rows.count,), search_tile(rows.size), key | search_constexprs(rows.size)),
        *(rows.logits, *lists, *bounds, temperature, top_k, top_p, *found, *rows.sizes),
    )
