"""Snapshot-free verification: the records from which a state can be advanced, kept per running request.

A row's buffers hold first its pending records (accepted, not folded into the checkpoint yet), oldest first, then free
space. A verify writes the records of its N nodes at one common ``node_offset`` behind the longest pending list of the
batch; commit moves the accepted ones to the end of the row's own list (in a chain they are mostly there already).
In a captured step the offset is constant: that of the longest possible list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.pool_memory.lazy_memory import give_back_zeros, lazy_zeros
from specmamba.cache.shapes import CacheShape, pending_capacity
from specmamba.cache.state_pool import StatePool
from specmamba.core import TreeShape
from specmamba.kernels import gpu, mamba1, selective_scan, state_copy, state_records
from specmamba.kernels import tree as tree_ops
from specmamba.kernels.state_records import RecordOperands, RowSet
from specmamba.verify.state_buffers import HostVerifySlots, Lease, StateBuffers, VerifyPlan, VerifySlots, conv_index

# Exact arithmetic takes the pending records of a row one after the other in each verify, so it pays to fold sooner. Not
# for Mamba1: exact folds of the selective scan are calls outside of captured steps.
MOST_EXACT_PENDING = 3
# Of Mamba1 each takes an exponential for every entry of the state; kernels/mamba1/README.md has the arithmetic.
MOST_SELECTIVE_PENDING = 1


@dataclass(frozen=True, slots=True)
class RecordPlan(VerifyPlan):
    """Where one verify reads pending records and writes its own; ``conv_index`` indexes ``conv_inputs``."""

    trees: state_records.Trees  # slots and trees as kernels take them
    checkpoints: RowSet  # indices of the rows' checkpoints in the states that kernels read


class RecordBuffers(StateBuffers[RecordPlan]):
    """Records of every running row, sized by running requests and not by cache slots.

    ``k`` [layers, rows, R, Hk, K], ``u`` [layers, rows, R, Hv, V] and ``decay`` [layers, rows, R, Hv] (or, by key
    channel, [layers, rows, R, Hv, K]; of Mamba1 time steps, [layers, rows, R, 1, V]) are float32;
    ``conv_inputs`` [layers, rows, W-1+R, C] starts with the window of the checkpoint. R is the capacity: what a verify
    adds always fits, since rows that are too full fold first.
    """

    def __init__(
        self,
        shape: CacheShape,
        pool: StatePool,
        num_rows: int,
        max_nodes: int,
        device: torch.device,
        folds_early: bool = True,
    ) -> None:
        """Allocate the buffers; ``folds_early``: no state before the newest step's is asked for."""
        super().__init__(pool, max_nodes)
        self._folds_early = folds_early
        s, layers = shape.state, shape.num_state_layers
        self.capacity = pending_capacity(max_nodes, shape.folds_in_verify)
        self.folds_in_verify = shape.folds_in_verify
        # on a CPU reading the indices is free, and copying records to their own place is not
        self._reads_moves = device.type == "cpu" and not gpu.runs_on(device, "state_copy")
        self._widened: Tensor | None = None  # [rows, Hv, K, V] float32, the checkpoints of one layer and batch
        size = (layers, num_rows + 1, self.capacity)
        self.k = lazy_zeros((*size, s.num_key_heads, s.key_dim), torch.float32, device)
        self.u = lazy_zeros((*size, s.num_value_heads, s.value_dim), torch.float32, device)
        self.decay = lazy_zeros((*size, *s.decay_shape), torch.float32, device)
        self._records = self.k, self.u, self.decay
        self.window = s.conv_width - 1
        of_inputs = layers, num_rows + 1, self.window + self.capacity, s.conv_channels
        self.conv_inputs = lazy_zeros(of_inputs, shape.dtype, device)
        self._layers = [
            state_records.Buffers(states, conv_inputs, k, u, decay, windows, shape.is_exact)
            for states, conv_inputs, k, u, decay, windows in zip(
                self._read_states(num_rows), self.conv_inputs, *self._records, pool.conv, strict=True
            )
        ]
        self._all_layers = state_records.Buffers(
            pool.recurrent, self.conv_inputs, *self._records, pool.conv, shape.is_exact
        )
        self._rates = shape.rates
        if s.is_selective:
            self._folds_rows = mamba1.can_fold_rows(self._all_layers, self._rates)
        else:
            self._folds_rows = state_records.can_fold_rows(self._all_layers)
        self.folds_in_plan = layers > 0 and not self.folds_in_verify and self._folds_rows
        self._num_pending = [0] * (num_rows + 1)
        # numbers of records of all layers: [capacity + 1, layers]
        self._counts = torch.arange(self.capacity + 1, device=device)[:, None].repeat(1, layers).unbind()

    def _read_states(self, num_rows: int) -> Sequence[Tensor]:
        """Checkpoints as kernels read them, by layer. Native code reads float32: other dtypes are copied before use."""
        states = self._pool.recurrent
        if states.dtype is torch.float32 or self.folds_in_verify:
            return states.unbind()
        self._widened = torch.zeros(num_rows + 1, *states.shape[2:], device=states.device)
        return [self._widened] * len(states)

    def give_back(self) -> None:
        for buffer in (*self._records, self.conv_inputs):
            give_back_zeros(buffer)

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """Start with no pending records and the checkpoint's window."""
        super().begin(row, slot, owner, position)
        self._num_pending[row] = 0
        for buffer in self._records:
            buffer[:, row].zero_()  # entries that masks hide are still multiplied by zero: they must be finite
        self.conv_inputs[:, row, : self.window] = self._pool.conv[:, slot]

    def end(self, row: int) -> None:
        """Forget a row and its pending records."""
        super().end(row)
        self._num_pending[row] = 0

    def positions(self, row: int) -> range:
        """Return the checkpoint's position and the positions of all pending records."""
        first = self._lease(row).position
        return range(first, first + self._num_pending[row] + 1)

    @property
    def num_pending(self) -> int:
        """Records of all rows that are not folded into a checkpoint yet."""
        return sum(self._num_pending)

    @property
    def num_records(self) -> int:
        """Records that the buffers have room for, without the padding row's."""
        return self.capacity * (len(self._num_pending) - 1)

    def node_offset(self, num_nodes: int) -> int:
        """Return the largest offset: no row ever has more pending records before a tree."""
        return self.capacity - num_nodes

    def most_unfolded(self, num_nodes: int) -> int | None:
        return self._room(num_nodes) if self.folds_in_verify or self.folds_in_plan else None

    def _room(self, num_nodes: int) -> int:
        """Pending records of a row that need not fold before such a tree."""
        # where the verify folds, all of its nodes may be accepted, and the next one must fit behind them
        room = self.capacity - num_nodes - (self.max_nodes if self.folds_in_verify else 0)
        if not self._folds_early:
            return room
        if self._rates is not None:
            return min(room, MOST_SELECTIVE_PENDING) if self._folds_rows else room
        return min(room, MOST_EXACT_PENDING) if self._all_layers.is_exact else room

    def _place(
        self, rows: tuple[int, ...], slots: tuple[int, ...], num_nodes: int, is_captured: bool
    ) -> HostVerifySlots:
        """Fold the rows whose pending list might overflow: now, in the plan or in the verify."""
        room = self._room(num_nodes)
        full = tuple(row for row in rows if self._num_pending[row] > room)
        if not (self.folds_in_verify or (is_captured and self.folds_in_plan)):
            self._fold(full)
            full = ()
        for row in full:  # if the step fails, nothing goes on from a state that may have moved
            self._pool.begin_write(self._leases[row].slot, self._leases[row].owner)
        return HostVerifySlots(rows, slots, tuple(self._num_pending[row] for row in rows), full)

    def plan_at(self, slots: VerifySlots, tree: TreeShape) -> RecordPlan:
        """Fold rows if that is the plan's part, index the convolutions' inputs, and gather the operands of kernels."""
        rows, num_pending, offset = slots.rows, slots.num_pending, slots.node_offset
        folds = slots.folds
        if folds is not None and self.folds_in_plan:
            assert num_pending is not None
            self._fold_rows(rows.index, slots.state_slots.index, num_pending, folds)
            folds = None
        index = self._conv_index(tree, num_pending, offset).contiguous()
        checkpoints = slots.state_slots
        if self._widened is not None:
            places = range(1, 1 + len(checkpoints))  # 0 would be padding to kernels in Triton
            checkpoints = RowSet.of(places, index.device, torch.arange(1, places.stop, device=index.device))
        tensors = rows.index, checkpoints.index, index, num_pending, offset, tree.ancestors, folds
        firsts, counts, num_packed = None, None, None
        if tree.packing is not None:
            firsts, counts, num_packed = tree.packing.firsts, tree.packing.counts, tree.packing.num_packed
        trees = state_records.Trees(*tensors, firsts, counts, num_packed, tree.is_chain)
        return RecordPlan(slots, tree, index, trees, checkpoints)

    def operands(self, layer: int, plan: RecordPlan) -> RecordOperands:
        """Return the buffers of a layer; checkpoints that native code cannot read are copied to float32 first."""
        if self._widened is not None:
            self._widened[1 : 1 + len(plan.checkpoints)] = plan.slots.state_slots.take(self._pool.recurrent[layer])
        return RecordOperands(self._layers[layer], plan.trees, plan.slots.rows, plan.checkpoints)

    def promote(self, plan: RecordPlan, path: Tensor, num_accepted: Tensor) -> None:
        """Move the records of the paths behind the pending ones."""
        slots, rows = plan.slots, plan.slots.rows.index
        if plan.tree.is_chain and slots.num_pending is None:
            return
        base = slots.num_pending
        if base is None:
            base = torch.full_like(rows, slots.node_offset)
        elif plan.trees.folds is not None:
            base = base.masked_fill(plan.trees.folds, 0)
        source, target = tree_ops.commit_moves(path, num_accepted, slots.node_offset, base)
        if slots.is_exact and self._reads_moves:
            rows, source, target = state_copy.needed(rows, source, target)
        for buffer in self._records:
            state_copy.compact(buffer, rows, source, target)
        state_copy.compact(self.conv_inputs, rows, source + self.window, target + self.window)

    def _advance(self, placed: HostVerifySlots, accepted: Sequence[int]) -> None:
        """Count the new pending records, after moving the checkpoints of rows that plan or verify folded."""
        for row in placed.folded:
            self._move_checkpoint(row)
        for row, count in zip(placed.rows, accepted, strict=True):
            self._num_pending[row] += count + 1

    def reserve(self, rows: Sequence[int], num_tokens: int) -> None:
        """Fold the rows without room for ``num_tokens`` more records; until these are added, no checkpoint moves."""
        self._fold([row for row in rows if self._num_pending[row] + num_tokens > self.capacity])

    def roll_back(self, row: int, position: int) -> None:
        """Drop a row's newest pending records, those after ``position``.

        Raises:
            StateOwnershipError: the row never began, or has ended.
            ValueError: the position is before the checkpoint, or after the row's current state.
        """
        lease = self._lease_with(row, position)
        self._num_pending[row] = position - lease.position

    def _conv_index(self, tree: TreeShape, num_pending: Tensor | None, offset: int) -> Tensor:
        """Return entries of ``conv_inputs``: nodes start at the offset, older inputs end with the last pending one."""
        relative = conv_index(tree, self.window + 1)
        if num_pending is None:
            return relative + (self.window + offset)
        before_root = self.window + num_pending[:, None, None]
        return relative + torch.where(relative >= 0, self.window + offset, before_root)

    def _write_state(self, row: int, position: int, slot: int) -> None:
        """Fold the first records into a slot, all layers as one batch; in place if it is the row's own slot."""
        lease = self._leases[row]
        count, states = position - lease.position, self._pool.recurrent
        k, u, decay = (x.select(1, row).narrow(1, 0, count) for x in self._records)
        state, target = states.select(1, lease.slot).float(), states.select(1, slot)
        if self._rates is not None:
            scan_fold = selective_scan.fold_exactly if self._all_layers.is_exact else selective_scan.fold
            folded = scan_fold(state, k, u, decay, self._rates, self._counts[count])
        else:
            out = target if target.dtype is torch.float32 else None
            fold = state_records.fold_exactly if self._all_layers.is_exact else state_records.fold
            folded = fold(state, k, u, decay, self._counts[count], out)
        if folded is not target:
            target.copy_(state_records.as_stored(folded, target.dtype))
        self._pool.conv.select(1, slot).copy_(self.conv_inputs.select(1, row).narrow(1, count, self.window))

    def _fold(self, rows: Sequence[int]) -> None:
        """Advance the checkpoints of rows over all their pending records."""
        leases = [self._leases[row] for row in rows]
        for lease in leases:
            self._pool.begin_write(lease.slot, lease.owner)
        if rows and self._folds_rows:
            slots, counts = [lease.slot for lease in leases], [self._num_pending[row] for row in rows]
            self._fold_rows(*(torch.tensor(x) for x in (rows, slots, counts)))
        else:
            for row, lease in zip(rows, leases, strict=True):
                self._write_state(row, self.position(row), lease.slot)
                window = self._pool.conv.select(1, lease.slot)
                self.conv_inputs.select(1, row).narrow(1, 0, self.window).copy_(window)
        for row in rows:
            self._move_checkpoint(row)

    def _fold_rows(self, rows: Tensor, slots: Tensor, num_pending: Tensor, folds: Tensor | None = None) -> None:
        """Advance checkpoints and windows in native code, all layers at once; those of ``folds``, or all."""
        if self._rates is not None:
            mamba1.fold_rows(self._all_layers, self._rates, rows, slots, num_pending, folds)
        else:
            state_records.fold_rows(self._all_layers, rows, slots, num_pending, folds)

    def _move_checkpoint(self, row: int) -> None:
        """Stamp a row's checkpoint, written anew, with the position after all its pending records; drop these."""
        lease, end = self._leases[row], self.position(row)
        self._pool.end_write(lease.slot, end)
        self._leases[row] = Lease(lease.owner, lease.slot, end)
        self._num_pending[row] = 0
