"""Sets of rows of a pool or buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSet:
    """Distinct rows. Where they are consecutive, ``take`` is a view: no copy of the states of a whole batch.

    In a captured step the host does not know the rows, and padding repeats row 0, which belongs to no request.
    """

    rows: tuple[int, ...]  # empty where the host does not know them
    is_range: bool
    _device: torch.device
    _index: Tensor | None = None

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device, index: Tensor | None = None) -> RowSet:
        """From host numbers; ``index`` [B] int64 are the same rows on the device, where such a tensor exists."""
        is_range = bool(rows) and all(row == rows[0] + i for i, row in enumerate(rows))
        return cls(tuple(rows), is_range, device, index)

    @cached_property
    def index(self) -> Tensor:
        """The rows as a tensor [B] int64; made at first use, which consecutive rows seldom need."""
        if self._index is not None:
            return self._index
        return torch.tensor(self.rows, dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return len(self.rows) if self._index is None else len(self._index)

    def take(self, x: Tensor) -> Tensor:
        """x[rows]: a view when the rows are consecutive, else a copy."""
        return x.narrow(0, self.rows[0], len(self.rows)) if self.is_range else x.index_select(0, self.index)

    def put(self, x: Tensor, values: Tensor) -> None:
        """x[rows] = values."""
        if self.is_range:
            x.narrow(0, self.rows[0], len(self.rows)).copy_(values)
        else:
            x.index_copy_(0, self.index, values.to(x.dtype))

    def put_at(self, x: Tensor, first: int, values: Tensor) -> None:
        """x[rows, first : first + N] = values [B, N, ...]."""
        end = first + values.shape[1]
        if self.is_range:
            self.take(x)[:, first:end].copy_(values)
        else:
            x[self.index[:, None], torch.arange(first, end, device=x.device)] = values.to(x.dtype)
