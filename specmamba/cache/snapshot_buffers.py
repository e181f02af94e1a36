"""Verification with snapshots: a whole state per tree node, and the accepted one is copied into the checkpoint.

This is how the hybrid-model support of SGLang does it (``intermediate_ssm``, ``intermediate_conv_window``). It is here
as the comparison for ``SpecBuffers``: the same text from N states per row in place of N small records.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specmamba.cache.rows import RowSet
from specmamba.cache.shapes import CacheShape
from specmamba.cache.state_buffers import HostPlaces, Places, StateBuffers, VerifyPlan, conv_index
from specmamba.cache.state_pool import StatePool
from specmamba.core import TreeShape
from specmamba.kernels import causal_conv1d, gated_delta_rule, ssd
from specmamba.kernels.state_records import as_stored


class SnapshotBuffers(StateBuffers[VerifyPlan]):
    """States of every running row and node.

    ``intermediate_ssm`` [layers, rows + 1, N, Hv, K, V] float32, whatever type slots have, and
    ``intermediate_conv_window`` [layers, rows + 1, N, W-1, C] in the model's dtype hold what a slot would hold after
    each node; a commit rounds what it copies. They are read from a verify to its commit, and by ``materialize`` until
    the next plan. Nothing is ever pending: every commit moves the checkpoint and its stamp.
    """

    def __init__(self, shape: CacheShape, pool: StatePool, num_rows: int, max_nodes: int, device: torch.device) -> None:
        super().__init__(pool, max_nodes)
        s = shape.state
        size = (shape.num_state_layers, num_rows + 1, max_nodes)
        self.intermediate_ssm = torch.zeros(*size, s.num_value_heads, s.key_dim, s.value_dim, device=device)
        self.window = s.conv_width - 1
        self.intermediate_conv_window = torch.zeros(
            *size, self.window, s.conv_channels, dtype=shape.dtype, device=device
        )
        self._paths = torch.zeros(num_rows + 1, max_nodes, dtype=torch.int64, device=device)
        self._path_length = [0] * (num_rows + 1)  # nodes of the last commit's path, while their states still stand

    def begin(self, row: int, slot: int, owner: str, position: int) -> None:
        """See ``StateBuffers``."""
        super().begin(row, slot, owner, position)
        self._path_length[row] = 0

    def positions(self, row: int) -> range:
        """See ``StateBuffers``: the positions on the last accepted path; before the first commit, the checkpoint's."""
        end = self._lease(row).position + 1
        return range(end - max(1, self._path_length[row]), end)

    def place(self, rows: Sequence[int], num_nodes: int) -> HostPlaces:
        """See ``StateBuffers``; from here on the snapshots of the verify before are gone."""
        self._check_size(num_nodes)
        slots = self._checked_slots(rows)
        for row in rows:
            self._path_length[row] = 0
        return HostPlaces(tuple(rows), slots)

    def plan_at(self, places: Places, tree: TreeShape) -> VerifyPlan:
        """See ``StateBuffers``."""
        index = conv_index(tree, self.window + 1) + self.window  # the kernel puts the window in front of the nodes
        return VerifyPlan(places, tree, index)

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor, bias: Tensor | None, plan: VerifyPlan) -> Tensor:
        """See ``StateBuffers``; leaves a window behind every node."""
        windows = plan.slots.take(self._pool.conv[layer])
        y, after = causal_conv1d.tree_verify_snapshots(inputs, windows, plan.conv_index, weight, bias)
        _put_nodes(self.intermediate_conv_window[layer], plan.rows, after)
        return y

    def delta_rule(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, plan: VerifyPlan
    ) -> Tensor:
        """See ``StateBuffers``."""
        return self._verify(layer, plan, partial(gated_delta_rule.tree_verify_snapshots, q, k, v, g, beta))

    def ssd(self, layer: int, c: Tensor, b: Tensor, u: Tensor, g: Tensor, plan: VerifyPlan) -> Tensor:
        """See ``StateBuffers``."""
        return self._verify(layer, plan, partial(ssd.tree_verify_snapshots, c, b, u, g))

    def _verify(self, layer: int, plan: VerifyPlan, tree_verify: Callable[..., Tensor]) -> Tensor:
        """Run all nodes, and leave a state behind every one."""
        state = plan.slots.take(self._pool.recurrent[layer]).float()
        buffer, num_nodes = self.intermediate_ssm[layer], plan.tree.num_nodes
        if plan.rows.is_range:
            snapshots = plan.rows.take(buffer)[:, :num_nodes]
        else:
            snapshots = buffer.new_empty(len(plan.rows), num_nodes, *buffer.shape[2:])
        parents = None if plan.tree.is_chain else plan.tree.parents
        out = tree_verify(state, snapshots, parents)
        if not plan.rows.is_range:
            _put_nodes(buffer, plan.rows, snapshots)
        return out

    def promote(self, plan: VerifyPlan, path: Tensor, num_accepted: Tensor) -> None:
        """See ``StateBuffers``; copies the state after each path's last node into the row's slot."""
        last = path.gather(1, num_accepted[:, None]).squeeze(1)
        for layer, states in enumerate(self._pool.recurrent):
            after = self.intermediate_ssm[layer][plan.rows.index, last]
            plan.slots.put(states, as_stored(after, states.dtype))
            plan.slots.put(self._pool.conv[layer], self.intermediate_conv_window[layer][plan.rows.index, last])
        self._paths[plan.rows.index, : path.shape[1]] = path

    def advance(self, places: HostPlaces, accepted: Sequence[int]) -> None:
        """See ``StateBuffers``."""
        for row, count in zip(places.rows, accepted, strict=True):
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


def _put_nodes(buffer: Tensor, rows: RowSet, values: Tensor) -> None:
    """Write values [B, N, ...] to the first N nodes of rows of a layer's buffer."""
    num_nodes = values.shape[1]
    if rows.is_range:
        rows.take(buffer)[:, :num_nodes].copy_(values)
    else:
        buffer[rows.index, :num_nodes] = values
