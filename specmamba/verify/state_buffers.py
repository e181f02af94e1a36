"""Recurrent states between a verify and its commit: the contract ``StateBuffers`` of the two backends.

``RecordBuffers`` (records) and ``SnapshotBuffers`` (whole states) implement it; the step and the layers do not know
which of the two they use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from specmamba.cache.state_pool import StateOwnershipError, StatePool
from specmamba.core import TreeShape
from specmamba.kernels import tree as tree_ops
from specmamba.kernels.state_records import RecordOperands, RowSet, SnapshotOperands


@dataclass(frozen=True, slots=True)
class HostVerifySlots:
    """Slots of a verify on the host, known before the trees are drafted."""

    rows: tuple[int, ...]
    state_slots: tuple[int, ...]  # of the rows' checkpoints
    num_pending: tuple[int, ...] = ()  # pending records of each row; empty for snapshots
    folded: tuple[int, ...] = ()  # rows whose pending records plan or verify fold

    def on(self, device: torch.device) -> VerifySlots:
        """Return the slots on a device; the nodes' records start right after the longest pending list."""
        rows, slots = RowSet.of(self.rows, device), RowSet.of(self.state_slots, device)
        offset = max(self.num_pending, default=0)
        folds = torch.tensor([row in self.folded for row in self.rows], device=device) if self.folded else None
        is_ragged = folds is not None or min(self.num_pending, default=0) < offset
        num_pending = torch.tensor(self.num_pending, device=device) if is_ragged else None
        return VerifySlots(rows, slots, offset, num_pending, folds)


@dataclass(frozen=True, slots=True)
class VerifySlots:
    """Slots of a verify on the device; padding has row 0 and slot 0."""

    rows: RowSet
    state_slots: RowSet
    node_offset: int  # first record of the nodes; no row has more pending records
    num_pending: Tensor | None = None  # [B] int64; None when every row has node_offset of them
    folds: Tensor | None = None  # [B] bool, rows whose pending records plan or verify fold; None: no row folds

    @property
    def is_exact(self) -> bool:
        """Whether the host knows the rows; it does not in a captured step."""
        return bool(self.rows.rows)


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """One verify: its slots, its trees and what follows from both; the same for all layers. Backends add to it."""

    slots: VerifySlots
    tree: TreeShape
    conv_index: Tensor  # [B, N, W] int64, inputs of each node's convolution, as indices of the backend's buffer


@dataclass(frozen=True, slots=True)
class Lease:
    """The checkpoint that a row verifies from: owner, slot, and the position of the state."""

    owner: str
    slot: int
    position: int


PlanT = TypeVar("PlanT", bound=VerifyPlan)


class StateBuffers(ABC, Generic[PlanT]):
    """States between a verify and the checkpoint, for every running row; a row is begun before it is verified.

    One verify is ``place`` and ``plan_at``, then ``operands`` once per layer, then ``promote`` and ``advance``. A plan
    holds until the next one of the same rows.

    ``place`` and ``advance`` are the host's part: stamps, and how many records are pending. ``plan_at``, ``operands``
    and ``promote`` work on the device alone and never wait for it, so that a graph can capture them. ``plan`` and
    ``commit`` do both parts at once, for callers that run no captured steps.
    """

    # full rows are folded by ``place``, unless
    folds_in_verify = False  # kernels fold them while they read their states
    folds_in_plan = False  # ``plan_at`` folds those of captured steps

    def most_unfolded(self, num_nodes: int) -> int | None:
        """Return the pending records of a row that a captured step of such trees does not fold, at the most.

        None: ``place`` has work to do that depends on the step before, so that must have been read.
        """
        return None

    def __init__(self, pool: StatePool, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self._pool = pool
        self._leases: dict[int, Lease] = {}
        self._placed = HostVerifySlots((), ())  # the last verify

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """Start verifying for a request whose checkpoint is in ``slot``, at ``position``.

        Raises:
            StateOwnershipError: the slot holds another state.
        """
        self._pool.check(slot, owner, position)
        self._leases[row] = Lease(owner, slot, position)

    def end(self, row: int) -> None:
        """Forget a row; its checkpoint stays where it is. A row that never began is fine."""
        self._leases.pop(row, None)

    def state_moved(self, row: int, slot: int) -> None:
        """Note that a row's checkpoint stands in another slot now; a row that never began is fine. Between steps."""
        if row in self._leases:
            self._leases[row] = replace(self._leases[row], slot=slot)

    @abstractmethod
    def give_back(self) -> None:
        """Give back the memory of what is kept, on a CPU; no row has begun."""

    def position(self, row: int) -> int:
        """Return the position of a row's current state: the number of tokens it has seen.

        Raises:
            StateOwnershipError: the row never began, or has ended.
        """
        return self.positions(row)[-1]

    @abstractmethod
    def positions(self, row: int) -> range:
        """Return the positions whose state ``materialize`` can write now; the last one is the current position.

        Between a commit and the next plan, every position that the commit added is among them.

        Raises:
            StateOwnershipError: the row never began, or has ended.
        """

    def plan(self, rows: Sequence[int], tree: TreeShape) -> PlanT:
        """Prepare a verify of ``tree`` for rows; errors as for ``place``."""
        return self.plan_at(self.place(rows, tree.num_nodes).on(tree.parents.device), tree)

    def place(self, rows: Sequence[int], num_nodes: int, is_captured: bool = False) -> HostVerifySlots:
        """Prepare a verify of trees of ``num_nodes`` nodes for rows, on the host; ``advance`` ends it.

        ``is_captured``: the slots are inputs of a captured step, which has a flag for rows that fold.

        Raises:
            StateOwnershipError: a row never began, or its slot no longer holds the checkpoint that it continues.
            ValueError: the tree has more nodes than these buffers are made for.
        """
        if num_nodes > self.max_nodes:
            raise ValueError(f"a tree of {num_nodes} nodes does not fit buffers for {self.max_nodes}")
        self._placed = self._place(tuple(rows), self._checked_slots(rows), num_nodes, is_captured)
        return self._placed

    @abstractmethod
    def _place(
        self, rows: tuple[int, ...], slots: tuple[int, ...], num_nodes: int, is_captured: bool
    ) -> HostVerifySlots:
        """Do ``place`` after its checks; ``slots`` are those of the rows' checkpoints."""

    def node_offset(self, num_nodes: int) -> int:
        """Return ``VerifySlots.node_offset`` of all captured steps with trees of ``num_nodes`` nodes."""
        return 0

    @abstractmethod
    def plan_at(self, slots: VerifySlots, tree: TreeShape) -> PlanT:
        """Return the plan of a verify of ``tree``; runs on the device alone."""

    @abstractmethod
    def operands(self, layer: int, plan: PlanT) -> RecordOperands | SnapshotOperands:
        """Return the checkpoints that a layer reads for a plan's rows, and the buffers it writes for every node."""

    def commit(self, plan: PlanT, path: Tensor, num_accepted: Tensor, accepted: Sequence[int]) -> None:
        """Advance every row of a plan over its accepted path.

        Args:
            plan: the verify that ran the nodes.
            path: [B, N] int64 node indices from the root down.
            num_accepted: [B] int64 drafts accepted; ``accepted`` are the same numbers on the host.
        """
        self.promote(plan, path, num_accepted)
        self.advance(accepted)

    @abstractmethod
    def promote(self, plan: PlanT, path: Tensor, num_accepted: Tensor) -> None:
        """Keep the records or states of the accepted paths; runs on the device alone. Arguments as for ``commit``."""

    def advance(self, accepted: Sequence[int]) -> None:
        """Count, on the host, what the last placed verify added to every row: ``accepted`` drafts and the root.

        Of a row whose number is -1 nothing is kept but what the verify has folded.

        Raises:
            ValueError: no verify of so many rows was placed since the last call.
        """
        placed, self._placed = self._placed, HostVerifySlots((), ())
        if len(placed.rows) != len(accepted):
            raise ValueError(f"a verify of {len(placed.rows)} rows was placed, and {len(accepted)} are counted")
        self._advance(placed, accepted)

    @abstractmethod
    def _advance(self, placed: HostVerifySlots, accepted: Sequence[int]) -> None:
        """Do ``advance`` for a verify with these slots."""

    def materialize(self, row: int, position: int, slot: int) -> None:
        """Write the state of a row at ``position`` (recurrent state and window) into another slot of the pool.

        The slot is stamped with ``position`` and keeps its owner; the row and its checkpoint do not change.

        Args:
            row: a row that has begun.
            position: one of ``positions(row)``.
            slot: an allocated slot that no row verifies from.

        Raises:
            StateOwnershipError: the row never began, its checkpoint was touched by others, or the slot is free, half
                written, or the checkpoint of a row.
            ValueError: the state at ``position`` is not available (any more).
        """
        lease = self._lease_with(row, position)
        for user, other in self._leases.items():
            if other.slot == slot:
                raise StateOwnershipError(f"state slot {slot} is the checkpoint of row {user}: it cannot be written")
        stamp = self._pool.stamp(slot)
        if not stamp.is_written:
            raise StateOwnershipError(f"state slot {slot} is being written by {stamp.owner!r}")
        self._pool.check(lease.slot, lease.owner, lease.position)
        self._write_stamped(row, position, slot, stamp.owner)

    def retire(self, row: int, position: int) -> None:
        """End a row with its checkpoint at ``position``, so that the slot can change its owner.

        Raises:
            StateOwnershipError, ValueError: as for ``materialize``.
        """
        lease = self._lease_with(row, position)
        self._pool.check(lease.slot, lease.owner, lease.position)
        if position != lease.position:
            self._write_stamped(row, position, lease.slot, lease.owner)
        self.end(row)

    def _lease_with(self, row: int, position: int) -> Lease:
        """Return the lease of a row that has the state at ``position``; errors as for ``materialize``."""
        lease, available = self._lease(row), self.positions(row)
        if position not in available:
            raise ValueError(
                f"row {row} has no state at position {position}: only {available[0]} to {available[-1]} can be had"
            )
        return lease

    def _write_stamped(self, row: int, position: int, slot: int, owner: str) -> None:
        self._pool.begin_write(slot, owner)
        self._write_state(row, position, slot)
        self._pool.end_write(slot, position)

    @abstractmethod
    def _write_state(self, row: int, position: int, slot: int) -> None:
        """Write recurrent state and window of all layers, after all checks."""

    def _lease(self, row: int) -> Lease:
        if row not in self._leases:
            raise StateOwnershipError(f"row {row} has no checkpoint to verify from: it never began, or has ended")
        return self._leases[row]

    def _checked_slots(self, rows: Sequence[int]) -> tuple[int, ...]:
        """Check by their stamps that the rows' slots still hold their checkpoints; returns the slots."""
        leases = [self._lease(row) for row in rows]
        for lease in leases:
            self._pool.check(lease.slot, lease.owner, lease.position)
        return tuple(lease.slot for lease in leases)


@dataclass(frozen=True, slots=True)
class VerifyState(Generic[PlanT]):
    """The states of one verify, as layers use them (``StateView``)."""

    buffers: StateBuffers[PlanT]
    plan: PlanT

    def operands(self, layer: int) -> RecordOperands | SnapshotOperands:
        """Return the states of one layer."""
        return self.buffers.operands(layer, self.plan)


def conv_index(tree: TreeShape, width: int) -> Tensor:
    """``kernels.tree.conv_index`` of a tree: [B, N, W] int64, nodes from 0 on, -1 the newest input before the root."""
    if tree.is_chain:
        return _chain_conv_index(*tree.parents.shape, width, tree.parents.device)
    return tree_ops.conv_index(tree.parents, width)


@cache
def _chain_conv_index(batch_size: int, num_nodes: int, width: int, device: torch.device) -> Tensor:
    """Return the index of chains, which depends on sizes alone and is therefore computed once."""
    nodes = torch.arange(num_nodes, device=device)[:, None]
    return (nodes + torch.arange(1 - width, 1, device=device)).expand(batch_size, -1, -1)
