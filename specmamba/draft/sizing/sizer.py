"""Decides in every step whether to draft, how deep, for which requests, and how many nodes the verify takes.

Before a draft, each depth is judged by the candidates of recent drafts: expected tokens over predicted time, with the best
number of nodes (``budget``). A deeper draft is made after a predicted gain of 3 % for 8 steps, a shallower one after 3
steps; when the number of requests changes, at once. Below a gain of 2 % over plain decoding nothing is drafted. Then a
quarter of the requests at the most is drafted for at depth 1 now and then, at intervals that double, so that it is seen
when drafts would pay again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from specmamba.draft.candidates import Bools, Floats, Ints
from specmamba.draft.sizing import budget
from specmamba.draft.sizing.confidence import DRAWN, NUM_MODES, Confidence, logits_of
from specmamba.draft.sizing.costs import StepCosts
from specmamba.draft.sizing.history import LENGTH, ValueHistory
from specmamba.draft.sizing.trees import HostTrees, trees_of

LEAST_GAIN, GAIN_OF_CHANGE = 1.02, 1.03
STEPS_TO_RAISE, STEPS_TO_LOWER = 8, 3
INTERVAL = 4  # steps between two looks at the depth
FIRST_PROBE, LAST_PROBE = 4, 32  # steps between two probes
PROBED_SHARE = 4  # one request of so many is probed
WEIGHT = 0.3  # of a new look in the mean gains
WEIGHT_OF_THRESHOLD = 0.1
FIRST_THRESHOLD = 0.3
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
    modes: Ints  # [B]; see ``confidence``
    max_depths: Ints  # [B], bounds of the requests
    num_keys: Callable[[], int]  # in front of the roots, of all requests


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a step drafts."""

    depth: int  # 0: nothing
    drafted: Bools | None = None  # [B], rows that are drafted for; None: all, or none at depth 0
    is_probe: bool = False


@dataclass
class SizerFigures:
    """What has been decided since the start."""

    num_steps: int = 0
    num_plain_steps: int = 0
    num_probes: int = 0
    num_nodes: int = 0
    num_rows: int = 0
    sum_of_depths: int = 0
    predicted_seconds: float = 0.0
    measured_seconds: float = 0.0


@dataclass
class _Pending:
    """A step between its decision and its result."""

    batch: SizedBatch
    size: DraftSize
    predicted: float
    num_nodes: int
    rows: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [B'], those that are drafted for
    modes: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    drafted: Ints = field(default_factory=lambda: np.zeros(0, np.int64))  # [B'], their places in the batch
    logits: Floats | None = None
    p: Floats | None = None
    tokens: Ints | None = None
    parents: Ints | None = None
    depths: Ints | None = None
    ranks: Ints | None = None
    kept: Bools | None = None


class DraftSizer:
    """Owns confidence, history, costs and the present depth. Not thread-safe."""

    def __init__(self, bounds: Bounds, num_rows: int, costs: StepCosts, totals: Callable[[int], Sequence[int]]) -> None:
        """Start without drafts' results.

        Args:
            bounds: the largest draft.
            num_rows: of the request table, row 0 included.
            costs: of steps.
            totals: rising numbers of nodes to which verifies of so many requests are padded.
        """
        self.bounds, self.costs = bounds, costs
        self.confidence = Confidence(num_rows)
        self.history = ValueHistory(num_rows, NUM_MODES, bounds.depths, bounds.ranks, bounds.width)
        self.figures = SizerFigures()
        self.depth = 0
        self.gains = np.ones(bounds.num_steps + 1)  # of each depth over plain decoding, as it is thought now
        self._totals = totals
        self._threshold = FIRST_THRESHOLD
        self._members: tuple[int, ...] = ()
        self._seconds: list[Floats] = []  # by depth, of the present requests
        self._age = self._wish_age = self._wish = 0
        self._until_probe = self._probe_interval = FIRST_PROBE
        self._next_probed = 0
        self._pending: _Pending | None = None
        self.forced: tuple[int, int] | None = None  # depth, and nodes of each row: for measurements
        self.overhead = 0.0  # seconds of a step that are not in its measured time

    def begin(self, row: int, mode: int) -> None:
        """Start a request in this row."""
        self.confidence.begin(row)
        self.history.begin(row, mode)

    def plan(self, batch: SizedBatch, must_draft: Sequence[bool]) -> DraftSize:
        """Decide what the next step of these requests drafts.

        Args:
            batch: the requests.
            must_draft: rows that cannot be left out of a draft.
        """
        size = self._planned(batch)
        if size.drafted is not None:
            drafted = size.drafted | np.array(must_draft)
            size = replace(size, drafted=None if drafted.all() else drafted)
        self._pending = _Pending(batch, size, self._seconds[0][len(batch.rows)], len(batch.rows))
        return size

    def _planned(self, batch: SizedBatch) -> DraftSize:
        members = tuple(batch.rows.tolist())
        deepest = int(batch.max_depths.max())
        if self.forced is not None:
            self._load(batch)
            return DraftSize(min(self.forced[0], deepest))
        if len(members) != len(self._members) or not self._seconds:
            self._members = members
            self._load(batch)
            self._look(batch, LENGTH, 1.0)
            self.depth = self._best()
            self._age = 0
        elif self._age >= INTERVAL:
            self._members = members
            self._load(batch)
            self._look(batch, 2, WEIGHT)
            self._change_depth(self._age)
            self._age = 0
        self._age += 1
        if deepest == 0:
            return DraftSize(0)
        if self.depth:
            self._until_probe = self._probe_interval = FIRST_PROBE
            return self._with_rows(batch, min(self.depth, deepest))
        self._until_probe -= 1
        if self._until_probe > 0:
            return DraftSize(0)
        self._probe_interval = min(2 * self._probe_interval, LAST_PROBE)
        self._until_probe = self._probe_interval
        return self._probe(batch)

    def _with_rows(self, batch: SizedBatch, depth: int) -> DraftSize:
        drafted = batch.max_depths > 0
        return DraftSize(depth, None if drafted.all() else drafted)

    def _probe(self, batch: SizedBatch) -> DraftSize:
        can = np.flatnonzero(batch.max_depths > 0)
        number = -(-len(can) // PROBED_SHARE)
        chosen = can[(self._next_probed + np.arange(number)) % len(can)]
        self._next_probed += number
        drafted = np.zeros(len(batch.rows), np.bool_)
        drafted[chosen] = True
        return DraftSize(1, None if drafted.all() else drafted, is_probe=True)

    def choose(self, tokens: Ints, parents: Ints, logp: Floats, depths: Ints, ranks: Ints) -> HostTrees:
        """Choose the trees of the planned step from what was drafted.

        Args:
            tokens, parents, logp: [B', C], of the rows that were drafted for; see ``Candidates``.
            depths, ranks: [C] or [B', C].
        """
        pending = self._pending
        assert pending is not None
        batch, size = pending.batch, pending.size
        drafted = np.arange(len(batch.rows)) if size.drafted is None else np.flatnonzero(size.drafted)
        rows, modes = batch.rows[drafted], batch.modes[drafted]
        logits = logits_of(logp.astype(np.float64))
        p = self.confidence.probabilities(logits, depths, ranks, modes, rows)
        p = np.where((logp > -np.inf) & (depths <= batch.max_depths[drafted, None]), p, 0.0)
        values = budget.path_values(p, parents, size.depth)
        for place, (row, mode) in enumerate(zip(rows.tolist(), modes.tolist(), strict=True)):
            self.history.add(row, mode, values[place], p[place], size.depth)
        seconds = self._seconds[size.depth]
        kept = self._kept(values, batch, drafted, size, seconds)
        all_kept = np.zeros((len(batch.rows), tokens.shape[1]), np.bool_)
        all_kept[drafted] = kept
        of_all = (np.zeros((len(batch.rows), tokens.shape[1]), np.int64) for _ in range(2))
        all_tokens, all_parents = of_all
        all_tokens[drafted], all_parents[drafted] = tokens, parents
        trees = trees_of(all_tokens, all_parents, all_kept, int(all_kept.sum(1).max()) + 1)
        pending.predicted, pending.num_nodes = float(seconds[trees.num_nodes]), trees.num_nodes
        pending.rows, pending.modes, pending.drafted = rows, modes, drafted
        pending.logits, pending.p, pending.tokens, pending.parents = logits, p, tokens, parents
        pending.depths, pending.ranks = np.broadcast_to(depths, p.shape), np.broadcast_to(ranks, p.shape)
        pending.kept = kept
        return trees

    def _kept(self, values: Floats, batch: SizedBatch, drafted: Ints, size: DraftSize, seconds: Floats) -> Bools:
        if self.forced is not None or size.is_probe:
            number = (self.forced[1] if self.forced is not None else 2) - 1
            order = self.bounds.ranks[: values.shape[1]] if self.forced is not None and self.bounds.width == 1 else -values
            place = np.argsort(np.argsort(order, axis=-1, kind="stable"), axis=-1)
            result: Bools = (place < number) & (values > 0)
            return result
        others = len(batch.rows) - len(drafted)
        limits = budget.Limits(self.bounds.max_nodes, seconds[others:], self._threshold)
        found = budget.choose(values, batch.modes[drafted] == DRAWN, limits)
        self._threshold += WEIGHT_OF_THRESHOLD * (found.best_threshold - self._threshold)
        return found.kept

    def observe(self, decided: Sequence[Sequence[int]], seconds: float, learns: bool = True) -> None:
        """Learn from the result of the planned step.

        Args:
            decided: for each row of the batch, accepted drafts and the target's own token.
            seconds: that the step took, measured by the host.
            learns: whether all chosen nodes were verified.
        """
        pending = self._pending
        assert pending is not None
        self._pending = None
        batch = pending.batch
        self.costs.observe(len(batch.rows), pending.num_nodes, pending.predicted - self.overhead, seconds)
        figures = self.figures
        figures.num_steps += 1
        figures.num_plain_steps += pending.size.depth == 0
        figures.num_probes += pending.size.is_probe
        figures.num_nodes += pending.num_nodes
        figures.num_rows += len(batch.rows)
        figures.sum_of_depths += pending.size.depth
        figures.predicted_seconds += pending.predicted
        figures.measured_seconds += seconds
        if pending.kept is not None and learns:
            self._learn(pending, decided)

    def observe_rest(self, seconds: float) -> None:
        """Learn how long the host works on a step behind its measured time."""
        if 0 <= seconds < LONGEST_REST:
            self.overhead += WEIGHT_OF_REST * (seconds - self.overhead)

    def _learn(self, pending: _Pending, decided: Sequence[Sequence[int]]) -> None:
        """Show every observed node to the confidence: the kept children of accepted nodes."""
        assert pending.kept is not None
        columns = (pending.kept, pending.tokens, pending.parents, pending.depths, pending.ranks, pending.logits, pending.p)
        for at, place in enumerate(pending.drafted.tolist()):
            path, row, mode = decided[place], int(pending.rows[at]), int(pending.modes[at])
            kept, tokens, parents, depths, ranks, logits, p = (column[at].tolist() for column in columns)
            accepted = {0}
            for c in range(len(kept)):
                if not kept[c] or parents[c] not in accepted:
                    continue
                is_accepted = depths[c] < len(path) and path[depths[c] - 1] == tokens[c]
                if is_accepted:
                    accepted.add(c + 1)
                self.confidence.observe(mode, row, (depths[c], ranks[c]), logits[c], p[c], is_accepted)

    def _load(self, batch: SizedBatch) -> None:
        """Predict the times of steps of these requests, by depth and number of nodes."""
        size = len(batch.rows)
        most = size * self.bounds.max_nodes
        padded = np.array(self._totals(size))
        to = padded[np.minimum(np.searchsorted(padded, np.arange(size, most + 1)), len(padded) - 1)]
        self._seconds = []
        for depth in range(self.bounds.num_steps + 1):
            seconds = self.costs.totals(size, depth, batch.num_keys(), max(most, int(to.max())))
            seconds = np.concatenate([seconds[:size], seconds[np.maximum(to, size)]]) + self.overhead
            self._seconds.append(seconds)

    def _look(self, batch: SizedBatch, number: int, weight: float) -> None:
        """Judge every depth by some kept drafts."""
        size, bounds = len(batch.rows), self.bounds
        tokens, seconds = np.zeros(bounds.num_steps + 1), np.zeros(bounds.num_steps + 1)
        for i in range(number):
            values = self.history.sample(batch.rows, self.figures.num_steps + i)
            values = np.where(bounds.depths <= batch.max_depths[:, None], values, 0.0)
            for depth in range(bounds.num_steps + 1):
                known = values[:, bounds.depths <= depth]
                count, rate = budget.best_rate(known, self._seconds[depth], bounds.max_nodes)
                took = self._seconds[depth][size + count]
                tokens[depth] += rate * took
                seconds[depth] += took
        rates = tokens / seconds
        self.gains += weight * (rates / rates[0] - self.gains)

    def _best(self) -> int:
        best = int(self.gains.argmax())
        return best if self.gains[best] >= LEAST_GAIN else 0

    def _change_depth(self, num_steps: int) -> None:
        """Move to a depth that has been better for some steps."""
        best, present = self._best(), self.gains[self.depth]
        if best == self.depth or (best > self.depth and self.gains[best] < GAIN_OF_CHANGE * present and self.depth):
            self._wish_age = 0
            return
        self._wish_age = self._wish_age + num_steps if (best > self.depth) == (self._wish > self.depth) else num_steps
        self._wish = best
        if self._wish_age >= (STEPS_TO_RAISE if best > self.depth else STEPS_TO_LOWER):
            self.depth, self._wish_age = best, 0
