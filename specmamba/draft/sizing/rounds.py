"""Values of the sizer: bounds, what a step drafts, its requests, rounds of steps, and what has been decided so far."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from specmamba.kernels.draft_sizing import Ints

TimedStep = tuple[float, int]  # seconds of a step, and its nodes of all requests
MOST_SLOWER = 6.0  # a step than the median of its round; what takes longer was held up by something else
PROBED_NODES = 2  # of a request, the root included
WARM_STEPS, WARM_SECONDS = 4, 0.008  # of a warm-up: whichever comes first


@dataclass(frozen=True)
class Bounds:
    """The largest draft."""

    num_steps: int
    max_nodes: int  # of a tree, the root included
    depths: Ints  # [C], of the candidates of the deepest draft, level by level
    ranks: Ints  # [C]
    width: int  # nodes of a level that have children

    @cached_property
    def num_nodes(self) -> list[int]:
        """Of all candidates of a draft, by its depth, the root included."""
        return [1 + int((self.depths <= depth).sum()) for depth in range(self.num_steps + 1)]

    @property
    def chain_places(self) -> Ints:
        """The candidates of the first child of the root, of its first child and so on, as far as trees are large."""
        depths = range(1, min(self.num_steps, self.max_nodes - 1) + 1)
        return np.array([int(np.flatnonzero(self.depths == depth)[0]) for depth in depths], np.int64)


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a step drafts."""

    depth: int  # 0: nothing
    is_chain: bool = False  # a whole chain for every request, without a choice
    drafted: NDArray[np.bool_] | None = None  # [B], rows that are drafted for; None: all, or none at depth 0
    is_probe: bool = False
    learns: bool = (
        True  # the drafter's probabilities are judged by the result; False: the host counts what a chain brings
    )

    def places(self, num_rows: int) -> Ints:
        """Return the place of each row among those that are drafted for, [B]; any place for one that is not."""
        if self.drafted is None:
            return np.arange(num_rows)
        found: Ints = np.maximum(np.cumsum(self.drafted) - 1, 0)
        return found


NOTHING = DraftSize(0)


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
    num_nodes: list[int] = field(default_factory=list)  # of trees, which differ from step to step
    num_accepted: list[Sequence[int]] = field(default_factory=list)  # of each request, where nothing else learns it
    decided: list[Sequence[Sequence[int]]] = field(default_factory=list)  # tokens of each request; or the newest
    num_counted: int = 0  # steps that are in the figures

    @property
    def kind(self) -> tuple[int, bool]:
        """Depth and form of its steps, on which their times depend."""
        return self.size.depth, self.size.is_chain

    @property
    def drafted(self) -> list[float]:
        """Seconds of usual steps that drafted."""
        return [seconds for seconds in self.seconds if seconds is not None] if self.size.depth else []

    @property
    def drafted_tokens(self) -> int:
        """Of all requests, in these steps."""
        steps = zip(self.seconds, self.decided, strict=True)
        return sum([len(tokens) for seconds, decided in steps if seconds is not None for tokens in decided])

    @property
    def drafted_seconds(self) -> float:
        """Of these steps. The first one may be longer, since it runs what the drafter missed, but not by any factor."""
        drafted = self.drafted
        most = MOST_SLOWER * sorted(drafted)[len(drafted) // 2]
        return sum([min(seconds, most) for seconds in drafted])

    @property
    def nodes_of_steps(self) -> list[int]:
        """The nodes of each step so far, of all requests."""
        is_fixed = self.size.is_chain or self.size.depth == 0
        return [len(self.rows) * (1 + self.size.depth)] * len(self.seconds) if is_fixed else self.num_nodes


@dataclass
class WarmUp:
    """The first steps of a kind, which take longer than later ones."""

    num_steps: int = 0
    seconds: float = 0.0

    def is_over(self, seconds: float) -> bool:
        """Whether a step that took so long is a later one; else it is counted."""
        if self.num_steps >= WARM_STEPS or self.seconds > WARM_SECONDS:
            return True
        self.num_steps, self.seconds = self.num_steps + 1, self.seconds + seconds
        return False

    def later(self, steps: list[TimedStep]) -> list[TimedStep]:
        """Those of some steps that are later ones; the others are counted."""
        for place, (seconds, _) in enumerate(steps):
            if self.is_over(seconds):
                return steps[place:]
        return []


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

    def count(self, round_: Round) -> None:
        """Count the steps of a round that have not been counted."""
        size, number = round_.size, len(round_.seconds) - round_.num_counted
        self.num_steps += number
        self.num_plain_steps += number * (size.depth == 0)
        self.num_probes += number * size.is_probe
        self.num_nodes += sum(round_.nodes_of_steps[round_.num_counted :])
        self.num_requests += number * len(round_.rows)
        self.num_draft_levels += number * size.depth
        round_.num_counted += number
