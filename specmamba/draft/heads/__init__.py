"""Drafting with a head (MTP, EAGLE, EAGLE-3) from the target's hidden states: chains, dynamic and static trees."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specmamba.cache.access import PagedKV, batch_rows, causal_keys, prefill_chunk, tree_keys
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import pending_token_capacity
from specmamba.core import Batch, DraftTree, Packing, PendingTokens, PrefillChunk, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, HostPendingTokens, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.draft.heads.descent import Descent
from specmamba.draft.heads.missed_steps import MissedSteps
from specmamba.draft.heads.pending_tokens import PendingTokenTable, Window
from specmamba.draft.heads.tree_growth import (
    StaticLayout,
    candidates_of,
    grow,
    grow_dynamic_tree,
    grow_static_tree,
    offer_comb,
)
from specmamba.kernels import paged_attention
from specmamba.layers.context import ForwardContext, without_padding
from specmamba.models.base import DraftHead
from specmamba.sampling_params import SamplingBatch, SamplingParams
from specmamba.trees import StaticTree

MISSED_AT_A_TIME = 2048  # tokens of skipped steps that the head runs in one forward
FIRST_KEY = 1  # entry t needs the hidden state of position t-1, so the first token has none; module d starts d later


class MTPDrafter(Drafter):
    """Drafts from the target's hidden states at the first step, and from the head's own states at later steps.

    While it drafts, the head makes its KV entries from its own hidden states. For accepted tokens they are made again
    from the target's states, together with the entry of the new root, in the first forward of the next draft: the
    decided tokens stay *pending* until then. Steps whose tree is the root alone may defer their pending tokens further.
    Steps without drafts it may skip; it runs their newest tokens when it returns, and older ones never.

    A head may have several modules (DeepSeek-V3, arXiv 2412.19437, section 2.2). Module d mod D proposes the children
    at depth d of a draft (d = 0: the root's). Each module has an entry of its own for every position t from
    FIRST_KEY + d on, in known text and on each path of a draft, made from the token at t and the state of the module
    before it at t - 1:

        s[d, t] = module_d(token[t], s[d-1, t-1]; its entries up to t)

    Module 0 takes the target's states; after the root there are none, and it takes those of the last module. With one
    module that is the head itself. So known text is run through all modules in turn, and a step of a draft through one
    of them (``Descent``). Modules beyond the depth of every draft are not run.
    """

    is_capturable = True
    has_pending_tokens = True
    drafts_chains = True

    def __init__(
        self,
        head: DraftHead,
        plan: DraftPlan,
        kv_pool: KVPool,
        table: RequestTable,
        dtype: torch.dtype,
        own_kv: KVPool | None = None,
    ) -> None:
        """Make a drafter.

        Args:
            head: drafts.
            plan: shapes of drafts.
            kv_pool: has the head's entries.
            table: of requests.
            dtype: of hidden states.
            own_kv: the part of ``kv_pool`` that is the head's alone; None: it cannot skip steps.
        """
        self.max_nodes = plan.max_nodes
        self.max_steps = plan.num_steps
        self.num_distributions = 2 + (plan.num_steps - 1) * plan.width
        self.head = head
        self._plan = plan
        self._picker = ChildPicker(plan.draws_drafts)
        self._layouts: dict[tuple[StaticTree, bool], StaticLayout] = {}
        self._kv_pool, self._own_kv = kv_pool, own_kv
        self._table = table
        self._device = table.kv_slots.device
        self._num_modules = max(1, min(head.num_modules, plan.num_steps))
        self.pending = PendingTokenTable(
            table.num_rows + 1,
            pending_token_capacity(plan.max_nodes),
            head.num_modules,
            head.width,
            dtype,
            self._device,
        )
        self._stay: Sequence[bool] = ()  # the rows of the current step whose pending tokens are deferred
        self._missed: MissedSteps | None = None
        if own_kv is not None and plan.is_sized:
            shape = table.num_rows + 1, plan.max_nodes, head.width
            self.stand_in = self._missed = MissedSteps(shape, dtype, self._device, head.combine)
        self._window: Window | None = None  # positions and slots of the current draft
        self._descent: Descent | None = None  # states of the current draft; None for heads of one module

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        if self._missed is not None:
            self._missed.forget(row)
        self.pending.begin(row, tokens)

    def resume(self, row: int, features: Tensor, position: int) -> None:
        """Continue from the states after the last cached token: the target's, then those of modules, [D * H]."""
        self.pending.resume(row, features)

    def features(self, row: int, position: int) -> Tensor | None:
        self._return_to([row])
        # before the first draft of a row, the first column holds the states at the end of the newest prefill chunk
        column = max(0, self.pending.num_tokens[row] - 1 - (self.pending.root[row] - position))
        if self._num_modules > 1 and column >= self.pending.num_with_states[row]:
            pending_tokens = HostPendingTokens(self.pending.counts([row]), is_deferred=True)
            self._complete(self._batch_of(row), pending_tokens.on(self._device))
        return self.pending.states_before(row, column)

    def begin_finish(self, rows: Sequence[int]) -> HostPendingTokens:
        self._return_to(rows)
        return HostPendingTokens(self.pending.counts(rows), is_deferred=True)

    def finish(self, batch: Batch) -> None:
        """Make the entries of all pending tokens, because others may share them and no further draft makes them."""
        assert batch.pending_tokens is not None
        self._complete(batch, batch.pending_tokens)

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        """Make the head's entries for known tokens."""
        self._run_known(chunk, self.head.combine(features))

    def _run_known(self, chunk: PrefillChunk, states: Tensor) -> None:
        """Make the head's entries for known tokens from the target's states [B, L, H] after them."""
        last = (chunk.lengths - 1)[:, None, None].expand(-1, 1, states.shape[2])
        for module in range(self._num_modules):
            stored = self.pending.before[module]
            before = torch.cat([stored[chunk.row_index, :1], states[:, :-1]], 1)
            stored[chunk.row_index, 0] = states.gather(1, last).squeeze(1)
            kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk, FIRST_KEY + module)
            states = self.head.forward(chunk.tokens, before, ForwardContext(kv, None, chunk.positions), module)

    def num_nodes(self, batch_size: int) -> int:
        trees = self._plan.trees
        return self.max_nodes if trees is None else trees.for_batch(batch_size).num_nodes

    def may_follow(self, batch_size: int) -> bool:
        return len(self.pending.before) == 1 and self.num_nodes(batch_size) > 1

    def keep(self, batch: Batch) -> None:
        self.pending.keep(batch, self.max_nodes)

    def kept_features(self, row: int, position: int) -> Tensor:
        return self.pending.kept_before(row, position)

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens:
        """Defer the pending tokens if the step drafts nothing and there is room for those that it decides."""
        guesses = drafts and self.num_nodes(batch_size) > 1
        self._return_to(rows)
        return self.prepare_pending(rows, is_deferred=not guesses and not any(self.must_draft(rows)))

    def prepare_some(self, rows: Sequence[int], drafted: Sequence[bool]) -> HostPendingTokens:
        """Defer the pending tokens of rows that are not drafted for."""
        counts = self.pending.counts(rows)
        self._stay = [not is_drafted for is_drafted in drafted]
        kept = tuple(count * stays for count, stays in zip(counts, self._stay, strict=True))
        return HostPendingTokens(counts, is_deferred=False, kept=kept)

    def must_draft(self, rows: Sequence[int]) -> list[bool]:
        """Whether a row has as many pending tokens as a step can decide; captured steps run no more."""
        self._return_to(rows)
        return [count >= self.max_nodes for count in self.pending.counts(rows)]

    def prepare_pending(self, rows: Sequence[int], is_deferred: bool) -> HostPendingTokens:
        """Do the work of ``prepare`` for a caller that knows whether the pending tokens are deferred."""
        self._stay = [is_deferred] * len(rows)
        return HostPendingTokens(self.pending.counts(rows), is_deferred)

    def propose(self, batch: Batch) -> DraftTree:
        plan = self._plan
        if plan.trees is not None:
            tree = plan.trees.for_batch(batch.size)
            if tree.num_nodes == 1:
                return self.propose_nothing(batch)
            if tree.is_greedy_chain:
                return self._grow_chain(batch, tree.num_nodes)
            layout = self._layout(tree, self._picker.draws_for(batch))
            return grow_static_tree(self, self._picker, layout, batch, self.catch_up(batch))
        if plan.topk > 1:
            return grow_dynamic_tree(self, self._picker, plan, batch, self.catch_up(batch))
        return self._grow_chain(batch, plan.max_nodes)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        assert batch.pending_tokens is not None
        if not batch.pending_tokens.is_deferred:
            self.catch_up(batch)
        return root_tree(batch)

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        topk, width, hidden = self._plan.topk, self._plan.width, self.catch_up(batch)
        if width == 1:
            return offer_comb(self, self._picker, batch, hidden, num_steps, topk)
        return candidates_of(grow(self, self._picker, batch, hidden, (num_steps, topk, width)))

    def propose_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        return self._grow_chain(batch, num_nodes)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        hidden = self.head.combine(features)
        self.pending.add(batch, verdict.path_tokens[:, : hidden.shape[1]], verdict.on_path(hidden))

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        self.pending.advance(rows, [len(tokens) for tokens in decided], self._stay)

    def catch_up(self, batch: Batch, num_entries: int | None = None) -> Tensor:
        """Run the head over the pending tokens.

        Args:
            batch: the roots and the numbers of pending tokens.
            num_entries: entries that the following draft may make, the root's included; None: as many as the plan has.

        Returns:
            The head's states after the roots, [B, 1, H].
        """
        pending_tokens = batch.pending_tokens
        assert pending_tokens is not None
        num_entries = num_entries or self._plan.num_lookahead_slots
        window = self._window = Window.of(self._table, batch, pending_tokens, num_entries)
        outputs = self._run_pending(batch, pending_tokens, window)
        if pending_tokens.counts is None:
            at_roots = [states[:, -1:] for states in outputs]
        else:
            last = pending_tokens.counts[:, None, None] - 1
            at_roots = [states.gather(1, last.expand(-1, 1, states.shape[2])) for states in outputs]
        self.pending.store_root_states(batch, at_roots)
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
            hidden: [B, F, H], the head's states at their parents, as returned by this method.
            depth: depth of the nodes below the root.
            ancestors: [B, F, first_entry + F] bool: which entries each node sees; entry 0 is the root, the nodes
                themselves are the last F. None: a chain.
            first_entry: number of earlier entries; the KV slot of node f is the one first_entry + f after the root's.

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
        else:  # in a batch of one the newest entry is the last key, so it sees all of them
            keys = causal_keys(self._table, batch, positions, num_keys, FIRST_KEY, sees_all=batch.size == 1)
        return self._forward(tokens, hidden, positions, slots, keys)

    def _descend_modules(self, batch: Batch, tokens: Tensor, depth: int, ancestors: Tensor | None) -> Tensor:
        """Do ``descend`` for heads of several modules, whose steps also run entries of earlier depths."""
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

    def _run_pending(self, batch: Batch, pending_tokens: PendingTokens, window: Window) -> list[Tensor]:
        """Run the pending tokens through all modules; return the states of each module, [B, longest, H]."""
        longest, rows = pending_tokens.max_count, batch_rows(batch)
        tokens = rows.take(self.pending.tokens)[:, :longest]
        positions, slots = window.positions[:, :longest], window.slots[:, :longest]
        num_keys = batch.max_root_position + 1
        outputs: list[Tensor] = []
        for module in range(self._num_modules):
            hidden = rows.take(self.pending.before[module])[:, :longest]
            if module:
                hidden = torch.cat([hidden[:, :1], outputs[-1][:, :-1]], 1)
            first_key = FIRST_KEY + module
            sees_all = tokens.numel() == 1 and num_keys > first_key  # the only token is the last key
            packing = pending_tokens.packing
            keys = causal_keys(self._table, batch, positions, num_keys, first_key, sees_all, packing)
            with without_padding(packing):
                outputs.append(self._forward(tokens, hidden, positions, slots, keys, module, packing))
        return outputs

    def _return_to(self, rows: Sequence[int]) -> None:
        """Go on after skipped steps: run their tokens, up to the roots."""
        missing = [] if self._missed is None else self._missed.among(rows, self.pending.root)
        if not missing:
            return
        runs: list[tuple[int, list[int], Tensor]] = []  # a row, tokens in front of its root, states after each
        for row, number in missing:
            tokens, before = self._known(row, number)
            self.pending.root[row] += number
            self.pending.before[0][row, 0] = before[0]
            self.pending.restart(row, tokens[-1])
            if len(tokens) > 1:
                runs.append((row, tokens[:-1], before[1:]))
        at_a_time = max(1, MISSED_AT_A_TIME // max([len(tokens) for _, tokens, _ in runs], default=1))
        for first in range(0, len(runs), at_a_time):
            group = runs[first : first + at_a_time]
            of_group = [row for row, _, _ in group]
            starts = [self.pending.root[row] - len(tokens) for row, tokens, _ in group]
            chunk = prefill_chunk(of_group, starts, [tokens for _, tokens, _ in group], self._device)
            self._run_known(chunk, pad_sequence([states for _, _, states in group], batch_first=True))

    def _known(self, row: int, num_missed: int) -> tuple[list[int], Tensor]:
        """Return the pending and missed tokens of a row, up to the new root, and the states [n, H] before each."""
        assert self._missed is not None
        pending, number = self.pending, self.pending.num_tokens[row]
        missed = self._missed.take(row, pending.root[row], num_missed)
        if not missed.num_lost:
            tokens = pending.tokens[row, :number].tolist() + missed.tokens
            return tokens, torch.cat([pending.before[0][row, :number], missed.states])
        # entries of what is not known become zeros, not those of other requests
        for before in pending.before:
            before[row, 0] = 0
        positions = pending.root[row] + 1 + torch.arange(-number, missed.num_lost, device=self._device)[None]
        assert self._own_kv is not None
        self._own_kv.clear(self._table.slots_at(torch.tensor([row], device=self._device), positions).flatten())
        return missed.tokens, missed.states

    def _complete(self, batch: Batch, pending_tokens: PendingTokens) -> None:
        """Make the entries of all pending tokens and store the modules' states; the tokens stay pending."""
        window = Window.of(self._table, batch, pending_tokens, 1)  # there may be no KV slots after the roots
        outputs = self._run_pending(batch, pending_tokens, window)
        self.pending.store_module_states(batch, outputs)

    def _batch_of(self, row: int) -> Batch:
        """Return a batch of one row for ``_complete``; its sampling settings are not used."""
        root = self.pending.root[row]
        index, position = (torch.tensor([x], device=self._device) for x in (row, root))
        sampling = SamplingBatch.of([SamplingParams()], [0], self._device)
        return Batch(
            (row,), index, self.pending.tokens[index, self.pending.num_tokens[row] - 1], position, root, sampling
        )

    def _grow_chain(self, batch: Batch, num_nodes: int) -> DraftTree:
        def descend(nodes: Tensor, hidden: Tensor, depth: int) -> Tensor:
            return self.descend(batch, nodes, hidden, depth, None, depth)

        return grow_chain(self._picker, batch, num_nodes, self.catch_up(batch), self.head.logits, descend)

    def _layout(self, tree: StaticTree, draws: bool) -> StaticLayout:
        if (tree, draws) not in self._layouts:
            self._layouts[tree, draws] = StaticLayout.of(tree, draws, self._device)
        return self._layouts[tree, draws]

    def _forward(
        self,
        tokens: Tensor,
        hidden: Tensor,
        positions: Tensor,
        slots: Tensor,
        keys: paged_attention.AttentionMetadata,
        module: int = 0,
        packing: Packing | None = None,
    ) -> Tensor:
        kv = PagedKV(self._kv_pool, slots.reshape(-1), keys)
        return self.head.forward(tokens, hidden, ForwardContext(kv, None, positions, packing), module)
