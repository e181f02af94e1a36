"""Packed operands of captured steps: how many of their rows are no padding is a number in memory.

A captured step has fixed shapes, so the nodes of ragged trees are packed into as many rows as there may be. Native
operators that work row by row then leave out the padding behind the last node; its rows in their results may hold
anything. All other forms of operators compute padding too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import local

from torch import Tensor


class _Scope(local):
    """The operands of this thread."""

    num_rows = -1
    address: int | None = None


_SCOPE = _Scope()


@contextmanager
def live_rows(num_rows: int, count: Tensor | None) -> Iterator[None]:
    """Inside, of ``num_rows`` rows of packed operands as many are no padding as ``count`` says when they are used.

    Args:
        num_rows: of packed operands.
        count: [1] int64 on the CPU, kept by the caller; None: all rows, as outside.
    """
    before = _SCOPE.num_rows, _SCOPE.address
    if count is not None and count.is_cpu:
        _SCOPE.num_rows, _SCOPE.address = num_rows, count.data_ptr()
    try:
        yield
    finally:
        _SCOPE.num_rows, _SCOPE.address = before


def live_count(shape: Sequence[int], num_rows: int) -> int | None:
    """The address of the number of rows that are no padding, of an operand of this shape; None: all are.

    Packed operands are [1, T, ...], or [T, K] where experts take them; those of trees side by side are [B, N, ...].
    ``num_rows`` are the rows that the operator works on: heads may be rows of their own.
    """
    if num_rows != _SCOPE.num_rows:
        return None
    is_packed = shape[0] == num_rows if len(shape) == 2 else len(shape) > 2 and (shape[0], shape[1]) == (1, num_rows)
    return _SCOPE.address if is_packed else None


def is_partial() -> bool:
    """Whether some rows of packed operands may be padding."""
    return _SCOPE.address is not None
