"""Records from which a recurrent state can be advanced, of gated delta nets and Mamba2 alike: fold, and operands."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.state_records import native_ops, torch_ops
from specmamba.kernels.state_records.operands import (
    Buffers,
    ExtendOperands,
    RecordOperands,
    SnapshotOperands,
    StateOperands,
    Trees,
    as_stored,
)
from specmamba.kernels.state_records.rows import RowSet

__all__ = [
    "Buffers",
    "ExtendOperands",
    "RecordOperands",
    "RowSet",
    "SnapshotOperands",
    "StateOperands",
    "Trees",
    "as_stored",
    "fold",
]


def fold(
    state: Tensor,
    records_k: Tensor,
    records_u: Tensor,
    records_decay: Tensor,
    num_pending: Tensor,
    out: Tensor | None = None,
) -> Tensor:
    """Checkpoints advanced over their pending records, in place where ``out`` is state; see ``torch_ops.fold``."""
    records = records_k, records_u, records_decay
    if gpu.can_launch(state, *records, num_pending, out):
        from specmamba.kernels.state_records import triton_ops

        return triton_ops.fold(state, *records, num_pending, out)
    if native_ops.can_take(state, *records, *(() if out is None else (out,))):
        return native_ops.fold(state, *records, num_pending, out)
    return torch_ops.fold(state, *records, num_pending, out)
