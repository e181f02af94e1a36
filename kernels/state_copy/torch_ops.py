"""Row moves in vectorised PyTorch. See README.md."""

from torch import Tensor


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Move entries inside rows of a buffer, in all layers at once; every read happens before any write.

    Args:
        buffer: [layers, rows, R, ...], changed in place.
        rows: [B] int64, distinct, but for padding: row 0, which is nobody's.
        source, target: [B, J] int64, entries of the row; moves of one row that share a target share the source.
    """
    row = rows[:, None]
    buffer[:, row, target] = buffer[:, row, source]
