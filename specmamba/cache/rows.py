"""Sets of rows of a pool or buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowSet:
    """Distinct rows. Where they are consecutive, ``take`` is a view: no copy of the states of a whole batch."""

    rows: tuple[int, ...]
    is_range: bool
    _device: torch.device

    @classmethod
    def of(cls, rows: Sequence[int], device: torch.device) -> RowSet:
        is_range = all(row == rows[0] + i for i, row in enumerate(rows))
        return cls(tuple(rows), is_range, device)

    @cached_property
    def index(self) -> Tensor:
        """The rows as a tensor [B] int64; made at first use, which for consecutive rows seldom comes."""
        return torch.tensor(self.rows, dtype=torch.int64, device=self._device)

    def __len__(self) -> int:
        return len(self.rows)

    def take(self, x: Tensor) -> Tensor:
        """x[rows]: a view when the rows are consecutive, a copy when they are not."""
        return x.narrow(0, self.rows[0], len(self.rows)) if self.is_range else x.index_select(0, self.index)

    def put(self, x: Tensor, values: Tensor) -> None:
        """x[rows] = values."""
        if self.is_range:
            x.narrow(0, self.rows[0], len(self.rows)).copy_(values)
        else:
            x.index_copy_(0, self.index, values.to(x.dtype))
