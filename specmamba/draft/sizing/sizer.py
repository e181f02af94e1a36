"""Decides whether to draft, how deep, for which requests, and how many nodes the verify takes.

Before a draft, each depth is judged by the candidates of recent drafts: expected tokens over predicted time, with the
best number of nodes (``kernels/draft_sizing``). ``DraftSchedule`` follows these rates. A decision holds for a round of
steps, up to 192 of them without drafts, unless their text begins to repeat itself; the nodes are chosen in every step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import numpy as np

from specmamba.core import SizingStats
from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.costs import StepCosts
from specmamba.draft.sizing.expected_tokens import ExpectedTokens
from specmamba.draft.sizing.present_times import PresentTimes
from specmamba.draft.sizing.repeats import Repeats
from specmamba.draft.sizing.rounds import NOTHING, Bounds, DraftSize, Round, SizedBatch, SizerFigures
from specmamba.draft.sizing.schedule import ROUND, DraftSchedule
from specmamba.draft.sizing.tree_choice import TreeChoice
from specmamba.draft.sizing.tries import SHORT_ROUND, TIMED_STEPS
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import Chosen, Floats, Ints, TreeArrays

FIRST_DRAFTS = 24  # steps with requests of a mode that draft to see what that brings
CHAINS_TO_LEARN = 8  # one round of chains of so many judges probabilities, which takes a few percent of a step
ALL_DEPTHS = 4  # of chains, which cost more by steps where products take another tile of rows
HEARD_STEPS = 48  # of a round without drafts, at the most, after which their tokens are looked at
RELAXING_ROUND = 32  # steps of a decision while what is known of requests fades, at the most
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
        self.bounds, self.trees = bounds, trees
        num_rows = len(trees.num_nodes)
        self.times, self.expected = PresentTimes(bounds, costs, totals), ExpectedTokens(bounds, num_rows)
        self.schedule, self._repeats = DraftSchedule(bounds.num_steps), Repeats()
        self.forced: tuple[int, int] | None = None  # depth, and nodes of each row, 0: a chain: for measurements
        self.last_seconds: float | None = None  # of the newest step
        self.times_rest = False  # ``observe_rest`` is to follow the newest step
        self._figures = SizerFigures()
        self._is_option = _options(bounds.num_steps)
        self._num_drafts = np.zeros(draft_sizing.NUM_MODES, np.int64)  # steps so far, by mode, at most FIRST_DRAFTS
        self._num_chain_rounds = 0
        self._num_begun = 0  # requests since rates were last judged
        self._age = 0  # steps so far when rates were last judged; -1: never
        self._is_news = False  # since rates were judged
        self._round: Round | None = None
        self._choice = TreeChoice(self.expected.state, trees)

    @property
    def figures(self) -> SizerFigures:
        """What has been decided since the start, the steps of the present round included."""
        if self._round is not None:
            self._figures.count(self._round)
        return self._figures

    @property
    def learns_on_host(self) -> bool:
        """Whether ``learn`` follows the planned step."""
        return self._choice.learns_on_host

    def begin(self, row: int, mode: int, tokens: Sequence[int]) -> None:
        """Start a request in this row, with its known ``tokens``."""
        self._end_round()  # it may be of the request that had this row before
        self.expected.begin(row, mode)
        self._num_begun += 1
        self._repeats.begin(row, tokens)
        self.schedule.begin()

    def again(self, rows: tuple[int, ...]) -> DraftSize | None:
        """Return what the next step of these rows drafts, if that has been decided; None: ``plan`` decides."""
        now = self._round
        if now is None or now.num_left <= 0 or now.rows != rows or now.forced != self.forced:
            return None
        if len(now.decided) >= HEARD_STEPS and not now.size.depth:
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
        self._choice.begin(self._round, self.times.trees[size.depth])
        self._figures.decision_seconds += time.perf_counter() - began
        return size

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """Get ready for a captured step that chooses, if it has been recorded.

        Args:
            key: of the step, as ``choose`` got it.
            padded_size: rows of the trees, the last ones padding.
        """
        self._choice.prepare(key, padded_size)

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable = None) -> Chosen:
        """Choose the trees of the planned step from what was drafted, and write them to ``trees``.

        Args:
            candidates: of the rows that were drafted for, and perhaps of padding.
            padded_size: rows of the trees, the last ones padding.
            key: of a captured step that calls this and ``learn_in_step``, and later repeats both after ``prepare``;
                None: there is none.
        """
        return self._choice.choose(candidates, padded_size, key)

    def learn_in_step(self, key: Hashable, paths: Ints, num_accepted: Ints) -> None:
        """Learn from the result of a captured step that chose by this key; arguments as for ``learn``."""
        self._choice.learn(paths, num_accepted, key)

    def learn(self, paths: Ints, num_accepted: Ints) -> None:
        """Learn from the result of a step whose trees the host has chosen, if all of their nodes were verified.

        Args:
            paths: [B, W], for each row of the batch the root, the accepted nodes, and padding.
            num_accepted: [B].
        """
        self._choice.learn(paths, num_accepted)

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
        now.decided.append(decided)
        size = now.size
        if not size.depth:
            return
        offer = self._choice.offer
        if not size.is_chain:
            now.num_nodes.append(len(now.rows) if offer is None else offer.written.num_nodes)
        elif offer is None and num_accepted is not None:
            now.num_accepted.append(num_accepted)
        if size.is_probe and seconds is not None:
            self.times.learn_probe(len(now.rows), seconds)

    def observe_rest(self, seconds: float) -> None:
        """Learn how long the host works on a step behind its measured time."""
        now = self._round
        if now is not None:
            self.times.rests.observe(len(now.rows), now.kind, seconds)

    def stats(self) -> SizingStats:
        """Return what has been decided, and what is thought now."""
        schedule = self.schedule
        gains = tuple(round(float(gain), 3) for gain in schedule.gains)
        error = draft_sizing.calibration_error(self.expected.state)
        number = self.times.num_requests
        is_judged = number and self._age >= 0
        reason = schedule.reason(number) if is_judged else "no draft has been judged yet"
        decision_seconds = self.figures.decision_seconds + float(self.expected.state.seconds[0])
        figures = replace(self.figures, decision_seconds=decision_seconds)
        return SizingStats(**vars(figures), calibration_error=error, depth=schedule.depth, gains=gains, reason=reason)

    def _end_round(self) -> None:
        """Learn from the steps of the present round."""
        done, self._round = self._round, None
        if done is None or not done.seconds:
            return
        self._figures.count(done)
        self._is_news |= done.size.depth > 0
        self.expected.pass_round(done)
        steps = self.times.timed(done)
        if done.forced is not None:
            return
        self.schedule.passed(len(done.seconds), len(steps))
        if done.drafted and len(done.rows) == self.times.num_requests:
            self._learn_gains(done)
        if done.decided and not done.size.depth:
            self._hear(done)
        if steps:
            predicted, measured = self.times.learn(done, steps)
            self._figures.predicted_seconds += predicted
            self._figures.measured_seconds += measured
        if done.num_accepted:
            self.expected.keep_chains(done)

    def _hear(self, now: Round) -> bool:
        """Look at the newest tokens of steps without drafts; whether drafts are to be tried soon."""
        decided, now.decided = now.decided, []
        if now.forced is not None:
            return False
        self._repeats.add(now.rows, decided)
        return self.schedule.hear(self._repeats.share(now.rows), len(decided))

    def _learn_gains(self, done: Round) -> None:
        """Count what drafts took and brought."""
        self.schedule.charge(self.times.taken(done), done.drafted_tokens / len(done.rows), self.times.plain)
        place = self.schedule.place(*done.kind)
        self.expected.learn(done, place, self.times.of_round(done))

    def _planned(self, batch: SizedBatch) -> tuple[DraftSize, int]:
        """What the next steps draft, and their number."""
        deepest = self.bounds.num_steps
        if self.forced is not None:
            self.times.ignore(len(batch.rows))
            depth, nodes = self.forced
            return DraftSize(depth, is_chain=nodes == 0) if depth else NOTHING, ROUND
        if len(batch.rows) != self.times.num_requests:
            self._predict(batch)
            self.schedule.set_requests(len(batch.rows))
            self._age = -1
            if not self.schedule.depth and self._num_begun:
                return NOTHING, 1  # others may come, and drafts that begin and end at once are dear
        if 1 < len(batch.rows) <= self._num_begun:
            self._age = -1  # all of them are new
        if int(self._num_drafts[batch.modes].min()) < FIRST_DRAFTS and int(batch.max_depths.min()) > 0:
            self._num_drafts[batch.modes] += ROUND
            self.expected.begin_first_drafts()
            return DraftSize(deepest), ROUND  # little is known of such requests
        now = self._figures.num_steps
        if self._age < 0:
            self.schedule.restart(self._rates(batch), len(batch.rows))
            self._age, self._num_begun = now, 0
        elif now - self._age >= SHORT_ROUND:
            if self.times.is_due:
                self._predict(batch)
            if (not self.schedule.depth and self.expected.fade(batch)) or self._is_news:
                self.schedule.judge(self._rates(batch), now - self._age)
            self._age, self._is_news = now, False
        size, number = self.schedule.next(batch.max_depths)
        is_relaxing = not self.schedule.depth and self.expected.is_fading
        return size, min(number, RELAXING_ROUND) if is_relaxing else number

    def _predict(self, batch: SizedBatch) -> None:
        """Predict the times of steps of these requests."""
        self.times.predict(batch, self.schedule.depth > 0)
        self.schedule.set_times(TIMED_STEPS + self.times.num_warm, self.times.lengths, self.times.of_probe)
        self._is_news = True

    def _rates(self, batch: SizedBatch) -> Floats:
        """Judge every option of the schedule: expected tokens per second, 0 for what is never drafted."""
        return self.expected.rates(batch, self._figures.num_steps, self.times) * self._is_option


def _options(num_steps: int) -> Floats:
    """1 for what is drafted: [2 (D + 1)], by depth, of chosen trees and of chains. Each kind takes long to record."""
    depths, found = np.arange(num_steps + 1), np.zeros((2, num_steps + 1))
    found[:, ((depths & (depths - 1)) == 0) | (depths == num_steps)] = 1.0
    found[1, chain_depths(num_steps)] = 1.0
    return found.ravel()


def chain_depths(num_steps: int) -> list[int]:
    """Depths of chains that are drafted: all up to 4, then powers of two, and the deepest."""
    return [d for d in range(1, num_steps + 1) if d <= ALL_DEPTHS or d & (d - 1) == 0 or d == num_steps]
