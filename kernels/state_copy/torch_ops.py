"""Row moves in vectorised PyTorch. See README.md."""

from torch import Tensor


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor, valid: Tensor) -> None:
    """Move entries inside rows of a buffer, in all layers at once; every read happens before any write.

    Args:
        buffer: [layers, rows, R, ...], changed in place.
        rows: [B] int64, distinct.
        source, target: [B, J] int64, entries of the row; targets of one row are distinct.
        valid: [B, J] bool; other moves do not happen.
    """
    batch, move = valid.nonzero(as_tuple=True)
    row = rows[batch]
    buffer[:, row, target[batch, move]] = buffer[:, row, source[batch, move]]
