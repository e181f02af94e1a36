"""Values of the sizer: bounds, the requests of a step, rounds of steps, and what has been decided since the start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specmamba.draft.sizing.schedule import DraftSize
from specmamba.kernels.draft_sizing import Ints


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest draft."""

    num_steps: int
    max_nodes: int  # of a tree, the root included
    depths: Ints  # [C], of the candidates of the deepest draft, level by level
    ranks: Ints  # [C]
    width: int  # nodes of a level that have children

    @property
    def chain_places(self) -> Ints:
        """The candidates of the first child of the root, of its first child and so on, as far as trees are large."""
        depths = range(1, min(self.num_steps, self.max_nodes - 1) + 1)
        return np.array([int(np.flatnonzero(self.depths == depth)[0]) for depth in depths], np.int64)


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """The requests of a step, as the sizer sees them."""

    rows: Ints  # [B]
    modes: Ints  # [B]; see ``kernels.draft_sizing``
    max_depths: Ints  # [B], bounds of the requests
    num_keys: Callable[[], int]  # in front of the roots, of all requests


@dataclass
class Round:
    """Steps in a row that draft the same for the same requests, by one decision."""

    batch: SizedBatch
    rows: tuple[int, ...]
    size: DraftSize
    num_left: int  # steps that may follow without another decision
    forced: tuple[int, int] | None  # what was forced when it began
    # of each step so far
    seconds: list[float | None] = field(default_factory=list)  # None: it was no usual step
    num_nodes: list[int] = field(default_factory=list)
    num_accepted: list[Sequence[int]] = field(default_factory=list)  # of each request, where nothing else learns it


@dataclass
class SizerFigures:
    """What has been decided since the start."""

    num_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_requests: int = 0
    num_nodes: int = 0
    num_draft_levels: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0
    decision_seconds: float = 0.0  # of the host between steps; ``SizerState.seconds`` has the rest

    def add(self, size: DraftSize, num_requests: int, num_nodes: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_plain_steps += size.depth == 0
        self.num_probes += size.is_probe
        self.num_nodes += num_nodes
        self.num_requests += num_requests
        self.num_draft_levels += size.depth
