"""Row moves in native code (native.cpp): entries that stay where they are, are not read. See README.md."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_int
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from specmamba.kernels.native import library
from specmamba.kernels.native.tensors import is_contiguous_from, require, struct

SOURCE = Path(__file__).parent / "native.cpp"

_Moves = struct(
    "Moves",
    ["buffer", "rows", "source", "target"],
    [
        *("layers", "num_rows", "num_entries", "entry_bytes", "batch", "moves"),
        *("layer_bytes", "row_bytes", "entry_stride"),
    ],
)


def can_take(buffer: Tensor) -> bool:
    """Whether native code moves entries of this buffer: those on the CPU that lie side by side."""
    return buffer.is_cpu and is_contiguous_from(buffer, 3) and code() is not None


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """One call for all layers and rows."""
    require(source.shape == target.shape == (len(rows), source.shape[-1]), "rows, sources and targets do not fit")
    require(all(x.dtype is torch.int64 and x.is_cpu for x in (rows, source, target)), "moves are int64 on the CPU")
    if not buffer.numel():
        return
    rows, source, target = rows.contiguous(), source.contiguous(), target.contiguous()
    size = buffer.element_size()
    moves = _Moves(
        *(x.data_ptr() for x in (buffer, rows, source, target)),
        *(*buffer.shape[:3], buffer[0, 0, 0].numel() * size, *source.shape),
        *(stride * size for stride in buffer.stride()[:3]),
    )
    if not library.required(code()).state_copy_move(moves, torch.get_num_threads()):
        raise IndexError("a move is outside of the buffer")


@cache
def code() -> ctypes.CDLL | None:
    """The library of this operator, or None where native code cannot run."""
    return library.load_functions(SOURCE, {"state_copy_move": [POINTER(_Moves), c_int]}, {"state_copy_move": c_int})
