"""The trees of the steps of a round: chosen between draft and verify, and what their verdicts say of probabilities.

Both are calls of ``kernels/draft_sizing``. A captured step of a CPU makes them itself, by rules that are written where
it reads them, once for a round.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np

from specmamba.draft.candidates import Candidates
from specmamba.draft.sizing.rounds import PROBED_NODES, Round
from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import Chosen, Drafted, Floats, Ints, Offer, SizerState, TreeArrays


class TreeChoice:
    """Owns the offers of captured steps, and which rows are drafted for."""

    def __init__(self, state: SizerState, trees: TreeArrays) -> None:
        """``state`` calibrates and learns; chosen trees are written to ``trees``."""
        self._state = state
        self._drafted = Drafted(len(trees.num_nodes), len(state.depths), trees)
        self._given: Ints | None = None  # rows of the batch that _drafted was filled for, all of them
        self._offers: dict[Hashable, Offer] = {}  # of captured steps, which read them again
        self.offer: Offer | None = None  # of the planned step; None: nothing is chosen in it
        self._arranged: Offer | None = None  # by the rules of the present round
        self._round: Round | None = None
        self._seconds: Floats = np.zeros(1)
        self.learns_on_host = False  # ``learn`` follows the planned step

    def begin(self, now: Round, seconds: Floats) -> None:
        """Begin a round, whose steps take so many ``seconds`` [T + 1] by their nodes."""
        self._round, self._seconds = now, seconds
        self.offer = self._arranged = None
        self.learns_on_host = False

    def prepare(self, key: Hashable, padded_size: int) -> None:
        """As ``DraftSizer.prepare``."""
        offer = self.offer = self._offers.get(key)
        if offer is not None and offer is not self._arranged:
            self._set_rules(offer, padded_size)
            draft_sizing.arrange(self._state, self._drafted, offer)
            self._arranged = offer

    def choose(self, candidates: Candidates, padded_size: int, key: Hashable) -> Chosen:
        """As ``DraftSizer.choose``."""
        assert self._round is not None
        columns = *candidates.on_host(len(candidates.tokens)), candidates.depths, candidates.ranks
        size = self._round.size
        offer = Offer(*columns, len(self._round.rows), padded_size, size.depth, self._seconds)
        self._set_rules(offer, padded_size)
        self.offer, self.learns_on_host = offer, key is None
        if key is not None:
            self._offers[key] = offer
        return draft_sizing.choose(self._state, self._drafted, offer)

    def learn(self, paths: Ints, num_accepted: Ints, key: Hashable = None) -> None:
        """As ``DraftSizer.learn``, or ``learn_in_step`` where there is a key."""
        offer = self.offer if key is None else self._offers[key]
        assert offer is not None
        draft_sizing.learn(self._state, self._drafted, offer, paths, num_accepted)

    def _set_rules(self, offer: Offer, padded_size: int) -> None:
        """Let an offer be that of the planned step."""
        assert self._round is not None
        now, size = self._round, self._round.size
        offer.num_rows, offer.batch_size, offer.padded_size = self._fill(now), len(now.rows), padded_size
        offer.seconds = self._seconds
        if size.is_chain:
            offer.nodes_per_row = size.depth + 1
        elif now.forced is not None:
            offer.nodes_per_row = now.forced[1]
        else:
            offer.nodes_per_row = PROBED_NODES if size.is_probe else 0

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
