"""Snapshot-free verification: the records from which a state can be advanced, kept per running request.

A row's buffers hold first its pending records (accepted, not folded into the checkpoint yet), oldest first, then free
space. A verify writes the records of its N nodes at one common ``node_offset`` behind the longest pending list of the
batch; commit moves the accepted ones up to the end of the row's own list (for a chain they mostly stand there already).
In a step that is replayed the offset is always the same: that of the longest list there may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specmamba.cache.shapes import CacheShape, pending_capacity
from specmamba.cache.state_buffers import HostPlaces, Places, StateBuffers, VerifyPlan, conv_index
from specmamba.cache.state_pool import StatePool
from specmamba.core import TreeShape
from specmamba.kernels import causal_conv1d, delta_net, gated_delta_rule, gpu, mamba2, ssd, state_copy, state_records
from specmamba.kernels import tree as tree_ops


@dataclass(frozen=True, slots=True)
class RecordPlan(VerifyPlan):
    """Where one verify finds pending records and leaves its own; ``conv_index`` counts entries of ``conv_inputs``."""

    trees: state_records.Trees  # places and tree as kernels want them


class SpecBuffers(StateBuffers[RecordPlan]):
    """Records of every running row, sized by running requests and not by cache slots.

    ``k`` [layers, rows, R, Hk, K], ``u`` [layers, rows, R, Hv, V] and ``decay`` [layers, rows, R, Hv] are float32;
    ``conv_inputs`` [layers, rows, W-1+R, C] starts with the checkpoint's window. R is the capacity: what a verify adds
    always fits, since rows that are too full fold first.
    """

    def __init__(self, shape: CacheShape, pool: StatePool, num_rows: int, max_nodes: int, device: torch.device) -> None:
        super().__init__(pool, max_nodes)
        s, layers = shape.state, shape.num_state_layers
        self.capacity = pending_capacity(max_nodes, shape.folds_in_verify)
        self.folds_in_verify = shape.folds_in_verify
        # on a CPU, to look at what is to be moved costs nothing, and to copy what stays does
        self._can_look = device.type == "cpu" and not gpu.runs_on(device)
        self._widened: Tensor | None = None  # [rows, Hv, K, V] float32, the checkpoints of one layer and batch
        size = (layers, num_rows + 1, self.capacity)
        self.k = torch.zeros(*size, s.num_key_heads, s.key_dim, device=device)
        self.u = torch.zeros(*size, s.num_value_heads, s.value_dim, device=device)
        self.decay = torch.zeros(*size, s.num_value_heads, device=device)
        self._records = self.k, self.u, self.decay
        self.window = s.conv_width - 1
        self.conv_inputs = torch.zeros(
            layers, num_rows + 1, self.window + size[2], s.conv_channels, dtype=shape.dtype, device=device
        )
        self._layers = [
            state_records.Buffers(*of_layer)
            for of_layer in zip(self._read_states(num_rows), self.conv_inputs, *self._records, pool.conv, strict=True)
        ]
        self._num_pending = [0] * (num_rows + 1)

    def _read_states(self, num_rows: int) -> Sequence[Tensor]:
        """Where kernels find checkpoints, by layer. Native code reads float32: others are copied before every call."""
        states = self._pool.recurrent
        if states.dtype is torch.float32 or gpu.runs_on(states.device):
            return states.unbind()
        self._widened = torch.zeros(num_rows + 1, *states.shape[2:], device=states.device)
        return [self._widened] * len(states)

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """See ``StateBuffers``."""
        super().begin(row, slot, owner, position)
        self._num_pending[row] = 0
        for buffer in self._records:
            buffer[:, row].zero_()  # entries that masks hide are still multiplied by zero: they must be finite
        self.conv_inputs[:, row, : self.window] = self._pool.conv[:, slot]

    def end(self, row: int) -> None:
        """See ``StateBuffers``; pending records are gone."""
        super().end(row)
        self._num_pending[row] = 0

    def positions(self, row: int) -> range:
        """See ``StateBuffers``: the checkpoint's, and those of all pending records."""
        first = self._lease(row).position
        return range(first, first + self._num_pending[row] + 1)

    @property
    def num_pending(self) -> int:
        """Records of all rows that no checkpoint has in it yet."""
        return sum(self._num_pending)

    @property
    def num_records(self) -> int:
        """Records that the buffers have room for, those of padding not counted."""
        return self.capacity * (len(self._num_pending) - 1)

    def node_offset(self, num_nodes: int) -> int:
        """See ``StateBuffers``: no row ever has more pending records in front of a tree."""
        return self.capacity - num_nodes

    def place(self, rows: Sequence[int], num_nodes: int) -> HostPlaces:
        """See ``StateBuffers``; rows whose pending list might overflow are folded: now, or by the verify."""
        self._check_size(num_nodes)
        slots = self._checked_slots(rows)
        # a verify that folds leaves room for its own nodes, behind all that is pending, and for those of the next one
        room = self.capacity - (2 * self.max_nodes if self.folds_in_verify else num_nodes)
        full = tuple(row for row in rows if self._num_pending[row] > room)
        if not self.folds_in_verify:
            self._fold(full)
            full = ()
        return HostPlaces(tuple(rows), slots, tuple(self._num_pending[row] for row in rows), full)

    def plan_at(self, places: Places, tree: TreeShape) -> RecordPlan:
        """See ``StateBuffers``."""
        rows, slots, num_pending, offset = places.rows, places.slots, places.num_pending, places.node_offset
        index = self._conv_index(tree, num_pending, offset).contiguous()
        slot_index = slots.index if self._widened is None else torch.arange(len(slots), device=index.device)
        ancestors = tree.ancestors
        trees = state_records.Trees(rows.index, slot_index, index, num_pending, offset, ancestors, places.folds)
        return RecordPlan(places, tree, index, trees)

    def delta_net(self, layer: int, inputs: delta_net.Inputs, weights: delta_net.Weights, plan: RecordPlan) -> Tensor:
        """See ``StateBuffers``; in one native call where there is one for these."""
        if delta_net.can_fuse(inputs, weights, self._layers[layer]):
            self._widen(layer, plan)
            return delta_net.tree_verify(inputs, weights, self._layers[layer], plan.trees)
        return super().delta_net(layer, inputs, weights, plan)

    def mamba2(self, layer: int, inputs: mamba2.Inputs, weights: mamba2.Weights, plan: RecordPlan) -> Tensor:
        """See ``StateBuffers``; in one native call where there is one for these."""
        if mamba2.can_fuse(inputs, weights, self._layers[layer]):
            self._widen(layer, plan)
            return mamba2.tree_verify(inputs, weights, self._layers[layer], plan.trees)
        return super().mamba2(layer, inputs, weights, plan)

    def _widen(self, layer: int, plan: RecordPlan) -> None:
        if self._widened is not None:
            self._widened[: len(plan.slots)] = plan.slots.take(self._pool.recurrent[layer])

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, plan: RecordPlan) -> Tensor:
        """See ``StateBuffers``; records the inputs."""
        offset = self.window + plan.places.node_offset
        stored = plan.rows.take(self.conv_inputs[layer])[:, : offset + inputs.shape[1]]
        stored[:, offset:] = inputs
        if not plan.rows.is_range:  # what was written is a copy
            self._put_nodes(self.conv_inputs[layer], plan, offset, inputs)
        return causal_conv1d.tree_verify(stored, plan.conv_index, weight, bias)

    def delta_rule(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: RecordPlan
    ) -> Tensor:
        """See ``StateBuffers``."""
        return self._verify(layer, plan, partial(gated_delta_rule.tree_verify, q, k, v, g, beta))

    def ssd(self, layer: int, c: Tensor, b: Tensor, u: Tensor, g: Tensor, plan: RecordPlan) -> Tensor:
        """See ``StateBuffers``."""
        return self._verify(layer, plan, partial(ssd.tree_verify, c, b, u, g))

    def _verify(self, layer: int, plan: RecordPlan, tree_verify: Callable[..., Tensor]) -> Tensor:
        """One read of the checkpoint, and a record of key, update and path decay per node."""
        state = plan.slots.take(self._pool.recurrent[layer]).float()
        k_rows, u_rows, decay_rows = (plan.rows.take(x[layer]) for x in self._records)
        records = k_rows, u_rows, decay_rows
        offset = plan.places.node_offset
        out = tree_verify(state, *records, plan.places.num_pending, offset, plan.tree.ancestors)
        if not plan.rows.is_range:  # what was written is a copy
            nodes = slice(offset, offset + plan.tree.num_nodes)
            for buffer, written in zip(self._records, records, strict=True):
                self._put_nodes(buffer[layer], plan, nodes.start, written[:, nodes])
        return out

    def promote(self, plan: RecordPlan, path: Tensor, num_accepted: Tensor) -> None:
        """See ``StateBuffers``; makes the records of the paths pending."""
        places, rows = plan.places, plan.rows.index
        if plan.tree.is_chain and places.num_pending is None:
            return
        base = places.num_pending
        if base is None:
            base = torch.full_like(rows, places.node_offset)
        elif places.folds is not None:
            base = base.masked_fill(places.folds, 0)
        source, target = tree_ops.commit_moves(path, num_accepted, places.node_offset, base)
        if places.is_exact and self._can_look:
            rows, source, target = state_copy.needed(rows, source, target)
        for buffer in self._records:
            state_copy.compact(buffer, rows, source, target)
        state_copy.compact(self.conv_inputs, rows, source + self.window, target + self.window)

    def advance(self, places: HostPlaces, accepted: Sequence[int]) -> None:
        """See ``StateBuffers``."""
        for row in places.folded:
            self._move_checkpoint(row)
        for row, count in zip(places.rows, accepted, strict=True):
            self._num_pending[row] += count + 1

    def reserve(self, rows: Sequence[int], num_tokens: int) -> None:
        """Fold the rows that have no room for so many more records: until they are there, no checkpoint moves."""
        self._fold([row for row in rows if self._num_pending[row] + num_tokens > self.capacity])

    def roll_back(self, row: int, position: int) -> None:
        """Drop a row's newest pending records: what came behind ``position`` has never been.

        Raises:
            StateOwnershipError: the row never began, or has ended.
            ValueError: the checkpoint stands behind the position already, or the row's state before it.
        """
        lease = self._lease_with(row, position)
        self._num_pending[row] = position - lease.position

    def _conv_index(self, tree: TreeShape, num_pending: Tensor | None, offset: int) -> Tensor:
        """Node-relative indices -> entries of conv_inputs: nodes behind the offset, older inputs behind the pending."""
        relative = conv_index(tree, self.window + 1)
        if num_pending is None:
            return relative + (self.window + offset)
        before_root = self.window + num_pending[:, None, None]
        return relative + torch.where(relative >= 0, self.window + offset, before_root)

    def _put_nodes(self, buffer: Tensor, plan: RecordPlan, offset: int, values: Tensor) -> None:
        nodes = torch.arange(offset, offset + values.shape[1], device=buffer.device)
        buffer[plan.rows.index[:, None], nodes] = values

    def _write_state(self, row: int, position: int, slot: int) -> None:
        """A fold of the first records into a slot, all layers as one batch; in place where it is the row's own."""
        lease = self._leases[row]
        count, states = position - lease.position, self._pool.recurrent
        k, u, decay = (x[:, row, :count] for x in self._records)
        counts = torch.full(states.shape[:1], count, device=states.device)
        state, target = states[:, lease.slot].float(), states[:, slot]
        is_exact = target.dtype is torch.float32
        folded = state_records.fold(state, k, u, decay, counts, out=target if is_exact else None)
        if not is_exact:
            target.copy_(state_records.as_stored(folded, target.dtype))
        self._pool.conv[:, slot] = self.conv_inputs[:, row, count : count + self.window]

    def _fold(self, rows: Sequence[int]) -> None:
        """Advance the checkpoints of rows over all their pending records, each row's layers as one batch."""
        for row in rows:
            lease = self._leases[row]
            self._write_state(row, self.position(row), lease.slot)
            self.conv_inputs[:, row, : self.window] = self._pool.conv[:, lease.slot]
            self._move_checkpoint(row)

    def _move_checkpoint(self, row: int) -> None:
        """A row's checkpoint stands where its pending records end, and none is pending any more."""
        lease, end = self._leases[row], self.position(row)
        self._pool.begin_write(lease.slot, lease.owner)
        self._pool.end_write(lease.slot, end)
        self._leases[row] = replace(lease, position=end)
        self._num_pending[row] = 0
