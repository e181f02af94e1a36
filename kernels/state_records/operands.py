"""Operands that say where a recurrent layer reads and writes its state in one forward. Shapes are named in README.md.

A forward is one of three: it extends states over known tokens, or verifies draft trees with records or with snapshots.
``run`` of each runs a recurrence over them in PyTorch: ``forms`` has ``extend``, ``tree_verify`` and
``tree_verify_snapshots``; ``launch`` runs its Triton forms in place. ``tokens`` are the recurrence's inputs,
[B, L, ...] float32, in the forms' order, and the outputs are [B, L, Hv, V] float32, unspecified on padding.

``Buffers`` and ``Trees`` stay for several calls and compare by identity, so that their ctypes structs are made once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSet:
    """Distinct rows. Where they are consecutive, ``take`` is a view: no copy of the states of a whole batch.

    In a captured step the host does not know the rows, and padding repeats row 0, which belongs to no request.
    """

    rows: tuple[int, ...]  # empty where the host does not know them
    is_range: bool
    _device: torch.device
    _index: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device, index: Tensor | None = None) -> RowSet:
        """From host numbers; ``index`` [B] int64 are the same rows on the device, where such a tensor exists."""
        is_range = bool(rows) and all(row == rows[0] + i for i, row in enumerate(rows))
        return cls(tuple(rows), is_range, device, index)

    @cached_property
    def index(self) -> Tensor:
        """The rows as a tensor [B] int64; made at first use, which consecutive rows seldom need."""
        if self._index is not None:
            return self._index
        return torch.tensor(self.rows, dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return len(self.rows) if self._index is None else len(self._index)

    def take(self, x: Tensor) -> Tensor:
        """x[rows]: a view when the rows are consecutive, else a copy."""
        return x.narrow(0, self.rows[0], len(self.rows)) if self.is_range else x.index_select(0, self.index)

    def put(self, x: Tensor, values: Tensor) -> None:
        """x[rows] = values."""
        if self.is_range:
            x.narrow(0, self.rows[0], len(self.rows)).copy_(values)
        else:
            x.index_copy_(0, self.index, values.to(x.dtype))

    def put_at(self, x: Tensor, first: int, values: Tensor) -> None:
        """x[rows, first : first + N] = values [B, N, ...]."""
        end = first + values.shape[1]
        if self.is_range:
            self.take(x)[:, first:end].copy_(values)
        else:
            x[self.index[:, None], torch.arange(first, end, device=x.device)] = values.to(x.dtype)


@dataclass(frozen=True, eq=False)
class Buffers:
    """State memory of one layer: checkpoints by slot; inputs and records of pending tokens and of nodes by row."""

    states: Tensor  # [slots, Hv, K, V]; float32 for native code. Only folds write it
    conv_inputs: Tensor  # [rows, W - 1 + R, C]: the checkpoint's window, then an input per record
    k: Tensor  # [rows, R, Hk, K] float32
    u: Tensor  # [rows, R, Hv, V] float32
    decay: Tensor  # [rows, R, Hv] or [rows, R, Hv, K] float32, log decay of the record's own step, by key channel
    windows: Tensor | None = None  # [slots, W - 1, C], the checkpoints' last inputs; only folds write it
    is_exact: bool = False  # verifies and folds have one fixed arithmetic (README.md), which native code alone has


MAX_CHAIN = 8  # nodes up to which Triton runs a chain as the recurrence; products do more nodes at a time beyond
Records = tuple[Tensor, Tensor, Tensor]  # of a batch: k [B, R, Hk, K], u [B, R, Hv, V], decay [B, R, Hv], as in Buffers


class TreePlacement(NamedTuple):
    """How the nodes of draft trees follow the records of their rows."""

    num_pending: Tensor | None  # [B] int64: so many records precede the root; None: node_offset everywhere
    node_offset: int  # node i leaves record node_offset + i; >= every num_pending
    ancestors: Tensor  # [B, N, N] bool, inclusive, in topological order


@dataclass(frozen=True, eq=False)
class Trees:
    """Trees of one verify: rows and slots that they read and write, and which node sees which.

    A row that ``folds`` advances its checkpoint over all its pending records, in ``states`` and ``windows``, and moves
    its window at the start of ``conv_inputs`` up to the new checkpoint; the nodes continue from there, and
    no record is pending before them. ``conv_index`` refers to the lists before the fold. Slot 0 means padding.
    """

    rows: Tensor  # [B] int64, distinct
    slots: Tensor  # [B] int64
    conv_index: Tensor  # [B, N, W] int64, the entries of conv_inputs under each node, oldest first
    num_pending: Tensor | None  # [B] int64; None: node_offset everywhere
    node_offset: int  # node i leaves record node_offset + i
    ancestors: Tensor  # [B, N, N] bool, inclusive
    folds: Tensor | None = (
        None  # [B] bool: fold pending records into the checkpoint first; None: no row folds. GPU only
    )
    # Native forms take the nodes of ragged trees packed, [1, T, ...]: row b's begin at firsts[b]. Others ignore these.
    firsts: Tensor | None = None  # [B] int64
    counts: Tensor | None = None  # [B] int64, nodes of each tree, their sum not above T
    num_packed: int | None = None  # T; None: inputs are [B, N, ...]
    is_chain: bool = False  # every tree is a chain of all N nodes: known on the host. Triton runs short ones otherwise

    @cached_property
    def placement(self) -> TreePlacement:
        """The part of it that does not depend on where buffers and checkpoints are."""
        return TreePlacement(self.num_pending, self.node_offset, self.ancestors)

    @property
    def num_nodes(self) -> int:
        return self.ancestors.shape[1]

    @property
    def is_short_chain(self) -> bool:
        """Whether Triton runs them as the recurrence, without products of nodes with each other."""
        return self.is_chain and self.num_nodes <= MAX_CHAIN


@dataclass(frozen=True, slots=True)
class ExtendOperands:
    """Known tokens: the states and windows in slots are read, advanced and written."""

    states: Tensor  # [slots, Hv, K, V], any float dtype
    windows: Tensor  # [slots, W - 1, C]
    slots: RowSet
    lengths: Tensor  # [B] int64; tokens from lengths[b] on are padding
    is_exact: bool = False  # as in ``Buffers``

    def run(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Read the states, advance them over the tokens and write them back."""
        out: Tensor
        refuse_exact(self.is_exact)
        out, after = forms.extend(*tokens, self.slots.take(self.states).float(), self.lengths)
        self.slots.put(self.states, as_stored(after, self.states.dtype))
        return out

    def launch(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Advance the states in place. The windows' dtype, which is the model's, may choose products and launches."""
        products = {"model_dtype": self.windows.dtype} if forms.EXTENDS_IN_PARTS else {}
        out: Tensor = forms.extend_in_place(*tokens, self.states, self.slots.index, self.lengths, **products)
        return out


@dataclass(frozen=True, slots=True)
class RecordOperands:
    """Draft trees with records: checkpoints are read, the nodes' inputs and records are written to the buffers."""

    buffers: Buffers
    trees: Trees
    rows: RowSet  # of the buffers; the same as trees.rows
    slots: RowSet  # of buffers.states; the same as trees.slots

    @property
    def states(self) -> Tensor:
        """The checkpoints' pool [slots, Hv, K, V]."""
        return self.buffers.states

    @property
    def is_exact(self) -> bool:
        """As in ``Buffers``."""
        return self.buffers.is_exact

    def run(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Read every checkpoint once for all nodes, and write a record (key, update, log decay) of each."""
        out: Tensor
        refuse_exact(self.buffers.is_exact)
        buffers, trees, rows = self.buffers, self.trees, self.rows
        checkpoints = self.slots.take(buffers.states).float()
        k, u, decay = rows.take(buffers.k), rows.take(buffers.u), rows.take(buffers.decay)
        out = forms.tree_verify(*tokens, checkpoints, (k, u, decay), trees.placement)
        if not rows.is_range:  # the records were written to copies
            first = trees.node_offset
            nodes = slice(first, first + trees.num_nodes)
            for buffer, written in ((buffers.k, k), (buffers.u, u), (buffers.decay, decay)):
                rows.put_at(buffer, first, written[:, nodes])
        return out

    def launch(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Verify in one launch, in which rows may fold."""
        out: Tensor = forms.tree_verify_in_place(*tokens, self.buffers, self.trees)
        return out


@dataclass(frozen=True, slots=True)
class SnapshotOperands:
    """Draft trees with snapshots: checkpoints are read, the whole state and window after each node is written."""

    states: Tensor  # [slots, Hv, K, V], any float dtype
    windows: Tensor  # [slots, W - 1, C]
    state_snapshots: Tensor  # [rows, N', Hv, K, V] float32, N' >= N
    window_snapshots: Tensor  # [rows, N', W - 1, C]
    rows: RowSet  # of the snapshots
    slots: RowSet
    conv_index: Tensor  # [B, N, W] int64, into window and nodes, oldest first
    parents: Tensor | None  # [B, N] int64; None: chains

    def run(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Run the recurrence itself, node after node, and write the state after every node."""
        out: Tensor
        buffer, rows, num_nodes = self.state_snapshots, self.rows, tokens[0].shape[1]
        if rows.is_range:
            snapshots = rows.take(buffer)[:, :num_nodes]
        else:
            snapshots = buffer.new_empty(len(rows), num_nodes, *buffer.shape[2:])
        out = forms.tree_verify_snapshots(*tokens, self.slots.take(self.states).float(), snapshots, self.parents)
        if not rows.is_range:
            rows.put_at(buffer, 0, snapshots)
        return out

    def launch(self, forms: Any, tokens: tuple[Tensor, ...]) -> Tensor:
        """Verify as ``run`` does: the Triton form has the same arguments."""
        return self.run(forms, tokens)


StateOperands = ExtendOperands | RecordOperands | SnapshotOperands


def refuse_exact(is_exact: bool) -> None:
    """Raise RuntimeError where states need the fixed arithmetic: this form has another one."""
    if is_exact:
        raise RuntimeError(
            "exact states need native code for every operator, and these operands are none that it takes"
        )


def as_stored(state: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert a float32 state to a pool's dtype; float16 saturates at its largest finite number, NaN stays."""
    if dtype is torch.float16:
        largest = torch.finfo(dtype).max
        state = state.clamp(-largest, largest)
    return state.to(dtype)
