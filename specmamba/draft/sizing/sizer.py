"""Decides in every step whether to draft, how deep, for which requests, and how many nodes the verify takes.

Before a draft, each depth is judged by the candidates of recent drafts: expected tokens over predicted time, with the
best number of nodes (``kernels/draft_sizing``). ``DraftSchedule`` follows these rates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specmamba.core import SizingStats
from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.costs import StepCosts
from specmamba.draft.sizing.schedule import DraftSchedule, DraftSize
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import (
    LENGTH,
    WEIGHT_OF_ODDS,
    Chosen,
    Drafted,
    Floats,
    Ints,
    Offer,
    SizerState,
    TreeArrays,
)

INTERVAL, INTERVAL_OFF = 4, 16  # steps between two looks at the depth
COST_INTERVAL = 64  # steps after which times are predicted anew
FIRST_DRAFTS = 24  # steps with requests of a mode that draft to see what that brings
COAST = 7  # steps without a decision after a plain one, where drafts have not paid for long
WARM_SECONDS = 0.008  # after a change of kind in which steps take longer than later ones
STRETCH_SECONDS = 0.02  # of another kind, to see what it brings or takes
WEIGHT_OF_REST, LONGEST_REST = 0.02, 1.0


@dataclass(frozen=True, slots=True)
class Bounds:
    """The largest draft."""

    num_steps: int
    max_nodes: int  # of a tree, the root included
    depths: Ints  # [C], of the candidates of the deepest draft, level by level
    ranks: Ints  # [C]
    width: int  # nodes of a level that have children


@dataclass(frozen=True, slots=True)
class SizedBatch:
    """The requests of a step, as the sizer sees them."""

    rows: Ints  # [B]
    modes: Ints  # [B]; see ``kernels.draft_sizing``
    max_depths: Ints  # [B], bounds of the requests
    num_keys: Callable[[], int]  # in front of the roots, of all requests


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

    def add(self, size: DraftSize, num_requests: int, num_nodes: int) -> None:
        """Count a step."""
        self.num_steps += 1
        self.num_plain_steps += size.depth == 0
        self.num_probes += size.is_probe
        self.num_nodes += num_nodes
        self.num_requests += num_requests
        self.num_draft_levels += size.depth


class DraftSizer:
    """Owns calibration, recent values, costs and the present depth. Not thread-safe."""

    def __init__(
        self, bounds: Bounds, trees: TreeArrays, costs: StepCosts, totals: Callable[[int], Sequence[int]]
    ) -> None:
        """Start without drafts' results.

        Args:
            bounds: the largest draft.
            trees: chosen trees are written there.
            costs: of steps.
            totals: rising numbers of nodes to which verifies of so many requests are padded.
        """
        self.bounds, self.costs, self.trees = bounds, costs, trees
        num_rows = len(trees.num_nodes)
        self.state = SizerState(bounds.depths, bounds.ranks, bounds.width, bounds.max_nodes, num_rows + 1)
        self.figures = SizerFigures()
        self.schedule = DraftSchedule(bounds.num_steps)
        self.forced: tuple[int, int] | None = None  # depth, and nodes of each row, 0: a chain: for measurements
        self.overhead = 0.0  # seconds of a step that are not in its measured time
        self.last_seconds: float | None = None  # of the newest step
        self._totals = totals
        self._drafted = Drafted(num_rows, len(bounds.depths), trees)
        self._offers: dict[Hashable, Offer] = {}  # of captured steps, which read them again
        self._given: Ints | None = None  # rows of the batch that _drafted was filled for, all of them
        self._num_requests = 0
        self._bases = self._seconds = np.zeros((0, 0))  # [D + 1, T + 1], of the present requests
        self._age = self._age_of_costs = self._coasting = 0
        self._coast_rows: tuple[int, ...] = ()
        self._num_drafts = np.zeros(draft_sizing.NUM_MODES, np.int64)  # steps so far, by mode, at most FIRST_DRAFTS
        # depth and form of the newest steps, and the seconds of those that were timed
        self._kind, self._warm_seconds = (0, False), 0.0
        self._chain_places = _chain_places(bounds)
        self._is_option = _options(bounds.num_steps)
        self._chain_bases = self._chain_seconds = np.zeros(0)  # [D + 1]
        # the step between its decision and its result
        self._size, self._offer, self._num_nodes, self._predicted = DraftSize(0), None, 0, 0.0

    _offer: Offer | None

    def begin(self, row: int, mode: int) -> None:
        """Start a request in this row."""
        draft_sizing.begin(self.state, row, mode)
        self.schedule.expect_news()
        self._coasting = 0

    def coasts(self, rows: Sequence[int]) -> bool:
        """Whether the next step drafts nothing, as those before it, without ``plan`` and ``observe``."""
        if self._coasting <= 0 or rows != self._coast_rows:
            return False
        self._coasting -= 1
        self._warm_seconds += self._predicted
        self._age += 1
        self._age_of_costs += 1
        self.figures.add(DraftSize(0), len(rows), len(rows))
        return True

    def plan(self, batch: SizedBatch, must_draft: Callable[[], Sequence[bool]]) -> DraftSize:
        """Decide what the next step of these requests drafts.

        Args:
            batch: the requests.
            must_draft: rows that cannot be left out of a draft.
        """
        size = self._planned(batch)
        if size.drafted is not None:
            drafted = size.drafted | np.array(must_draft())
            size = replace(size, drafted=None if drafted.all() else drafted)
        number = len(batch.rows)
        self._size, self._offer, self._num_nodes = size, None, number * (1 + size.depth * size.is_chain)
        self._predicted = float(self._chain_seconds[size.depth] if size.is_chain else self._seconds[0, number])
        self._batch = batch
        self._coasting = 0 if size.keeps_up else self.schedule.coast(COAST)
        self._coast_rows = tuple(batch.rows.tolist()) if self._coasting else ()
        return size

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """Get ready for a captured step that chooses, if it has been recorded.

        Args:
            key: of the step, as ``choose`` got it.
            padded_size: rows of the trees, the last ones padding.
        """
        offer = self._offer = self._offers.get(key)
        if offer is not None:
            self._set_rules(offer, padded_size)
            draft_sizing.arrange(self.state, self._drafted, offer)

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """Choose the trees of the planned step from what was drafted, and write them to ``trees``.

        Args:
            candidates: of the rows that were drafted for, and perhaps of padding.
            padded_size: rows of the trees, the last ones padding.
            key: of a captured step that calls this, and later repeats it after ``prepare``; None: there is none.
        """
        size = self._size
        columns = *candidates.on_host(len(candidates.tokens)), candidates.depths, candidates.ranks
        offer = Offer(*columns, len(self._batch.rows), padded_size, size.depth, self._seconds[size.depth])
        self._set_rules(offer, padded_size)
        self._offer = offer
        if key is not None:
            self._offers[key] = offer
        return draft_sizing.choose(self.state, self._drafted, offer)

    def _set_rules(self, offer: Offer, padded_size: int) -> None:
        """Let an offer be that of the planned step."""
        size = self._size
        offer.num_rows, offer.batch_size, offer.padded_size = self._fill(), len(self._batch.rows), padded_size
        offer.seconds = self._seconds[size.depth]
        offer.nodes_per_row = self.forced[1] if self.forced is not None else 2 if size.is_probe else 0

    def _fill(self) -> int:
        """Write the rows that are drafted for to ``_drafted``; returns their number."""
        batch, size, found = self._batch, self._size, self._drafted
        number = len(batch.rows) if size.drafted is None else int(size.drafted.sum())
        if size.drafted is None and self._given is batch.rows:
            return number
        self._given = batch.rows if size.drafted is None else None
        places = np.arange(number) if size.drafted is None else np.flatnonzero(size.drafted)
        found.places[:number], found.rows[:number] = places, batch.rows[places]
        found.modes[:number], found.max_depths[:number] = batch.modes[places], batch.max_depths[places]
        return number

    def observe(self, tokens: Ints, num_accepted: Ints, seconds: float | None, learns: bool = True) -> None:
        """Learn from the result of the planned step.

        Args:
            tokens: [B, W], for each row of the batch accepted drafts, and more.
            num_accepted: [B].
            seconds: that the step took, measured by the host; None: it was no usual step.
            learns: whether all chosen nodes were verified.
        """
        size, figures, number = self._size, self.figures, len(num_accepted)
        self.last_seconds = seconds
        if self._offer is not None:
            self._num_nodes = draft_sizing.chosen(self._offer).num_nodes
            self._predicted = float(self._seconds[size.depth, self._num_nodes])
        kind = size.depth, size.is_chain
        if kind != self._kind:
            self._kind, self._warm_seconds = kind, 0.0
        is_warm, self._warm_seconds = self._warm_seconds > WARM_SECONDS, self._warm_seconds + (seconds or 0.0)
        if seconds is not None and is_warm and self.forced is None:
            if size.is_chain:
                self.costs.observe(number, size.depth, "chain", float(self._chain_bases[size.depth]), seconds)
            else:
                base = float(self._bases[size.depth, self._num_nodes])
                self.costs.observe(number, self._num_nodes, size.depth > 0, base, seconds)
            figures.predicted_seconds += self._predicted
            figures.measured_seconds += seconds + self.overhead
        figures.add(size, number, self._num_nodes)
        if size.is_chain and learns and self.forced is None:
            self._remember_chains(num_accepted)
        if self._offer is not None and learns:
            draft_sizing.learn(self.state, self._drafted, self._offer, tokens, num_accepted)
        self._offer = None

    def observe_rest(self, seconds: float) -> None:
        """Learn how long the host works on a step behind its measured time."""
        if 0 <= seconds < LONGEST_REST:
            self.overhead += WEIGHT_OF_REST * (seconds - self.overhead)

    def stats(self) -> SizingStats:
        """Return what has been decided, and what is thought now."""
        schedule = self.schedule
        gains = tuple(round(float(gain), 3) for gain in schedule.gains)
        error = draft_sizing.calibration_error(self.state)
        reason = schedule.reason(self._num_requests)
        return SizingStats(
            **vars(self.figures), calibration_error=error, depth=schedule.depth, gains=gains, reason=reason
        )

    def _planned(self, batch: SizedBatch) -> DraftSize:
        deepest = self.bounds.num_steps
        if self.forced is not None:
            self._num_requests = 0  # times are predicted when it ends
            self._seconds = self._bases = np.ones((deepest + 1, len(batch.rows) * self.bounds.max_nodes + 1))
            self._chain_seconds = self._chain_bases = np.ones(deepest + 1)
            return DraftSize(self.forced[0], is_chain=self.forced[1] == 0)
        self._age += 1
        self._age_of_costs += 1
        if len(batch.rows) != self._num_requests:
            self._predict(batch)
            self._age = -1
        if int(self._num_drafts[batch.modes].min()) < FIRST_DRAFTS and int(batch.max_depths.min()) > 0:
            self._num_drafts[batch.modes] += 1
            return DraftSize(deepest)  # little is known of such requests
        if self._age < 0:
            self.schedule.restart(self._rates(batch, LENGTH))
        elif self._age > (INTERVAL if self.schedule.depth else INTERVAL_OFF):
            if self._age_of_costs > COST_INTERVAL:
                self._predict(batch)
            age = self._age - 1
            self.schedule.judge(self._rates(batch, 2), age)
        return self.schedule.next(batch.max_depths)

    def _predict(self, batch: SizedBatch) -> None:
        """Predict the times of steps of these requests, by depth and number of nodes."""
        size = self._num_requests = len(batch.rows)
        most = size * self.bounds.max_nodes
        padded = np.array(self._totals(size))
        numbers = np.arange(size, most + 1)
        to = np.maximum(padded[np.minimum(np.searchsorted(padded, numbers), len(padded) - 1)], size)
        keys, largest = batch.num_keys(), int(to.max())
        found = self.costs.totals(size, self.bounds.num_steps, keys, largest)
        padding = np.concatenate([np.arange(size), to])
        self._bases = np.stack([base[padding] for base, _ in found])
        self._seconds = np.stack([seconds[padding] for _, seconds in found]) + self.overhead
        self._chain_bases, chains = self.costs.chains(size, keys, self.bounds.num_steps)
        self._chain_seconds = chains + self.overhead
        self._age_of_costs = 0
        self.schedule.set_stretch(STRETCH_SECONDS / float(self._seconds[0, size]))

    def _rates(self, batch: SizedBatch, number: int) -> Floats:
        """Judge every option of the schedule by some kept drafts: expected tokens per second."""
        draws, self._age = (self.figures.num_steps, number), 0
        rates = draft_sizing.look(self.state, batch.rows, batch.max_depths, draws, self._seconds)
        return np.concatenate([rates, self._chain_rates(batch)]) * self._is_option

    def _chain_rates(self, batch: SizedBatch) -> Floats:
        """Expected tokens per second with chains, [D + 1] by depth."""
        rates = np.zeros(self.bounds.num_steps + 1)
        places = self._chain_places
        survival = self.state.values_of_row[batch.rows][:, :, places].mean(1).sum(0)
        known = self._chain_seconds[1 : len(places) + 1]
        rates[1 : len(places) + 1] = (len(batch.rows) + survival.cumsum()) / known
        return rates

    def _remember_chains(self, num_accepted: Ints) -> None:
        """Keep what became of chains as values of their nodes: 1 or 0."""
        state, depth, places = self.state, self._size.depth, self._chain_places
        for row, mode, count in zip(self._batch.rows, self._batch.modes, num_accepted, strict=True):
            odds = state.odds[mode, :, 0]
            odds[:count] += WEIGHT_OF_ODDS * (1.0 - odds[:count])
            if count < depth:
                odds[count] -= WEIGHT_OF_ODDS * odds[count]
            values = state.values_of_row[row, state.next_of_row[row] % LENGTH]
            values[:] = 0.0
            values[places[:count]] = 1.0
            if count == depth < len(places):
                values[places[depth:]] = np.cumprod(odds[depth : len(places)])
            state.next_of_row[row] += 1


def _options(num_steps: int) -> Floats:
    """1 for depths that are powers of two, and for the deepest: each kind of step takes long to record. [2 (D + 1)]."""
    depths = np.arange(num_steps + 1)
    of_depth = ((depths & (depths - 1)) == 0) | (depths == num_steps)
    return np.tile(of_depth.astype(np.float64), 2)


def _chain_places(bounds: Bounds) -> Ints:
    """The candidates of the first child of the first child and so on, as far as a tree is large enough."""
    depths = range(1, min(bounds.num_steps, bounds.max_nodes - 1) + 1)
    return np.array([int(np.flatnonzero(bounds.depths == depth)[0]) for depth in depths], np.int64)
