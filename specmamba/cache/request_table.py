"""The request table: the KV slot of every position of every running request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from specmamba.cache.kv_pool import NO_PAGES, KVPool, Pages
from specmamba.cache.pair_writes import PairWrites
from specmamba.cache.prefix.node import TokenSlots
from specmamba.core import PrefillChunk


@dataclass(frozen=True, slots=True)
class _Holding:
    """The pages that a row holds, from position first_page * page_size on; its first tokens may be borrowed."""

    num_borrowed: int
    first_page: int
    pages: Pages

    @property
    def end_page(self) -> int:
        return self.first_page + len(self.pages)


class RequestTable:
    """Rows 1..num_rows for requests that hold memory; row 0 is padding.

    ``kv_slots[row, position]`` is the token slot of a position, for as many positions as the row has pages for. The
    first of them may be borrowed from the prefix cache, which has locked them for the row; the others stand in pages
    that the row holds itself. A position's offset in its page is position % page_size either way. As every token has
    a slot of its own, a row that borrows part of a page continues at the same offset of a new one, and nothing is
    copied; the beginning of that new page stays unused.
    """

    def __init__(
        self, num_rows: int, max_positions: int, kv_pool: KVPool, device: torch.device, is_mirrored: bool | None = None
    ) -> None:
        """Allocate the table; no row is taken.

        Args:
            num_rows: requests that hold memory at the same time.
            max_positions: of one row.
            kv_pool: has the pages.
            device: where kernels read the table.
            is_mirrored: the device has its own copy; None: it has one unless it is a CPU.
        """
        self.num_rows = num_rows
        self.max_positions = max_positions
        self._host = np.zeros((num_rows + 1, max_positions), dtype=np.int64)
        on_host = torch.from_numpy(self._host)
        self._is_mirrored = device.type != "cpu" if is_mirrored is None else is_mirrored
        self._on_device = on_host.to(device, copy=True) if self._is_mirrored else on_host
        self._changes: list[tuple[int, int, int]] = []  # row, start, end of changes to upload
        self._writes = PairWrites(device)
        self._kv_pool = kv_pool
        self._holdings: dict[int, _Holding] = {}
        self.num_held = [0] * (num_rows + 1)  # positions that each row has pages for
        self._free_rows = sorted(range(1, num_rows + 1), reverse=True)

    @property
    def kv_slots(self) -> Tensor:
        """[rows + 1, positions] int64 on the device, with all changes uploaded."""
        self.upload()
        return self._on_device

    def upload(self) -> None:
        """Upload pending table changes to the device, in one copy; captured steps need it before they run."""
        if not self._changes:
            return
        numbers = self._writes.begin(sum([end - start for _, start, end in self._changes]))
        first = 0
        for row, start, end in self._changes:
            last, offset = first + end - start, row * self.max_positions
            numbers[0, first:last] = np.arange(offset + start, offset + end)
            numbers[1, first:last] = self._host[row, start:end]
            first = last
        index, slots = self._writes.send()
        self._on_device.view(-1).index_copy_(0, index, slots)
        self._changes.clear()

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def allocate_row(self) -> int | None:
        """Allocate the lowest free row, so that a batch's rows stay consecutive; None if there is none."""
        if not self._free_rows:
            return None
        row = self._free_rows.pop()
        self._hold(row, _Holding(0, 0, NO_PAGES))
        return row

    def num_missing_pages(self, row: int | None, num_positions: int, num_borrowed: int = 0) -> int:
        """Return the number of pages that a row still needs for ``num_positions`` tokens.

        Args:
            row: None: a new one.
            num_positions: tokens.
            num_borrowed: of a new row, the first tokens, which it will borrow.
        """
        size = self._kv_pool.page_size
        end = num_borrowed // size if row is None else self._holdings[row].end_page
        return max(0, -(-num_positions // size) - end)

    def borrow(self, row: int, slots: TokenSlots) -> None:
        """Point a new row's first positions at slots of the prefix cache, which the caller has locked."""
        self._hold(row, _Holding(len(slots), len(slots) // self._kv_pool.page_size, NO_PAGES))
        self._put(row, 0, slots)

    def ensure(self, row: int, num_positions: int) -> bool:
        """Allocate pages for the row's first ``num_positions`` positions; False, with no change, if too few are free.

        Raises:
            ValueError: more positions than a row has room for.
        """
        if num_positions > self.max_positions:
            raise ValueError(f"row {row} has room for {self.max_positions} positions, not {num_positions}")
        new_pages = self._kv_pool.allocator.allocate(self.num_missing_pages(row, num_positions))
        if new_pages is None:
            return False
        if len(new_pages):
            held = self._holdings[row]
            self._point_at(row, new_pages, held)
            self._hold(row, replace(held, pages=np.concatenate([held.pages, new_pages])))
        return True

    def slots_of_positions(self, row: int, start: int, end: int) -> TokenSlots:
        """Return the token slots [end - start] of positions [start, end), on the host."""
        return self._host[row, start:end].copy()

    def settle(self, row: int, start: int, slots: TokenSlots) -> None:
        """Point positions [start, start + len(slots)) at slots that the prefix cache owns now, as all before them.

        The row releases the pages that end in these positions; the cache holds those it needs.
        """
        held, end = self._holdings[row], start + len(slots)
        if not np.array_equal(slots, self._host[row, start:end]):  # usually they are the row's own
            self._put(row, start, slots)
        num_given = min(max(0, end // self._kv_pool.page_size - held.first_page), len(held.pages))
        self._kv_pool.allocator.release(held.pages[:num_given], pinned=True)
        self._hold(row, _Holding(end, held.first_page + num_given, held.pages[num_given:]))

    def pages_moved(self, now: Pages) -> None:
        """Point all rows at pages that have moved; ``now`` [pages + 1]: by page, what it is now."""
        size = self._kv_pool.page_size
        for row, held in self._holdings.items():
            end = min(max(held.end_page * size, held.num_borrowed), self.max_positions)
            slots = self._host[row, :end]
            moved = now[slots // size] * size + slots % size
            changed = np.flatnonzero(moved != slots)
            if len(changed):
                self._put(row, int(changed[0]), moved[changed[0] : changed[-1] + 1])
            self._holdings[row] = replace(held, pages=now[held.pages])

    def state_moved(self, slot: int, now: int) -> bool:
        """Rows do not know states."""
        return False

    def release(self, row: int) -> None:
        """Free a row and release its pages."""
        self._kv_pool.allocator.release(self._holdings.pop(row).pages, pinned=True)
        self._host[row] = 0
        if self._is_mirrored:
            self._changes = [change for change in self._changes if change[0] != row]
            self._on_device[row].zero_()
        self._free_rows.append(row)
        self._free_rows.sort(reverse=True)

    def held_pages(self) -> dict[int, int]:
        """Return the number of rows that hold each page, for all pages that rows hold."""
        held = np.concatenate([NO_PAGES, *(holding.pages for holding in self._holdings.values())])
        pages, counts = np.unique(held, return_counts=True)
        return dict(zip(pages.tolist(), counts.tolist(), strict=True))

    def slots_at(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return token slots [B, N] int64 of positions [B, N] of rows [B]."""
        return self.kv_slots[rows[:, None], positions]

    def slots_of(self, chunk: PrefillChunk) -> Tensor:
        """Token slots [B, L] of a chunk's tokens; 0, the padding slot, for its padding."""
        if not chunk.is_padded:
            return self.slots_at(chunk.row_index, chunk.positions)
        slots = self.slots_at(chunk.row_index, chunk.positions.clamp(max=self.max_positions - 1))
        return slots * chunk.is_token

    def _hold(self, row: int, holding: _Holding) -> None:
        self._holdings[row] = holding
        self.num_held[row] = holding.end_page * self._kv_pool.page_size

    def _point_at(self, row: int, pages: Pages, held: _Holding) -> None:
        """Point the positions after a row's pages at new pages; borrowed positions do not change."""
        size = self._kv_pool.page_size
        slots = (pages[:, None] * size + np.arange(size)).reshape(-1)
        begin = held.end_page * size
        first = max(begin, held.num_borrowed)
        self._put(row, first, slots[first - begin : self.max_positions - begin])

    def _put(self, row: int, start: int, slots: TokenSlots) -> None:
        end = start + len(slots)
        self._host[row, start:end] = slots
        if self._is_mirrored and len(slots):
            self._changes.append((row, start, end))


class TokenCounts:
    """``output_counts`` [rows, V] int32 and ``prompt_mask`` [rows, V] bool, by row of the request table."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._size = (num_rows + 1, vocab_size)
        self._device = device
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._rows: set[int] = set()
        self._writes = PairWrites(device)

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start counting for a row whose request has penalties: its prompt, and its output so far."""
        counts, mask = self._tensors = self._tensors or self._make()
        counts[row].zero_()
        mask[row].zero_()
        mask[row, torch.tensor(prompt, device=self._device)] = True
        self._rows.add(row)
        self.add([row], [output])

    def _make(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):  # made in a step, but also written by aborts outside of one
            counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
            return counts, torch.zeros(self._size, dtype=torch.bool, device=self._device)

    @property
    def is_used(self) -> bool:
        """Whether any row is counted."""
        return bool(self._rows)

    def add(self, rows: Sequence[int], tokens: Sequence[Sequence[int]]) -> None:
        """Count new output tokens, in one copy to the device; rows that ``begin`` was not called for are left out."""
        size = self._size[1]
        places = [
            row * size + token for row, ids in zip(rows, tokens, strict=True) if row in self._rows for token in ids
        ]
        if places and self._tensors is not None:
            numbers = self._writes.begin(len(places))
            numbers[0], numbers[1] = places, 1
            index, ones = self._writes.send()
            self._tensors[0].view(-1).index_add_(0, index, ones.to(torch.int32))

    def end(self, row: int) -> None:
        """Stop counting for a row; unknown rows are ignored.

        Its counts are zeroed, since a later request without penalties may use the row in a batch with penalties.
        """
        if row in self._rows and self._tensors is not None:
            for tensor in self._tensors:
                tensor[row].zero_()
            self._rows.discard(row)

    def of(self, row_index: Tensor) -> tuple[Tensor, Tensor]:
        """Return counts [B, V] int32 and prompt mask [B, V] bool of rows [B].

        Raises:
            RuntimeError: ``begin`` was never called.
        """
        if self._tensors is None:
            raise RuntimeError("token counts were asked for, but no request has penalties")
        counts, mask = self._tensors
        return counts[row_index], mask[row_index]
