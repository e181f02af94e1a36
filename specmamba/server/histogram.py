"""A histogram for figures that come many at a time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily, Metric


class Histogram:
    """Written by one thread alone, so that it needs no lock; read by any.

    A step gives a request several tokens at once, each of which is an observation of the same value: they cost one.
    """

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """``bounds``: ascending; a value belongs to the first that is not below it."""
        self._name, self._text, self._bounds = name, text, tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def collect(self) -> list[Metric]:
        counts = list(accumulate(self._counts))
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        buckets = list(zip(bounds, counts, strict=True))
        return [HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)]
