"""Drafting with an MTP head that is applied to its own output: chains, dynamic trees and static trees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, ancestor_mask, causal_mask
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.core import Batch, Chunk, DraftTree, Verdict
from specmamba.draft.base import Drafter, chain_shape
from specmamba.draft.children import ChildPicker
from specmamba.draft.dynamic_tree import grow_dynamic_tree
from specmamba.draft.plan import DraftPlan
from specmamba.draft.static_tree import StaticLayout, grow_static_tree
from specmamba.layers.context import ForwardContext
from specmamba.models.base import DraftHead
from specmamba.trees import StaticTree

FIRST_KEY = 1  # entry t needs the hidden state of position t-1, so the first token has no entry
MIN_BACKLOG = 16


@dataclass(frozen=True, slots=True)
class Window:
    """Where the head's entries of one draft stand: first those it catches up with, then the root's and its own."""

    positions: Tensor  # [B, root + E] int64; entry m of a draft stands m behind the root
    slots: Tensor  # [B, root + E] int64, of keys and values; 0 for padding
    root: int  # the column of entry 0, which is the root's


class MTPDrafter(Drafter):
    """Drafts from the target's hidden states, and below the first step from the head's own.

    The head's entries for accepted tokens were made from its own hidden states. They are made again from the target's,
    together with the entry of the new root, in the first forward of the next draft: one forward, not two. Steps whose
    tree is the root alone leave their entries to a later one.
    """

    def __init__(
        self, head: DraftHead, plan: DraftPlan, kv_pool: KVPool, table: RequestTable, hidden_size: int
    ) -> None:
        self.max_nodes = plan.max_nodes
        self.head = head
        self._plan = plan
        self._picker = ChildPicker(plan.draws_drafts)
        self._layouts: dict[StaticTree, StaticLayout] = {}
        self._kv_pool = kv_pool
        self._table = table
        self._device = table.kv_slots.device
        # what the next draft starts from: tokens up to the root, and the target's states before each of them
        self._backlog = max(MIN_BACKLOG, 2 * plan.max_nodes)
        size = (table.num_rows + 1, self._backlog)
        self._tokens = torch.zeros(*size, dtype=torch.int64, device=self._device)
        self._hidden = torch.zeros(*size, hidden_size, dtype=kv_pool.k.dtype, device=self._device)
        self._num_new = [1] * size[0]  # the root is always the last of them
        self._window: Window | None = None  # of the draft that is being made

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self._hidden[row].zero_()
        self._tokens[row, 0] = tokens[-1]
        self._num_new[row] = 1

    def resume(self, row: int, features: Tensor) -> None:
        """See ``Drafter``; the features are the target's hidden state after the last cached token."""
        self._hidden[row, 0] = features

    def features(self, row: int, behind_root: int) -> Tensor | None:
        """See ``Drafter``."""
        return self._hidden[row, self._num_new[row] - 1 - behind_root]

    def finish(self, batch: Batch) -> None:
        """See ``Drafter``; what the next draft would catch up with is shared too, and that draft never comes."""
        counts = {row: self._num_new[row] for row in batch.rows}
        self.catch_up(batch, 1)  # behind the roots there may be no room any more
        for row, count in counts.items():
            self._num_new[row] = count

    def extend(self, chunk: Chunk, hidden: Tensor) -> None:
        """Make the head's entries for known tokens. See ``Drafter``."""
        before = torch.cat([self._hidden[chunk.row_index, :1], hidden[:, :-1]], 1)
        kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk, FIRST_KEY)
        self.head.forward(chunk.tokens, before, ForwardContext(kv, None, chunk.positions))
        last = (chunk.lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        self._hidden[chunk.row_index, 0] = hidden.gather(1, last).squeeze(1)

    def propose(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        plan, size = self._plan, len(batch.rows)
        if plan.trees is not None:
            tree = plan.trees.for_batch(size)
            if tree.num_nodes == 1:
                return self._propose_nothing(batch)
            if tree.is_greedy_chain:
                return self._grow_chain(batch, tree.num_nodes)
            return grow_static_tree(self, self._picker, self._layout(tree), batch, self.catch_up(batch))
        if plan.topk > 1:
            return grow_dynamic_tree(self, self._picker, plan, batch, self.catch_up(batch))
        return self._grow_chain(batch, plan.max_nodes)

    def observe(self, batch: Batch, verdict: Verdict, hidden: Tensor, accepted: Sequence[int]) -> None:
        """See ``Drafter``."""
        num_nodes = hidden.shape[1]
        on_path = hidden.gather(1, verdict.path[..., None].expand_as(hidden))
        first = [self._num_new[row] for row in batch.rows]
        rows = RowSet.of(batch.rows, self._device)
        if rows.is_range and len(set(first)) == 1:
            columns = slice(first[0], first[0] + num_nodes)
            rows.take(self._tokens)[:, columns] = verdict.path_tokens[:, :num_nodes]
            rows.take(self._hidden)[:, columns] = on_path
        else:
            places = torch.tensor(first, device=self._device)[:, None] + torch.arange(num_nodes, device=self._device)
            self._tokens[rows.index[:, None], places] = verdict.path_tokens[:, :num_nodes]
            self._hidden[rows.index[:, None], places] = on_path
        for row, count in zip(batch.rows, accepted, strict=True):
            self._num_new[row] += count + 1

    def catch_up(self, batch: Batch, num_entries: int | None = None) -> Tensor:
        """Run the head over what was decided since its last forward; its state after the root, [B, 1, H].

        The draft that follows may make ``num_entries`` entries, the root's counted; None: as many as any draft does.
        """
        counts = [self._num_new[row] for row in batch.rows]
        longest, rows = max(counts), RowSet.of(batch.rows, self._device)
        window = self._window = self._place(batch, counts, num_entries or self._plan.num_slots)
        tokens, hidden = rows.take(self._tokens)[:, :longest], rows.take(self._hidden)[:, :longest]
        positions, slots = window.positions[:, :longest], window.slots[:, :longest]
        num_keys = batch.max_root_position + 1
        is_lone = tokens.numel() == 1 and num_keys > FIRST_KEY  # one query at the last key: it sees all from the first
        mask = None if is_lone else causal_mask(positions, num_keys, FIRST_KEY)
        out = self._forward(batch, tokens, hidden, positions, slots, num_keys, mask)
        for row in batch.rows:
            self._num_new[row] = 0
        if min(counts) == longest:
            return out[:, -1:]
        last = torch.tensor(counts, device=self._device)[:, None, None] - 1
        return out.gather(1, last.expand(-1, 1, out.shape[2]))

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Run the head over draft nodes of one depth, after ``catch_up`` with the same batch.

        Args:
            batch: the roots.
            tokens: [B, F] int64, the nodes.
            hidden: [B, F, H], the head's states at their parents.
            depth: of the nodes, below the root.
            ancestors: [B, F, first_entry + F] bool: which entries each node sees; entry 0 is the root, the nodes
                themselves are the last F. None: a chain.
            first_entry: entries before these; node f's keys and values stand first_entry + f slots behind the root.

        Returns:
            The head's states at the nodes, [B, F, H].
        """
        num_entries = first_entry + tokens.shape[1]
        num_keys = batch.max_root_position + num_entries
        window = self._window
        assert window is not None
        slots = window.slots[:, window.root + first_entry : window.root + num_entries]
        positions = window.positions[:, window.root + depth, None].expand(-1, tokens.shape[1])
        mask = None
        if ancestors is not None:
            mask = ancestor_mask(batch.root_positions, ancestors, num_keys, FIRST_KEY)
        elif len(batch.rows) > 1:
            mask = causal_mask(positions, num_keys, FIRST_KEY)
        return self._forward(batch, tokens, hidden, positions, slots, num_keys, mask)

    def _place(self, batch: Batch, counts: Sequence[int], num_entries: int) -> Window:
        """Positions and slots of everything this draft may run, made at once; padding stands at the root."""
        longest = max(counts)
        offsets = torch.arange(1 - longest, num_entries, device=self._device)
        if min(counts) == longest:
            positions = batch.root_positions[:, None] + offsets
            return Window(positions, self._table.slots_at(batch.row_index, positions), longest - 1)
        missing = longest - torch.tensor(counts, device=self._device)[:, None]
        moved = offsets + missing  # tokens stand at the left of their columns, what follows the root stays
        positions = batch.root_positions[:, None] + moved.clamp(max=0).maximum(offsets)
        slots = self._table.slots_at(batch.row_index, positions)
        slots[:, :longest] *= moved[:, :longest] <= 0
        return Window(positions, slots, longest - 1)

    def _propose_nothing(self, batch: Batch) -> DraftTree:
        if max(self._num_new[row] for row in batch.rows) + self.max_nodes > self._backlog:
            self.catch_up(batch)
        return DraftTree(batch.root_tokens[:, None], chain_shape(len(batch.rows), 1, self._device))

    def _grow_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        hidden = self.catch_up(batch)
        token, tokens, probs = batch.root_tokens[:, None], [batch.root_tokens[:, None]], []
        for depth in range(num_nodes - 1):
            if depth:
                hidden = self.descend(batch, token, hidden, depth, None, depth)
            token, drawn_from = self._picker.pick_one(self.head.logits(hidden), batch, depth)
            tokens.append(token)
            if drawn_from is not None:
                probs.append(drawn_from)
        draft_probs = torch.cat([*probs, probs[-1]], 1) if probs else None  # the last node has no children: any will do
        shape = chain_shape(len(batch.rows), num_nodes, self._device)
        return DraftTree(torch.cat(tokens, 1), shape, draft_probs)

    def _layout(self, tree: StaticTree) -> StaticLayout:
        if tree not in self._layouts:
            self._layouts[tree] = StaticLayout.of(tree, self._plan.draws_drafts, self._device)
        return self._layouts[tree]

    def _forward(
        self,
        batch: Batch,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        num_keys: int,
        mask: Tensor | None,
    ) -> Tensor:
        read_slots = self._table.read_slots(batch, FIRST_KEY if mask is None else 0, num_keys)
        kv = PagedKV(self._kv_pool, slots.reshape(-1), read_slots, mask)
        return self.head.forward(tokens, hidden, ForwardContext(kv, None, positions))
