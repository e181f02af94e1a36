"""Random numbers, argmax, penalties, filters and sampling in Triton. See README.md, "On a GPU"."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.sampling import triton_cutoffs, triton_drafts
from specmamba.kernels.sampling import triton_kernels as kernels
from specmamba.kernels.sampling.reference import Filter, Strengths
from specmamba.kernels.sampling.torch_ops import stream_key
from specmamba.kernels.sampling.triton_filters import (
    BOUNDS_TILE,
    GROUPS,
    bounds_constexprs,
    cutoffs,
    list_constexprs,
    search_constexprs,
    search_tile,
)
from specmamba.kernels.sampling.triton_rows import (
    Rows,
    Tile,
    chunk_constexprs,
    chunk_tile,
    key_constexprs,
    row_constexprs,
)

UNIFORM_TILE = Tile(256, 2)
PENALTY_TILE = Tile(1024, 4)
PEAKS_TILE = Tile(64, 1)  # its block is the chunks of a row
DRAFT_TILE = Tile(2048, 8)  # one program has a whole row; with 4,096 tokens at a time it spills on sm_100
CHOICE_TILE = Tile(64, 2)  # the same, with some tokens of each


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """One launch."""
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    if out.numel() == 0:
        return out
    counters, tile = positions.reshape(len(positions), -1), UNIFORM_TILE
    launch(
        *(kernels.uniform_kernel, (num_blocks(out.numel(), tile.block),), tile, {"BLOCK": tile.block}),
        *(seeds.contiguous(), counters, out, out.numel(), counters.shape[1], stream_key(stream), *counters.stride()),
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Two launches; the first NaN where there is one."""
    return checked_argmax(logits)[0]


def has_finite_max(logits: Tensor) -> Tensor:
    """The same launches as ``argmax``."""
    return checked_argmax(logits)[1]


def checked_argmax(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Two launches: the first of the largest, and whether it is finite."""
    rows = Rows.of(logits)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    is_finite = torch.empty(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if tokens.numel() == 0:
        return tokens, is_finite
    peaks, firsts, tile = rows.per_chunk(torch.float32), rows.per_chunk(torch.int32), chunk_tile(rows.size)
    chunk, row = chunk_constexprs(rows.size), row_constexprs(rows.size)
    launch(kernels.chunk_peaks_kernel, rows.grid, tile, chunk, rows.logits, peaks, firsts, *rows.sizes[1:])
    arguments = peaks, firsts, tokens, is_finite, rows.size, rows.num_chunks
    launch(kernels.row_peaks_kernel, (rows.count,), PEAKS_TILE, row, *arguments)
    return tokens, is_finite


def likeliest(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Two launches; of equal logits the lowest ids."""
    rows = Rows.of(logits)
    tokens = torch.empty(*logits.shape[:-1], k, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    if tokens.numel() == 0:
        return tokens, logprobs
    chosen, tile = choice_constexprs(k), chunk_tile(rows.size)
    of_chunk = chosen | chunk_constexprs(rows.size)
    values, ids = (rows.per_chunk(dtype, chosen["BLOCK_K"]) for dtype in (torch.float32, torch.int32))
    masses = rows.per_chunk(torch.float64)
    arguments = rows.logits, values, ids, masses, *rows.sizes[1:]
    launch(kernels.chunk_likeliest_kernel, rows.grid, tile, of_chunk, *arguments)
    found = values, ids, masses, tokens, logprobs, rows.size, rows.num_chunks
    launch(kernels.row_likeliest_kernel, (rows.count,), CHOICE_TILE, chosen | row_constexprs(rows.size), *found)
    return tokens, logprobs


def choice_constexprs(k: int) -> dict[str, int]:
    """Constants of launches that choose k tokens of a row."""
    return {"NUM_CHOSEN": k, "BLOCK_K": next_power_of_2(k)}


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """Differs from PyTorch's form only where rounding moves a boundary past a uniform.

    Tokens whose logit is NaN or +inf are never drawn; where no token has mass, any token is returned.
    """
    rows = Rows.of(logits)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if tokens.numel() == 0:
        return tokens
    temperature = temperature.contiguous()
    filters = cutoffs(rows, temperature, top_k, top_p, min_p)
    masses = _chunk_masses(rows, temperature, filters)
    arguments = rows.logits, temperature, uniforms.contiguous(), *filters, *masses, tokens, *rows.sizes
    launch(kernels.draw_kernel, (rows.count,), chunk_tile(rows.size), rows.constexprs, *arguments)
    return tokens


def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """0 where a logit is NaN or +inf; all 0 where no token has mass."""
    rows = Rows.of(logits)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if probs.numel() == 0:
        return probs
    temperature = temperature.contiguous()
    filters = cutoffs(rows, temperature, top_k, top_p, min_p)
    masses = _chunk_masses(rows, temperature, filters)
    arguments = rows.logits, temperature, *filters, *masses, probs, *rows.sizes
    launch(kernels.probabilities_kernel, rows.grid, chunk_tile(rows.size), rows.constexprs, *arguments)
    return probs


def penalize(
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """One launch."""
    rows, tile = Rows.of(logits), PENALTY_TILE
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    counts, prompt, tokens, mask = (dense(x) for x in (output_counts, prompt_mask, tokens, ancestors))
    strides = counts.stride(0), prompt.stride(0), tokens.stride(0), *mask.stride()[:2]
    dense_strengths = (x.contiguous() for x in strengths)
    grid = rows.count, num_blocks(rows.size, tile.block)
    arguments = rows.logits, counts, prompt, tokens, mask, *dense_strengths, out, *rows.sizes[:3], *strides
    launch(kernels.penalize_kernel, grid, tile, {"BLOCK": tile.block}, *arguments)
    return out


def draw_children(probs: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """One launch, with a program for each row."""
    rows = Rows.of(probs)
    tokens = torch.empty(uniforms.shape, dtype=torch.int64, device=probs.device)
    is_drawn = torch.empty(uniforms.shape, dtype=torch.bool, device=probs.device)
    if tokens.numel() == 0:
        return tokens, is_drawn
    count, tile = uniforms.shape[-1], DRAFT_TILE
    arguments = rows.logits, uniforms.contiguous(), tokens, is_drawn, rows.size, rows.logits.stride(0), count
    launch(triton_drafts.children_kernel, (rows.count,), tile, draft_constexprs(rows.size, count), *arguments)
    return tokens, is_drawn


def residual_choice(
    probs: Tensor,
    tokens: Tensor,
    parents: Tensor,
    draft_probs: Tensor | None,
    max_children: int,
    accept_uniforms: Tensor,
    choice_uniforms: Tensor,
) -> Tensor:
    """One launch, with a program for each node: it reads a row once, and once more for each child that is refused."""
    rows, drafts = Rows.of(probs), Rows.of(probs if draft_probs is None else draft_probs)
    choices = torch.empty(probs.shape[:2], dtype=torch.int64, device=probs.device)
    if choices.numel() == 0:
        return choices
    most, tile = max(1, min(max_children, rows.nodes - 1)), DRAFT_TILE
    constants = draft_constexprs(rows.size, most) | tree_constexprs(rows.nodes, has_drafts=draft_probs is not None)
    of_nodes = (x.contiguous() for x in (accept_uniforms, choice_uniforms))
    arguments = rows.logits, tokens.contiguous(), parents.contiguous(), drafts.logits, *of_nodes, choices
    strides = rows.nodes, rows.size, rows.logits.stride(0), drafts.logits.stride(0)
    launch(triton_drafts.residual_kernel, (rows.count,), tile, constants, *arguments, *strides, max_children)
    return choices


def draft_constexprs(size: int, count: int) -> dict[str, int]:
    """Constants of launches that take up to ``count`` tokens out of rows of a vocabulary."""
    chunks = next_power_of_2(num_blocks(size, DRAFT_TILE.block))
    return {"BLOCK": DRAFT_TILE.block, "CHUNKS": chunks, "BLOCK_K": next_power_of_2(count)}


def tree_constexprs(nodes: int, has_drafts: bool) -> dict[str, Any]:
    """Constants of launches that look for children of nodes."""
    return {"BLOCK_N": next_power_of_2(nodes), "HAS_DRAFTS": has_drafts}


def _chunk_masses(
    rows: Rows, temperature: Tensor, filters: tuple[Tensor, Tensor] | tuple[None, None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Peaks, the first tokens that have them, and masses; [R, chunks] float32, int32, float64."""
    out = rows.per_chunk(torch.float32), rows.per_chunk(torch.int32), rows.per_chunk(torch.float64)
    constexprs = chunk_constexprs(rows.size) | key_constexprs(rows.logits.dtype)
    arguments = rows.logits, temperature, *filters, *out, *rows.sizes
    launch(kernels.chunk_masses_kernel, rows.grid, chunk_tile(rows.size), constexprs, *arguments)
    return out


_TYPES = {
    "logits": "*fp32",
    **dict.fromkeys(("temperature", "top_p", "min_p", "uniforms", "levels", "peaks"), "*fp32"),
    **dict.fromkeys(("drafts", "accept_uniforms", "choice_uniforms"), "*fp32"),
    **dict.fromkeys(("presence", "frequency", "repetition", "probs", "out", "logprobs"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "tokens", "parents", "choices", "top_k"), "*i64"),
    **dict.fromkeys(("cuts", "firsts", "counts", "lows"), "*i32"),
    "places": "*i16",
    **dict.fromkeys(("prompt_mask", "mask", "is_finite", "is_drawn"), "*i1"),
    **dict.fromkeys(("masses", "totals"), "*fp64"),
    "key": "i64",
}


_TYPES_OF: dict[Any, dict[str, str]] = {
    kernels.chunk_likeliest_kernel: {"values": "*fp32", "tokens": "*i32"},
    kernels.row_likeliest_kernel: {"values": "*fp32", "chunk_tokens": "*i32"},
}


def variants() -> list[Variant]:
    """A vocabulary of 151,936 tokens: greedy in bfloat16, sampled in float32, with filters and without."""
    size, tile, search = 151_936, chunk_tile(151_936), search_tile(151_936)
    chunk, row, key = chunk_constexprs(size), row_constexprs(size), key_constexprs(torch.float32)
    key_bf16, drawn = key_constexprs(torch.bfloat16), {**key, **chunk, **row}
    four = choice_constexprs(4)
    of_lists, of_search = list_constexprs(size), search_constexprs(size)
    no_filters = {"levels": None, "cuts": None}
    return [
        _variant("uniform", kernels.uniform_kernel, {"BLOCK": UNIFORM_TILE.block}, UNIFORM_TILE),
        _variant("chunk_peaks bf16", kernels.chunk_peaks_kernel, chunk, tile, "*bf16"),
        _variant("chunk_likeliest bf16 k=4", kernels.chunk_likeliest_kernel, chunk | four, tile, "*bf16"),
        _variant("row_likeliest k=4", kernels.row_likeliest_kernel, row | four, CHOICE_TILE),
        _variant("row_peaks", kernels.row_peaks_kernel, row, PEAKS_TILE),
        _variant("chunk_bounds bf16", triton_cutoffs.chunk_bounds_kernel, {**chunk, "GROUPS": GROUPS}, tile, "*bf16"),
        _variant("row_bounds", triton_cutoffs.row_bounds_kernel, key | bounds_constexprs(size), BOUNDS_TILE),
        _variant("candidates fp32", triton_cutoffs.candidates_kernel, key | of_lists, tile),
        _variant("candidates bf16", triton_cutoffs.candidates_kernel, key_bf16 | of_lists, tile, "*bf16"),
        _variant("row_cutoffs fp32", triton_cutoffs.row_cutoffs_kernel, key | of_search, search),
        _variant("row_cutoffs bf16", triton_cutoffs.row_cutoffs_kernel, key_bf16 | of_search, search, "*bf16"),
        _variant("chunk_masses fp32", kernels.chunk_masses_kernel, {**key, **chunk}, tile),
        _variant("draw fp32", kernels.draw_kernel, drawn, tile),
        _variant("draw bf16 no filters", kernels.draw_kernel, {**drawn, **key_bf16, **no_filters}, tile, "*bf16"),
        _variant("probabilities fp32", kernels.probabilities_kernel, drawn, tile),
        _variant("children k=4", triton_drafts.children_kernel, draft_constexprs(size, 4), DRAFT_TILE),
        *(
            _variant(
                f"residual {'drawn' if has_drafts else 'chosen'} N=8",
                triton_drafts.residual_kernel,
                draft_constexprs(size, 4) | tree_constexprs(8, has_drafts),
                DRAFT_TILE,
            )
            for has_drafts in (False, True)
        ),
        _variant("penalize bf16", kernels.penalize_kernel, {"BLOCK": PENALTY_TILE.block}, PENALTY_TILE, "*bf16"),
    ]


def _variant(name: str, kernel: Any, constants: dict[str, Any], tile: Tile, logits: str = "*fp32") -> Variant:
    of_nodes = frozenset({"row_stride", "position_stride", "tokens_stride", "tree_stride"})
    types = _TYPES | {"logits": logits} | _TYPES_OF.get(kernel, {"values": logits})
    return Variant.of(name, kernel, types, constants, tile, of_nodes)
