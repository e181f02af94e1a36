"""Token counts of running requests, for penalties. Allocated at first use, since most requests have none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class TokenCounts:
    """``output_counts`` [rows, V] int32 and ``prompt_mask`` [rows, V] bool, by row of the request table."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self._size = (num_rows + 1, vocab_size)
        self._device = device
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._rows: set[int] = set()

    def begin(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Start counting for a row whose request has penalties: its prompt, and its output so far."""
        counts, mask = self._tensors = self._tensors or self._make()
        counts[row].zero_()
        mask[row].zero_()
        mask[row, torch.tensor(prompt, device=self._device)] = True
        self._rows.add(row)
        self.add(row, output)

    def _make(self) -> tuple[Tensor, Tensor]:
        with torch.inference_mode(False):  # made in a step, but also written by aborts outside of one
            counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
            return counts, torch.zeros(self._size, dtype=torch.bool, device=self._device)

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Count new output tokens; nothing happens for a row that ``begin`` was not called for."""
        if row in self._rows and tokens and self._tensors is not None:
            ids = torch.tensor(tokens, device=self._device)
            self._tensors[0][row].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))

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
