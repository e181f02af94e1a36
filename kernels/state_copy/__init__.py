"""Moves rows inside the per-request buffers."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.state_copy import native_ops, torch_ops
from specmamba.kernels.state_copy.torch_ops import needed

__all__ = ["compact", "needed"]


@operator(triton=lambda buffer, *_: gpu.can_launch(buffer), native=lambda buffer, *_: native_ops.can_take(buffer))
def compact(buffer: Tensor, rows: Tensor, source: Tensor, target: Tensor) -> None:
    """Move entries inside rows of a buffer, in all layers at once; every read happens before any write.

    Args:
        buffer: [layers, rows, R, ...], changed in place.
        rows: [B] int64, distinct except for row 0, which is padding.
        source, target: [B, J] int64, entries of the row; moves of one row that share a target share the source. J is
            at most 64 in the Triton form.

    Raises:
        ValueError: the elements of an entry are not contiguous, or have more than 8 bytes (Triton form); moves differ
            in shape or are not int64 (native form).
        IndexError: a row or an entry is outside of the buffer (on a CPU).
    """
    torch_ops.compact(buffer, rows, source, target)
