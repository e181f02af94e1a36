"""All memory of requests, the slots that a verify reads and writes in it, and the commit of accepted paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, causal_keys, tree_keys
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.memory import MemoryPlan
from specmamba.cache.pool_memory import cuda_driver
from specmamba.cache.pool_memory.chunk_store import ChunkStore
from specmamba.cache.request_table import RequestTable, TokenCounts
from specmamba.cache.shapes import CacheShape
from specmamba.cache.split import Split
from specmamba.cache.state_pool import StatePool
from specmamba.core import Batch, DraftTree, Verdict
from specmamba.kernels import tree as tree_ops
from specmamba.layers.context import ForwardContext
from specmamba.verify.record_buffers import RecordBuffers
from specmamba.verify.snapshot_buffers import SnapshotBuffers
from specmamba.verify.state_buffers import StateBuffers, VerifyPlan, VerifySlots, VerifyState


@dataclass(frozen=True, slots=True)
class Placement:
    """The slots that one verify reads and writes."""

    kv_slots: Tensor  # [B, N] int64, of the nodes: at positions root, root + 1, ...
    states: VerifyPlan


class Pools:
    """KV, recurrent states and token counts of all requests, sized by one plan."""

    def __init__(self, shape: CacheShape, vocab_size: int, plan: MemoryPlan, device: torch.device) -> None:
        bounds = plan.elastic
        most = (None, None) if bounds is None else (bounds.most_pages, bounds.most_state_slots)
        store = _new_store(plan, device)
        self.kv = KVPool(shape, plan.num_pages, plan.page_size, device, most[0], store)
        self.states = StatePool(shape, plan.num_state_slots, device, most[1], store)
        self.split = None if bounds is None else Split(self.kv, self.states, bounds)
        self.table = RequestTable(plan.num_rows, plan.context_length + plan.num_lookahead_slots, self.kv, device)
        backend = RecordBuffers if plan.speculative_state == "records" else SnapshotBuffers
        self.state_buffers: StateBuffers[Any] = backend(shape, self.states, plan.num_rows, plan.max_nodes, device)
        self.counts = TokenCounts(plan.num_rows, vocab_size, device)
        if self.split is not None:
            self.split.followers.append(self.table)
        self._device = device

    def give_back(self) -> None:
        """Make keys, values, states and records zeros that take no memory on a CPU, as at the start.

        Elastic pools have the sizes of the start again. Does nothing while a request or the prefix cache holds a page
        or a slot.
        """
        if self.kv.is_unused and self.states.is_unused:
            if self.split is not None:
                self.split.restore()
            self.kv.give_back()
            self.states.give_back()
            self.state_buffers.give_back()

    def place(self, batch: Batch, tree: DraftTree, slots: VerifySlots | None) -> Placement:
        """Choose the slots that the verify of ``tree`` reads and writes.

        Args:
            batch: has the roots.
            tree: the drafts on these roots.
            slots: of recurrent states, in a captured step; None: the host places them now, and folds full rows.

        Raises:
            StateOwnershipError: a row's checkpoint is not in its slot.
            ValueError: the tree has more nodes than the buffers.
        """
        num_nodes = tree.shape.num_nodes
        if slots is None:
            slots = self.state_buffers.place(batch.rows, num_nodes).on(self._device)
        positions = batch.root_positions[:, None] + torch.arange(num_nodes, device=self._device)
        kv_slots = self.table.slots_at(batch.row_index, positions)
        return Placement(kv_slots, self.state_buffers.plan_at(slots, tree.shape))

    def context(self, batch: Batch, tree: DraftTree, placement: Placement) -> ForwardContext:
        """Return the context of a verify: nodes attend to their ancestors, states continue from the checkpoints."""
        num_nodes, shape = tree.shape.num_nodes, tree.shape
        num_keys = batch.max_root_position + num_nodes
        positions = batch.root_positions[:, None] + shape.depth
        if shape.is_chain:
            is_single = batch.size == num_nodes == 1  # its token sees all keys, so no mask is needed
            keys = causal_keys(self.table, batch, positions, num_keys, sees_all=is_single, packing=shape.packing)
        else:
            keys = tree_keys(self.table, batch, shape.ancestors, num_keys, packing=shape.packing)
        return ForwardContext(
            kv=PagedKV(self.kv, placement.kv_slots.view(-1), keys),
            state=VerifyState(self.state_buffers, placement.states),
            positions=positions,
            packing=shape.packing,
        )

    def history(self, batch: Batch) -> tuple[Tensor, Tensor] | None:
        """Return output counts [B, V] and prompt mask [B, V] of the batch; None without penalties."""
        return None if batch.sampling.penalties is None else self.counts.of(batch.row_index)

    def commit(self, batch: Batch, placement: Placement, verdict: Verdict) -> None:
        """Commit the accepted paths: their records become pending, their KV moves to the slots of their positions."""
        self.state_buffers.promote(placement.states, verdict.path, verdict.num_accepted)
        if placement.states.tree.is_chain or not self.kv.k:
            return
        source, target = tree_ops.kv_moves(verdict.path, verdict.num_accepted, placement.kv_slots)
        if (
            batch.is_exact and source.is_cpu
        ):  # reading the indices is free on a CPU, copying tokens to their own slot is not
            is_moved = source != target
            source, target = source[is_moved], target[is_moved]
        self.kv.move(source.flatten(), target.flatten())

    def advance(self, num_accepted: Sequence[int]) -> None:
        """Count, on the host, the tokens that the last placed verify committed in every row of its batch."""
        self.state_buffers.advance(num_accepted)


def _new_store(plan: MemoryPlan, device: torch.device) -> ChunkStore | None:
    """Create the memory that is mapped into elastic pools of a GPU; None: they have memory of their own."""
    bounds = plan.elastic
    if bounds is None or not bounds.chunk_bytes:
        return None
    driver = cuda_driver.driver_of(device)
    assert driver is not None, "a plan for mapped memory is made where there is a driver"
    with_padding = bounds.pool_bytes + bounds.page_bytes + bounds.slot_bytes
    # a layer takes its bytes in whole chunks: at most one chunk more than these, and so many are in end_bytes
    return ChunkStore(driver, device, (with_padding + plan.end_bytes) // bounds.chunk_bytes)
