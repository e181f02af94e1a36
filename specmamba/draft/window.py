"""Where one draft of a head writes keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specmamba.cache.request_table import RequestTable
from specmamba.core import Batch, PendingTokens


@dataclass(frozen=True, slots=True)
class Window:
    """Where the head's entries of one draft stand: first those it catches up with, then the root's and its own."""

    positions: Tensor  # [B, root + E] int64; entry m of a draft stands m behind the root
    slots: Tensor  # [B, root + E] int64, of keys and values; 0 for padding
    root: int  # the column of entry 0, which is the root's

    @classmethod
    def of(cls, table: RequestTable, batch: Batch, pending_tokens: PendingTokens, num_entries: int) -> Window:
        """Positions and slots of everything a draft may run, made at once; padding stands at the root.

        Args:
            table: has the slots.
            batch: the roots.
            pending_tokens: tokens of each row that it catches up with, the root counted.
            num_entries: that the draft may make, the root's counted.
        """
        longest, device = pending_tokens.max_count, batch.row_index.device
        offsets = torch.arange(1 - longest, num_entries, device=device)
        if pending_tokens.counts is None:
            positions = batch.root_positions[:, None] + offsets
            return cls(positions, table.slots_at(batch.row_index, positions), longest - 1)
        missing = longest - pending_tokens.counts[:, None]
        moved = offsets + missing  # tokens stand at the left of their columns, what follows the root stays
        positions = batch.root_positions[:, None] + moved.clamp(max=0).maximum(offsets)
        slots = table.slots_at(batch.row_index, positions)
        slots[:, :longest] *= moved[:, :longest] <= 0
        return cls(positions, slots, longest - 1)
