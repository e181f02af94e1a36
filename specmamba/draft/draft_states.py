"""The recurrent states of a draft model, which runs ahead of the text and is called back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from specmamba.cache.access import ExtendState
from specmamba.cache.shapes import CacheShape
from specmamba.cache.state_pool import StatePool
from specmamba.core import PrefillChunk, TreeShape
from specmamba.kernels.state_records import RowSet
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
        """A request starts in this row: its state is the one before any token."""
        self._records.end(row)
        self._is_started[row] = False
        self._pool.free(row, _owner(row))
        self._pool.allocate(_owner(row))  # the lowest free slot is the only one: the same, with zeros in it

    @contextmanager
    def extend(self, chunk: PrefillChunk) -> Iterator[ExtendState]:
        """What layers see of the states while known tokens are run; behind it, the states stand at the chunk's end.

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
        """From here on the row drafts; it has run ``position`` tokens. A row that drafts already is fine.

        Raises:
            StateOwnershipError: its state does not stand there.
        """
        if self._is_started[row]:
            return
        self._records.begin(row, row, _owner(row), position)
        self._is_started[row] = True

    def reserve(self, rows: Sequence[int], num_tokens: int) -> None:
        """Make room for so many tokens behind each row's checkpoint; until then rolling back is possible."""
        self._records.reserve(rows, num_tokens)

    def plan(self, rows: Sequence[int], chain: TreeShape) -> tuple[RecordPlan, VerifyState[RecordPlan]]:
        """Prepare a forward of chains behind what rows have run; also what layers see of the states in it."""
        plan = self._records.plan(rows, chain)
        return plan, VerifyState(self._records, plan)

    def commit(self, plan: RecordPlan, counts: Sequence[int]) -> None:
        """After the forward: of row b the first ``counts[b]`` tokens have been run, the rest was padding."""
        last = [count - 1 for count in counts]
        path = torch.arange(plan.tree.num_nodes, device=self._device).expand(len(counts), -1)
        self._records.commit(plan, path, torch.tensor(last, device=self._device), last)

    def position(self, row: int) -> int:
        """Tokens that a row that drafts has run."""
        return self._records.position(row)

    def roll_back(self, row: int, position: int) -> None:
        """What a row has run behind ``position`` was not the text. Errors as for ``RecordBuffers.roll_back``."""
        self._records.roll_back(row, position)

    def is_started(self, row: int) -> bool:
        """Whether the row drafts already."""
        return self._is_started[row]

    def values(self, row: int, position: int) -> Tensor:
        """A row's state at ``position``, as ``load`` takes it: [F] float32, the conversion of every dtype is exact.

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
        """A row that has begun goes on from the state at ``position`` that ``values`` gave."""
        self._pool.begin_write(row, _owner(row))
        parts = self._pool.recurrent[:, row], self._pool.conv[:, row]
        for part, loaded in zip(parts, values.split([part.numel() for part in parts]), strict=True):
            part.copy_(loaded.view_as(part))
        self._pool.end_write(row, position)


def _owner(row: int) -> str:
    return f"draft of row {row}"
