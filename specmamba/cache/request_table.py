"""Which row, which KV slots and which state slot belong to which running request."""

from __future__ import annotations

import torch
from torch import Tensor

from specmamba.cache.kv_pool import KVPool
from specmamba.core import Batch, Chunk


class RequestTable:
    """Rows 1..num_rows for requests that hold memory; row 0 is padding.

    ``kv_slots[row, position]`` is the token slot of a position, for as many positions as the row has pages for.
    """

    def __init__(self, num_rows: int, max_positions: int, kv_pool: KVPool, device: torch.device) -> None:
        self.num_rows = num_rows
        self.max_positions = max_positions
        self.kv_slots = torch.zeros(num_rows + 1, max_positions, dtype=torch.int64, device=device)
        self._kv_pool = kv_pool
        self._pages: dict[int, list[int]] = {}
        self._free_rows = sorted(range(1, num_rows + 1), reverse=True)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate_row(self) -> int | None:
        """The lowest free row (low rows stay dense, which keeps a batch's rows consecutive), or None."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._pages[row] = []
        return row

    def num_missing_pages(self, row: int | None, num_positions: int) -> int:
        """Pages that a row (None: a new one) still needs to hold ``num_positions`` tokens."""
        have = 0 if row is None else len(self._pages[row])
        return max(0, -(-num_positions // self._kv_pool.page_size) - have)

    def ensure(self, row: int, num_positions: int) -> bool:
        """Give the row pages for its first ``num_positions`` positions; False (and no change) when there are none.

        Raises:
            ValueError: more positions than a row has room for.
        """
        if num_positions > self.max_positions:
            raise ValueError(f"row {row} has room for {self.max_positions} positions, not {num_positions}")
        new_pages = self._kv_pool.allocator.allocate(self.num_missing_pages(row, num_positions))
        if new_pages is None:
            return False
        if new_pages:
            size, pages = self._kv_pool.page_size, self._pages[row]
            first = len(pages) * size
            slots = [page * size + offset for page in new_pages for offset in range(size)][: self.max_positions - first]
            self.kv_slots[row, first : first + len(slots)] = torch.tensor(slots, device=self.kv_slots.device)
            pages.extend(new_pages)
        return True

    def release(self, row: int) -> None:
        """Free a row and its pages."""
        self._kv_pool.allocator.free(self._pages.pop(row))
        self.kv_slots[row].zero_()
        self._free_rows.append(row)
        self._free_rows.sort(reverse=True)

    def slots_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Token slots of positions [B, N] of rows [B]."""
        return self.kv_slots[rows[:, None], positions]

    def read_slots(self, batch: Batch, first: int, end: int) -> Tensor:
        """Token slots [B, end - first] of positions [first, end); a view where the rows are consecutive."""
        if batch.rows[-1] - batch.rows[0] == len(batch.rows) - 1:
            return self.kv_slots[batch.rows[0] : batch.rows[-1] + 1, first:end]
        return self.kv_slots[batch.row_index, first:end]

    def slots_of(self, chunk: Chunk) -> Tensor:
        """Token slots [B, L] of a chunk's tokens; 0, which is nobody's, for its padding."""
        if not chunk.is_padded:
            return self.slots_at(chunk.row_index, chunk.positions)
        slots = self.slots_at(chunk.row_index, chunk.positions.clamp(max=self.max_positions - 1))
        return slots * chunk.is_token
