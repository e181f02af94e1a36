"""Decides in every step whether to draft, how deep, for which requests, and how many nodes the verify takes.

Before a draft, each depth is judged by the candidates of recent drafts: expected tokens over predicted time, with the
best number of nodes (``kernels/draft_sizing``). A deeper draft is made after a predicted gain of 3 % for 8 steps, a
shallower one after 3 steps; when the number of requests changes, at once. Below a gain of 2 % over plain decoding
nothing is drafted. Then a quarter of the requests at the most is drafted for at depth 1 now and then, at intervals that
double, so that it is seen when drafts would pay again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from specmamba.core import SizingStats
from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.costs import StepCosts
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import LENGTH, Chosen, Drafted, Floats, Ints, Offer, SizerState, TreeArrays

LEAST_GAIN, GAIN_OF_CHANGE = 1.02, 1.03
STEPS_TO_RAISE, STEPS_TO_LOWER = 8, 3
INTERVAL = 4  # steps between two looks at the depth
COST_INTERVAL = 64  # steps after which times are predicted anew
FIRST_PROBE, LAST_PROBE = 4, 32  # steps between two probes
TREES_BESIDE_CHAINS = 24  # steps with chains between two with chosen trees, which show what those would bring
FIRST_PLAIN, LAST_PLAIN = 32, 256  # steps with drafts between two without, which show what plain decoding takes
PROBED_SHARE = 4  # one request of so many is probed
WEIGHT = 0.3  # of a new look in the mean gains
WEIGHT_OF_REST, LONGEST_REST, WEIGHT_OF_BESIDE = 0.02, 1.0, 0.1


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


@dataclass(frozen=True, slots=True)
class DraftSize:
    """What a step drafts."""

    depth: int  # 0: nothing
    is_chain: bool = False  # a whole chain for every request, drafted and verified in one captured step
    drafted: NDArray[np.bool_] | None = None  # [B], rows that are drafted for; None: all, or none at depth 0
    is_probe: bool = False

    def places(self, num_rows: int) -> Ints:
        """Return the place of each row among those that are drafted for, [B]; any place for one that is not."""
        if self.drafted is None:
            return np.arange(num_rows)
        found: Ints = np.maximum(np.cumsum(self.drafted) - 1, 0)
        return found


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
        self.depth = 0
        # over plain decoding, as it is thought now: of each depth with chosen trees, then of chains of each depth
        self.gains = np.ones(2 * (bounds.num_steps + 1))
        self.is_chain = False
        self.forced: tuple[int, int] | None = None  # depth, and nodes of each row, 0: a chain: for measurements
        self.overhead = 0.0  # seconds of a step that are not in its measured time
        self.beside = 0.0  # seconds that prompts took just before the step, whatever it drafts
        self.last_seconds: float | None = None  # of the newest step
        self._mean_beside = 0.0
        self._totals = totals
        self._drafted = Drafted(num_rows, len(bounds.depths), trees)
        self._offers: dict[Hashable, Offer] = {}  # of captured steps, which read them again
        self._given: Ints | None = None  # rows of the batch that _drafted was filled for, all of them
        self._num_requests = 0
        self._bases = self._seconds = np.zeros((0, 0))  # [D + 1, T + 1], of the present requests
        self._age = self._age_of_costs = self._wish_age = self._wish = 0
        self._until_probe = self._probe_interval = FIRST_PROBE
        self._until_plain = self._plain_interval = FIRST_PLAIN
        self._until_trees = TREES_BESIDE_CHAINS
        self._chain_places = _chain_places(bounds)
        self._chain_bases = self._chain_seconds = np.zeros(0)  # [D + 1]
        self._next_probed = 0
        # the step between its decision and its result
        self._size, self._offer, self._num_nodes, self._predicted = DraftSize(0), None, 0, 0.0

    _offer: Offer | None

    def begin(self, row: int, mode: int) -> None:
        """Start a request in this row."""
        draft_sizing.begin(self.state, row, mode)

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
        return size

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """Get ready for a captured step that chooses, if it has been recorded.

        Args:
            key: of the step, as ``choose`` got it.
            padded_size: rows of the trees, the last ones padding.
        """
        offer = self._offer = self._offers.get(key)
        if offer is not None:
            self._set_rules(offer, self._fill(), padded_size)
            draft_sizing.arrange(self.state, self._drafted, offer)

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """Choose the trees of the planned step from what was drafted, and write them to ``trees``.

        Args:
            candidates: of the rows that were drafted for, and perhaps of padding.
            padded_size: rows of the trees, the last ones padding.
            key: of a captured step that calls this, and later repeats it after ``prepare``; None: there is none.
        """
        number, size = self._fill(), self._size
        columns = *candidates.on_host(len(candidates.tokens)), candidates.depths, candidates.ranks
        offer = Offer(*columns, len(self._batch.rows), padded_size, size.depth, self._seconds[size.depth])
        self._set_rules(offer, number, padded_size)
        self._offer = offer
        if key is not None:
            self._offers[key] = offer
        return draft_sizing.choose(self.state, self._drafted, offer)

    def _set_rules(self, offer: Offer, number: int, padded_size: int) -> None:
        """Let an offer of ``number`` rows be that of the planned step."""
        size = self._size
        offer.num_rows, offer.batch_size, offer.padded_size = number, len(self._batch.rows), padded_size
        seconds = self._seconds[size.depth]
        offer.seconds = seconds + self.beside if self.beside else seconds
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
        if seconds is not None:
            has_draft = size.depth > 0
            if size.is_chain:
                self.costs.observe(number, size.depth, "chain", float(self._chain_bases[size.depth]), seconds)
            else:
                base = float(self._bases[size.depth, self._num_nodes])
                self.costs.observe(number, self._num_nodes, has_draft, base, seconds)
            figures.predicted_seconds += self._predicted
            figures.measured_seconds += seconds + self.overhead
        figures.num_steps += 1
        figures.num_plain_steps += size.depth == 0
        figures.num_probes += size.is_probe
        figures.num_nodes += self._num_nodes
        figures.num_requests += number
        figures.num_draft_levels += size.depth
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
        gains = tuple(round(float(gain), 3) for gain in self.gains)
        error = draft_sizing.calibration_error(self.state)
        return SizingStats(
            **vars(self.figures), calibration_error=error, depth=self.depth, gains=gains, reason=self._reason()
        )

    def _reason(self) -> str:
        place = int(self.gains[1:].argmax()) + 1
        best = place % (self.bounds.num_steps + 1)
        gain = f"{(float(self.gains[place]) - 1) * 100:+.0f} %"
        requests = f"{self._num_requests} request{'s' if self._num_requests != 1 else ''}"
        if not self._num_requests:
            return "no step yet"
        if self.depth:
            shape = "chains" if self.is_chain else "drafts"
            return f"{shape} of depth {self.depth}: depth {best} is predicted to gain {gain} with {requests}"
        return f"off: drafts are predicted to gain {gain} at the best, depth {best}, with {requests}"

    def _planned(self, batch: SizedBatch) -> DraftSize:
        deepest = self.bounds.num_steps
        if self.forced is not None:
            self._num_requests = 0  # times are predicted when it ends
            self._seconds = self._bases = np.ones((deepest + 1, len(batch.rows) * self.bounds.max_nodes + 1))
            self._chain_seconds = self._chain_bases = np.ones(deepest + 1)
            return DraftSize(self.forced[0], is_chain=self.forced[1] == 0)
        self._age += 1
        self._age_of_costs += 1
        self._mean_beside += WEIGHT_OF_BESIDE * (self.beside - self._mean_beside)
        if len(batch.rows) != self._num_requests:
            self._predict(batch)
            self._look(batch, LENGTH, 1.0)
            self.depth, self.is_chain = self._option(self._best())
        elif self._age > INTERVAL:
            if self._age_of_costs > COST_INTERVAL:
                self._predict(batch)
            age = self._age - 1
            self._look(batch, 2, WEIGHT)
            self._change_depth(age)
        if self.depth:
            self._until_probe = self._probe_interval = FIRST_PROBE
            self._until_plain -= 1
            if self._until_plain <= 0:
                self._plain_interval = min(2 * self._plain_interval, LAST_PLAIN)
                self._until_plain = self._plain_interval
                return DraftSize(0)
            drafted = batch.max_depths > 0
            if not drafted.any():
                return DraftSize(0)
            if self.is_chain and int(batch.max_depths.min()) >= self.depth:
                self._until_trees -= 1
                if self._until_trees > 0:
                    return DraftSize(self.depth, is_chain=True)
                self._until_trees = TREES_BESIDE_CHAINS
            return DraftSize(self.depth, drafted=None if drafted.all() else drafted)
        self._until_probe -= 1
        if self._until_probe > 0:
            return DraftSize(0)
        self._probe_interval = min(2 * self._probe_interval, LAST_PROBE)
        self._until_probe = self._probe_interval
        return self._probe(batch)

    def _probe(self, batch: SizedBatch) -> DraftSize:
        can = np.flatnonzero(batch.max_depths > 0)
        if not len(can):
            return DraftSize(0)
        number = -(-len(can) // PROBED_SHARE)
        drafted = np.zeros(len(batch.rows), np.bool_)
        drafted[can[(self._next_probed + np.arange(number)) % len(can)]] = True
        self._next_probed += number
        return DraftSize(1, drafted=None if drafted.all() else drafted, is_probe=True)

    def _predict(self, batch: SizedBatch) -> None:
        """Predict the times of steps of these requests, by depth and number of nodes."""
        size = self._num_requests = len(batch.rows)
        most = size * self.bounds.max_nodes
        padded = np.array(self._totals(size))
        numbers = np.arange(size, most + 1)
        to = np.maximum(padded[np.minimum(np.searchsorted(padded, numbers), len(padded) - 1)], size)
        keys, largest = batch.num_keys(), int(to.max())
        found = [self.costs.totals(size, depth, keys, largest) for depth in range(self.bounds.num_steps + 1)]
        padding = np.concatenate([np.arange(size), to])
        self._bases = np.stack([base[padding] for base, _ in found])
        self._seconds = np.stack([seconds[padding] for _, seconds in found]) + self.overhead
        self._chain_bases, chains = self.costs.chains(size, keys, self.bounds.num_steps)
        self._chain_seconds = chains + self.overhead
        self._age_of_costs = 0

    def _look(self, batch: SizedBatch, number: int, weight: float) -> None:
        """Judge every depth by some kept drafts."""
        draws = self.figures.num_steps, number
        seconds = self._seconds + self._mean_beside
        rates = draft_sizing.look(self.state, batch.rows, batch.max_depths, draws, seconds)
        of_all = np.concatenate([rates, self._chain_rates(batch)])
        self.gains += weight * (of_all / rates[0] - self.gains)
        self._age = 0

    def _chain_rates(self, batch: SizedBatch) -> Floats:
        """Expected tokens per second with chains, [D + 1] by depth."""
        rates = np.zeros(self.bounds.num_steps + 1)
        places = self._chain_places
        survival = self.state.values_of_row[batch.rows][:, :, places].mean(1).sum(0)
        known = self._chain_seconds[1 : len(places) + 1] + self._mean_beside
        rates[1 : len(places) + 1] = (len(batch.rows) + survival.cumsum()) / known
        return rates

    def _remember_chains(self, num_accepted: Ints) -> None:
        """Keep what became of chains as values of their nodes: 1 or 0."""
        state, depth, places = self.state, self._size.depth, self._chain_places
        for row, mode, count in zip(self._batch.rows, self._batch.modes, num_accepted, strict=True):
            values = state.values_of_row[row, state.next_of_row[row] % LENGTH]
            values[:] = 0.0
            values[places[:count]] = 1.0
            if count == depth < len(places):
                values[places[depth:]] = np.cumprod(state.odds[mode, depth : len(places), 0])
            state.next_of_row[row] += 1

    def _best(self) -> int:
        best = int(self.gains.argmax())
        return best if self.gains[best] >= LEAST_GAIN else 0

    def _option(self, place: int) -> tuple[int, bool]:
        """The depth of an option among ``gains``, and whether it is that of chains."""
        return place % (self.bounds.num_steps + 1), place > self.bounds.num_steps

    def _change_depth(self, num_steps: int) -> None:
        """Move to a depth that has been better for some steps."""
        place = self.depth + (self.bounds.num_steps + 1) * self.is_chain
        best, present = self._best(), float(self.gains[place])
        depth, is_chain = self._option(best)
        is_raise = depth > self.depth
        if best == place or (best and self.depth and self.gains[best] < GAIN_OF_CHANGE * present):
            self._wish_age = 0
            return
        is_same = self._wish_age > 0 and is_raise == (self._wish > self.depth)
        self._wish, self._wish_age = depth, num_steps + (self._wish_age if is_same else 0)
        if self._wish_age >= (STEPS_TO_RAISE if is_raise else STEPS_TO_LOWER):
            self.depth, self.is_chain, self._wish_age = depth, is_chain, 0


def _chain_places(bounds: Bounds) -> Ints:
    """The candidates of the first child of the first child and so on, as far as a tree is large enough."""
    depths = range(1, min(bounds.num_steps, bounds.max_nodes - 1) + 1)
    return np.array([int(np.flatnonzero(bounds.depths == depth)[0]) for depth in depths], np.int64)
