"""Drafting with a small separate model (arXiv 2211.17192), whose recurrent states are rolled back by records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specmamba.cache.access import ExtendState, PagedKV, batch_rows
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.cache.shapes import CacheShape
from specmamba.cache.state_pool import StatePool
from specmamba.core import Batch, DraftTree, PrefillChunk, TreeShape, Verdict
from specmamba.draft.draft_plan import DraftPlan
from specmamba.draft.drafter import Drafter, chain_shape, root_tree
from specmamba.draft.heads.children import ChildPicker, grow_chain
from specmamba.kernels import paged_attention
from specmamba.kernels.state_records import RowSet
from specmamba.layers.context import ForwardContext
from specmamba.models.base import LoadedModel
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
        self._records = RecordBuffers(shape, self._pool, num_rows, max_nodes, device)
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

    def plan(self, rows: Sequence[int], chain: TreeShape) -> tuple[RecordPlan, VerifyState[RecordPlan]]:
        """Prepare a forward of chains behind what rows have run; returns the plan and the states for layers."""
        plan = self._records.plan(rows, chain)
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
        """Run the known tokens that the target has run."""
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
