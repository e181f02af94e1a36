"""Chains from an MTP head that is applied to its own output."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specmamba.cache.access import PagedKV, causal_mask
from specmamba.cache.kv_pool import KVPool
from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, Chunk, DraftTree, Verdict
from specmamba.draft.base import Drafter, chain_shape
from specmamba.layers.context import ForwardContext
from specmamba.models.base import DraftHead

FIRST_KEY = 1  # entry t needs the hidden state of position t-1, so the first token has no entry


class MTPDrafter(Drafter):
    """Drafts ``num_steps`` tokens, each from the head's own hidden state and guess before it.

    The head's entries for accepted tokens were made from its own hidden states. They are made again from the target's,
    together with the entry of the new root, in the first forward of the next ``propose``: one forward, not two.
    """

    def __init__(self, head: DraftHead, num_steps: int, kv_pool: KVPool, table: RequestTable, hidden_size: int) -> None:
        self.max_nodes = num_steps + 1
        self._head = head
        self._num_steps = num_steps
        self._kv_pool = kv_pool
        self._table = table
        rows, device = table.num_rows + 1, table.kv_slots.device
        # what the next propose starts from: tokens up to the root, and the target's states before each of them
        self._tokens = torch.zeros(rows, self.max_nodes, dtype=torch.int64, device=device)
        self._hidden = torch.zeros(rows, self.max_nodes, hidden_size, dtype=kv_pool.k.dtype, device=device)
        self._num_new = [1] * rows

    def begin(self, row: int) -> None:
        """See ``Drafter``."""
        self._hidden[row].zero_()
        self._num_new[row] = 1

    def extend(self, chunk: Chunk, hidden: Tensor) -> None:
        """Make the head's entries for known tokens. See ``Drafter``."""
        before = torch.cat([self._hidden[chunk.row_index, :1], hidden[:, :-1]], 1)
        kv = PagedKV.of_chunk(self._kv_pool, self._table, chunk, FIRST_KEY)
        self._head.forward(chunk.tokens, before, ForwardContext(kv, None, chunk.positions))
        last = (chunk.lengths - 1)[:, None, None].expand(-1, 1, hidden.shape[2])
        self._hidden[chunk.row_index, 0] = hidden.gather(1, last).squeeze(1)

    def propose(self, batch: Batch) -> DraftTree:
        """See ``Drafter``."""
        hidden = self._catch_up(batch)
        token = self._head.logits(hidden).argmax(-1)
        tokens = [batch.root_tokens[:, None], token]
        for step in range(1, self._num_steps):
            positions = (batch.root_positions + step)[:, None]
            slots = self._table.slots_at(batch.row_index, positions)
            num_keys = batch.max_root_position + step + 1
            hidden = self._forward(batch, token, hidden, positions, slots, num_keys)
            token = self._head.logits(hidden).argmax(-1)
            tokens.append(token)
        shape = chain_shape(len(batch.rows), self.max_nodes, token.device)
        return DraftTree(torch.cat(tokens, 1), shape)

    def observe(self, batch: Batch, verdict: Verdict, hidden: Tensor, accepted: Sequence[int]) -> None:
        """See ``Drafter``."""
        num_nodes = hidden.shape[1]
        on_path = hidden.gather(1, verdict.path[..., None].expand_as(hidden))
        self._tokens[batch.row_index, :num_nodes] = verdict.path_tokens[:, :num_nodes]
        self._hidden[batch.row_index, :num_nodes] = on_path
        for row, count in zip(batch.rows, accepted, strict=True):
            self._num_new[row] = count + 1

    def _catch_up(self, batch: Batch) -> Tensor:
        """Run the head over what was decided since the last draft; its state after the root, [B, 1, H]."""
        counts = [self._num_new[row] for row in batch.rows]
        longest = max(counts)
        tokens = self._tokens[batch.row_index, :longest]
        hidden = self._hidden[batch.row_index, :longest]
        steps = torch.arange(longest, device=tokens.device)
        last = torch.tensor(counts, device=tokens.device)[:, None] - 1
        tokens.scatter_(1, last, batch.root_tokens[:, None])
        positions = batch.root_positions[:, None] - last + steps
        slots = self._table.slots_at(batch.row_index, positions)
        if min(counts) < longest:
            slots = slots * (steps <= last)
        num_keys = batch.max_root_position + 1
        out = self._forward(batch, tokens, hidden, positions, slots, num_keys)
        return out.gather(1, last[..., None].expand(-1, 1, out.shape[2]))

    def _forward(
        self, batch: Batch, tokens: Tensor, hidden: Tensor, positions: Tensor, slots: Tensor, num_keys: int
    ) -> Tensor:
        is_lone = tokens.numel() == 1 and num_keys > FIRST_KEY  # one query at the last key: it sees all from the first
        read_slots = self._table.read_slots(batch, FIRST_KEY if is_lone else 0, num_keys)
        mask = None if is_lone else causal_mask(positions, num_keys, FIRST_KEY)
        kv = PagedKV(self._kv_pool, slots.reshape(-1), read_slots, mask)
        return self._head.forward(tokens, hidden, ForwardContext(kv, None, positions))
