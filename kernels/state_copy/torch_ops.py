"""Row moves in vectorised PyTorch. See README.md."""

from torch import Tensor


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """One indexed read of all sources, then one indexed write."""
    row = rows[:, None]
    buffer[:, row, target] = buffer[:, row, source]


def needed(rows: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The moves that change something, without those that are given twice; it looks at the numbers.

    Args:
        rows: [B] int64.
        source, target: [B, J] int64, as for ``compact``; sources of one row differ, unless they repeat the first move.

    Returns:
        rows [M], source and target [M, 1], for ``compact``.
    """
    moves = source != target
    moves[:, 1:] &= source[:, 1:] != source[:, :1]
    batch, move = moves.nonzero(as_tuple=True)
    return rows[batch], source[batch, move, None], target[batch, move, None]
