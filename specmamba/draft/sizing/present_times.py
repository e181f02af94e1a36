"""What steps of the present requests are predicted to take, by what they draft; steps that were made correct it.

``StepCosts`` knows the times of all steps. Here are those that are asked for in the middle of serving, as arrays for
the present number of requests, predicted anew now and then.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from specmamba.draft.sizing.costs import RestTimes, StepCosts
from specmamba.draft.sizing.rounds import WARM_SECONDS, WARM_STEPS, Bounds, Round, SizedBatch, TimedStep, WarmUp
from specmamba.kernels.draft_sizing import Floats, Ints

# after which times are predicted anew: with drafts, without, and where another kind of steps was timed
COST_SECONDS, COST_SECONDS_WHERE_OFF, COST_SECONDS_OF_CHANGE = 0.25, 1.0, 0.05
WEIGHT_OF_PROBE = 0.25  # of a probe in the mean time of probes
MOST_OF_MEDIAN = 2.0  # a step that was held up for long counts as one that took so many times as long as most


class PresentTimes:
    """Owns the predicted times of steps of the present requests, which include what the host does behind a step."""

    def __init__(self, bounds: Bounds, costs: StepCosts, totals: Callable[[int], Sequence[int]]) -> None:
        """Predict nothing yet; arguments as for ``DraftSizer``."""
        self.costs, self.rests = costs, RestTimes()
        self.num_requests = 0  # that times are predicted for; 0: for none
        self.trees: Floats = np.zeros((0, 0))  # [D + 1, T + 1], by depth and nodes of all requests; depth 0 is plain
        self.chains: Floats = np.zeros(1)  # [D + 1], by depth
        self._bases: list[list[float]] = []  # the same, as measured at the start
        self._chain_bases = [0.0]
        self._bounds, self._totals = bounds, totals
        self._padded: dict[int, Ints] = {}  # by number of requests
        self._of_probe: dict[int, float] = {}  # plain steps that a probe takes longer, by the bucket of requests
        self._next = 0.0  # when times are predicted anew, by the clock
        self._kind, self._warm_up = (0, False), WarmUp()  # depth and form of the newest steps
        self._timed_kind = 0, False  # of the newest steps that were timed

    @property
    def is_due(self) -> bool:
        """Whether times are to be predicted anew."""
        return time.perf_counter() >= self._next

    @property
    def plain(self) -> float:
        """Seconds of a step without drafts."""
        return float(self.trees[0, self.num_requests])

    @property
    def of_probe(self) -> float:
        """Plain steps that a probe takes longer."""
        return self._of_probe.get(self.num_requests.bit_length(), 1.0)

    @property
    def num_warm(self) -> int:
        """The first steps of a kind whose times do not count, as they are predicted."""
        return min(WARM_STEPS, math.ceil(WARM_SECONDS / self.plain))

    @property
    def lengths(self) -> Floats:
        """A step of each option of ``DraftSchedule``, in plain steps: [2 (D + 1)]."""
        lengths = np.where(np.isfinite(self.chains), self.chains, 0.0) / self.plain
        return np.tile(np.maximum(lengths, 1.0), 2)

    def ignore(self, num_requests: int) -> None:
        """Predict the same for all steps of so many requests, whose sizes are given."""
        self.num_requests = 0  # times are predicted when that ends
        self.trees = np.ones((self._bounds.num_steps + 1, num_requests * self._bounds.max_nodes + 1))

    def predict(self, batch: SizedBatch, is_drafting: bool) -> None:
        """Predict the times of steps of these requests; ``is_drafting``: they do not hold for long."""
        size, deepest = len(batch.rows), self._bounds.num_steps
        self.num_requests = size
        padding = self._padding(size)
        keys, largest = batch.num_keys(), int(padding[-1])
        found = self.costs.totals(size, deepest, keys, largest)
        self._bases = [base[padding].tolist() for base, _ in found]
        rests = np.array(
            [[self.rests.of(size, (d, is_chain)) for d in range(deepest + 1)] for is_chain in (False, True)]
        )
        self.trees = np.stack([seconds[padding] for _, seconds in found]) + rests[0, :, None]
        bases, chains = self.costs.chains(size, keys, deepest)
        self._chain_bases, self.chains = bases.tolist(), chains + rests[1]
        self._next = time.perf_counter() + (COST_SECONDS if is_drafting else COST_SECONDS_WHERE_OFF)

    def timed(self, done: Round) -> list[TimedStep]:
        """The steps of a round whose times count: not the first ones of their kind, which take longer."""
        kind = done.kind
        if kind != self._kind:
            self._kind, self._warm_up = kind, WarmUp()
        steps = zip(done.seconds, done.nodes_of_steps, strict=True)
        return self._warm_up.later([(seconds, nodes) for seconds, nodes in steps if seconds is not None])

    def learn(self, done: Round, steps: Sequence[TimedStep]) -> tuple[float, float]:
        """Learn from steps of a round whose times count; returns the predicted and the measured seconds of them."""
        if done.kind != self._timed_kind:
            self._timed_kind = done.kind
            self._next = min(self._next, time.perf_counter() + COST_SECONDS_OF_CHANGE)
        if len(done.rows) != self.num_requests:
            return 0.0, 0.0
        (depth, is_chain), number = done.kind, len(done.rows)
        if is_chain:
            bases, now, nodes = self._chain_bases, self.chains, [depth] * len(steps)
            num_nodes = depth * number
        else:
            bases, now, nodes = self._bases[depth], self.trees[depth], [nodes for _, nodes in steps]
            num_nodes = sorted(nodes)[len(nodes) // 2]
        predicted = sum([now.item(place) for place in nodes])
        if not math.isfinite(predicted):
            return 0.0, 0.0
        ratio = _mean([seconds / bases[place] for (seconds, _), place in zip(steps, nodes, strict=True)])
        self.costs.observe(number, num_nodes, "chain" if is_chain else depth > 0, 1.0, ratio, len(steps))
        rest = self.rests.of(number, done.kind)
        return predicted, sum([seconds for seconds, _ in steps]) + rest * len(steps)

    def learn_probe(self, num_requests: int, seconds: float) -> None:
        """Learn how long a probe takes, the tokens included that the drafter missed and runs first."""
        name, found = num_requests.bit_length(), max(seconds / float(self.trees[0, num_requests]) - 1.0, 0.0)
        self._of_probe[name] = found + (1.0 - WEIGHT_OF_PROBE) * (self._of_probe.get(name, found) - found)

    def of_round(self, done: Round) -> float:
        """The predicted seconds of the usual steps of a round that drafted."""
        if done.size.is_chain:
            return float(self.chains[done.size.depth]) * len(done.drafted)
        of_depth, of_steps = self.trees[done.size.depth], zip(done.seconds, done.num_nodes, strict=True)
        return float(sum([of_depth[nodes] for took, nodes in of_steps if took is not None]))

    def taken(self, done: Round) -> float:
        """The seconds that usual steps of a round that drafted took, with what the host did behind them."""
        return done.drafted_seconds + len(done.drafted) * self.rests.of(len(done.rows), done.kind)

    def _padding(self, size: int) -> Ints:
        """The number of nodes to which each number of nodes of so many requests is padded."""
        if size not in self._padded:
            totals = np.array(self._totals(size))
            numbers = np.arange(size, size * self._bounds.max_nodes + 1)
            to = np.maximum(totals[np.minimum(np.searchsorted(totals, numbers), len(totals) - 1)], size)
            self._padded[size] = np.concatenate([np.arange(size), to])
        return self._padded[size]


def _mean(ratios: list[float]) -> float:
    """A mean, as speed is one; but of what held up single steps only a part counts."""
    ratios.sort()
    most = MOST_OF_MEDIAN * ratios[len(ratios) // 2]
    num_less = bisect_right(ratios, most)
    return (sum(ratios[:num_less]) + most * (len(ratios) - num_less)) / len(ratios)
