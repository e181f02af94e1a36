"""Rows whose requests end, as a drafter sees them that completes what others may go on from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from specmamba.core import Batch, PendingTokens
from specmamba.cuda_graphs import Columns, Queue, at_once
from specmamba.draft.drafter import HostPendingTokens
from specmamba.sampling_params import SamplingBatch, SamplingParams


class EndingRows:
    """Makes batches of rows that end behind a step in flight: their numbers go to the device in one copy.

    The host does not wait for it, and neither for the step: two pieces of memory take turns (``Columns``), and a step
    is read before the second end behind it.
    """

    def __init__(
        self, num_rows: int, device: torch.device, is_mirrored: bool | None = None, queue: Queue = at_once
    ) -> None:
        """Allocate the numbers of ``num_rows`` rows; other arguments as for ``Columns``."""
        padding = {"row": 0, "position": 0, "num_pending_tokens": 1}
        self._columns = Columns(padding, num_rows, torch.int64, device, is_mirrored, queue)
        self._sampling = SamplingBatch.of([SamplingParams()], [0], device)

    def batch(self, rows: Sequence[int], positions: Sequence[int], pending_tokens: HostPendingTokens) -> Batch:
        """Make a batch for ``Drafter.finish``, valid until the next one; its root tokens and sampling mean nothing.

        Args:
            rows: ascending.
            positions: of their roots.
            pending_tokens: as ``Drafter.begin_finish`` returns them.
        """
        counts = pending_tokens.counts
        self._columns.write({"row": rows, "position": positions, "num_pending_tokens": counts})
        column = partial(self._columns.read, num_rows=len(rows))
        exact = column("num_pending_tokens") if min(counts) < max(counts) else None
        return Batch(
            rows=tuple(rows),
            row_index=column("row"),
            root_tokens=torch.zeros_like(column("row")),
            root_positions=column("position"),
            max_root_position=max(positions),
            sampling=self._sampling,
            pending_tokens=PendingTokens(max(counts), exact, pending_tokens.is_deferred),
        )
