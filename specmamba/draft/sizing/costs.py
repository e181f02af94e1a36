"""The time of a step: a draft of some depth, and a verify of some nodes, for any number of requests.

Measured are, for a few numbers of requests R, drafts D[R, depth] and the rest of a step V[R, T] with T nodes in all,
and what keys in front of the roots add. Between measured points times are interpolated linearly, first over T, then
over R. What the host does behind a step is timed while the engine runs.

While the engine runs, moving ratios of measured over predicted time correct them (``Ratios``): one of all steps, which
follows the speed of the machine, one of each kind of steps, and one of each bucket of R and T.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from specmamba.draft.sizing.ratios import Ratios
from specmamba.kernels.draft_sizing import Floats, Ints

LEAST_RATIO, MOST_RATIO = 0.5, 2.0  # of a kind of steps and its bucket, over the machine's speed
LEAST_OF_REST, LONGEST_REST = 0.02, 1.0  # of a step in a mean, and what is no time of a step
PLAIN_KIND = 0, False  # depth of the draft, and whether it is a chain
Curve = dict[int, float]  # seconds by a number


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of steps with one number of requests."""

    drafts: Curve  # by depth
    verifies: Curve  # by nodes of all requests, roots included: the rest of the step
    chains: Curve = field(default_factory=dict)  # whole steps with a chain for every request, by depth; or nothing


@dataclass(frozen=True, slots=True)
class _Table:
    """Seconds of steps of some number of requests, by nodes of all requests."""

    verifies: Floats  # [T], behind short prompts
    of_key: Floats  # [T], added by every key
    drafts: list[float]  # by depth
    buckets: tuple[list[int], Ints]  # a number of nodes of each bucket, and the place of its bucket for each number


@dataclass
class StepCosts:
    """Predicts the seconds of steps. One owner: the sizer of an engine."""

    times: dict[int, StepTimes]  # by number of requests
    # seconds that a verify takes longer for every key in front of a request's root, by the request's nodes; or nothing
    of_key: Curve = field(default_factory=dict)
    of_key_in_chain: Curve = field(default_factory=dict)  # the same of whole chains
    ratios: Ratios = field(default_factory=Ratios, compare=False)
    # by what they are asked for, since they are asked for in the middle of serving
    _tables: dict[tuple[int, int, int], _Table] = field(default_factory=dict)
    _chains: dict[tuple[int, int], tuple[Floats, Floats]] = field(default_factory=dict)

    def totals(self, num_requests: int, max_depth: int, num_keys: int, max_nodes: int) -> list[tuple[Floats, Floats]]:
        """Predict steps by depth from 0 on and by nodes: [max_nodes + 1] seconds each, infinite below ``num_requests``.

        The first are those of the measurement, the second these times what the ratios say now.

        Args:
            num_requests: R.
            max_depth: of drafts; 0: there is none.
            num_keys: in front of the roots, summed over the requests.
            max_nodes: of all requests.
        """
        known = self._tables.get((num_requests, max_depth, max_nodes))
        if known is None:
            known = self._tables[num_requests, max_depth, max_nodes] = self._table(num_requests, max_depth, max_nodes)
        verify = known.verifies + known.of_key * num_keys
        buckets, places = known.buckets
        # a step without drafts has no other nodes than the roots
        of_plain = self.ratio(num_requests, num_requests, False)
        of_drafts = self._ratios_of(num_requests, buckets, True)[places] if max_depth else of_plain
        nothing, found = np.full(num_requests, math.inf), []
        for depth, draft in enumerate(known.drafts):
            base = verify + draft
            found.append(
                (np.concatenate([nothing, base]), np.concatenate([nothing, base * (of_drafts if depth else of_plain)]))
            )
        return found

    def chains(self, num_requests: int, num_keys: int, max_depth: int) -> tuple[Floats, Floats]:
        """Predict steps with a chain for every request, [max_depth + 1] seconds by depth, as ``totals`` does.

        The first is infinite; all are where chains are not known.
        """
        if not all(t.chains for t in self.times.values()):
            return (np.full(max_depth + 1, math.inf),) * 2
        known = self._chains.get((num_requests, max_depth))
        if known is None:
            depths = np.arange(1, max_depth + 1)
            of_key = self._of_key(depths + 1, self.of_key_in_chain)
            known = self._mean(num_requests, lambda t: _at(t.chains, depths)), of_key
            self._chains[num_requests, max_depth] = known
        seconds = known[0] + known[1] * num_keys
        of_depths = [depth * num_requests for depth in range(1, max_depth + 1)]
        ratios, nothing = self._ratios_of(num_requests, of_depths, "chain"), np.full(1, math.inf)
        return np.concatenate([nothing, seconds]), np.concatenate([nothing, seconds * ratios])

    def _table(self, num_requests: int, max_depth: int, max_nodes: int) -> _Table:
        """What is measured of steps of so many requests."""
        numbers = np.arange(num_requests, max_nodes + 1)
        drafts = [0.0]
        if max_depth:
            drafts += self._mean(num_requests, lambda t: _at(t.drafts, np.arange(1, max_depth + 1))).tolist()
        verifies = self._mean(num_requests, lambda t: _at(t.verifies, numbers))
        buckets = [bucket_of(num_requests, number)[1] for number in numbers.tolist()]
        _, firsts, places = np.unique(buckets, return_index=True, return_inverse=True)
        of_key = self._of_key(numbers / num_requests, self.of_key)
        return _Table(verifies, of_key, drafts, (numbers[firsts].tolist(), places))

    def ratio(self, num_requests: int, num_nodes: int, kind: Hashable) -> float:
        """Measured over predicted time of steps of a kind, as far as it is known; of chains by depth."""
        return float(self._ratios_of(num_requests, (num_nodes,), kind)[0])

    def _ratios_of(self, num_requests: int, numbers: Sequence[int], kind: Hashable) -> Floats:
        """``ratio`` for each of some numbers of nodes."""
        own = self.ratios.errors([_parts(num_requests, number, kind) for number in numbers])
        found: Floats = math.exp(self.ratios.speed) * np.clip(np.exp(own), LEAST_RATIO, MOST_RATIO)
        return found

    def observe(
        self, num_requests: int, num_nodes: int, kind: Hashable, base: float, seconds: float, num_steps: int = 1
    ) -> None:
        """Learn from steps. Times that no clock means are ignored.

        Args:
            num_requests: of each step.
            num_nodes: as for ``ratio``.
            kind: as for ``ratio``.
            base: what ``totals`` or ``chains`` say first.
            seconds: of one of the steps that stands for all of them.
            num_steps: how many there were.
        """
        if not (math.isfinite(seconds) and seconds > 0 and math.isfinite(base) and base > 0):
            return
        self.ratios.observe(*_parts(num_requests, num_nodes, kind), seconds / base, num_steps)

    def _of_key(self, numbers: Floats | Ints, curve: Curve) -> Floats:
        """Seconds of a key by the nodes that see it."""
        return np.maximum(_at(curve, numbers), 0.0) if curve else np.zeros(len(numbers))

    def _mean(self, num_requests: int, of_times: Callable[[StepTimes], Floats]) -> Floats:
        """Interpolate between the measured numbers of requests."""
        sizes = sorted(self.times)
        place = min(max(bisect_left(sizes, num_requests), 1), len(sizes) - 1)
        if len(sizes) == 1:
            return of_times(self.times[sizes[0]])
        low, high = sizes[place - 1], sizes[place]
        share = (num_requests - low) / (high - low)
        return of_times(self.times[low]) * (1 - share) + of_times(self.times[high]) * share


@dataclass
class RestTimes:
    """Seconds that the host works on a step behind its measured time: more where a step decides more tokens."""

    # mean and number of observations, by the bucket of requests and kind of step
    _means: dict[Hashable, tuple[float, int]] = field(default_factory=dict)
    _newest: float = 0.0  # mean of the newest kind

    def observe(self, num_requests: int, kind: Hashable, seconds: float) -> None:
        """Learn from one step. Times that no clock means are ignored."""
        if not 0 <= seconds < LONGEST_REST:
            return
        key = num_requests.bit_length(), kind
        mean, count = self._means.get(key, (0.0, 0))
        self._newest = mean + max(LEAST_OF_REST, 1 / (count + 1)) * (seconds - mean)
        self._means[key] = self._newest, count + 1

    def of(self, num_requests: int, kind: Hashable) -> float:
        """Return the seconds of a step; of a kind that has not been seen: of a plain step, else of the newest one."""
        size = num_requests.bit_length()
        return self._means.get((size, kind), self._means.get((size, PLAIN_KIND), (self._newest, 0)))[0]


def bucket_of(num_requests: int, num_nodes: int) -> tuple[int, int]:
    """Return the bucket of a step: the power of two of its requests, and eighths of nodes per request."""
    size = 1 << (num_requests - 1).bit_length()
    return size, -(-8 * num_nodes // num_requests) // max(1, 8 // size)


@lru_cache(maxsize=4096)
def _parts(num_requests: int, num_nodes: int, kind: Hashable) -> tuple[Hashable, Hashable]:
    """The kind of steps with about so many requests, and the bucket of it."""
    size, _ = bucket = bucket_of(num_requests, num_nodes)
    return (size, kind), (bucket, kind)


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
