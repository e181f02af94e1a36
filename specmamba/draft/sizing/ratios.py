"""Measured over predicted times of steps, on a machine whose speed changes.

The logarithm of such a ratio is a sum: the speed of the machine, which walks; the error of the prediction for a kind of
steps; and that for a bucket of this kind. The errors are nearly constant. How much of a difference is the machine's
follows from how well each part is known (a Kalman filter; Kalman, "A New Approach to Linear Filtering and Prediction
Problems", 1960): steps of a kind that was seldom seen say little about the machine, and so about other kinds.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from specmamba.kernels.draft_sizing import Floats

# standard deviations of logarithms. Of the parts, before anything is known:
OF_SPEED, OF_KIND, OF_BUCKET = 2.0, 0.2, 0.07
# of their changes in a step
WALK_OF_SPEED, WALK_OF_ERRORS = 0.01, 0.0003
# of a step, and of a few steps in a row together, which other work disturbs alike
NOISE, NOISE_OF_ROUND = 0.15, 0.03
FARTHEST = math.log(1.25)  # a known part moves as if nothing was farther from what was expected
LARGEST_SPEED = math.log(64.0)
MANY, MOST_HELD = 16, 256  # steps of one bucket in a row: from which on they wait for more of them, and at the most
_SPEED = "speed"


@dataclass(slots=True)
class _Held:
    """Steps of one bucket in a row that nothing was learned from yet."""

    kind: Hashable
    bucket: Hashable
    of_all: float = 0.0  # the sum of their ratios
    num_steps: int = 0

    def takes(self, kind: Hashable, bucket: Hashable, ratio: float) -> bool:
        """Whether steps with this mean ratio are like them."""
        is_same = self.kind == kind and self.bucket == bucket
        return is_same and abs(math.log(ratio * self.num_steps / self.of_all)) < FARTHEST


class Ratios:
    """Owns what is known. Not thread-safe.

    Learning takes a tenth of a millisecond, a third of a small model's step. So from many steps in a row it waits until
    something is asked, or until others follow.
    """

    def __init__(self) -> None:
        self._held: _Held | None = None
        self._places: dict[Hashable, int] = {_SPEED: 0}
        self._means: list[float] = [0.0]
        self._covariance: Floats = np.full((1, 1), OF_SPEED**2)
        self._most: Floats = np.full(1, OF_SPEED**2)  # variance of each part: what is not seen stays no less known

    @property
    def speed(self) -> float:
        """The logarithm of measured over predicted time that all steps have in common."""
        self._settle()
        return self._means[0]

    def errors(self, kinds: Sequence[tuple[Hashable, Hashable]]) -> Floats:
        """Return the sum of the logarithms of a kind of steps and its bucket, for each pair; an unknown one is 0."""
        self._settle()
        places, means = self._places, [*self._means, 0.0]
        return np.array([means[places.get(kind, -1)] + means[places.get(bucket, -1)] for kind, bucket in kinds])

    def observe(self, kind: Hashable, bucket: Hashable, ratio: float, num_steps: int) -> None:
        """Learn from some steps in a row.

        Args:
            kind: of the steps.
            bucket: of this kind.
            ratio: mean of their measured over predicted times.
            num_steps: how many there were.
        """
        held = self._held
        if held is None or not held.takes(kind, bucket, ratio):
            self._settle()
            held = self._held = _Held(kind, bucket)
        held.of_all += ratio * num_steps
        held.num_steps += num_steps
        if num_steps < MANY or held.num_steps >= MOST_HELD:
            self._settle()

    def _settle(self) -> None:
        """Learn from the steps that are held."""
        held, self._held = self._held, None
        if held is None:
            return
        num_steps = held.num_steps
        places = [0, self._place(held.kind, OF_KIND), self._place(held.bucket, OF_BUCKET)]
        known, means = self._covariance, self._means
        known[0, 0] += WALK_OF_SPEED**2 * num_steps
        variances = np.einsum("ii->i", known)  # a view
        variances += WALK_OF_ERRORS**2 * num_steps * (variances < self._most)
        of_sum = known[places].sum(0)
        variance = float(of_sum[places].sum()) + NOISE**2 / num_steps + NOISE_OF_ROUND**2
        found = min(max(math.log(held.of_all / num_steps), -LARGEST_SPEED), LARGEST_SPEED)
        rest = found - sum([means[place] for place in places])
        most = max(FARTHEST, 2.0 * math.sqrt(variance))
        gains = of_sum * (1.0 / variance)
        rest = min(max(rest, -most), most)
        self._means = [mean + rest * gain for mean, gain in zip(means, gains.tolist(), strict=True)]
        known -= of_sum[:, None] * gains

    def _place(self, part: Hashable, deviation: float) -> int:
        """The place of a part, which may be new."""
        place = self._places.get(part)
        if place is None:
            place = self._places[part] = len(self._means)
            self._means.append(0.0)
            self._covariance = np.pad(self._covariance, (0, 1))
            self._covariance[place, place] = deviation**2
            self._most = np.append(self._most, deviation**2)
        return place
