"""Drafting with a small separate model (arXiv 2211.17192), whose recurrent states are rolled back by records."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, batch_rows
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, DraftTree, PrefillChunk, Verdict
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.draft_states import DraftStates
from specmamba.draft.drafter import Drafter, chain_shape, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.kernels import paged_attention
from specmamba.layers.context import ForwardContext
from specmamba.models.base import LoadedModel

MAX_PENDING = 2  # pending tokens of a row: the root, and before it the last draft of a step that accepted all drafts


class ModelDrafter(Drafter):
    """Drafts chains from a model that runs the same text as the target.

    Keys and values of both models have the same token slots, so that a prefix that is shared for one is shared for the
    other. In a step the model runs the root and every draft but the last, one by one; after the target's decision the
    records of rejected drafts are dropped. If all drafts were accepted, the last one has not been run: it is run
    together with the next root, or when the state after it is needed. A request that continues from a cached prefix
    starts from a copy of the whole state.
    """

    def __init__(self, model: LoadedModel, plan: DraftPlan, kv_pool: KVPool, table: RequestTable) -> None:
        self.max_nodes = plan.max_nodes
        self._model = model.target
        self._picker = ChildPicker(plan.draws_drafts)
        self._kv_pool = kv_pool.from_layer(len(kv_pool.k) - model.cache_shape.num_kv_layers)
        self._table = table
        self._device = table.kv_slots.device
        # a step runs max_nodes - 1 tokens and perhaps a last draft of the step before; its own last draft may follow
        self._max_records = plan.max_nodes + 1
        self._states = DraftStates(model.cache_shape, table.num_rows, plan.max_nodes, self._device)
        self._tokens = torch.zeros(table.num_rows + 1, MAX_PENDING, dtype=torch.int64, device=self._device)
        num_rows = table.num_rows + 1
        self._num_pending = [1] * num_rows  # pending tokens of each row; the root is the last of them
        self._root = [0] * num_rows  # positions of the roots

    def begin(self, row: int, tokens: Sequence[int]) -> None:
        self._states.begin(row)
        self._tokens[row, 0] = tokens[-1]
        self._num_pending[row], self._root[row] = 1, len(tokens) - 1

    def resume(self, row: int, features: Tensor, position: int) -> None:
        """Continue from a copy of the model's state after the last cached token."""
        self._states.load(row, features, position)

    def features(self, row: int, position: int) -> Tensor:
        if self._states.is_started(row) and position > self._states.position(row):
            self._run_last_drafts((row,))
        return self._states.values(row, position)

    def finish(self, batch: Batch) -> None:
        """Run last drafts that were accepted and have neither KV nor state in this model yet."""
        self._run_last_drafts(batch.rows)

    def extend(self, chunk: PrefillChunk, features: Tensor) -> None:
        """PrefillRun the known tokens that the target has run."""
        kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk)
        with self._states.extend(chunk) as state:
            self._model.forward(chunk.tokens, ForwardContext(kv, state, chunk.positions))

    def propose(self, batch: Batch) -> DraftTree:
        self._start(batch)

        def descend(token: Tensor, _: Tensor, depth: int) -> Tensor:
            positions = batch.root_positions[:, None] + depth
            return self._run(batch.rows, token, positions, batch.max_root_position + depth + 1)

        hidden = self._catch_up(batch)
        return grow_chain(self._picker, batch, self.max_nodes, hidden, self._model.logits, descend)

    def propose_nothing(self, batch: Batch) -> DraftTree:
        """Run the pending tokens all the same, so that the model's state follows the text."""
        self._start(batch)
        self._catch_up(batch)
        return root_tree(batch)

    def observe(self, batch: Batch, verdict: Verdict, features: Tensor) -> None:
        num_drafts = self.max_nodes - 1
        first_new = verdict.num_accepted.clamp(max=num_drafts - 1)[:, None] + torch.arange(
            MAX_PENDING, device=self._device
        )
        batch_rows(batch).put(self._tokens, verdict.path_tokens.gather(1, first_new))

    def advance(self, rows: Sequence[int], decided: Sequence[Sequence[int]]) -> None:
        for row, tokens in zip(rows, decided, strict=True):
            self._root[row] += len(tokens)
            self._num_pending[row] = 2 if len(tokens) == self.max_nodes else 1
            self._states.roll_back(row, self._root[row] + 1 - self._num_pending[row])

    def _start(self, batch: Batch) -> None:
        for row in batch.rows:
            self._states.start(row, self._root[row])
        self._states.reserve(batch.rows, self._max_records)

    def _catch_up(self, batch: Batch) -> Tensor:
        """Run the pending tokens; return the model's hidden states after the roots, [B, 1, H]."""
        counts = [self._num_pending[row] for row in batch.rows]
        longest = max(counts)
        tokens = batch_rows(batch).take(self._tokens)[:, :longest]
        offsets = torch.arange(1 - longest, 1, device=self._device)
        if min(counts) == longest:
            positions = batch.root_positions[:, None] + offsets
            return self._run(batch.rows, tokens, positions, batch.max_root_position + 1)[:, -1:]
        count = torch.tensor(counts, device=self._device)[:, None]
        behind_root = offsets + (longest - count)  # tokens are left-aligned; padding gets the root's position
        positions = batch.root_positions[:, None] + behind_root.clamp(max=0)
        hidden = self._run(batch.rows, tokens, positions, batch.max_root_position + 1, counts, behind_root <= 0)
        return hidden.gather(1, (count - 1)[..., None].expand(-1, 1, hidden.shape[2]))

    def _run_last_drafts(self, rows: Sequence[int]) -> None:
        """Run the pending token before the root, of the rows that have one."""
        rows = [row for row in rows if self._num_pending[row] == MAX_PENDING]
        if not rows:
            return
        index = torch.tensor(rows, device=self._device)
        before_root = [self._root[row] - 1 for row in rows]
        positions = torch.tensor(before_root, device=self._device)[:, None]
        self._run(rows, self._tokens[index, :1], positions, max(before_root) + 1)
        self._tokens[index, 0] = self._tokens[index, 1]
        for row in rows:
            self._num_pending[row] = 1

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
