"""One way beside the best of others, from speeds of the same rounds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

NORMAL_90 = 1.645  # of the standard deviation: two-sided interval of 90 %


def over_best(speeds: Mapping[str, Sequence[float]], way: str) -> list[float]:
    """Ratios of ``way`` to the best of the other ways, one for each round.

    The best of several noisy medians is too high by chance. So the best way of the even rounds is compared in the odd
    ones, and the other way round (two-fold cross-validation).

    Args:
        speeds: of every way in every round; at least one other way. With one round, that round chooses too.
        way: the one that is compared.
    """
    number = len(speeds[way])
    halves = [range(start, number, 2) for start in (0, 1)] if number > 1 else [range(1)] * 2
    found: dict[int, float] = {}
    for chosen_in, compared_in in (halves, halves[::-1]):
        best = max((name for name in speeds if name != way), key=lambda name: _middle(speeds, name, way, chosen_in))
        found |= {i: speeds[way][i] / speeds[best][i] for i in compared_in}
    return [found[i] for i in sorted(found)]


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval that holds the median of what ``values`` are samples of with a probability of 90 % or more.

    Fewer than five values are too few for that: the interval is their range.

    Its ends are order statistics: the number of samples below the median is binomial, here in its normal approximation.
    """
    ordered, number = sorted(values), len(values)
    below = max(math.floor(number / 2 - NORMAL_90 / 2 * math.sqrt(number)) - 1, 0)
    return ordered[below], ordered[number - 1 - below]


def _middle(speeds: Mapping[str, Sequence[float]], name: str, way: str, rounds: range) -> float:
    """Median over rounds of the speed of ``name`` over that of ``way``."""
    return statistics.median(speeds[name][i] / speeds[way][i] for i in rounds)
