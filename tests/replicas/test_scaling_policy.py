"""How many replicas there should be: decisions along a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from specmamba.replicas.scaling_policy import CALM_SHARE, Load, Marks, ScalingPolicy

POLICY = ScalingPolicy(min_replicas=1, max_replicas=4, target_tokens=1000, grow_delay_s=5.0, shrink_delay_s=60.0)
CALM, BETWEEN, BUSY = 100, 900, 1500  # queued tokens of each replica


def follow(loads: Iterable[tuple[float, Load]], policy: ScalingPolicy = POLICY) -> list[int]:
    """The decisions about these loads, one after the other."""
    marks, found = Marks(), []
    for now, load in loads:
        number, marks = policy.decide(load, now, marks)
        found.append(number)
    return found


def steady(number: int, each: int, times: Iterable[float], num_starting: int = 0) -> list[tuple[float, Load]]:
    return [(now, Load(number, num_starting, each * number)) for now in times]


@pytest.mark.parametrize(
    ("number", "each", "upto", "wanted"),
    [
        (1, BUSY, 4.9, 1),
        (1, BUSY, 5.0, 2),
        (1, 3500, 5.0, 4),  # as many as have the target each
        (1, 99_999, 5.0, 4),  # and no more than there can be
        (4, BUSY, 999.0, 4),
        (3, BETWEEN, 999.0, 3),
        (3, CALM, 59.9, 3),
        (3, CALM, 60.0, 2),  # one at a time
        (1, 0, 999.0, 1),
    ],
)
def test_a_load_counts_when_it_has_lasted(number: int, each: int, upto: float, wanted: int) -> None:
    assert follow(steady(number, each, [0.0, upto / 2, upto]))[-1] == wanted


def test_a_short_peak_and_a_short_calm_change_nothing() -> None:
    peaks = [(float(now), Load(2, 0, 2 * (BUSY if now % 5 else BETWEEN))) for now in range(30)]
    assert follow(peaks) == [2] * 30
    calms = [(float(now), Load(2, 0, 2 * (CALM if now % 50 else BETWEEN))) for now in range(200)]
    assert follow(calms) == [2] * 200


def test_it_waits_for_those_that_start() -> None:
    assert follow([*steady(1, BUSY, [0.0, 5.0]), *steady(1, BUSY, [6.0, 99.0], num_starting=1)]) == [1, 2, 2, 2]
    # and begins to count when they serve
    after = [(100.0, Load(2, 0, 2 * BUSY)), (104.0, Load(2, 0, 2 * BUSY)), (105.0, Load(2, 0, 2 * BUSY))]
    assert follow([*steady(1, BUSY, [6.0, 99.0], num_starting=1), *after]) == [2, 2, 2, 2, 3]


def test_one_that_starts_and_is_not_needed_any_more_leaves() -> None:
    assert follow(steady(1, 0, [0.0, 60.0], num_starting=1)) == [2, 1]


def test_a_number_does_not_swing() -> None:
    """What makes one leave does not make one start again, and the other way round."""
    for number in range(1, 4):
        tokens = POLICY.target_tokens * number + 1  # one more was wanted
        assert follow([(0.0, Load(number + 1, 0, tokens)), (9999.0, Load(number + 1, 0, tokens))])[-1] == number + 1
        tokens = int(CALM_SHARE * POLICY.target_tokens * number)  # the one before has left
        assert follow([(0.0, Load(number, 0, tokens)), (9999.0, Load(number, 0, tokens))])[-1] <= number


def test_bounds_hold_at_once() -> None:
    policy = ScalingPolicy(2, 3, 1000, 5.0, 60.0)
    assert follow([(0.0, Load(1, 0, 0))], policy) == [2]
    assert follow([(0.0, Load(1, 1, 99_999))], policy) == [2]
    assert follow([(0.0, Load(5, 0, 99_999))], policy) == [3]


@pytest.mark.parametrize(
    ("load", "rests"),
    [
        (Load(1, 0, 0), True),
        (Load(3, 0, 3 * BETWEEN), True),
        (Load(4, 0, 4 * BUSY), True),
        (Load(2, 0, 0), False),
        (Load(1, 0, BUSY), False),
        (Load(1, 1, BETWEEN), False),
        (Load(0, 0, 0), False),
    ],
)
def test_when_there_is_nothing_to_wait_for(load: Load, rests: bool) -> None:
    assert POLICY.is_at_rest(load) is rests
    if rests:
        assert follow([(0.0, load), (1e6, load)]) == [load.num_replicas] * 2
