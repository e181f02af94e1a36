"""Random numbers, argmax, penalties, filters and sampling in Triton. See README.md, "On a GPU"."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.kernels.sampling import tiles
from specmamba.kernels.sampling import triton_kernels as kernels
from specmamba.kernels.sampling.torch_ops import stream_key


def uniform(seeds: Tensor, positions: Tensor, stream: int = 0) -> Tensor:
    """One launch."""
    out = torch.empty(positions.shape, dtype=torch.float32, device=positions.device)
    if out.numel() == 0:
        return out
    counters, tile = positions.reshape(len(positions), -1), tiles.UNIFORM_TILE
    kernels.uniform_kernel[(-(-out.numel() // tile.block),)](
        *(seeds.contiguous(), counters, out, out.numel(), counters.shape[1], stream_key(stream), *counters.stride()),
        BLOCK=tile.block,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out


def argmax(logits: Tensor) -> Tensor:
    """Two launches; the first NaN where there is one."""
    return _row_peaks(logits)[0]


def has_finite_max(logits: Tensor) -> Tensor:
    """The same launches as ``argmax``."""
    return _row_peaks(logits)[1]


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    uniforms: Tensor,
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
    launch = _Launch(kernels.draw_kernel, (rows.count,), tiles.chunk_tile(rows.size), rows.constexprs)
    launch(rows.logits, temperature, uniforms.contiguous(), *filters, *masses, tokens, *rows.sizes)
    return tokens


def probabilities(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> Tensor:
    """0 where a logit is NaN or +inf; all 0 where no token has mass."""
    rows = _Rows.of(logits)
    probs = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if probs.numel() == 0:
        return probs
    temperature = temperature.contiguous()
    filters = _cutoffs(rows, temperature, top_k, top_p, min_p)
    masses = _chunk_masses(rows, temperature, filters)
    launch = _Launch(kernels.probabilities_kernel, rows.grid, tiles.chunk_tile(rows.size), rows.constexprs)
    launch(rows.logits, temperature, *filters, *masses, probs, *rows.sizes)
    return probs


def penalize(
    logits: Tensor,
    output_counts: Tensor,
    prompt_mask: Tensor,
    tokens: Tensor,
    ancestors: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> Tensor:
    """One launch."""
    rows, tile = _Rows.of(logits), tiles.PENALTY_TILE
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    if out.numel() == 0:
        return out
    counts, prompt, tokens, mask = (_dense(x) for x in (output_counts, prompt_mask, tokens, ancestors))
    strides = counts.stride(0), prompt.stride(0), tokens.stride(0), *mask.stride()[:2]
    strengths = (x.contiguous() for x in (presence, frequency, repetition))
    grid = rows.count, -(-rows.size // tile.block)
    launch = _Launch(kernels.penalize_kernel, grid, tile, {"BLOCK": tile.block})
    launch(rows.logits, counts, prompt, tokens, mask, *strengths, out, *rows.sizes[:3], *strides)
    return out


@dataclass(frozen=True)
class _Rows:
    """Logits as rows [R, V]; ``nodes`` of them belong to one request."""

    logits: Tensor
    nodes: int

    @classmethod
    def of(cls, logits: Tensor) -> _Rows:
        rows = _dense(logits.reshape(-1, logits.shape[-1]))
        return cls(rows, logits.shape[1] if logits.dim() > 2 else 1)

    @property
    def count(self) -> int:
        return self.logits.shape[0]

    @property
    def size(self) -> int:
        return self.logits.shape[1]

    @property
    def num_chunks(self) -> int:
        return tiles.chunks_of(self.size)

    @property
    def grid(self) -> tuple[int, int]:
        return self.count, self.num_chunks

    @property
    def constexprs(self) -> dict[str, int]:
        """Of kernels that look at one chunk of tokens, and at the sums of all."""
        of_tokens = tiles.chunk_constexprs(self.size) | tiles.key_constexprs(self.logits.dtype)
        return of_tokens | tiles.row_constexprs(self.size)

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
    is_sound = torch.empty(logits.shape[:-1], dtype=torch.bool, device=logits.device)
    if tokens.numel() == 0:
        return tokens, is_sound
    peaks, firsts, tile = rows.per_chunk(torch.float32), rows.per_chunk(torch.int32), tiles.chunk_tile(rows.size)
    of_chunks = _Launch(kernels.chunk_peaks_kernel, rows.grid, tile, tiles.chunk_constexprs(rows.size))
    of_chunks(rows.logits, peaks, firsts, *rows.sizes[1:])
    of_rows = _Launch(kernels.row_peaks_kernel, (rows.count,), tiles.PEAKS_TILE, tiles.row_constexprs(rows.size))
    of_rows(peaks, firsts, tokens, is_sound, rows.size, rows.num_chunks)
    return tokens, is_sound


def _cutoffs(
    rows: _Rows, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, min_p: Tensor | None
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """What filters keep: levels [R, 2] float32 and cuts [R, 2] int32, see the kernel; None where there are none."""
    if top_k is top_p is min_p is None:
        return None, None
    levels = torch.empty(rows.count, 2, dtype=torch.float32, device=rows.logits.device)
    cuts = torch.empty(rows.count, 2, dtype=torch.int32, device=rows.logits.device)
    tile = tiles.cutoff_tile(rows.size)
    settings = (x if x is None else x.contiguous() for x in (top_k, top_p, min_p))
    constexprs = {"BLOCK": tile.block, **tiles.key_constexprs(rows.logits.dtype)}
    launch = _Launch(kernels.row_cutoffs_kernel, (rows.count,), tile, constexprs)
    launch(rows.logits, temperature, *settings, levels, cuts, *rows.sizes[:3])
    return levels, cuts


def _chunk_masses(
    rows: _Rows, temperature: Tensor, filters: tuple[Tensor, Tensor] | tuple[None, None]
) -> tuple[Tensor, Tensor, Tensor]:
    """Peaks, the first tokens that have them, and masses; [R, chunks] float32, int32, float64."""
    out = rows.per_chunk(torch.float32), rows.per_chunk(torch.int32), rows.per_chunk(torch.float64)
    constexprs = tiles.chunk_constexprs(rows.size) | tiles.key_constexprs(rows.logits.dtype)
    launch = _Launch(kernels.chunk_masses_kernel, rows.grid, tiles.chunk_tile(rows.size), constexprs)
    launch(rows.logits, temperature, *filters, *out, *rows.sizes)
    return out


@dataclass(frozen=True)
class _Launch:
    kernel: Any
    grid: tuple[int, ...]
    tile: tiles.Tile
    constexprs: dict[str, int]

    def __call__(self, *arguments: Tensor | int | None) -> None:
        warps_and_stages = {"num_warps": self.tile.num_warps, "num_stages": self.tile.num_stages}
        self.kernel[self.grid](*arguments, **self.constexprs, **warps_and_stages)


def _dense(x: Tensor) -> Tensor:
    """With neighbouring elements of the last dimension; rows may lie anywhere, or all in one place."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
