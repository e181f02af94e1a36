"""Drafting with a head (MTP, EAGLE) from the target's hidden states: chains, dynamic trees and static trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, causal_keys, tree_keys
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.rows import RowSet
from specmamba.core import Batch, Chunk, DraftTree, PendingTokens, SamplingBatch, SamplingParams, Verdict
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, HostPendingTokens, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.draft.heads.descent import Descent
from specmamba.draft.heads.dynamic_tree import grow_dynamic_tree
from specmamba.draft.heads.pending_tokens import PendingTokenTable, Window
from specmamba.draft.heads.static_tree import StaticLayout, grow_static_tree
from specmamba.kernels import paged_attention
from specmamba.layers.context import ForwardContext
from specmamba.models.base import DraftHead
from specmamba.trees import StaticTree

FIRST_KEY = 1  # entry t needs the hidden state of position t-1, so the first token has none; module d starts d later
MIN_CAPACITY = 16


class MTPDrafter(Drafter):
    """Drafts from the target's hidden states, and below the first step from the head's own.

    The head's entries for accepted tokens were made from its own hidden states. They are made again from the target's,
    together with the entry of the new root, in the first forward of the next draft: one forward, not two. Steps whose
    tree is the root alone leave their entries to a later one.

    A head may have several modules (DeepSeek-V3, arXiv 2412.19437, section 2.2). Module d guesses at depth d of a
    draft, d = 0 after the root, and deeper ones go round. Each has an entry of its own for every position t from
    FIRST_KEY + d on, of known text and of each path of a draft alike, made of the token at t and what the module before
    it gave at t - 1:

        s[d, t] = module_d(token[t], s[d-1, t-1]; its entries up to t)

    Module 0 takes the target's states; behind the root there are none, and it takes the last module's. A head of one
    module is the case where that is itself. So known text is run through all modules in turn, and a step of a draft
    through one of them (see ``Descent``). Modules that lie deeper than any draft are not run.
    """

    is_capturable = True
    has_pending_tokens = True

    def __init__(
        self, head: DraftHead, plan: DraftPlan, kv_pool: KVPool, table: RequestTable, dtype: torch.dtype
    ) -> None:
        self.max_nodes = plan.max_nodes
        self.head = head
        self._plan = plan
        self._picker = ChildPicker(plan.draws_drafts)
        self._layouts: dict[StaticTree, StaticLayout] = {}
        self._kv_pool = kv_pool
        self._table = table
        self._device = table.kv_slots.device
        self._num_modules = max(1, min(head.num_modules, plan.num_steps))
        capacity = max(MIN_CAPACITY, 2 * plan.max_nodes)
        self.pending = PendingTokenTable(
            table.num_rows + 1, capacity, head.num_modules, head.width, dtype, self._device
        )
        self._is_deferred = False  # of the step that is being made
        self._window: Window | None = None  # of the draft that is being made
        self._descent: Descent | None = None  # the same; None for heads of one module

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        """See ``Drafter``."""
        self.pending.begin(row, tokens)

    def resume(self, row: int, features: Tensor, position: int) -> None:
        """See ``Drafter``; the features are the states after the last cached token: the target's, then modules'."""
        self.pending.resume(row, features)

    def features(self, row: int, position: int) -> Tensor | None:
        """See ``Drafter``."""
        # before a row drafts, its root is not run, and what the first column holds stands at the newest chunk's end
        column = max(0, self.pending.num_new[row] - 1 - (self.pending.root[row] - position))
        if self._num_modules > 1 and column >= self.pending.num_complete[row]:
            self._complete(self._batch_of(row))
        return self.pending.states_before(row, column)

    def finish(self, batch: Batch) -> None:
        """See ``Drafter``; what the next draft would catch up with is shared too, and that draft never comes."""
        self._complete(batch)

    def extend(self, chunk: Chunk, features: Tensor) -> None:
        """Make the head's entries for known tokens. See ``Drafter``."""
        states = self.head.combine(features)
        last = (chunk.lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
        for module in range(self._num_modules):
            stored = self.pending.before[module]
            before = torch.cat([stored[chunk.row_index, :1], states[:, :-1]], 1)
            stored[chunk.row_index, 0] = states.gather(1, last).squeeze(1)
            kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk, FIRST_KEY + module)
            states = self.head.forward(chunk.tokens, before, ForwardContext(kv, None, chunk.positions), module)

    def num_nodes(self, batch_size: int) -> int:
        """See ``Drafter``."""
        trees = self._plan.trees
        return self.max_nodes if trees is None else trees.for_batch(batch_size).num_nodes

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens:
        """See ``Drafter``; the head is told nothing where it has nothing to guess, as long as there is room."""
        counts = self.pending.counts(rows)
        has_room = max(counts) + self.max_nodes <= self.pending.capacity
        guesses = drafts and self.num_nodes(batch_size) > 1
        return self.prepare_pending(rows, is_deferred=has_room and not guesses)

    def prepare_pending(self, rows: Sequence[int], is_deferred: bool) -> HostPendingTokens:
        """``prepare``, for whoever knows whether it will catch up."""
        self._is_deferred = is_deferred
        return HostPendingTokens(self.pending.counts(rows), is_deferred)

    def propose(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        plan = self._plan
        if plan.trees is not None:
            tree = plan.trees.for_batch(batch.size)
            if tree.num_nodes == 1:
                return self.propose_nothing(batch)
            if tree.is_greedy_chain:
                return self._grow_chain(batch, tree.num_nodes)
            return grow_static_tree(self, self._picker, self._layout(tree), batch, self.catch_up(batch))
        if plan.topk > 1:
            return grow_dynamic_tree(self, self._picker, plan, batch, self.catch_up(batch))
        return self._grow_chain(batch, plan.max_nodes)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        assert batch.pending_tokens is not None
        if not batch.pending_tokens.is_deferred:
            self.catch_up(batch)
        return root_tree(batch)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        """See ``Drafter``."""
        hidden = self.head.combine(features)
        on_path = hidden.gather(1, verdict.path[..., None].expand_as(hidden))
        self.pending.add(batch, verdict.path_tokens[:, : hidden.shape[1]], on_path)

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        """See ``Drafter``."""
        self.pending.advance(rows, [len(tokens) for tokens in decided], self._is_deferred)

    def catch_up(self, batch: Batch, num_entries: int | None = None) -> Tensor:
        """Run the head over what was decided since its last forward; its state after the root, [B, 1, H].

        The draft that follows may make ``num_entries`` entries, the root's counted; None: as many as any draft does.
        """
        pending_tokens = batch.pending_tokens
        assert pending_tokens is not None
        given = self._run_pending(batch, pending_tokens, num_entries or self._plan.num_lookahead_slots)
        if pending_tokens.counts is None:
            at_roots = [states[:, -1:] for states in given]
        else:
            last = pending_tokens.counts[:, None, None] - 1
            at_roots = [states.gather(1, last.expand(-1, 1, states.shape[2])) for states in given]
        self.pending.tell(batch, at_roots)
        if self._num_modules > 1:
            self._descent = Descent(batch.root_tokens[:, None], at_roots)
        return at_roots[0]

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Run the head over draft nodes of one depth, after ``catch_up`` with the same batch.

        Args:
            batch: the roots.
            tokens: [B, F] int64, the nodes.
            hidden: [B, F, H], the head's states at their parents, as this gave them.
            depth: of the nodes, below the root.
            ancestors: [B, F, first_entry + F] bool: which entries each node sees; entry 0 is the root, the nodes
                themselves are the last F. None: a chain.
            first_entry: entries before these; node f's keys and values stand first_entry + f slots behind the root.

        Returns:
            The head's states at the nodes, [B, F, H].
        """
        if self._num_modules > 1:
            return self._descend_modules(batch, tokens, depth, ancestors)
        num_entries = first_entry + tokens.shape[1]
        num_keys = batch.max_root_position + num_entries
        window = self._window
        assert window is not None
        slots = window.slots[:, window.root + first_entry : window.root + num_entries]
        positions = window.positions[:, window.root + depth, None].expand(-1, tokens.shape[1])
        if ancestors is not None:
            keys = tree_keys(self._table, batch, ancestors, num_keys, FIRST_KEY)
        else:  # the newest entry of a lone row is the last of all keys
            keys = causal_keys(self._table, batch, positions, num_keys, FIRST_KEY, sees_all=batch.size == 1)
        return self._forward(tokens, hidden, positions, slots, keys)

    def _descend_modules(self, batch: Batch, tokens: Tensor, depth: int, ancestors: Tensor | None) -> Tensor:
        """``descend`` for heads of several modules, which hand each other more states than those of the parents."""
        window, descent = self._window, self._descent
        assert window is not None
        assert descent is not None
        module, hidden = descent.step(tokens, depth, ancestors)
        entries, first = descent.entries, descent.first
        num_keys = batch.max_root_position + entries.num_entries
        slots = window.slots[:, window.root + first : window.root + entries.num_entries]
        positions = batch.root_positions[:, None] + entries.depth[first:]
        seen = entries.seen(first, batch.root_positions, FIRST_KEY + module)
        keys = tree_keys(self._table, batch, seen, num_keys, FIRST_KEY + module)
        states = self._forward(entries.tokens[:, first:], hidden, positions, slots, keys, module)
        descent.keep(states)
        return states[:, -tokens.shape[1] :]

    def _run_pending(self, batch: Batch, pending_tokens: PendingTokens, num_entries: int) -> list[Tensor]:
        """Run known tokens through all modules: what each gives, [B, longest, H]."""
        longest, rows = pending_tokens.max_count, RowSet.of_batch(batch)
        window = self._window = Window.of(self._table, batch, pending_tokens, num_entries)
        tokens = rows.take(self.pending.tokens)[:, :longest]
        positions, slots = window.positions[:, :longest], window.slots[:, :longest]
        num_keys = batch.max_root_position + 1
        given: list[Tensor] = []
        for module in range(self._num_modules):
            hidden = rows.take(self.pending.before[module])[:, :longest]
            if module:
                hidden = torch.cat([hidden[:, :1], given[-1][:, :-1]], 1)
            first_key = FIRST_KEY + module
            is_lone = tokens.numel() == 1 and num_keys > first_key  # it stands at the last of all keys
            keys = causal_keys(self._table, batch, positions, num_keys, first_key, sees_all=is_lone)
            given.append(self._forward(tokens, hidden, positions, slots, keys, module))
        return given

    def _complete(self, batch: Batch) -> None:
        """Make the entries of all known tokens, and note the modules' states; the next draft makes them again."""
        pending_tokens = HostPendingTokens(self.pending.counts(batch.rows), is_deferred=True).on(self._device)
        given = self._run_pending(batch, pending_tokens, 1)  # behind the roots there may be no room any more
        self.pending.complete(batch, given)

    def _batch_of(self, row: int) -> Batch:
        """A row alone, for ``_complete``."""
        root = self.pending.root[row]
        index, position = (torch.tensor([x], device=self._device) for x in (row, root))
        sampling = SamplingBatch.of([SamplingParams()], [0], self._device)
        return Batch((row,), index, self.pending.tokens[index, self.pending.num_new[row] - 1], position, root, sampling)

    def _grow_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        def descend(nodes: Tensor, hidden: Tensor, depth: int) -> Tensor:
            return self.descend(batch, nodes, hidden, depth, None, depth)

        return grow_chain(self._picker, batch, num_nodes, self.catch_up(batch), self.head.logits, descend)

    def _layout(self, tree: StaticTree) -> StaticLayout:
        if tree not in self._layouts:
            self._layouts[tree] = StaticLayout.of(tree, self._plan.draws_drafts, self._device)
        return self._layouts[tree]

    def _forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: paged_attention.AttentionMetadata,
        module: int = 0,
    ) -> Tensor:
        kv = PagedKV(self._kv_pool, slots.reshape(-1), keys)
        return self.head.forward(tokens, hidden, ForwardContext(kv, None, positions), module)
