"""What the verify of a recurrent layer works on, of either kind; see README.md for the shapes' names.

Operands that stay for several calls compare by identity, so that what native code is told of them is worked out once.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Buffers:
    """Of one layer: checkpoints by slot, and by row the inputs and records of pending tokens and of nodes."""

    states: Tensor  # [slots, Hv, K, V]; float32 for native code. Only folds write it
    conv_inputs: Tensor  # [rows, W - 1 + R, C]: the checkpoint's window, then an input per record
    k: Tensor  # [rows, R, Hk, K] float32
    u: Tensor  # [rows, R, Hv, V] float32
    decay: Tensor  # [rows, R, Hv] float32, log decay of the whole path from the checkpoint
    windows: Tensor | None = None  # [slots, W - 1, C], the checkpoints' last inputs; only folds write it


@dataclass(frozen=True, eq=False)
class Trees:
    """Of one verify: where its trees find and leave what they need, and who sees whom.

    A row that ``folds`` leaves its checkpoint advanced over all its pending records, in ``states`` and ``windows``, and
    its window in front of ``conv_inputs`` moved up to there; the nodes' path decays count from the new checkpoint, and
    nothing is pending in front of them. ``conv_index`` is that of the lists before the fold. Slot 0 means padding.
    """

    rows: Tensor  # [B] int64, distinct
    slots: Tensor  # [B] int64
    conv_index: Tensor  # [B, N, W] int64, the entries of conv_inputs under each node, oldest first
    num_pending: Tensor | None  # [B] int64; None: node_offset everywhere
    node_offset: int  # node i leaves record node_offset + i
    ancestors: Tensor  # [B, N, N] bool, inclusive
    folds: Tensor | None = None  # [B] bool: pending records go into the checkpoint first; None: no row's. GPU only
