"""When drafts change: hysteresis, probes, tries of other options."""

from __future__ import annotations

import numpy as np
import pytest

from specmamba.draft.sizing.schedule import LAST_PROBE, DraftSchedule, DraftSize

NUM_STEPS = 3
ANY = np.full(8, NUM_STEPS)


def rates(*of_depth: float, chains: tuple[float, ...] = ()) -> np.ndarray:
    return np.array([*of_depth, 0.0, *chains, *[0.0] * (NUM_STEPS - len(chains))])


def test_the_best_option_is_taken_at_once_for_another_batch() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 14, 12))
    assert (schedule.depth, schedule.is_chain) == (2, False)
    schedule.restart(rates(10, 11, 14, 12, chains=(10, 15, 11)))
    assert (schedule.depth, schedule.is_chain) == (2, True)
    schedule.restart(rates(10, 10.1, 9, 8))  # below 2 %
    assert schedule.depth == 0


@pytest.mark.parametrize(("better", "num_steps"), [(3, 8), (1, 3)])
def test_a_change_waits_until_the_gain_has_lasted(better: int, num_steps: int) -> None:
    schedule, found = DraftSchedule(NUM_STEPS), rates(10, 12, 14, 12)
    schedule.restart(found)
    found[better] = 100
    for _ in range(num_steps - 1):
        schedule.judge(found, 1)
        assert schedule.depth == 2
    schedule.judge(found, 1)
    assert schedule.depth == better


def test_a_small_gain_changes_nothing() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 12))
    for _ in range(100):
        schedule.judge(rates(10, 12, 14, 14.3), 1)
    assert schedule.depth == 2


def test_probes_take_a_quarter_in_turns_at_intervals_that_double() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9, 8, 7))
    sizes = [schedule.next(ANY) for _ in range(500)]
    probes = [i for i, size in enumerate(sizes) if size.is_probe]
    gaps = np.diff(probes)
    assert gaps.tolist() == [min(16 << i, LAST_PROBE) for i in range(len(gaps))]
    masks = [sizes[i].drafted for i in probes[:4]]
    assert all(
        mask is not None and mask.sum() == 2 and sizes[i].depth == 1 for i, mask in zip(probes, masks, strict=False)
    )
    assert np.all(np.sum([mask for mask in masks if mask is not None], axis=0) == 1)
    assert sizes[0].keeps_up
    assert not sizes[-1].keeps_up  # drafts have not paid for long


def test_other_requests_are_probed_soon() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9, 8, 7))
    for _ in range(400):
        schedule.next(ANY)
    schedule.expect_news()
    assert any(schedule.next(ANY).is_probe for _ in range(8))


def test_steps_that_are_skipped_end_before_the_next_probe() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9, 8, 7))
    assert schedule.coast(100) == 7
    assert schedule.coast(100) == 0
    assert schedule.next(ANY).is_probe


def test_drafts_make_way_for_plain_steps_and_chains_for_trees_now_and_then() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 12, 13, chains=(12, 13, 20)))
    schedule.set_stretch(4)
    sizes = [schedule.next(ANY) for _ in range(1000)]
    plain = [i for i, size in enumerate(sizes) if not size.depth]
    trees = [i for i, size in enumerate(sizes) if size == DraftSize(3)]
    assert len(plain) % 5 == 0
    assert 10 <= len(plain) <= 30
    assert 10 <= len(trees) <= 40


def test_requests_that_want_no_drafts_get_none() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 12, 13))
    size = schedule.next(np.array([3, 0, 1]))
    assert size.drafted is not None
    assert size.drafted.tolist() == [True, False, True]
    assert schedule.next(np.zeros(3, np.int64)).depth == 0
