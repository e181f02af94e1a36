"""Moving accepted records to the front of their row, one record at a time: the specification of this op."""

from torch import Tensor


def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Move records inside their buffer rows, in place, in all layers.

    buffer [layers, rows_total, R, ...] of any dtype, rows [B] int64 (row of the buffer for each batch row),
    source and target [B, J] int64 positions below R.

    For each (b, j): buffer[:, rows[b], target[b, j]] = *old* buffer[:, rows[b], source[b, j]].
    All reads happen before any write, so moves may overlap. Moves of one row that share a target must share the
    source too: lists of different lengths are filled up with a move that is made anyway. Batch rows that share a
    buffer row leave the result of one of them there: row 0, which is padding, may be given many times.
    Raises IndexError from torch on a position outside R.
    """
    old = buffer.clone()
    for b in range(rows.shape[0]):
        row = int(rows[b])
        for j in range(source.shape[1]):
            buffer[:, row, int(target[b, j])] = old[:, row, int(source[b, j])]
