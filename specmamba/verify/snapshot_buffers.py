"""Verification with snapshots: a whole state per tree node; commit copies the accepted one into the checkpoint.

SGLang's hybrid models are verified in this way (``intermediate_ssm``, ``intermediate_conv_window``). It is the
comparison for ``RecordBuffers``: the same text from N states per row instead of N small records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specmamba.cache.pool_memory.lazy_memory import give_back_zeros, lazy_zeros
from specmamba.cache.shapes import CacheShape
from specmamba.cache.state_pool import StatePool
from specmamba.core import TreeShape
from specmamba.kernels.state_records import SnapshotOperands, as_stored
from specmamba.verify.state_buffers import HostVerifySlots, StateBuffers, VerifyPlan, VerifySlots, conv_index


class SnapshotBuffers(StateBuffers[VerifyPlan]):
    """States of every running row and node.

    ``intermediate_ssm`` [layers, rows + 1, N, Hv, K, V] float32 for every dtype of slots, and
    ``intermediate_conv_window`` [layers, rows + 1, N, W-1, C] in the model's dtype are state and window after each
    node; a commit rounds the state to the dtype of slots. They are read from a verify to
    its commit, and by ``materialize`` until the next plan. Nothing is ever pending: every commit moves the checkpoint
    and its stamp.
    """

    def __init__(self, shape: CacheShape, pool: StatePool, num_rows: int, max_nodes: int, device: torch.device) -> None:
        super().__init__(pool, max_nodes)
        s = shape.state
        size = (shape.num_state_layers, num_rows + 1, max_nodes)
        self.intermediate_ssm = lazy_zeros((*size, s.num_value_heads, s.key_dim, s.value_dim), torch.float32, device)
        self.window = s.conv_width - 1
        self.intermediate_conv_window = lazy_zeros((*size, self.window, s.conv_channels), shape.dtype, device)
        self._paths = torch.zeros(num_rows + 1, max_nodes, dtype=torch.int64, device=device)
        self._path_length = [0] * (num_rows + 1)  # nodes of the last commit's path, while their snapshots exist

    def give_back(self) -> None:
        give_back_zeros(self.intermediate_ssm)
        give_back_zeros(self.intermediate_conv_window)

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """Start without snapshots."""
        super().begin(row, slot, owner, position)
        self._path_length[row] = 0

    def positions(self, row: int) -> range:
        """Return the positions on the last accepted path; before the first commit, the checkpoint's alone."""
        end = self._lease(row).position + 1
        return range(end - max(1, self._path_length[row]), end)

    def _place(
        self, rows: tuple[int, ...], slots: tuple[int, ...], num_nodes: int, is_captured: bool
    ) -> HostVerifySlots:
        """Drop the snapshots of the previous verify."""
        for row in rows:
            self._path_length[row] = 0
        return HostVerifySlots(rows, slots)

    def plan_at(self, slots: VerifySlots, tree: TreeShape) -> VerifyPlan:
        """Index the convolutions' inputs: the window first, then the nodes."""
        return VerifyPlan(slots, tree, conv_index(tree, self.window + 1) + self.window)

    def operands(self, layer: int, plan: VerifyPlan) -> SnapshotOperands:
        """Return the checkpoints of a layer, and its buffers for a state and a window per node."""
        return SnapshotOperands(
            self._pool.recurrent[layer],
            self._pool.conv[layer],
            self.intermediate_ssm[layer],
            self.intermediate_conv_window[layer],
            plan.slots.rows,
            plan.slots.state_slots,
            plan.conv_index,
            None if plan.tree.is_chain else plan.tree.parents,
        )

    def promote(self, plan: VerifyPlan, path: Tensor, num_accepted: Tensor) -> None:
        """Copy the state after each path's last node into the row's slot."""
        rows, slots = plan.slots.rows.index, plan.slots.state_slots
        last = path.gather(1, num_accepted[:, None]).squeeze(1)
        for layer, states in enumerate(self._pool.recurrent):
            after = self.intermediate_ssm[layer][rows, last]
            slots.put(states, as_stored(after, states.dtype))
            slots.put(self._pool.conv[layer], self.intermediate_conv_window[layer][rows, last])
        self._paths[rows, : path.shape[1]] = path

    def _advance(self, placed: HostVerifySlots, accepted: Sequence[int]) -> None:
        """Stamp every row's slot with the position after its path."""
        for row, count in zip(placed.rows, accepted, strict=True):
            lease = self._lease(row)
            self._pool.check(lease.slot, lease.owner, lease.position)
            self._pool.begin_write(lease.slot, lease.owner)
            position = lease.position + count + 1
            self._pool.end_write(lease.slot, position)
            self._leases[row] = replace(lease, position=position)
            self._path_length[row] = count + 1

    def _write_state(self, row: int, position: int, slot: int) -> None:
        lease = self._leases[row]
        if position == lease.position:
            self._pool.recurrent[:, slot] = self._pool.recurrent[:, lease.slot]
            self._pool.conv[:, slot] = self._pool.conv[:, lease.slot]
            return
        step = self._path_length[row] - 1 - (lease.position - position)
        node = self._paths[row, step : step + 1]
        after = self.intermediate_ssm[:, row].index_select(1, node).squeeze(1)
        self._pool.recurrent[:, slot] = as_stored(after, self._pool.recurrent.dtype)
        self._pool.conv[:, slot] = self.intermediate_conv_window[:, row].index_select(1, node).squeeze(1)
