"""What a verify asks of the recurrent states, whichever way they are kept: ``StateBuffers``, the seam of the backends.

``SpecBuffers`` (records) and ``SnapshotBuffers`` (whole states) stand behind it; the runner and the layers do not know
which of the two they talk to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from specmamba.cache.rows import RowSet
from specmamba.cache.state_pool import StateOwnershipError, StatePool
from specmamba.core import TreeShape
from specmamba.kernels import delta_net, mamba2
from specmamba.kernels import tree as tree_ops


@dataclass(frozen=True, slots=True)
class HostPlaces:
    """What the host knows of a verify before the tree is there: rows, their checkpoints, what is pending."""

    rows: tuple[int, ...]
    slots: tuple[int, ...]
    pending: tuple[int, ...] = ()  # pending records of each row; empty where nothing ever is
    folded: tuple[int, ...] = ()  # rows whose pending records the verify folds

    def on(self, device: torch.device) -> Places:
        """As a verify needs it, with records right behind the longest pending list."""
        rows, slots = RowSet.of(self.rows, device), RowSet.of(self.slots, device)
        offset = max(self.pending, default=0)
        folds = torch.tensor([row in self.folded for row in self.rows], device=device) if self.folded else None
        is_ragged = folds is not None or min(self.pending, default=0) < offset
        num_pending = torch.tensor(self.pending, device=device) if is_ragged else None
        return Places(rows, slots, offset, num_pending, folds)


@dataclass(frozen=True, slots=True)
class Places:
    """The same on the device. In a step that is replayed these tensors stay, and padding has row and slot 0."""

    rows: RowSet
    slots: RowSet
    node_offset: int  # of records: no row has more pending ones
    num_pending: Tensor | None = None  # [B] int64; None when every row has node_offset of them
    folds: Tensor | None = None  # [B] bool, rows whose pending records the verify folds; None: no row's

    @property
    def is_exact(self) -> bool:
        """Whether the host knows the rows: not in a step that is replayed."""
        return bool(self.rows.rows)


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """Where one verify finds and leaves everything; the same for all layers. Each backend adds what it needs."""

    places: Places
    tree: TreeShape
    conv_index: Tensor  # [B, N, W] int64, the inputs under each node's convolution, in the backend's own numbering

    @property
    def rows(self) -> RowSet:
        return self.places.rows

    @property
    def slots(self) -> RowSet:
        return self.places.slots


@dataclass(frozen=True, slots=True)
class Lease:
    """Whose checkpoint a row verifies from, and where it must stand."""

    owner: str
    slot: int
    position: int


PlanT = TypeVar("PlanT", bound=VerifyPlan)


class StateBuffers(ABC, Generic[PlanT]):
    """States between a verify and the checkpoint, for every running row; a row is begun before it is verified.

    One verify is ``plan``, then ``delta_net`` or ``mamba2`` once per layer (or their parts: ``convolve``, and
    ``delta_rule`` or ``ssd``), then ``commit``. A plan holds until the next one of the same rows.

    ``plan`` is two things, and so is ``commit``. ``place`` and ``advance`` are the host's part: stamps, and how many
    records are pending. ``plan_at`` and ``promote`` work on the device alone and never wait for it, so that they can be
    captured and replayed, with everything in between.
    """

    folds_in_verify = False  # kernels fold full rows while they read their states; else ``place`` does it

    def __init__(self, pool: StatePool, max_nodes: int) -> None:
        self.max_nodes = max_nodes
        self._pool = pool
        self._leases: dict[int, Lease] = {}
        self._placed = HostPlaces((), ())  # by the last ``plan``, for its ``commit``

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """Start verifying for a request whose checkpoint stands in ``slot`` at ``position``.

        Raises:
            StateOwnershipError: the slot holds something else.
        """
        self._pool.check(slot, owner, position)
        self._leases[row] = Lease(owner, slot, position)

    def end(self, row: int) -> None:
        """Forget a row; its checkpoint stays where it is. A row that never began is fine."""
        self._leases.pop(row, None)

    def position(self, row: int) -> int:
        """Tokens that a row's current state has seen.

        Raises:
            StateOwnershipError: the row never began, or has ended.
        """
        return self.positions(row)[-1]

    @abstractmethod
    def positions(self, row: int) -> range:
        """Positions whose state ``materialize`` can give now; the last one is the current position.

        Between a commit and the next plan, every position that the commit added is among them.

        Raises:
            StateOwnershipError: the row never began, or has ended.
        """

    def plan(self, rows: Sequence[int], tree: TreeShape) -> PlanT:
        """Prepare a verify of ``tree`` for rows; errors as for ``place``."""
        self._placed = self.place(rows, tree.num_nodes)
        return self.plan_at(self._placed.on(tree.parents.device), tree)

    @abstractmethod
    def place(self, rows: Sequence[int], num_nodes: int) -> HostPlaces:
        """Prepare a verify of trees of ``num_nodes`` nodes for rows, on the host.

        Raises:
            StateOwnershipError: a row never began, or its slot no longer holds the checkpoint that it continues.
            ValueError: the tree has more nodes than these buffers are made for.
        """

    def node_offset(self, num_nodes: int) -> int:
        """``Places.node_offset`` of all steps that are replayed with trees of so many nodes."""
        return 0

    @abstractmethod
    def plan_at(self, places: Places, tree: TreeShape) -> PlanT:
        """The plan of a verify of ``tree``; on the device alone."""

    @abstractmethod
    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, plan: PlanT) -> Tensor:
        """Convolve the nodes' inputs [B, N, C] along their own paths, weight [C, W], bias [C] -> [B, N, C] float32."""

    @abstractmethod
    def delta_rule(self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: PlanT) -> Tensor:
        """Outputs [B, N, Hv, V] of all nodes; arguments as for ``kernels.gated_delta_rule.tree_verify``."""

    @abstractmethod
    def ssd(self, layer: int, c: Tensor, b: Tensor, u: Tensor, g: Tensor, plan: PlanT) -> Tensor:
        """Outputs [B, N, H, P] of all nodes; arguments as for ``kernels.ssd.tree_verify``."""

    def delta_net(self, layer: int, inputs: delta_net.Inputs, weights: delta_net.Weights, plan: PlanT) -> Tensor:
        """Outputs [B, N, Hv, V] of all nodes, in the gate's dtype: all of a layer between its projections."""

        def convolve(x: Tensor, weight: Tensor) -> Tensor:
            return self.convolve(layer, x, weight, None, plan)

        def delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
            return self.delta_rule(layer, q, k, v, g, beta, plan)

        return delta_net.compose(inputs, weights, convolve, delta_rule)

    def mamba2(self, layer: int, inputs: mamba2.Inputs, weights: mamba2.Weights, plan: PlanT) -> Tensor:
        """Outputs [B, N, H P] of all nodes, in the gate's dtype: all of a layer between its projections."""

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return self.convolve(layer, x, weight, bias, plan)

        def recur(c: Tensor, b: Tensor, u: Tensor, g: Tensor) -> Tensor:
            return self.ssd(layer, c, b, u, g, plan)

        return mamba2.compose(inputs, weights, convolve, recur)

    def commit(self, plan: PlanT, path: Tensor, num_accepted: Tensor, accepted: Sequence[int]) -> None:
        """Advance every row of a plan over its accepted path.

        Args:
            plan: the verify that ran the nodes.
            path: [B, N] int64 node indices from the root down.
            num_accepted: [B] int64 drafts accepted; ``accepted`` are the same numbers on the host.
        """
        self.promote(plan, path, num_accepted)
        self.advance(self._placed, accepted)

    @abstractmethod
    def promote(self, plan: PlanT, path: Tensor, num_accepted: Tensor) -> None:
        """Move what the accepted paths leave behind to where it stays; on the device alone. Arguments as above."""

    @abstractmethod
    def advance(self, places: HostPlaces, accepted: Sequence[int]) -> None:
        """Note, on the host, how far every row has come: ``accepted`` drafts and the root."""

    def materialize(self, row: int, position: int, slot: int) -> None:
        """Write the state of a row at ``position`` (recurrent state and window) into another slot of the pool.

        The slot is stamped with ``position`` and stays its owner's; the row and its checkpoint do not change.

        Args:
            row: a row that has begun.
            position: one of ``positions(row)``.
            slot: an allocated slot that no row verifies from.

        Raises:
            StateOwnershipError: the row never began, its checkpoint was touched by others, or the slot is free, half
                written, or the checkpoint of a row.
            ValueError: the state at ``position`` is not to be had (any more).
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
        """Let a row end with its checkpoint at ``position``, for whoever gets the slot next.

        Raises:
            StateOwnershipError, ValueError: as for ``materialize``.
        """
        lease = self._lease_with(row, position)
        self._pool.check(lease.slot, lease.owner, lease.position)
        if position != lease.position:
            self._write_stamped(row, position, lease.slot, lease.owner)
        self.end(row)

    def _lease_with(self, row: int, position: int) -> Lease:
        """The lease of a row that has the state at ``position``; errors as for ``materialize``."""
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
        """Write recurrent state and window of all layers; everything has been checked."""

    def _lease(self, row: int) -> Lease:
        if row not in self._leases:
            raise StateOwnershipError(f"row {row} has no checkpoint to verify from: it never began, or has ended")
        return self._leases[row]

    def _check_size(self, num_nodes: int) -> None:
        if num_nodes > self.max_nodes:
            raise ValueError(f"a tree of {num_nodes} nodes does not fit buffers for {self.max_nodes}")

    def _checked_slots(self, rows: Sequence[int]) -> tuple[int, ...]:
        """The slots of rows, whose stamps say that they still hold the rows' checkpoints."""
        leases = [self._lease(row) for row in rows]
        for lease in leases:
            self._pool.check(lease.slot, lease.owner, lease.position)
        return tuple(lease.slot for lease in leases)


def conv_index(tree: TreeShape, width: int) -> Tensor:
    """``kernels.tree.conv_index`` of a tree: [B, N, W] int64, nodes from 0 on, -1 the newest input before the root."""
    if tree.is_chain:
        return _chain_conv_index(*tree.parents.shape, width, tree.parents.device)
    return tree_ops.conv_index(tree.parents, width)


@cache
def _chain_conv_index(batch_size: int, num_nodes: int, width: int, device: torch.device) -> Tensor:
    """Of chains it is always the same, so made once."""
    nodes = torch.arange(num_nodes, device=device)[:, None]
    return (nodes + torch.arange(1 - width, 1, device=device)).expand(batch_size, -1, -1)
