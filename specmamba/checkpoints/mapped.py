"""Copies of tensors that lie in mapped files."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from specmamba.parallel.share import Part
from specmamba.processes.unused_memory import give_back_pages

_MIN_PAGES_BYTES = 1 << 20  # of a tensor whose pages are given back
_PIECE_BYTES = 64 << 20  # of a file that are copied before their pages are given back


def copy_mapped(mapped: Tensor, part: Part | None = None) -> Tensor:
    """Copy a tensor that lies in a mapped file, which may change or shrink, and give the pages that it took back.

    Without that a process that has read a checkpoint holds the whole file beside the copies, as far as memory goes.

    Args:
        mapped: the tensor.
        part: of it that is copied; None: all. Other places are not looked at. A file is read in pages, though, so of
            columns that are narrower than a page the whole rows come from the disk, once for all ranks of a machine.

    Returns:
        The copy, contiguous where ``mapped`` is.
    """
    if part is None and mapped.nbytes <= _PIECE_BYTES:
        copy = mapped.clone()
    else:
        shape, dim, runs = tuple(mapped.shape), 0, [(0, len(mapped))]
        if part is not None:
            shape, dim, runs = part.shape(mapped.shape), part.dim, part.runs()
        copy, at = mapped.new_empty(shape), 0
        for begin, count in runs:
            for rows, own in _pieces(mapped.narrow(dim, begin, count), copy.narrow(dim, at, count)):
                own.copy_(rows)
                _give_back(rows)
            at += count
    _give_back(mapped)
    return copy


def _pieces(mapped: Tensor, copy: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Two tensors of one shape in pieces along the first dimension; a piece lies in ``_PIECE_BYTES`` of the file."""
    stride = mapped.stride(0) * mapped.element_size()
    rows = max(1, _PIECE_BYTES // max(1, stride))
    yield from zip(mapped.split(rows), copy.split(rows), strict=True)


def _give_back(mapped: Tensor) -> None:
    """Give back the pages between the first element and the last; a wish."""
    sizes = zip(mapped.shape, mapped.stride(), strict=True)
    span = (1 + sum((size - 1) * stride for size, stride in sizes)) * mapped.element_size() if mapped.numel() else 0
    if span >= _MIN_PAGES_BYTES:
        give_back_pages(mapped.data_ptr(), span)
