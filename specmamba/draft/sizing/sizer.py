"""Decides whether to draft, how deep, for which requests, and how many nodes the verify takes.

Before a draft, each depth is judged by the candidates of recent drafts: expected tokens over predicted time, with the
best number of nodes (``kernels/draft_sizing``). ``DraftSchedule`` follows these rates. A decision holds for a round of
steps, up to 192 of them without drafts, unless their text begins to repeat itself; the nodes are chosen in every step.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from specmamba.core import SizingStats
from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.costs import RestTimes, StepCosts
from specmamba.draft.sizing.earlier import EarlierRequests
from specmamba.draft.sizing.ratios import Brought
from specmamba.draft.sizing.repeats import Repeats
from specmamba.draft.sizing.rounds import (
    WARM_SECONDS,
    WARM_STEPS,
    Bounds,
    Round,
    SizedBatch,
    SizerFigures,
    TimedStep,
    WarmUp,
)
from specmamba.draft.sizing.schedule import (
    NOTHING,
    ROUND,
    SHORT_ROUND,
    TIMED_STEPS,
    DraftSchedule,
    DraftSize,
)
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
    Times,
    TreeArrays,
)

# after which times are predicted anew: with drafts, without, and where another kind of steps was timed
COST_SECONDS, COST_SECONDS_WHERE_OFF, COST_SECONDS_OF_CHANGE = 0.25, 1.0, 0.05
FIRST_DRAFTS = 24  # steps with requests of a mode that draft to see what that brings
DRAWS = 24  # kept drafts that are looked at, of all requests
CHAINS_TO_LEARN = 8  # one round of chains of so many judges probabilities, which takes a few percent of a step
ALL_DEPTHS = 4  # of chains, which cost more by steps where products take another tile of rows
WEIGHT_OF_PROBE = 0.25  # of a probe in the mean time of probes
HEARD_STEPS = 48  # of a round without drafts, at the most, after which their tokens are looked at
STEPS_TO_FORGET = 16  # without drafts, after which one of a request's kept drafts gives way to one of all requests
RELAXING_ROUND = 32  # steps of a decision meanwhile, at the most
WEIGHT_OF_OWN = 3  # of a new request's kept drafts: they soon say more of it than those of earlier requests
STEPS_OF_DRAFT = 2  # of chains that are counted by the host, which make one kept draft
REST_INTERVAL = 8  # steps of a round between two whose rest is timed


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
        self._figures = SizerFigures()
        self.schedule, self._repeats = DraftSchedule(bounds.num_steps), Repeats()
        self.forced: tuple[int, int] | None = None  # depth, and nodes of each row, 0: a chain: for measurements
        self.rests = RestTimes()
        self._brought: dict[int, Brought] = {}  # by the bucket of requests
        # rates of options, by kept drafts alone, and the rows that they are of: all have enough drafts of their own
        self._looked: Floats = np.full(2 * (bounds.num_steps + 1), np.nan)
        self._looked_rows: tuple[int, ...] = ()
        self._own_from = np.zeros(num_rows + 1, np.int64)  # number of the first kept draft behind all others, by row
        self._earlier = EarlierRequests(self.state)
        self._num_begun = 0  # requests since rates were last judged
        self._of_probe: dict[int, float] = {}  # plain steps that a probe takes longer, by the bucket of requests
        self.last_seconds: float | None = None  # of the newest step
        self.learns_on_host = False  # ``learn`` follows the planned step
        self.times_rest = False  # ``observe_rest`` is to follow the newest step
        self._totals = totals
        self._drafted = Drafted(num_rows, len(bounds.depths), trees)
        self._offers: dict[Hashable, Offer] = {}  # of captured steps, which read them again
        self._given: Ints | None = None  # rows of the batch that _drafted was filled for, all of them
        self._num_requests = self._num_chain_rounds = 0
        self._padded: dict[int, Ints] = {}  # by number of requests
        # predicted for the present requests, by depth and nodes: as measured at the start, and as it is thought now
        self._bases: list[list[float]] = []
        self._seconds = np.zeros((0, 0))
        self._chain_bases, self._chain_seconds = [0.0], np.zeros(1)
        self._age = 0  # steps so far when rates were last judged; -1: never
        self._next_costs = 0.0  # when times are predicted anew, by the clock
        self._is_news = False  # since rates were judged
        self._num_off = self._num_forgotten = 0  # steps without drafts in a row, and kept drafts that gave way
        self._num_drafts = np.zeros(draft_sizing.NUM_MODES, np.int64)  # steps so far, by mode, at most FIRST_DRAFTS
        self._kind, self._warm_up = (0, False), WarmUp()  # depth and form of the newest steps
        self._timed_kind = 0, False  # of the newest steps that were timed
        self._chain_places = bounds.chain_places
        self._is_option = _options(bounds.num_steps)
        self._round: Round | None = None
        self._offer: Offer | None = None  # of the planned step
        self._arranged: Offer | None = None  # by the rules of the present round

    @property
    def figures(self) -> SizerFigures:
        """What has been decided since the start, the steps of the present round included."""
        if self._round is not None:
            self._figures.count(self._round)
        return self._figures

    def begin(self, row: int, mode: int, tokens: Sequence[int]) -> None:
        """Start a request in this row, with its known ``tokens``."""
        self._end_round()  # it may be of the request that had this row before
        self._earlier.begin(row, mode, int(self._own_from[row]))
        self._num_begun += 1
        self._repeats.begin(row, tokens)
        self._own_from[row] = 0
        if row in self._looked_rows:
            self._looked_rows = ()
        self.schedule.begin()

    def again(self, rows: tuple[int, ...]) -> DraftSize | None:
        """Return what the next step of these rows drafts, if that has been decided; None: ``plan`` decides."""
        now = self._round
        if now is None or now.num_left <= 0 or now.rows != rows or now.forced != self.forced:
            return None
        if len(now.decided) >= HEARD_STEPS:
            began = time.perf_counter()
            is_heard = self._hear(now)
            self._figures.decision_seconds += time.perf_counter() - began
            if is_heard:
                return None
        now.num_left -= 1
        return now.size

    def plan(self, batch: SizedBatch, rows: tuple[int, ...], must_draft: Callable[[], Sequence[bool]]) -> DraftSize:
        """Decide what the next steps of these requests draft.

        Args:
            batch: the requests.
            rows: those of the batch.
            must_draft: rows that cannot be left out of a draft.
        """
        began = time.perf_counter()
        self._end_round()
        size, number = self._planned(batch)
        if size.is_chain:
            size = replace(size, learns=self.forced is None and self._num_chain_rounds % CHAINS_TO_LEARN == 0)
            self._num_chain_rounds += 1
        if size.drafted is not None:
            drafted = size.drafted | np.array(must_draft())
            size, number = replace(size, drafted=None if drafted.all() else drafted), 1
        self._round = Round(batch, rows, size, number - 1, self.forced)
        self._offer = self._arranged = None
        self.learns_on_host = False
        self._figures.decision_seconds += time.perf_counter() - began
        return size

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """Get ready for a captured step that chooses, if it has been recorded.

        Args:
            key: of the step, as ``choose`` got it.
            padded_size: rows of the trees, the last ones padding.
        """
        offer = self._offer = self._offers.get(key)
        if offer is not None and offer is not self._arranged:
            self._set_rules(offer, padded_size)
            draft_sizing.arrange(self.state, self._drafted, offer)
            self._arranged = offer

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """Choose the trees of the planned step from what was drafted, and write them to ``trees``.

        Args:
            candidates: of the rows that were drafted for, and perhaps of padding.
            padded_size: rows of the trees, the last ones padding.
            key: of a captured step that calls this and ``learn_in_step``, and later repeats both after ``prepare``;
                None: there is none.
        """
        now = self._present
        columns = *candidates.on_host(len(candidates.tokens)), candidates.depths, candidates.ranks
        offer = Offer(*columns, len(now.batch.rows), padded_size, now.size.depth, self._seconds[now.size.depth])
        self._set_rules(offer, padded_size)
        self._offer, self.learns_on_host = offer, key is None
        if key is not None:
            self._offers[key] = offer
        return draft_sizing.choose(self.state, self._drafted, offer)

    def learn_in_step(self, key: Hashable, paths: Ints, num_accepted: Ints) -> None:
        """Learn from the result of a captured step that chose by this key; arguments as for ``learn``."""
        draft_sizing.learn(self.state, self._drafted, self._offers[key], paths, num_accepted)

    def learn(self, paths: Ints, num_accepted: Ints) -> None:
        """Learn from the result of a step whose trees the host has chosen, if all of their nodes were verified.

        Args:
            paths: [B, W], for each row of the batch the root, the accepted nodes, and padding.
            num_accepted: [B].
        """
        assert self._offer is not None
        draft_sizing.learn(self.state, self._drafted, self._offer, paths, num_accepted)

    def observe(
        self, decided: Sequence[Sequence[int]], num_accepted: Sequence[int] | None, seconds: float | None
    ) -> None:
        """End the planned step.

        Args:
            decided: new tokens of each request.
            num_accepted: [B]; None: not all drafted nodes were verified.
            seconds: that the step took, measured by the host; None: it was no usual step.
        """
        now = self._round
        assert now is not None
        self.last_seconds = seconds
        self.times_rest = now.num_left % REST_INTERVAL == 0
        now.seconds.append(seconds)
        size, offer = now.size, self._offer
        if not size.depth:
            now.decided.append(decided)
            return
        if seconds is not None:
            now.note(seconds, decided)
            if size.is_probe:
                self._note_probe(seconds)
        if not size.is_chain:
            now.num_nodes.append(len(now.rows) if offer is None else offer.written.num_nodes)
        elif offer is None and num_accepted is not None:
            now.num_accepted.append(num_accepted)

    def observe_rest(self, seconds: float) -> None:
        """Learn how long the host works on a step behind its measured time."""
        now = self._round
        if now is not None:
            self.rests.observe(len(now.rows), (now.size.depth, now.size.is_chain), seconds)

    def stats(self) -> SizingStats:
        """Return what has been decided, and what is thought now."""
        schedule = self.schedule
        gains = tuple(round(float(gain), 3) for gain in schedule.gains)
        error = draft_sizing.calibration_error(self.state)
        is_judged = self._num_requests and self._age >= 0
        reason = schedule.reason(self._num_requests) if is_judged else "no draft has been judged yet"
        figures = replace(self.figures, decision_seconds=self.figures.decision_seconds + float(self.state.seconds[0]))
        return SizingStats(**vars(figures), calibration_error=error, depth=schedule.depth, gains=gains, reason=reason)

    def _note_probe(self, seconds: float) -> None:
        """Learn how long a probe takes, the tokens included that the drafter missed and runs first."""
        size = len(self._present.rows)
        name, found = size.bit_length(), max(seconds / float(self._seconds[0, size]) - 1.0, 0.0)
        self._of_probe[name] = found + (1.0 - WEIGHT_OF_PROBE) * (self._of_probe.get(name, found) - found)

    @property
    def _present(self) -> Round:
        assert self._round is not None
        return self._round

    def _set_rules(self, offer: Offer, padded_size: int) -> None:
        """Let an offer be that of the planned step."""
        now, size = self._present, self._present.size
        offer.num_rows, offer.batch_size, offer.padded_size = self._fill(now), len(now.rows), padded_size
        offer.seconds = self._seconds[size.depth]
        offer.nodes_per_row = self.forced[1] if self.forced is not None else 2 if size.is_probe else 0
        if size.is_chain:
            offer.nodes_per_row = size.depth + 1

    def _fill(self, now: Round) -> int:
        """Write the rows that are drafted for to ``_drafted``; returns their number."""
        batch, size, found = now.batch, now.size, self._drafted
        number = len(batch.rows) if size.drafted is None else int(size.drafted.sum())
        if size.drafted is None and self._given is batch.rows:
            return number
        self._given = batch.rows if size.drafted is None else None
        places = np.arange(number) if size.drafted is None else np.flatnonzero(size.drafted)
        found.places[:number], found.rows[:number] = places, batch.rows[places]
        found.modes[:number], found.max_depths[:number] = batch.modes[places], batch.max_depths[places]
        return number

    def _end_round(self) -> None:
        """Learn from the steps of the present round."""
        done, self._round = self._round, None
        if done is None or not done.seconds:
            return
        self._figures.count(done)
        self._is_news |= done.size.depth > 0
        if done.size.depth and not done.size.is_probe:
            self._num_off = self._num_forgotten = 0
        elif not done.size.depth:
            self._num_off += len(done.seconds)
        kind = done.size.depth, done.size.is_chain
        if kind != self._kind:
            self._kind, self._warm_up = kind, WarmUp()
        timed = zip(done.seconds, done.nodes_of_steps, strict=True)
        steps = self._warm_up.later([(seconds, nodes) for seconds, nodes in timed if seconds is not None])
        if done.forced is None:
            self.schedule.passed(len(done.seconds), len(steps))
            if done.drafted and len(done.rows) == self._num_requests:
                self._charge(done)
                if done.size.drafted is None and not done.size.is_probe and done.rows == self._looked_rows:
                    self._learn_tokens(done)
            if done.decided:
                self._hear(done)
            if steps and kind != self._timed_kind:
                self._timed_kind = kind
                self._next_costs = min(self._next_costs, time.perf_counter() + COST_SECONDS_OF_CHANGE)
            if steps and len(done.rows) == self._num_requests:
                self._learn_times(done, steps)
            if done.num_accepted:
                self._remember_chains(done)

    def _hear(self, now: Round) -> bool:
        """Look at the newest tokens of steps without drafts; whether drafts are to be tried soon."""
        decided, now.decided = now.decided, []
        if now.forced is not None:
            return False
        self._repeats.add(now.rows, decided)
        return self.schedule.hear(self._repeats.share(now.rows), len(decided))

    def _charge(self, done: Round) -> None:
        """Count what drafts took and brought."""
        size, number = len(done.rows), len(done.drafted)
        seconds = done.drafted_seconds + number * self.rests.of(size, (done.size.depth, done.size.is_chain))
        self.schedule.charge(seconds, done.drafted_tokens / size, float(self._seconds[0, size]))

    def _learn_times(self, done: Round, steps: Sequence[TimedStep]) -> None:
        """Learn from measured seconds, and the nodes of the steps that took them."""
        depth, number = done.size.depth, len(done.rows)
        measured = [seconds for seconds, _ in steps]
        if done.size.is_chain:
            ratios = [seconds / self._chain_bases[depth] for seconds in measured]
            predicted, num_nodes = self._chain_seconds.item(depth) * len(steps), depth * number
        elif depth == 0:
            base = self._bases[0][number]
            ratios = [seconds / base for seconds in measured]
            predicted, num_nodes = self._seconds.item(0, number) * len(steps), number
        else:
            bases, of_depth = self._bases[depth], self._seconds[depth]
            ratios = [seconds / bases[nodes] for seconds, nodes in steps]
            predicted = sum([of_depth.item(nodes) for _, nodes in steps])
            num_nodes = sorted([nodes for _, nodes in steps])[len(steps) // 2]
        if not math.isfinite(predicted):
            return
        # a mean, as speed is one; a step that was held up for long counts as one that took twice as long as most
        ratios.sort()
        most = 2.0 * ratios[len(ratios) // 2]
        num_less = bisect_right(ratios, most)
        ratio = (sum(ratios[:num_less]) + most * (len(ratios) - num_less)) / len(ratios)
        kind = "chain" if done.size.is_chain else depth > 0
        self.costs.observe(number, num_nodes, kind, 1.0, ratio, len(steps))
        self._figures.predicted_seconds += predicted
        rest = self.rests.of(number, (depth, done.size.is_chain))
        self._figures.measured_seconds += sum(measured) + rest * len(steps)

    def _planned(self, batch: SizedBatch) -> tuple[DraftSize, int]:
        """What the next steps draft, and their number."""
        deepest = self.bounds.num_steps
        if self.forced is not None:
            self._num_requests = 0  # times are predicted when it ends
            self._seconds = np.ones((deepest + 1, len(batch.rows) * self.bounds.max_nodes + 1))
            depth, nodes = self.forced
            return DraftSize(depth, is_chain=nodes == 0) if depth else NOTHING, ROUND
        if len(batch.rows) != self._num_requests:
            self._predict(batch)
            self.schedule.set_requests(len(batch.rows))
            self._age = -1
            if not self.schedule.depth and self._num_begun:
                return NOTHING, 1  # others may come, and drafts that begin and end at once are dear
        if 1 < len(batch.rows) <= self._num_begun:
            self._age = -1  # all of them are new
        if int(self._num_drafts[batch.modes].min()) < FIRST_DRAFTS and int(batch.max_depths.min()) > 0:
            self._num_drafts[batch.modes] += ROUND
            self._looked_rows = ()
            return DraftSize(deepest), ROUND  # little is known of such requests
        now = self._figures.num_steps
        if self._age < 0:
            self.schedule.restart(self._rates(batch), len(batch.rows))
            self._age, self._num_begun = now, 0
        elif now - self._age >= SHORT_ROUND:
            if time.perf_counter() >= self._next_costs:
                self._predict(batch)
            if self._forgets(batch) or self._is_news:
                self.schedule.judge(self._rates(batch), now - self._age)
            self._age, self._is_news = now, False
        size, number = self.schedule.next(batch.max_depths)
        is_relaxing = not self.schedule.depth and self._num_forgotten < LENGTH
        return size, min(number, RELAXING_ROUND) if is_relaxing else number

    def _forgets(self, batch: SizedBatch) -> bool:
        """Let what is known of requests fade while nothing is drafted for them; whether it has changed."""
        number = min(self._num_off // STEPS_TO_FORGET, LENGTH) - self._num_forgotten
        if self.schedule.depth or number <= 0:
            return False
        state = self.state
        for _ in range(number):
            places = state.next_of_row[batch.rows] % LENGTH
            state.values_of_row[batch.rows, places] = self._earlier.of(batch.modes, places)
            state.next_of_row[batch.rows] += 1
        self._own_from[batch.rows] = state.next_of_row[batch.rows]
        state.of_row[batch.rows] *= 1.0 - number / LENGTH
        self._num_forgotten += number
        return True

    def _predict(self, batch: SizedBatch) -> None:
        """Predict the times of steps of these requests, by depth and number of nodes."""
        size, deepest = len(batch.rows), self.bounds.num_steps
        self._num_requests = size
        padding = self._padding(size)
        keys, largest = batch.num_keys(), int(padding[-1])
        found = self.costs.totals(size, deepest, keys, largest)
        self._bases = [base[padding].tolist() for base, _ in found]
        rests = np.array(
            [[self.rests.of(size, (d, is_chain)) for d in range(deepest + 1)] for is_chain in (False, True)]
        )
        self._seconds = np.stack([seconds[padding] for _, seconds in found]) + rests[0, :, None]
        bases, chains = self.costs.chains(size, keys, deepest)
        self._chain_bases, self._chain_seconds = bases.tolist(), chains + rests[1]
        holds_for = COST_SECONDS if self.schedule.depth else COST_SECONDS_WHERE_OFF
        self._next_costs, self._is_news = time.perf_counter() + holds_for, True
        plain = float(self._seconds[0, size])
        lengths = np.where(np.isfinite(self._chain_seconds), self._chain_seconds, 0.0) / plain
        of_probe = self._of_probe.get(size.bit_length(), 1.0)
        num_tried = TIMED_STEPS + min(WARM_STEPS, math.ceil(WARM_SECONDS / plain))
        self.schedule.set_times(num_tried, np.tile(np.maximum(lengths, 1.0), 2), of_probe)

    def _padding(self, size: int) -> Ints:
        """The number of nodes to which each number of nodes of so many requests is padded."""
        if size not in self._padded:
            totals = np.array(self._totals(size))
            numbers = np.arange(size, size * self.bounds.max_nodes + 1)
            to = np.maximum(totals[np.minimum(np.searchsorted(totals, numbers), len(totals) - 1)], size)
            self._padded[size] = np.concatenate([np.arange(size), to])
        return self._padded[size]

    def _rates(self, batch: SizedBatch) -> Floats:
        """Judge every option of the schedule by some kept drafts: expected tokens per second."""
        draws = self._figures.num_steps, min(max(DRAWS // len(batch.rows), 1), LENGTH)
        self._emphasize(batch.rows)
        times = Times(self._seconds, self._chain_places, self._chain_seconds)
        self._looked = draft_sizing.look(self.state, batch.rows, batch.max_depths, draws, times)
        self._looked_rows = tuple(batch.rows.tolist()) if self._knows(batch) else ()
        return self._looked * self._of_bucket(len(batch.rows)).ratios * self._is_option

    def _emphasize(self, rows: Ints) -> None:
        """Let the own drafts of requests that have few of them stand for several of what was taken to be like them."""
        state, newest = self.state, self.state.next_of_row[rows]
        own, weight = newest - self._own_from[rows], min(len(rows), WEIGHT_OF_OWN)
        for row, last, number in zip(rows.tolist(), newest.tolist(), own.tolist(), strict=True):
            if 0 < number < LENGTH:
                others = np.arange(min(number * (weight - 1), LENGTH - number))
                values = state.values_of_row[row]
                values[(last + others) % LENGTH] = values[(last - 1 - others % number) % LENGTH]

    def _of_bucket(self, num_requests: int) -> Brought:
        bucket = num_requests.bit_length()
        if bucket not in self._brought:
            self._brought[bucket] = Brought(self.bounds.num_steps)
        return self._brought[bucket]

    def _knows(self, batch: SizedBatch) -> bool:
        """Whether what is expected of these requests comes from drafts of their own."""
        return int((self.state.next_of_row - self._own_from)[batch.rows].min()) >= LENGTH

    def _learn_tokens(self, done: Round) -> None:
        """Learn from what drafts for all requests brought."""
        size, place = done.size, self.schedule.place(done.size.depth, done.size.is_chain)
        if size.is_chain:
            seconds = self._chain_seconds.item(size.depth) * len(done.drafted)
        else:
            of_depth = self._seconds[size.depth]
            of_steps = zip(done.seconds, done.num_nodes, strict=True)
            seconds = sum([of_depth.item(nodes) for took, nodes in of_steps if took is not None])
        expected = float(self._looked[place]) * seconds
        if math.isfinite(expected):
            self._of_bucket(len(done.rows)).add(place, done.drafted_tokens, expected)

    def _remember_chains(self, done: Round) -> None:
        """Keep what became of chains as kept drafts of each request: shares that reached a node, of few steps each."""
        state, depth, places, batch = self.state, done.size.depth, self._chain_places, done.batch
        counts = np.array(done.num_accepted)  # [steps, B]
        reached = counts[..., None] > np.arange(depth)  # [steps, B, depth]
        mean = reached.mean(0)
        for mode, shares in zip(batch.modes, mean, strict=True):
            odds, above = state.odds[mode, :, 0], np.concatenate([[1.0], shares[:-1]])
            weight = WEIGHT_OF_ODDS * len(counts) * above
            odds[:depth] += np.minimum(weight, 1.0) * (shares / np.maximum(above, 1e-9) - odds[:depth])
        firsts = np.arange(0, len(counts), STEPS_OF_DRAFT)
        sizes = np.diff(firsts, append=len(counts))
        shares = np.add.reduceat(reached, firsts, axis=0, dtype=float) / sizes[:, None, None]  # [G, B, depth]
        shares = shares[-LENGTH:]
        values = np.zeros((*shares.shape[:2], len(state.depths)))
        values[..., places[:depth]] = shares[..., : len(places)]
        below = np.cumprod(state.odds[batch.modes, depth : len(places), 0], axis=1)
        values[..., places[depth:]] = shares[..., -1:] * below
        state.values_of_row[batch.rows, (state.next_of_row[batch.rows] + np.arange(len(values))[:, None]) % LENGTH] = (
            values
        )
        state.next_of_row[batch.rows] += len(values)
        for mode in np.unique(batch.modes):
            row = int(np.flatnonzero(batch.modes == mode)[0])
            state.values_of_mode[mode, state.shared_of_mode[mode] % LENGTH] = values[-1, row]
            state.shared_of_mode[mode] += 1


def _options(num_steps: int) -> Floats:
    """1 for what is drafted: [2 (D + 1)], by depth, of chosen trees and of chains. Each kind takes long to record."""
    depths, found = np.arange(num_steps + 1), np.zeros((2, num_steps + 1))
    found[:, ((depths & (depths - 1)) == 0) | (depths == num_steps)] = 1.0
    found[1, chain_depths(num_steps)] = 1.0
    return found.ravel()


def chain_depths(num_steps: int) -> list[int]:
    """Depths of chains that are drafted: all up to 4, then powers of two, and the deepest."""
    return [d for d in range(1, num_steps + 1) if d <= ALL_DEPTHS or d & (d - 1) == 0 or d == num_steps]
