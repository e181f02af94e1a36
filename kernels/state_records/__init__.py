"""Records of gated delta nets and Mamba2, from which a recurrent state can be advanced: the fold, and operands."""

from torch import Tensor

from specmamba.kernels import gpu
from specmamba.kernels.dispatch import operator
from specmamba.kernels.state_records import native_ops, torch_ops
from specmamba.kernels.state_records.native_ops import can_fold_rows
from specmamba.kernels.state_records.operands import (
    Buffers,
    ExtendOperands,
    RecordOperands,
    Records,
    RowSet,
    SnapshotOperands,
    StateOperands,
    TreePlacement,
    Trees,
    as_stored,
    refuse_exact,
)

__all__ = [
    "Buffers",
    "ExtendOperands",
    "RecordOperands",
    "Records",
    "RowSet",
    "SnapshotOperands",
    "StateOperands",
    "TreePlacement",
    "Trees",
    "as_stored",
    "can_fold_rows",
    "fold",
    "fold_exactly",
    "fold_rows",
]


def _is_native(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, _: Tensor, out: Tensor | None) -> bool:
    return native_ops.can_take(state, k, u, decay, *(() if out is None else (out,)))


@operator(triton=gpu.can_launch, native=_is_native)
def fold(state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None) -> Tensor:
    """Advance checkpoints over their pending records by one rank-m update each, m records at once.

    The state is S_m = e^(G_m) S_0 + sum over j <= m of e^(G_m - G_j) k_j u_j^T; see README.md.

    Args:
        state: [B, Hv, K, V] float32 (any float dtype in the Triton form); modified only where it is ``out``.
        k, u: records [B, R, Hk, K] and [B, R, Hv, V] float32.
        decay: [B, R, Hv] float32, each record's own log decay; or [B, R, Hv, K], one for each key channel.
        num_pending: [B] int64; rows with 0 keep their state.
        out: [B, Hv, K, V], takes the new states; it is ``state`` or does not overlap it. What float16 cannot hold
            becomes its largest finite number. None: a new tensor of the state's dtype.

    Returns:
        New states [B, Hv, K, V].

    Raises:
        ValueError: operands differ in shape, or num_pending is not int64 (native form).
    """
    return torch_ops.fold(state, k, u, decay, num_pending, out)


def fold_exactly(
    state: Tensor, k: Tensor, u: Tensor, decay: Tensor, num_pending: Tensor, out: Tensor | None = None
) -> Tensor:
    """As ``fold``, one record after the other: the bits that exact verifies and extends give a state (README.md).

    Raises:
        ValueError: as ``fold``.
        RuntimeError: native code, which alone has it, does not take the operands.
    """
    if state.numel() == 0:
        return torch_ops.fold(state, k, u, decay, num_pending, out)
    refuse_exact(not _is_native(state, k, u, decay, num_pending, out))
    return native_ops.fold_exactly(state, k, u, decay, num_pending, out)


@operator(native=lambda buffers, *_: native_ops.can_fold_rows(buffers))
def fold_rows(buffers: Buffers, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None) -> None:
    """Advance checkpoints over all their pending records in place, in all layers, and move their windows.

    Rows that fold have no pending records afterwards: a second call changes nothing.

    Args:
        buffers: of all layers: every tensor has one more dimension in front, [layers, ...]; with windows.
        rows, slots: [B] int64, distinct but for padding, which has nothing pending.
        num_pending: [B] int64; becomes 0 where a row folds.
        folds: [B] bool, the rows that fold; None: all.

    Raises:
        ValueError: buffers or places do not fit each other (native form).
        RuntimeError: they are exact, and native code does not take them.
    """
    refuse_exact(buffers.is_exact)
    torch_ops.fold_rows(buffers, rows, slots, num_pending, folds)
