"""The time of a step: a draft of some depth, and a verify of some nodes, for any number of requests.

Measured are, for a few numbers of requests R, drafts D[R, depth] and the rest of a step V[R, T] with T nodes in all,
the host's work included, and what keys in front of the roots add. Between measured points times are interpolated
linearly, first over T, then over R. While the engine runs, a moving ratio of measured over predicted time corrects all
of them, and one for each bucket of R and T the rest. A step that takes far longer than others moves a ratio no more
than one that takes a little longer.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from specmamba.kernels.draft_sizing import Floats, Ints

LEAST_RATIO, MOST_RATIO = 0.5, 2.0
WEIGHTS = (0.01, 0.03, 0.05)  # of a new step in the moving ratios, from the most general one
FEW_STEPS = 8  # before a ratio counts
FARTHEST = 1.25  # from a ratio, of a step that moves it
Curve = dict[int, float]  # seconds by a number


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of steps with one number of requests."""

    drafts: Curve  # by depth
    verifies: Curve  # by nodes of all requests, roots included: the rest of the step
    chains: Curve = field(default_factory=dict)  # whole steps with a chain for every request, by depth; or nothing


@dataclass
class StepCosts:
    """Predicts the seconds of steps. One owner: the sizer of an engine."""

    times: dict[int, StepTimes]  # by number of requests
    # seconds that a verify takes longer for every key in front of a request's root, by the request's nodes; or nothing
    of_key: Curve = field(default_factory=dict)
    # measured over predicted time: of all steps; with or without drafts, by size; of each bucket, relative to those
    _ratios: dict[Hashable, tuple[int, float]] = field(default_factory=dict)

    def totals(self, num_requests: int, depth: int, num_keys: int, max_nodes: int) -> tuple[Floats, Floats]:
        """Predict steps by their number of nodes: [max_nodes + 1] seconds, infinite below ``num_requests``.

        The first are those of the measurement, the second these times what the ratios say now.

        Args:
            num_requests: R.
            depth: of the draft; 0: there is none.
            num_keys: in front of the roots, summed over the requests.
            max_nodes: of all requests.
        """
        numbers = np.arange(num_requests, max_nodes + 1)
        seconds = self._mean(num_requests, lambda t: _at(t.verifies, numbers))
        seconds += self._of_key(numbers / num_requests) * num_keys
        if depth:
            seconds += self._mean(num_requests, lambda t: _at(t.drafts, np.array([depth])))
        ratios = [self.ratio(num_requests, int(number), depth > 0) for number in numbers]
        nothing = np.full(num_requests, math.inf)
        return np.concatenate([nothing, seconds]), np.concatenate([nothing, seconds * np.array(ratios)])

    def chains(self, num_requests: int, num_keys: int, max_depth: int) -> tuple[Floats, Floats]:
        """Predict steps with a chain for every request, [max_depth + 1] seconds by depth, as ``totals`` does.

        The first is infinite; all are where chains are not known.
        """
        if not all(t.chains for t in self.times.values()):
            return (np.full(max_depth + 1, math.inf),) * 2
        depths = np.arange(1, max_depth + 1)
        seconds = self._mean(num_requests, lambda t: _at(t.chains, depths))
        seconds += self._of_key(depths + 1) * num_keys
        ratios = [self.ratio(num_requests, int(depth), "chain") for depth in depths]
        nothing = np.full(1, math.inf)
        return np.concatenate([nothing, seconds]), np.concatenate([nothing, seconds * np.array(ratios)])

    def ratio(self, num_requests: int, num_nodes: int, kind: Hashable) -> float:
        """Measured over predicted time of steps of a kind, as far as it is known; of chains by depth."""
        size, _ = bucket = bucket_of(num_requests, num_nodes)
        ratio = 1.0
        for key in ("all", (size, kind)):
            count, found = self._ratios.get(key, (0, 1.0))
            ratio = found if count >= FEW_STEPS else ratio
        count, relative = self._ratios.get((bucket, kind), (0, 1.0))
        return _clipped(ratio * relative if count >= FEW_STEPS else ratio)

    def observe(self, num_requests: int, num_nodes: int, kind: Hashable, base: float, seconds: float) -> None:
        """Learn from a step; ``base`` is the first of ``totals`` or ``chains``. Times that no clock means are ignored.

        ``kind`` and ``num_nodes`` are as for ``ratio``.
        """
        if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(base) and base > 0):
            return
        size, _ = bucket = bucket_of(num_requests, num_nodes)
        found = _clipped(seconds / base)
        self._move("all", found, WEIGHTS[0])
        of_size = self._move((size, kind), found, WEIGHTS[1])
        self._move((bucket, kind), found / of_size, WEIGHTS[2])

    def _move(self, key: Hashable, found: float, weight: float) -> float:
        count, ratio = self._ratios.get(key, (0, 1.0))
        near = min(max(found, ratio / FARTHEST), ratio * FARTHEST) if count >= FEW_STEPS else found
        ratio += max(weight, 1 / (count + 1)) * (near - ratio)
        self._ratios[key] = count + 1, ratio
        return ratio

    def _of_key(self, numbers: Floats | Ints) -> Floats:
        """Seconds of a key by the nodes that see it."""
        return np.maximum(_at(self.of_key, numbers), 0.0) if self.of_key else np.zeros(len(numbers))

    def _mean(self, num_requests: int, of_times: Callable[[StepTimes], Floats]) -> Floats:
        """Interpolate between the measured numbers of requests."""
        sizes = sorted(self.times)
        place = min(max(bisect_left(sizes, num_requests), 1), len(sizes) - 1)
        if len(sizes) == 1:
            return of_times(self.times[sizes[0]])
        low, high = sizes[place - 1], sizes[place]
        share = (num_requests - low) / (high - low)
        return of_times(self.times[low]) * (1 - share) + of_times(self.times[high]) * share


def bucket_of(num_requests: int, num_nodes: int) -> tuple[int, int]:
    """Return the bucket of a step: the power of two of its requests, and eighths of nodes per request."""
    size = 1 << (num_requests - 1).bit_length()
    return size, -(-8 * num_nodes // num_requests) // max(1, 8 // size)


def _at(curve: Curve, numbers: Ints | Floats) -> Floats:
    """Interpolate linearly; beyond the last point with the slope of the last piece, never falling."""
    xs = np.array(sorted(curve), dtype=float)
    ys = np.maximum.accumulate(np.array([curve[int(x)] for x in xs]))
    found = np.interp(numbers, xs, ys)
    if len(xs) > 1:
        slope = (ys[-1] - ys[-2]) / (xs[-1] - xs[-2])
        found = found + np.maximum(numbers - xs[-1], 0) * slope
        first = (ys[1] - ys[0]) / (xs[1] - xs[0])
        found = found - np.minimum(np.maximum(xs[0] - numbers, 0) * first, ys[0] * 0.9)
    return found


def _clipped(ratio: float) -> float:
    return min(max(ratio, LEAST_RATIO), MOST_RATIO)
