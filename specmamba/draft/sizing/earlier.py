"""What is expected of a new request: kept drafts of earlier ones, one of each.

Drafts are made where they pay, so of easy texts there are many more than of hard ones. A mean over drafts would take
new requests to be like the easy ones; a mean over requests does not.
"""

from __future__ import annotations

import numpy as np

from specmamba.kernels import draft_sizing
from specmamba.kernels.draft_sizing import LENGTH, Floats, Ints, SizerState


class EarlierRequests:
    """Owns one kept draft of each of the newest requests that drafted, by mode. Not thread-safe."""

    def __init__(self, state: SizerState) -> None:
        """``state`` has the kept drafts of the present requests."""
        self._state = state
        self._values: Floats = np.zeros_like(state.values_of_mode)  # [M, LENGTH, C]
        self._num_kept = np.zeros(draft_sizing.NUM_MODES, np.int64)
        self._mode_of: dict[int, int] = {}  # by row
        self._rng = np.random.default_rng(0)

    def begin(self, row: int, mode: int, own_from: int) -> None:
        """Start a request in a row; kept is a draft of the one before, whose own are those from ``own_from`` on."""
        state = self._state
        self._keep(row, own_from)
        draft_sizing.begin(state, row, mode)
        self._mode_of[row] = mode
        state.values_of_row[row] = self.of(np.full(LENGTH, mode), np.arange(LENGTH))

    def of(self, modes: Ints, places: Ints) -> Floats:
        """Return kept drafts of earlier requests of these modes, [..., C]; of all drafts while there are too few."""
        is_known = (places < self._num_kept[modes])[..., None]
        found: Floats = np.where(is_known, self._values[modes, places], self._state.values_of_mode[modes, places])
        return found

    def _keep(self, row: int, own_from: int) -> None:
        number = int(self._state.next_of_row[row])
        num_own = min(number - own_from, LENGTH)
        if row not in self._mode_of or num_own <= 0:
            return
        mode, newest = self._mode_of[row], int(self._rng.integers(number - num_own, number))
        place = int(self._num_kept[mode]) % LENGTH
        self._values[mode, place] = self._state.values_of_row[row, newest % LENGTH]
        self._num_kept[mode] += 1
