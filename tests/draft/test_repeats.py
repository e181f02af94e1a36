"""How often text repeats itself."""

from __future__ import annotations

import pytest

from specmamba.draft.sizing.repeats import LONGEST_START, Repeats

LOOP = [7, 8, 9, 10]


def test_a_loop_is_seen_and_ends() -> None:
    repeats = Repeats()
    repeats.begin(3, [1, 2])
    for _ in range(40):
        repeats.add([3], [[LOOP]])
    assert repeats.share([3]) > 0.99
    repeats.add([3], [[range(100, 200)]])
    assert repeats.share([3]) < 0.01


def test_tokens_of_the_prompt_count_where_they_come_again() -> None:
    repeats = Repeats()
    repeats.begin(0, [*LOOP, *range(50, 80)])
    assert repeats.share([0]) == 0.0
    repeats.add([0], [[LOOP * 2]])
    assert repeats.share([0]) == pytest.approx((1 - (15 / 16) ** 2) * (1 + (15 / 16) ** 4))  # 9 and 10, twice


def test_a_long_prompt_is_cut() -> None:
    repeats = Repeats()
    repeats.begin(0, [*LOOP, *range(100, 100 + LONGEST_START)])
    repeats.add([0], [[LOOP]])
    assert repeats.share([0]) == 0.0


def test_rows_are_apart_and_another_request_starts_anew() -> None:
    repeats = Repeats()
    for row in (0, 5):
        repeats.begin(row, LOOP)
    for _ in range(40):
        repeats.add([0, 5], [[LOOP, [len(repeats._texts[5].after) + 1000]]])
    assert repeats.share([0, 5]) == pytest.approx(0.5, abs=0.01)
    repeats.begin(0, [])
    assert repeats.share([0]) == 0.0
