"""What drafts are expected to bring to the present requests, learned from drafts that were made.

Kept drafts of each request say it, those of earlier requests until it has drafted itself, and what options brought over
that corrects it (``Brought``).
"""

from __future__ import annotations

import math

import numpy as np

from specmamba.draft.sizing.earlier import EarlierRequests
from specmamba.draft.sizing.present_times import PresentTimes
from specmamba.draft.sizing.rounds import Bounds, Round, SizedBatch
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import LENGTH, WEIGHT_OF_ODDS, Floats, Ints, SizerState, Times

DRAWS = 24  # kept drafts that are looked at, of all requests
STEPS_TO_FORGET = 16  # without drafts, after which one of a request's kept drafts gives way to one of all requests
WEIGHT_OF_OWN = 3  # of a new request's kept drafts: they soon say more of it than those of earlier requests
STEPS_OF_DRAFT = 2  # of chains that are counted by the host, which make one kept draft
# tokens of requests: that were expected of an option and are kept at the most, and that stand for no error, of all
# options of a form and of a single one; the largest factor
MOST_EXPECTED, OF_FORM, OF_OPTION, MOST_WRONG = 4096.0, 32.0, 64.0, 1.5


class ExpectedTokens:
    """Owns calibration and kept drafts, which are read and written by ``kernels/draft_sizing`` too."""

    def __init__(self, bounds: Bounds, num_rows: int) -> None:
        """Start without drafts' results; ``num_rows``: of a batch at the most."""
        self.state = SizerState(bounds.depths, bounds.ranks, bounds.width, bounds.max_nodes, num_rows + 1)
        self._num_steps, self._chain_places = bounds.num_steps, bounds.chain_places
        self._own_from = np.zeros(num_rows + 1, np.int64)  # number of the first kept draft behind all others, by row
        self._earlier = EarlierRequests(self.state)
        self._brought: dict[int, Brought] = {}  # by the bucket of requests
        # rates of options, by kept drafts alone, and the rows that they are of: all have enough drafts of their own
        self._looked: Floats = np.full(2 * (bounds.num_steps + 1), np.nan)
        self._looked_rows: tuple[int, ...] = ()
        self._num_off = self._num_forgotten = 0  # steps without drafts in a row, and kept drafts that gave way

    @property
    def is_fading(self) -> bool:
        """Whether what is known of the present requests goes on to fade where nothing is drafted."""
        return self._num_forgotten < LENGTH

    def begin(self, row: int, mode: int) -> None:
        """Start a request in this row: it is taken to be like earlier ones."""
        self._earlier.begin(row, mode, int(self._own_from[row]))
        self._own_from[row] = 0
        if row in self._looked_rows:
            self.begin_first_drafts()

    def begin_first_drafts(self) -> None:
        """Expect nothing of the next drafts that they could correct."""
        self._looked_rows = ()

    def rates(self, batch: SizedBatch, number: int, times: PresentTimes) -> Floats:
        """Judge options of ``DraftSchedule`` by some kept drafts, from this number on: expected tokens per second."""
        draws = number, min(max(DRAWS // len(batch.rows), 1), LENGTH)
        self._emphasize(batch.rows)
        of_steps = Times(times.trees, self._chain_places, times.chains)
        self._looked = draft_sizing.look(self.state, batch.rows, batch.max_depths, draws, of_steps)
        self._looked_rows = tuple(batch.rows.tolist()) if self._knows(batch) else ()
        return self._looked * self.corrections(len(batch.rows)).ratios

    def corrections(self, num_requests: int) -> Brought:
        """What was brought over what had been expected with about so many requests."""
        bucket = num_requests.bit_length()
        if bucket not in self._brought:
            self._brought[bucket] = Brought(self._num_steps)
        return self._brought[bucket]

    def pass_round(self, done: Round) -> None:
        """Count steps without drafts."""
        if done.size.depth and not done.size.is_probe:
            self._num_off = self._num_forgotten = 0
        elif not done.size.depth:
            self._num_off += len(done.seconds)

    def learn(self, done: Round, place: int, seconds: float) -> None:
        """Learn from what drafts brought, if they were made for all requests and something was expected of them.

        Args:
            done: some steps.
            place: of their option.
            seconds: that these steps were predicted to take.
        """
        if done.size.drafted is not None or done.size.is_probe or done.rows != self._looked_rows:
            return
        expected = float(self._looked[place]) * seconds
        if math.isfinite(expected):
            self.corrections(len(done.rows)).add(place, done.drafted_tokens, expected)

    def keep_chains(self, done: Round) -> None:
        """Keep what became of chains as kept drafts of each request: shares that reached a node, of few steps each."""
        state, depth, places, batch = self.state, done.size.depth, self._chain_places, done.batch
        counts = np.array(done.num_accepted)  # [steps, B]
        reached = (counts[..., None] > np.arange(depth)).astype(float)  # [steps, B, depth]
        firsts = {mode: place for place, mode in reversed([*enumerate(batch.modes.tolist())])}  # row of each mode
        for mode in firsts:
            self._learn_odds(mode, reached if len(firsts) == 1 else reached[:, batch.modes == mode])
        whole = len(reached) - len(reached) % STEPS_OF_DRAFT
        shares = reached[:whole].reshape(-1, STEPS_OF_DRAFT, *reached.shape[1:]).mean(1)
        shares = np.concatenate([shares, reached[whole:]])[-LENGTH:]  # [G, B, depth]
        values = np.zeros((*shares.shape[:2], len(state.depths)))
        values[..., places[:depth]] = shares[..., : len(places)]
        if depth < len(places):
            below = np.cumprod(state.odds[batch.modes, depth : len(places), 0], axis=1)
            values[..., places[depth:]] = shares[..., -1:] * below
        numbers = (state.next_of_row[batch.rows] + np.arange(len(values))[:, None]) % LENGTH
        state.values_of_row[batch.rows, numbers] = values
        state.next_of_row[batch.rows] += len(values)
        for mode, row in firsts.items():
            state.values_of_mode[mode, state.shared_of_mode[mode] % LENGTH] = values[-1, row]
            state.shared_of_mode[mode] += 1

    def fade(self, batch: SizedBatch) -> bool:
        """Let what is known of requests fade while nothing is drafted for them; whether it has changed."""
        number = min(self._num_off // STEPS_TO_FORGET, LENGTH) - self._num_forgotten
        if number <= 0:
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

    def _learn_odds(self, mode: int, reached: Floats) -> None:
        """Let what reached a node of a chain, [steps, B, depth] of 0 or 1, move the mean odds of such nodes."""
        num_steps, num_rows, depth = reached.shape
        shares, odds = reached.mean((0, 1)), self.state.odds[mode, :depth, 0]
        above = np.concatenate([[1.0], shares[:-1]])
        weight = np.minimum(WEIGHT_OF_ODDS * num_steps * num_rows * above, 1.0)
        odds += weight * (shares / np.maximum(above, 1e-9) - odds)

    def _emphasize(self, rows: Ints) -> None:
        """Let the own drafts of requests that have few of them stand for several of what was taken to be like them."""
        state, newest = self.state, self.state.next_of_row[rows]
        own, weight = newest - self._own_from[rows], min(len(rows), WEIGHT_OF_OWN)
        if weight == 1 or own.min() >= LENGTH:
            return
        for row, last, number in zip(rows.tolist(), newest.tolist(), own.tolist(), strict=True):
            if 0 < number < LENGTH:
                others = np.arange(min(number * (weight - 1), LENGTH - number))
                values = state.values_of_row[row]
                values[(last + others) % LENGTH] = values[(last - 1 - others % number) % LENGTH]

    def _knows(self, batch: SizedBatch) -> bool:
        """Whether what is expected of these requests comes from drafts of their own."""
        return int((self.state.next_of_row - self._own_from)[batch.rows].min()) >= LENGTH


class Brought:
    """What drafts have brought over what was expected of them: of each option, shrunk towards all of its form.

    What is expected of an option comes from drafts of other options too, whose nodes were chosen: so it is wrong in
    ways that only its own steps show. (A ratio of sums, as tokens of a step are few and differ by chance.)
    """

    def __init__(self, num_steps: int) -> None:
        """``num_steps``: D, of the deepest draft. Options are those of ``DraftSchedule``."""
        self._brought: Floats = np.zeros(2 * (num_steps + 1))  # faded sums over requests and steps, by option
        self._expected: Floats = np.zeros(2 * (num_steps + 1))
        self._ratios: Floats | None = None  # by these sums

    def add(self, place: int, brought: float, expected: float) -> None:
        """Count some steps of an option: their tokens, and those that were expected."""
        self._brought[place] += brought
        self._expected[place] += expected
        fading = MOST_EXPECTED / max(float(self._expected[place]), MOST_EXPECTED)
        self._brought[place] *= fading
        self._expected[place] *= fading
        self._ratios = None

    @property
    def ratios(self) -> Floats:
        """[2 (D + 1)], by option."""
        if self._ratios is None:
            self._ratios = self._made_ratios()
        return self._ratios

    def _made_ratios(self) -> Floats:
        brought, expected = self._brought.reshape(2, -1), self._expected.reshape(2, -1)  # by form
        of_form = (brought.sum(1, keepdims=True) + OF_FORM) / (expected.sum(1, keepdims=True) + OF_FORM)
        found: Floats = (brought + of_form * OF_OPTION) / (expected + OF_OPTION)
        found = np.clip(found, 1 / MOST_WRONG, MOST_WRONG)
        found[0, 0] = 1.0  # a step without drafts
        return found.ravel()
