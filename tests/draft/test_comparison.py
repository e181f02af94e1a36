"""The comparison of one way with the best of others, without the luck of the best."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from specmamba.measure.comparison import median_interval, over_best


def test_each_half_of_the_rounds_is_compared_with_the_best_way_of_the_other() -> None:
    speeds = {"own": [10.0, 10.0, 10.0, 10.0], "even": [20.0, 5.0, 20.0, 5.0], "odd": [8.0, 8.0, 8.0, 8.0]}
    # "even" is the best of rounds 0 and 2, "odd" of rounds 1 and 3
    assert over_best(speeds, "own") == [10 / 8, 10 / 5, 10 / 8, 10 / 5]
    assert over_best({"own": [3.0], "other": [2.0]}, "own") == [1.5]


def test_equal_ways_are_equal_in_the_median_where_the_largest_median_is_not() -> None:
    rng = np.random.default_rng(0)
    unbiased, biased = [], []
    for _ in range(200):
        speeds = {name: rng.lognormal(0.0, 0.1, 12).tolist() for name in ("own", "a", "b", "c", "d", "e")}
        unbiased.append(statistics.median(over_best(speeds, "own")))
        middles = {name: statistics.median(values) for name, values in speeds.items()}
        biased.append(middles.pop("own") / max(middles.values()))
    assert statistics.mean(unbiased) == pytest.approx(1.0, abs=0.012)
    assert statistics.mean(biased) < 0.98


def test_the_interval_holds_the_median_nine_times_of_ten() -> None:
    rng = np.random.default_rng(1)
    for number in (9, 30, 100):
        intervals = [median_interval(rng.normal(size=number).tolist()) for _ in range(2000)]
        assert statistics.mean(low <= 0.0 <= high for low, high in intervals) == pytest.approx(0.93, abs=0.04)
    assert median_interval([2.0]) == (2.0, 2.0)
