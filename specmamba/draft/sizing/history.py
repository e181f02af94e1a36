"""The values of recent candidates, from which a draft that is not made yet is predicted."""

from __future__ import annotations

import numpy as np

from specmamba.draft.candidates import Floats, Ints

LENGTH = 8  # drafts that are kept, for each request and for each mode
FIRST_ODDS = (0.6, 0.12, 0.05, 0.03)  # of ranks, before anything is known
WEIGHT = 0.05  # of a new draft in the mean odds


class ValueHistory:
    """Values [C] of the candidates of recent drafts: of each row, and of all rows of each mode, for new requests.

    Candidates that a shallower draft did not make are filled in from mean odds by depth and rank.
    """

    def __init__(self, num_rows: int, num_modes: int, depths: Ints, ranks: Ints, width: int) -> None:
        """Start with guesses.

        Args:
            num_rows: of the request table, row 0 included.
            num_modes: kinds of requests whose drafts are worth the same.
            depths, ranks: [C], of the candidates of the deepest draft, level by level.
            width: nodes of a level that have children.
        """
        self._depths, self._ranks, self._width = depths, ranks, width
        self._num_ranks = int(ranks.max()) + 1
        guess = np.array([FIRST_ODDS[min(rank, len(FIRST_ODDS) - 1)] for rank in range(self._num_ranks)])
        self._odds = np.tile(guess, (num_modes, int(depths.max()), 1))  # [modes, depths, ranks]
        self._of_mode = np.zeros((num_modes, LENGTH, len(depths)))
        for mode in range(num_modes):
            self._of_mode[mode] = self._filled(np.zeros(len(depths)), 0, mode)
        self._of_row = np.zeros((num_rows, LENGTH, len(depths)))
        self._next_of_mode = np.zeros(num_modes, np.int64)
        self._next_of_row = np.zeros(num_rows, np.int64)

    def begin(self, row: int, mode: int) -> None:
        """Start a request: it is taken to be like the others of its mode."""
        self._of_row[row] = self._of_mode[mode]
        self._next_of_row[row] = 0

    def add(self, row: int, mode: int, values: Floats, p: Floats, depth: int) -> None:
        """Keep the values and the probabilities given parents, [C'] each, of a draft down to ``depth``."""
        places = self._depths[: len(p)] - 1, self._ranks[: len(p)]
        self._odds[mode][places] += WEIGHT * (p - self._odds[mode][places])
        filled = self._filled(values, depth, mode)
        self._of_row[row, self._next_of_row[row] % LENGTH] = filled
        self._next_of_row[row] += 1
        if self._next_of_row[row] % 4 == 0:
            self._of_mode[mode, self._next_of_mode[mode] % LENGTH] = filled
            self._next_of_mode[mode] += 1

    def sample(self, rows: Ints, number: int) -> Floats:
        """Return the values of one kept draft of each row, [B, C]; numbers that follow give others."""
        result: Floats = self._of_row[rows, (number + rows) % LENGTH]
        return result

    def _filled(self, values: Floats, depth: int, mode: int) -> Floats:
        filled = np.zeros(len(self._depths))
        filled[: len(values)] = values
        above = np.ones(1) if depth == 0 else np.sort(values[self._depths[: len(values)] == depth])[::-1]
        for level in range(depth + 1, int(self._depths.max()) + 1):
            places = np.flatnonzero(self._depths == level)
            parent = above[np.minimum(np.arange(len(places)) // self._num_ranks, len(above) - 1)]
            filled[places] = parent * self._odds[mode, level - 1][self._ranks[places]]
            above = np.sort(filled[places])[::-1][: self._width]
        return filled
