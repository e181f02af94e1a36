"""Drafting with a small separate model (arXiv 2211.17192), whose recurrent states are rolled back by records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specmamba.cache.access import ExtendState, PagedKV, batch_rows, tree_keys
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import CacheShape
from specmamba.cache.state_pool import StatePool
from specmamba.core import Batch, DraftTree, PrefillChunk, TreeShape, Verdict
from specmamba.draft.candidates import Candidates
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, HostPendingTokens, chain_shape, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.draft.heads.descent import DraftEntries
from specmamba.draft.heads.tree_growth import candidates_of, grow, grow_dynamic_tree, offer_comb
from specmamba.kernels import paged_attention
from specmamba.kernels.state_records import RowSet
from specmamba.layers.context import ForwardContext
from specmamba.models.base import LoadedModel, Target
from specmamba.verify.record_buffers import RecordBuffers, RecordPlan
from specmamba.verify.state_buffers import VerifyState


class DraftStates:
    """One state per row of the request table, at the slot of the row's number.

    Stamps say where each of them stands, and every call that has a position compares it: known tokens that were left
    out, or a state that was not loaded, raise StateOwnershipError.

    Known tokens advance a state in place. Once a row drafts (``start``), its state is a checkpoint with pending
    records: each token that is run adds one, and ``roll_back`` drops those of rejected drafts. ``RecordBuffers`` are
    used for drafts even where the target keeps snapshots: a draft's tokens are run one by one, in as many forwards,
    and the snapshots of one forward are gone with the next.
    """

    def __init__(self, shape: CacheShape, num_rows: int, max_nodes: int, device: torch.device) -> None:
        """Allocate the pools of a draft model.

        Args:
            shape: of the draft model.
            num_rows: of the request table.
            max_nodes: of a draft, the root counted.
            device: of the pools.
        """
        self._device = device
        self._pool = StatePool(shape, num_rows + 1, device)
        self._records = RecordBuffers(shape, self._pool, num_rows, max_nodes, device, folds_early=False)
        for row in range(1, num_rows + 2):
            self._pool.allocate(_owner(row))
        self._scratch = num_rows + 1  # the slot that states are materialized in
        self._is_started = [False] * (num_rows + 1)

    def begin(self, row: int) -> None:
        """Start a request in this row, with the state before any token."""
        self._records.end(row)
        self._is_started[row] = False
        self._pool.free(row, _owner(row))
        self._pool.allocate(_owner(row))  # the lowest free slot is the only one: the same, with zeros in it

    @contextmanager
    def extend(self, chunk: PrefillChunk) -> Iterator[ExtendState]:
        """Give layers the states for a forward over known tokens; afterwards the states are those at the chunk's end.

        Raises:
            StateOwnershipError: a row's state does not stand where its tokens begin.
        """
        runs = torch.stack([chunk.positions[:, 0], chunk.lengths], 1).tolist()
        for row, (start, _) in zip(chunk.rows, runs, strict=True):
            self._pool.check(row, _owner(row), start)
            self._pool.begin_write(row, _owner(row))
        yield ExtendState(self._pool, RowSet.of(chunk.rows, self._device), chunk.lengths)
        for row, (start, length) in zip(chunk.rows, runs, strict=True):
            self._pool.end_write(row, start + length)

    def start(self, row: int, position: int) -> None:
        """Make the state of a row that has run ``position`` tokens a checkpoint; does nothing if it is one already.

        Raises:
            StateOwnershipError: its state does not stand there.
        """
        if self._is_started[row]:
            return
        self._records.begin(row, row, _owner(row), position)
        self._is_started[row] = True

    def reserve(self, rows: Sequence[int], num_tokens: int) -> None:
        """Make room for ``num_tokens`` records behind each row's checkpoint, so that they can be rolled back."""
        self._records.reserve(rows, num_tokens)

    def reserve_trees(self, rows: Sequence[int], num_tokens: int, num_nodes: int) -> None:
        """Make room for ``num_tokens`` records and behind them for trees of ``num_nodes`` nodes: no forward folds."""
        spare = self._records.max_nodes if self._records.folds_in_verify else 0
        self._records.reserve(rows, num_tokens + num_nodes + spare)

    def plan(self, rows: Sequence[int], tree: TreeShape) -> tuple[RecordPlan, VerifyState[RecordPlan]]:
        """Prepare a forward of chains or trees behind what rows have run; returns the plan and the states for layers.

        Trees may have several nodes without a parent. A forward that is not committed leaves nothing behind, if room
        was made for its records (``reserve_trees``).
        """
        plan = self._records.plan(rows, tree)
        return plan, VerifyState(self._records, plan)

    def commit(self, plan: RecordPlan, counts: Sequence[int]) -> None:
        """Commit a forward: the first ``counts[b]`` tokens of row b were run, the others are padding."""
        last = [count - 1 for count in counts]
        path = torch.arange(plan.tree.num_nodes, device=self._device).expand(len(counts), -1)
        self._records.commit(plan, path, torch.tensor(last, device=self._device), last)

    def position(self, row: int) -> int:
        """Return the number of tokens that a started row has run."""
        return self._records.position(row)

    def roll_back(self, row: int, position: int) -> None:
        """Drop the tokens that a row has run behind ``position``. Errors as for ``RecordBuffers.roll_back``."""
        self._records.roll_back(row, position)

    def is_started(self, row: int) -> bool:
        """Whether the state of a row is a checkpoint."""
        return self._is_started[row]

    def values(self, row: int, position: int) -> Tensor:
        """Return a row's state at ``position`` for ``load``: [F] float32, exact for every dtype.

        Raises:
            StateOwnershipError: the row does not draft yet, and its state stands elsewhere.
            ValueError: the row drafts, and its state at ``position`` is not to be had (any more).
        """
        slot = row
        if self._is_started[row]:
            slot = self._scratch
            self._records.materialize(row, position, slot)
        else:
            self._pool.check(row, _owner(row), position)
        parts = self._pool.recurrent[:, slot], self._pool.conv[:, slot]
        return torch.cat([part.float().flatten() for part in parts])

    def load(self, row: int, values: Tensor, position: int) -> None:
        """Set the state of a row to the ``values`` of a state at ``position``."""
        self._pool.begin_write(row, _owner(row))
        parts = self._pool.recurrent[:, row], self._pool.conv[:, row]
        for part, loaded in zip(parts, values.split([part.numel() for part in parts]), strict=True):
            part.copy_(loaded.view_as(part))
        self._pool.end_write(row, position)


def _owner(row: int) -> str:
    return f"draft of row {row}"


MAX_PENDING = 8  # pending tokens of a row, its root included, before the model must run


class ModelDrafter(Drafter):
    """Drafts chains or dynamic trees from a model that runs the same text as the target.

    Keys and values of both models have the same token slots, so that a prefix that is shared for one is shared for
    the other. In a step the model runs its *pending* tokens (decided and not run yet, the root is the last of them) and
    every draft but the last, one by one; after the target's decision the records of rejected drafts are dropped. If all
    drafts were accepted, the last one has not been run: it stays pending before the next root. A step that drafts
    nothing for a row may leave all its tokens pending. A request that continues from a cached prefix starts from a copy
    of the whole state.

    A tree grows level by level. Each level is one forward over all nodes so far that have children, as a verify of
    their trees behind the root: siblings see their own ancestors, and their records stay where the next forward writes.
    So a tree leaves nothing to roll back, and the tokens of the accepted path are pending with the next root.
    """

    has_pending_tokens = True

    def __init__(self, model: LoadedModel, plan: DraftPlan, kv_pool: KVPool, table: RequestTable) -> None:
        self.max_nodes = plan.max_nodes
        self.num_distributions = 2 + (plan.num_steps - 1) * plan.width
        self._plan, self._is_tree = plan, plan.topk > 1
        self._entries = DraftEntries.of_roots(table.kv_slots.new_zeros(0, 1))  # of the tree that grows
        self._model = model.target
        self._picker = ChildPicker(plan.draws_drafts)
        self._kv_pool = kv_pool.from_layer(len(kv_pool.k) - model.cache_shape.num_kv_layers)
        self._table = table
        self._device = table.kv_slots.device
        most = max(plan.num_lookahead_slots, MAX_PENDING)  # tokens of one forward
        self._states = DraftStates(model.cache_shape, table.num_rows, most, self._device)
        num_rows = table.num_rows + 1
        self._num_left = plan.num_steps + 1 if self._is_tree else 2  # tokens that a draft may leave pending
        self._tokens = torch.zeros(num_rows, MAX_PENDING + self._num_left, dtype=torch.int64, device=self._device)
        self._num_pending = [1] * num_rows  # pending tokens of each row; the root is the last of them
        self._root = [0] * num_rows  # positions of the roots
        self._depth = 0  # of the current step's drafts
        self._stay: Sequence[bool] = ()  # the rows of the current step whose pending tokens are deferred

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._states.begin(row)
        self._tokens[row, 0] = tokens[-1]
        self._num_pending[row], self._root[row] = 1, len(tokens) - 1

    def resume(self, row: int, features: Tensor, position: int) -> None:
        """Continue from a copy of the model's state after the last cached token."""
        self._states.load(row, features, position)

    def features(self, row: int, position: int) -> Tensor:
        if position > self._root[row] + 1 - self._num_pending[row]:
            self._run_before_roots((row,))
        return self._states.values(row, position)

    def begin_finish(self, rows: Sequence[int]) -> None:
        """Run decided tokens that have neither KV nor state in this model yet."""
        self._run_before_roots(rows)

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        """Run the known tokens that the target has run."""
        kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk)
        with self._states.extend(chunk) as state:
            self._model.forward(chunk.tokens, ForwardContext(kv, state, chunk.positions))

    def prepare(self, rows: Sequence[int], batch_size: int, drafts: bool = True) -> HostPendingTokens:
        """Defer the pending tokens if the step drafts nothing and there is room for another one."""
        stays = not drafts and not any(self.must_draft(rows))
        return self._prepared(rows, [stays] * len(rows), drafts)

    def prepare_some(self, rows: Sequence[int], drafted: Sequence[bool]) -> HostPendingTokens:
        """Defer the pending tokens of rows that are not drafted for."""
        return self._prepared(rows, [not is_drafted for is_drafted in drafted], drafts=True)

    def must_draft(self, rows: Sequence[int]) -> list[bool]:
        """Whether a row has no room for another pending token."""
        return [self._num_pending[row] >= MAX_PENDING for row in rows]

    @property
    def head(self) -> Target:
        """The model, which has logits."""
        return self._model

    def propose(self, batch: Batch) -> DraftTree:
        self._depth = self._plan.num_steps
        hidden = self._catch_up(batch)
        if self._is_tree:
            return grow_dynamic_tree(self, self._picker, self._plan, batch, hidden)

        def descend(nodes: Tensor, states: Tensor, depth: int) -> Tensor:
            return self.descend(batch, nodes, states, depth, None, depth)

        return grow_chain(self._picker, batch, self.max_nodes, hidden, self._model.logits, descend)

    def offer(self, batch: Batch, num_steps: int) -> Candidates:
        self._depth = num_steps
        hidden = self._catch_up(batch)
        if self._is_tree:
            shape = num_steps, self._plan.topk, self._plan.width
            return candidates_of(grow(self, self._picker, batch, hidden, shape))
        return offer_comb(self, self._picker, batch, hidden, num_steps, 1)

    def descend(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, depth: int, ancestors: Tensor | None, first_entry: int
    ) -> Tensor:
        """Run the model over draft nodes of one depth; ``MTPDrafter.descend`` describes arguments and result."""
        if ancestors is not None:
            return self._run_trees(batch, tokens, ancestors)
        positions = batch.root_positions[:, None] + depth
        return self._run(batch.rows, tokens, positions, batch.max_root_position + depth + 1)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        assert batch.pending_tokens is not None
        self._depth = 0
        if not batch.pending_tokens.is_deferred:
            self._catch_up(batch)
        return root_tree(batch)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        pending = batch.pending_tokens
        assert pending is not None
        kept = pending.kept if pending.kept is not None else pending.counts if pending.is_deferred else None
        left = torch.arange(self._num_left, device=self._device)
        # of a chain, the last of self._depth drafts has not been run; of a tree, none has
        num_run = verdict.num_accepted.clamp(max=0 if self._is_tree else max(self._depth - 1, 0))
        source = num_run[:, None] + left
        if pending.is_deferred and kept is None:
            kept = torch.full_like(verdict.num_accepted, pending.max_count)
        if kept is None:
            target = left.expand_as(source)
        else:
            target = kept[:, None] + left
            source = source.where(kept[:, None] == 0, left)
        tokens = verdict.path_tokens.gather(1, source.clamp(max=verdict.path_tokens.shape[1] - 1))
        self._tokens[batch.row_index[:, None], target] = tokens

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        for row, tokens, stays in zip(rows, decided, self._stay, strict=True):
            self._root[row] += len(tokens)
            if stays:
                self._num_pending[row] += len(tokens)
                continue
            if self._is_tree:
                self._num_pending[row] = len(tokens)
            else:
                self._num_pending[row] = 2 if self._depth and len(tokens) > self._depth else 1
            self._states.roll_back(row, self._root[row] + 1 - self._num_pending[row])

    def _prepared(self, rows: Sequence[int], stay: Sequence[bool], drafts: bool) -> HostPendingTokens:
        counts = tuple(self._num_pending[row] for row in rows)
        self._stay = stay
        kept = tuple(count * stays for count, stays in zip(counts, stay, strict=True)) if drafts and any(stay) else None
        return HostPendingTokens(counts, is_deferred=not drafts and all(stay), kept=kept)

    def _catch_up(self, batch: Batch) -> Tensor:
        """Run the pending tokens; return the model's hidden states after the roots, [B, 1, H]."""
        rows, longest = batch.rows, max(self._num_pending[row] for row in batch.rows)
        tokens = batch_rows(batch).take(self._tokens)[:, :longest]
        counts = [self._num_pending[row] for row in rows]
        self._entries = DraftEntries.of_roots(batch.root_tokens[:, None])
        return self._run_pending(rows, tokens, batch.root_positions, counts, self._plan.num_lookahead_slots - 1)

    def _run_before_roots(self, rows: Sequence[int]) -> None:
        """Run the pending tokens before the roots, of the rows that have some."""
        rows = [row for row in rows if self._num_pending[row] > 1]
        if not rows:
            return
        index = torch.tensor(rows, device=self._device)
        counts = [self._num_pending[row] - 1 for row in rows]
        positions = torch.tensor([self._root[row] - 1 for row in rows], device=self._device)
        self._run_pending(rows, self._tokens[index, : max(counts)], positions, counts)
        last = torch.tensor(counts, device=self._device)
        self._tokens[index, 0] = self._tokens[index, last]
        for row in rows:
            self._num_pending[row] = 1

    def _run_pending(
        self, rows: Sequence[int], tokens: Tensor, ends: Tensor, counts: Sequence[int], num_drafts: int = 0
    ) -> Tensor:
        """Run the first ``counts[b]`` of each row's ``tokens`` [B, L], the last of them at position ``ends[b]``.

        There is room for the records of so many drafts behind them.

        Returns:
            Hidden states after the last of them, [B, 1, H].
        """
        for row in rows:
            self._states.start(row, self._root[row] + 1 - self._num_pending[row])
        longest = max(counts)
        last = max(self._root[row] - self._num_pending[row] + n for row, n in zip(rows, counts, strict=True))
        if self._is_tree and num_drafts:
            self._states.reserve_trees(rows, longest, num_drafts)
        else:
            self._states.reserve(rows, max(longest, 2) + num_drafts if num_drafts else longest)
        offsets, num_keys = torch.arange(1 - longest, 1, device=self._device), last + 1  # a lone token sees all keys
        if min(counts) == longest:
            return self._run(rows, tokens, ends[:, None] + offsets, num_keys)[:, -1:]
        count = torch.tensor(counts, device=self._device)[:, None]
        behind_end = offsets + (longest - count)  # tokens are left-aligned; padding gets the end's position
        positions = ends[:, None] + behind_end.clamp(max=0)
        hidden = self._run(rows, tokens, positions, num_keys, counts, behind_end <= 0)
        return hidden.gather(1, (count - 1)[..., None].expand(-1, 1, hidden.shape[2]))

    def _run_trees(self, batch: Batch, tokens: Tensor, ancestors: Tensor) -> Tensor:
        """Run the nodes of all depths so far, ``tokens`` [B, F] of the newest one included; nothing is committed.

        Returns:
            Hidden states after the newest nodes, [B, F, H].
        """
        entries = self._entries = self._entries.grow(tokens, ancestors)  # entry 0 is the root, which has been run
        size, num_entries = entries.tokens.shape
        shape = TreeShape(
            parents=entries.parents[:, 1:] - 1,
            ancestors=entries.ancestors[:, 1:, 1:].contiguous(),
            depth=entries.depth[1:].expand(size, -1) - 1,
            is_chain=False,
            max_children=num_entries - 1,
        )
        _, state = self._states.plan(batch.rows, shape)
        behind_root = batch.root_positions[:, None] + torch.arange(1, num_entries, device=self._device)
        slots = self._table.slots_at(batch.row_index, behind_root)
        keys = tree_keys(
            self._table, batch, entries.ancestors[:, 1:].contiguous(), batch.max_root_position + num_entries
        )
        kv = PagedKV(self._kv_pool, slots.view(-1), keys)
        positions = batch.root_positions[:, None] + entries.depth[1:]
        hidden = self._model.forward(entries.tokens[:, 1:], ForwardContext(kv, state, positions)).hidden
        return hidden[:, -tokens.shape[1] :]

    def _run(
        self,
        rows: Sequence[int],
        tokens: Tensor,
        positions: Tensor,
        num_keys: int,
        counts: Sequence[int] | None = None,
        is_token: Tensor | None = None,
    ) -> Tensor:
        """Run tokens that continue what these rows have run.

        Args:
            rows: ascending.
            tokens: [B, L] int64.
            positions: [B, L] int64.
            num_keys: larger than all positions.
            counts: tokens of each row, the rest is padding; None: no row has padding.
            is_token: [B, L] bool, False for padding; None as above.

        Returns:
            Hidden states [B, L, H].
        """
        size, length = tokens.shape
        plan, state = self._states.plan(rows, chain_shape(size, length, self._device))
        slots = self._table.slots_at(plan.slots.rows.index, positions)
        if is_token is not None:
            slots = slots * is_token
        first_row = plan.slots.rows.rows[0] if plan.slots.rows.is_range else None
        sees_all = tokens.numel() == 1  # the only token is the last key
        table, index = self._table.kv_slots, plan.slots.rows.index
        keys = paged_attention.AttentionMetadata(
            table, index, positions, num_keys, first_row=first_row, sees_all=sees_all
        )
        kv = PagedKV(self._kv_pool, slots.view(-1), keys)
        hidden = self._model.forward(tokens, ForwardContext(kv, state, positions)).hidden
        self._states.commit(plan, counts or [length] * size)
        return hidden
