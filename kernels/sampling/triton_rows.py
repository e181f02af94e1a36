"""Rows of logits as the kernels of sampling take them: their chunks, and the constants of launches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.kernels.gpu import dense, next_power_of_2, num_blocks


@dataclass(frozen=True)
class Tile:
    """One program takes ``block`` tokens at a time. Chosen by register counts, not measured."""

    block: int
    num_warps: int
    num_stages: int = 1  # no loop loads anything ahead


def chunk_tile(size: int) -> Tile:
    """For one chunk of a vocabulary: about 64 chunks, so that one row occupies a GPU; at most 16 tokens a thread."""
    block = min(max(next_power_of_2(num_blocks(size, 64)), 512), 4096)
    return Tile(block, num_warps=8 if block > 2048 else 4)


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


@dataclass(frozen=True)
class Rows:
    """Logits as rows [R, V]; ``nodes`` of them belong to one request."""

    logits: Tensor
    nodes: int

    @classmethod
    def of(cls, logits: Tensor) -> Rows:
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

    def per_chunk(self, dtype: torch.dtype, number: int = 1) -> Tensor:
        """New memory for so many values of each chunk: [R, chunks * number]."""
        return self.per_row(dtype, self.num_chunks * number)

    def per_row(self, dtype: torch.dtype, number: int = 1) -> Tensor:
        """New memory for so many values of each row: [R, number]."""
        return torch.empty(self.count, number, dtype=dtype, device=self.logits.device)
