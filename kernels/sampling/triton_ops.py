"""Random numbers, argmax, penalties, filters and sampling in Triton. See README.md, "On a GPU"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.gpu import Variant, dense, launch, next_power_of_2, num_blocks
from specmamba.kernels.sampling import triton_kernels as kernels
from specmamba.kernels.sampling.reference import Filter, Strengths
from specmamba.kernels.sampling.torch_ops import stream_key


@dataclass(frozen=True)
class Tile:
    """One program takes ``block`` tokens at a time. Chosen by register counts, not measured."""

    block: int
    num_warps: int
    num_stages: int = 1  # no loop loads anything ahead


UNIFORM_TILE = Tile(256, 2)
PENALTY_TILE = Tile(1024, 4)
PEAKS_TILE = Tile(64, 1)  # its block is the chunks of a row


def chunk_tile(size: int) -> Tile:
    """For one chunk of a vocabulary: about 64 chunks, so that one row occupies a GPU; at most 16 tokens a thread."""
    block = min(max(next_power_of_2(num_blocks(size, 64)), 512), 4096)
    return Tile(block, num_warps=8 if block > 2048 else 4)


def cutoff_tile(size: int) -> Tile:
    """For the search for a cutoff: one program reads a row repeatedly, with 512 threads of up to 8 tokens.

    More tokens would need more than the 128 registers that each of 512 threads can have.
    """
    return Tile(min(max(next_power_of_2(num_blocks(size, 4)), 256), 4096), num_warps=16)


def chunks_of(size: int) -> int:
    """The number of chunks of a vocabulary."""
    return num_blocks(size, chunk_tile(size).block)


def chunk_constexprs(size: int) -> dict[str, int]:
    """Constants of launches with a program for every chunk."""
    return {"BLOCK": chunk_tile(size).block}


def row_constexprs(size: int) -> dict[str, int]:
    """Constants of launches that read all chunks of a row."""
    return {"CHUNKS": max(next_power_of_2(chunks_of(size)), 16)}


def key_constexprs(dtype: torch.dtype) -> dict[str, int]:
    """Constants of launches that compare logits by integers: those of bfloat16 have 16 bits."""
    return {"SHIFT": 16 if dtype is torch.bfloat16 else 0}


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
    return _row_peaks(logits)[0]


def has_finite_max(logits: Tensor) -> Tensor:
    """The same launches as ``argmax``."""
    return _row_peaks(logits)[1]


def sample(
    logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter, uniforms: Tensor
) -> Tensor:
    """Differs from PyTorch's form only where rounding moves a boundary past a uniform.

    Tokens whose logit is NaN or +inf are never drawn; where no token has mass, any token is returned.
    """
    rows = _Rows.of(logits)
    tokens = torch.empty(logits.shape[:-1], dtype=torch.int64, device=logits.device)
    if tokens.numel() == 0:
        return tokens
    temperature = temperature.contiguous()
    filters = _cutoffs(rows, temperature, top_k, top_p, min_p)
    masses = _chunk_masses(rows, temperature, filters)
    arguments = rows.logits, temperature, uniforms.contiguous(), *filters, *masses, tokens, *rows.sizes
    launch(kernels.draw_kernel, (rows.count,), chunk_tile(rows.size), rows.constexprs, *arguments)
    return tokens


def probabilities(logits: Tensor, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter) -> Tensor:
    """0 where a logit is NaN or +inf; all 0 where no token has mass."""
    rows = _Rows.of(logits)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if probs.numel() == 0:
        return probs
    temperature = temperature.contiguous()
    filters = _cutoffs(rows, temperature, top_k, top_p, min_p)
    masses = _chunk_masses(rows, temperature, filters)
    arguments = rows.logits, temperature, *filters, *masses, probs, *rows.sizes
    launch(kernels.probabilities_kernel, rows.grid, chunk_tile(rows.size), rows.constexprs, *arguments)
    return probs


def penalize(
    logits: Tensor, output_counts: Tensor, prompt_mask: Tensor, tokens: Tensor, ancestors: Tensor, strengths: Strengths
) -> Tensor:
    """One launch."""
    rows, tile = _Rows.of(logits), PENALTY_TILE
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


@dataclass(frozen=True)
class _Rows:
    """Logits as rows [R, V]; ``nodes`` of them belong to one request."""

    logits: Tensor
    nodes: int

    @classmethod
    def of(cls, logits: Tensor) -> _Rows:
        rows = dense(logits.reshape(-1, logits.shape[-1]))
        return cls(rows, logits.shape[1] if logits.dim() > 2 else 1)

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def size(self) -> int:
        return self.logits.shape[1]

    @property
    def num_chunks(self) -> int:
        return chunks_of(self.size)

    @property
    def grid(self) -> tuple[int, int]:
        return self.count, self.num_chunks

    @property
    def constexprs(self) -> dict[str, int]:
        """Constants of kernels that read one chunk of tokens, and the sums of all chunks."""
        of_tokens = chunk_constexprs(self.size) | key_constexprs(self.logits.dtype)
        return of_tokens | row_constexprs(self.size)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """nodes, size, stride and num_chunks, as kernels take them."""
        return self.nodes, self.size, self.logits.stride(0), self.num_chunks

    def per_chunk(self, dtype: torch.dtype) -> Tensor:
        return torch.empty(self.count, self.num_chunks, dtype=dtype, device=self.logits.device)


def _row_peaks(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The first of the largest [...] int64, and whether it is finite [...] bool; of logits [..., V]."""
    rows = _Rows.of(logits)
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


def _cutoffs(
    rows: _Rows, temperature: Tensor, top_k: Filter, top_p: Filter, min_p: Filter
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """The bounds of what filters keep: levels [R, 2] float32, cuts [R, 2] int32 (see the kernel); None: no filters."""
    if top_k is top_p is min_p is None:
        return None, None
    levels = torch.empty(rows.count, 2, dtype=torch.float32, device=rows.logits.device)
    cuts = torch.empty(rows.count, 2, dtype=torch.int32, device=rows.logits.device)
    tile = cutoff_tile(rows.size)
    settings = (x if x is None else x.contiguous() for x in (top_k, top_p, min_p))
    constexprs = {"BLOCK": tile.block, **key_constexprs(rows.logits.dtype)}
    arguments = rows.logits, temperature, *settings, levels, cuts, *rows.sizes[:3]
    launch(kernels.row_cutoffs_kernel, (rows.count,), tile, constexprs, *arguments)
    return levels, cuts


def _chunk_masses(
    rows: _Rows, temperature: Tensor, filters: tuple[Tensor, Tensor] | tuple[None, None]
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
    **dict.fromkeys(("presence", "frequency", "repetition", "probs", "out"), "*fp32"),
    **dict.fromkeys(("seeds", "positions", "tokens", "top_k"), "*i64"),
    **dict.fromkeys(("cuts", "firsts", "counts"), "*i32"),
    **dict.fromkeys(("prompt_mask", "mask", "is_finite"), "*i1"),
    "masses": "*fp64",
    "key": "i64",
}


def variants() -> list[Variant]:
    """A vocabulary of 151,936 tokens: greedy in bfloat16, sampled in float32, with filters and without."""
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
    of_nodes = frozenset({"row_stride", "position_stride", "tokens_stride", "tree_stride"})
    return Variant.of(name, kernel, _TYPES | {"logits": logits}, constants, tile, of_nodes)
