"""When drafts change: hysteresis, probes, tries of other options, and text that repeats itself."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from specmamba.draft.sizing import tries as tries_module
from specmamba.draft.sizing.allowance import AT_FIRST, LEAST, MOST, OVERDRAFT, SHARE, Allowance
from specmamba.draft.sizing.repeats import LONGEST_START, Repeats
from specmamba.draft.sizing.rounds import MOST_SLOWER, DraftSize, Round, SizedBatch
from specmamba.draft.sizing.schedule import CALM_ROUND, LAST_PROBE, LONG_ROUND, ROUND, STEPS_OF_NEWS, DraftSchedule
from specmamba.draft.sizing.tries import (
    MOST_INTERVAL,
    SETTLING_STEPS,
    SHORT_ROUND,
    TIMED_STEPS,
)

NUM_STEPS = 3
ANY = np.full(8, NUM_STEPS)
LOOP = [7, 8, 9, 10]


@pytest.fixture(autouse=True)
def _no_hope(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gains are what they are thought to be; tests of hopes say otherwise."""
    monkeypatch.setattr(tries_module, "HOPE", 0.0)


def rates(*of_depth: float, chains: tuple[float, ...] = ()) -> np.ndarray:
    return np.array([*of_depth, 0.0, *chains, *[0.0] * (NUM_STEPS - len(chains))])


def steps_of(schedule: DraftSchedule, number: int) -> list[DraftSize]:
    """What each of the next steps drafts, at least ``number``."""
    sizes: list[DraftSize] = []
    while len(sizes) < number:
        size, count = schedule.next(ANY)
        assert count >= 1
        schedule.passed(count, count)
        sizes += [size] * count
    return sizes


def later(found: np.ndarray) -> DraftSchedule:
    """A schedule with these rates in a batch that began long ago."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(found, 8)
    schedule.passed(STEPS_OF_NEWS + 1, 0)
    return schedule


def test_the_best_option_is_taken_at_once_for_another_batch() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 14, 12), 8)
    assert (schedule.depth, schedule.is_chain) == (2, False)
    schedule.restart(rates(10, 11, 14, 12, chains=(10, 15, 11)), 8)
    assert (schedule.depth, schedule.is_chain) == (2, True)
    schedule.restart(rates(10, 10.1, 9, 8), 8)  # below 2 %
    assert schedule.depth == 0


@pytest.mark.parametrize(("better", "num_steps"), [(3, 8), (1, 3)])
def test_a_change_waits_until_the_gain_has_lasted(better: int, num_steps: int) -> None:
    found = rates(10, 12, 14, 12)
    schedule = later(found)
    found[better] = 100
    for _ in range(num_steps - 1):
        schedule.judge(found, 1)
        assert schedule.depth == 2
    schedule.judge(found, 1)
    assert schedule.depth == better


def test_one_look_changes_nothing() -> None:
    """The steps before a look have not shown what it shows."""
    found = rates(10, 12, 14, 12)
    schedule = later(found)
    found[1] = 100
    schedule.judge(found, 16)
    assert schedule.depth == 2
    assert schedule.next(ANY)[1] == SHORT_ROUND  # the next decision comes soon
    schedule.judge(found, 4)
    assert schedule.depth == 1


@pytest.mark.parametrize("num_requests", [1, 4])
def test_one_look_ends_drafts_of_several_new_requests(num_requests: int) -> None:
    """What is said by one of them is said by few steps."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 12), num_requests)
    assert schedule.next(ANY)[1] == (SHORT_ROUND if num_requests > 1 else ROUND)
    schedule.judge(rates(10, 8, 7, 6), SHORT_ROUND)
    assert schedule.depth == (0 if num_requests > 1 else 2)
    schedule.judge(rates(10, 11, 12, 30), SHORT_ROUND - 1)
    assert schedule.depth != 3
    schedule.restart(rates(10, 12, 14, 12), num_requests)
    schedule.judge(rates(10, 20, 14, 12), SHORT_ROUND)
    assert schedule.depth == 2  # less depth is no end: it takes two looks


def test_a_small_gain_changes_nothing() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 12), 8)
    for _ in range(100):
        schedule.judge(rates(10, 12, 14, 14.3), 1)
    assert schedule.depth == 2


def test_probes_take_a_quarter_in_turns_at_intervals_that_double() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 5, 4, 3), 8)
    sizes = steps_of(schedule, 2000)
    probes = [i for i, size in enumerate(sizes) if size.is_probe]
    tried = {i for i, size in enumerate(sizes) if size.depth and not size.is_probe}
    gaps = [later - first - len(tried & set(range(first, later))) for first, later in pairwise(probes)]
    assert gaps == [min(16 << i, LAST_PROBE) for i in range(len(gaps))]
    masks = [sizes[i].drafted for i in probes[:4]]
    assert all(
        mask is not None and mask.sum() == 2 and sizes[i].depth == 1 for i, mask in zip(probes, masks, strict=False)
    )
    assert np.all(np.sum([mask for mask in masks if mask is not None], axis=0) == 1)


@pytest.mark.parametrize(("of_probe", "first"), [(0.0, 8), (0.05, 8), (0.25, 25), (100.0, LAST_PROBE)])
def test_probes_are_as_rare_as_they_are_dear(of_probe: float, first: int) -> None:
    """They take 1 % of the time at the most, if that is possible within the longest interval."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)), of_probe)
    schedule.restart(rates(10, 20, 5, 5), 8)
    steps_of(schedule, 8)  # they draft
    schedule.restart(rates(10, 5, 4, 3), 8)
    probes = [i for i, size in enumerate(steps_of(schedule, 4000)) if size.is_probe]
    gaps = [later - before for before, later in pairwise(probes)]
    assert probes[0] >= first - 1
    assert min(gaps) >= first


def test_other_requests_are_probed_soon() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9, 8, 7), 8)
    steps_of(schedule, 500)
    schedule.probes.until = 200
    batch = np.full(3, NUM_STEPS)
    for _ in range(3):
        schedule.next(batch)
        assert schedule.probes.until == 200
        schedule.begin()
    schedule.next(batch)
    assert schedule.probes.until == 8


def test_a_batch_that_grows_is_probed_once() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9, 8, 7), 8)
    steps_of(schedule, 500)
    schedule.probes.until = 200
    for size in range(1, 5):
        schedule.begin()
        schedule.restart(rates(10, 9, 8, 7), 8)
        schedule.next(np.full(size, NUM_STEPS))
        schedule.passed(1, 0)
    assert schedule.probes.until > 8
    schedule.passed(SETTLING_STEPS, SETTLING_STEPS)
    schedule.next(np.full(4, NUM_STEPS))
    assert schedule.probes.until == 8


@pytest.mark.parametrize(
    ("found", "of_tries"),
    [
        (rates(10, 11, 12, 13, chains=(12, 13, 20)), lambda size: not size.depth),
        (rates(10, 11, 19.4, 13, chains=(12, 13, 20)), lambda size: size == DraftSize(2)),
        (rates(10, 7, 6, 5), lambda size: size.depth > 0 and not size.is_probe),
    ],
)
def test_other_options_are_tried_and_lose_little_time(found: np.ndarray, of_tries) -> None:  # type: ignore[no-untyped-def]
    """Tried are plain steps beside drafts, options that are nearly as good, and drafts where nothing is drafted."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(found, 8)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)))
    steps_of(schedule, MOST_INTERVAL)
    sizes = steps_of(schedule, 4 * MOST_INTERVAL)
    tried = sum(map(of_tries, sizes))
    best = schedule.gains.max()
    option = next(size for size in sizes if of_tries(size))
    loss = 1 - schedule.gains[option.depth + (NUM_STEPS + 1) * option.is_chain] / best
    assert tried >= 10
    assert 0.2 * 0.005 < tried * loss / len(sizes) < 1.2 * 0.005


def test_options_that_are_nearly_as_good_are_tried_in_turns() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 19.2, 5, 19.4, chains=(19.1, 20, 19.3)), 8)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)))
    tried = [(size.depth, size.is_chain) for size in steps_of(schedule, 20_000) if size.depth]
    others = [option for option in tried if option != (2, True)]
    counts = {option: others.count(option) for option in dict.fromkeys(others)}
    assert counts.keys() == {(1, False), (3, False), (1, True), (3, True)}
    assert max(counts.values()) <= 2 * min(counts.values())


def test_every_option_gets_some_tries_unless_it_is_thought_hopeless() -> None:
    """What is thought of an option comes from times that may have been measured on a busy machine."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 14, 20, chains=(13, 11, 19.5)), 8)
    tried = [(size.depth, size.is_chain) for size in steps_of(schedule, 20_000) if size.depth]
    assert {(2, False), (1, True), (3, True)} <= set(tried)
    assert not {(1, False), (2, True)} & set(tried)  # below 0.6 of the best
    first = schedule.tries.account.looks.copy()
    steps_of(schedule, 20_000)
    assert [*np.flatnonzero(schedule.tries.account.looks > first)] == [0, 7]  # plain steps, and the option that is near
    schedule.restart(rates(10, 11, 14, 20, chains=(13, 11, 19.5)), 2)
    assert not schedule.tries.account.looks.any()  # times of other numbers of requests are others


def test_an_option_that_is_thought_bad_is_tried_soon_at_first() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 12, 40), 8)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)))
    sizes = steps_of(schedule, 1200)
    assert sum(not size.depth for size in sizes) == 40


def test_a_try_that_is_cut_short_comes_again_soon() -> None:
    """Batches change all the time while requests come and go: only steps that were made count."""
    schedule, found = DraftSchedule(NUM_STEPS), rates(10, 11, 12, 40)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)))
    num_tries = 0
    for _ in range(400):
        schedule.restart(found, 8)
        size, _ = schedule.next(ANY)
        schedule.passed(1, 0)
        num_tries += not size.depth
    assert 2 <= num_tries <= 8
    sizes = steps_of(schedule, 120)
    assert sum(not size.depth for size in sizes) == 10


def test_no_try_begins_in_a_batch_that_has_just_changed() -> None:
    schedule, found = DraftSchedule(NUM_STEPS), rates(10, 11, 12, 40)
    schedule.set_times(10, np.ones(2 * (NUM_STEPS + 1)))
    schedule.restart(found, 8)
    steps_of(schedule, 60)
    schedule.restart(found, 8)
    sizes = steps_of(schedule, 40)
    assert [not size.depth for size in sizes].index(True) == SETTLING_STEPS


def test_longer_steps_are_tried_more_seldom() -> None:
    found, tried = rates(10, 7, 6, 5), []
    for length in (1.0, 2.0):
        schedule = DraftSchedule(NUM_STEPS)
        schedule.restart(found, 8)
        schedule.set_times(10, np.concatenate([[1.0], np.full(2 * NUM_STEPS + 1, length)]))
        sizes = steps_of(schedule, 5 * MOST_INTERVAL)
        tried.append(sum(size.depth > 0 and not size.is_probe for size in sizes))
    assert 0.4 * tried[0] < tried[1] < 0.7 * tried[0]


def test_requests_that_want_no_drafts_get_none() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 12, 13), 8)
    size, _ = schedule.next(np.array([3, 0, 1]))
    assert size.drafted is not None
    assert size.drafted.tolist() == [True, False, True]
    assert schedule.next(np.zeros(3, np.int64))[0].depth == 0


def test_a_try_lasts_until_enough_of_its_steps_were_timed() -> None:
    """Steps that are recorded, and those after a change of kind, are not timed."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.set_times(8, np.ones(2 * (NUM_STEPS + 1)))
    schedule.restart(rates(10, 11, 12, 40), 8)
    while schedule.next(ANY)[0].depth:
        schedule.passed(1, 1)
    counts = []
    for timed in (0, TIMED_STEPS - 1, 0, 1):
        size, count = schedule.next(ANY)
        assert not size.depth
        schedule.passed(count, timed)
        counts.append(count)
    assert counts == [8, TIMED_STEPS, 1, 1]
    assert schedule.tries.account.looks[0] == 1
    assert schedule.next(ANY)[0].depth
    while schedule.next(ANY)[0].depth:
        schedule.passed(1, 1)
    untimed = 0
    while not schedule.next(ANY)[0].depth:
        schedule.passed(1, 0)
        untimed += 1
    assert untimed == 24
    assert schedule.tries.account.looks[0] == 1  # nothing was seen


def off_steps(num_steps: int) -> DraftSchedule:
    """Nothing has been drafted for so many steps."""
    schedule = DraftSchedule(NUM_STEPS)
    schedule.set_times(8, np.ones(2 * (NUM_STEPS + 1)))
    schedule.restart(rates(10, 9, 9.2, 8), 8)
    steps_of(schedule, num_steps)
    return schedule


def looks_of(schedule: DraftSchedule, found: np.ndarray, number: int) -> list[DraftSize]:
    """Like ``steps_of``; what is drafted shows these rates."""
    sizes: list[DraftSize] = []
    while len(sizes) < number:
        size, count = schedule.next(ANY)
        schedule.passed(count, count)
        if size.depth:
            schedule.judge(found, count)
        sizes += [size] * count
    return sizes


def test_a_try_that_pays_goes_on_until_drafts_change() -> None:
    schedule = off_steps(20)
    sizes = looks_of(schedule, rates(10, 9, 14, 8), 400)
    first = next(i for i, size in enumerate(sizes) if size.depth and not size.is_probe)
    assert all(size.depth == 2 for size in sizes[first : first + 40])  # the best of the others is looked at first
    assert schedule.depth == 2


def test_a_try_that_does_not_pay_ends() -> None:
    schedule = off_steps(20)
    sizes = looks_of(schedule, rates(10, 9, 9.2, 8), 400)
    tried = [size.depth > 0 and not size.is_probe for size in sizes]
    assert 0 < sum(tried) <= 8 + 3 * 2 * 8  # two looks at each option, and another one
    assert schedule.depth == 0


def test_a_try_that_seems_to_pay_does_not_go_on_forever() -> None:
    """What each look shows differs too much to change drafts."""
    schedule, in_a_row, longest = off_steps(20), 0, 0
    for _ in range(200):
        size, count = schedule.next(ANY)
        schedule.passed(count, count)
        if size.depth:
            schedule.gains[:] = rates(1.0, 0.9, 0.9, 0.9)
            schedule.judge(rates(10, 9, 10.6, 8), count)
        in_a_row = in_a_row + count if size.depth and not size.is_probe else 0
        longest = max(longest, in_a_row)
    assert schedule.depth == 0
    assert longest == 8 + 4 * SHORT_ROUND


def test_text_that_begins_to_repeat_itself_leads_to_a_try_of_the_best_option() -> None:
    schedule = off_steps(40)
    schedule.tries.account.until["other"] = schedule.probes.until = 4000
    schedule.hear(0.29, 16)
    assert not schedule.next(ANY)[0].depth
    schedule.hear(0.31, 16)
    assert schedule.next(ANY)[0] == DraftSize(2)
    steps_of(schedule, 24)
    schedule.tries.account.until["other"] = schedule.probes.until = 4000
    schedule.hear(0.44, 64)  # not much more
    assert not schedule.next(ANY)[0].depth
    schedule.hear(0.47, 16)
    assert schedule.next(ANY)[0] == DraftSize(2)


def test_what_hears_repeats_is_told_whether_a_try_is_due() -> None:
    schedule = off_steps(40)
    schedule.tries.account.until["other"] = schedule.probes.until = 4000
    assert not schedule.hear(0.29, 16)
    assert schedule.hear(0.31, 16)
    assert not schedule.hear(0.9, 16)  # too soon behind the other one


def test_decisions_last_longer_where_nothing_asks_for_a_change() -> None:
    schedule = later(rates(10, 11, 14, 12))
    schedule.tries.account.until = dict.fromkeys(schedule.tries.account.until, 4000)
    assert schedule.next(ANY)[1] == ROUND
    schedule.judge(rates(10, 11, 14, 12), ROUND)
    assert schedule.next(ANY)[1] == CALM_ROUND
    schedule.judge(rates(10, 11, 14, 100), ROUND)
    assert schedule.next(ANY)[1] == SHORT_ROUND
    off = off_steps(40)
    off.tries.account.until["other"] = off.probes.until = 4000
    off.probes.interval = 4000
    assert off.next(ANY) == (DraftSize(0), LONG_ROUND)


def test_tries_of_repeated_text_that_do_not_pay_become_rare() -> None:
    schedule, num_tries = off_steps(40), 0
    for i in range(1000):
        schedule.tries.account.until["other"] = 4000
        schedule.hear(i % 2, 16)  # 16,000 steps
        num_tries += schedule.tries.account.until["other"] == 0
    assert 10 < num_tries < 30


def test_repeated_text_changes_nothing_while_drafts_are_on() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 11, 14, 12), 8)
    before = dict(schedule.tries.account.until)
    schedule.hear(1.0, 16)
    assert schedule.tries.account.until == before


def lossy_steps(schedule: DraftSchedule, of_plain: float, number: int) -> tuple[float, int]:
    """What drafts lose, in plain steps, and how many steps are made: each draft takes so many and brings 1 token."""
    lost, made = 0.0, 0
    while made < number:
        size, count = schedule.next(ANY)
        schedule.passed(count, count)
        if size.depth:
            schedule.charge(count * of_plain, count, 1.0)
            schedule.judge(rates(10, 12, 14, 8), count)  # it is always thought that they pay
            lost += count * (of_plain - 1.0)
        made += count
    return lost, made


def test_drafts_that_never_pay_lose_a_percent_of_the_time_whatever_is_thought_of_them() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 8), 8)
    assert schedule.depth == 2
    lost, _ = lossy_steps(schedule, 2.0, 2000)
    assert lost <= AT_FIRST + OVERDRAFT + 0.0075 * 2000 + ROUND + 3 * SHORT_ROUND
    lost, made = lossy_steps(schedule, 2.0, 20_000)
    assert 0.002 * made < lost < 0.01 * made  # they are still tried, in case that they pay


def test_drafts_that_pay_are_never_stopped_and_their_gains_are_not_kept_for_long() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 8), 8)
    lossy_steps(schedule, 0.7, 5000)
    assert schedule.depth == 2
    assert schedule.tries.account.allowance.left <= MOST
    lost, _ = lossy_steps(schedule, 2.0, 2000)
    assert lost <= MOST + OVERDRAFT + 0.0075 * 2000 + ROUND + 3 * SHORT_ROUND
    assert schedule.depth == 0


def test_each_number_of_requests_has_an_allowance_of_its_own() -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 12, 14, 8), 8)
    lossy_steps(schedule, 3.0, 2000)
    assert schedule.depth == 0
    schedule.restart(rates(10, 12, 14, 8), 2)
    assert schedule.depth == 2


def test_text_that_repeats_itself_is_tried_though_nothing_is_left() -> None:
    schedule = off_steps(300)
    schedule.charge(AT_FIRST + MOST, 0, 1.0)
    assert not any(size.depth for size in steps_of(schedule, 100))
    schedule.tries.account.allowance.left = -1.0
    assert not any(size.depth for size in steps_of(schedule, 100))
    schedule.hear(0.6, 64)
    assert schedule.next(ANY)[0].depth


def test_a_machine_that_was_slow_ends_no_drafts_for_ever() -> None:
    allowance = Allowance()
    allowance.charge(100_000.0, 2, 1.0)
    assert allowance.left == LEAST
    allowance.pass_steps(round(-LEAST / SHARE) + 1)
    assert allowance.may_try


def test_a_step_that_was_held_up_loses_little() -> None:
    """The first step of a round may take longer, since it runs what the drafter has missed."""
    size = SizedBatch(np.zeros(1, np.int64), np.zeros(1, np.int64), np.full(1, 4), lambda: 0)
    done = Round(size, (0,), DraftSize(2), 0, None)
    for seconds in (8.0, *[2.0] * 14, 1000.0):
        done.seconds.append(seconds)
        done.decided.append([[1, 2]])
    assert (done.drafted_seconds, done.drafted_tokens) == (8.0 + 14 * 2.0 + MOST_SLOWER * 2.0, 32)


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


def test_what_was_seen_little_is_hoped_to_be_better_and_is_drafted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries_module, "HOPE", 0.12)
    schedule, found = DraftSchedule(NUM_STEPS), rates(10, 11, 14, 13)
    schedule.restart(found, 1)
    assert schedule.depth == 2
    of_depth = [0] * (NUM_STEPS + 1)
    for _ in range(400):
        size, count = schedule.next(ANY[:1])
        schedule.passed(count, count)
        schedule.judge(found, count)
        of_depth[size.depth] += count
    assert 150 < of_depth[3] < 1500  # until the hope is smaller than the difference
    assert of_depth[2] > 4 * of_depth[3]
    assert of_depth[1] < 150
    assert schedule.depth == 2


def test_drafts_made_out_of_hope_are_said_to_be_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = DraftSchedule(NUM_STEPS)
    schedule.restart(rates(10, 9.5, 9, 8), 1)
    assert schedule.reason(1) == "off: drafts are predicted to gain -5 % at the best, depth 1, with 1 request"
    monkeypatch.setattr(tries_module, "HOPE", 0.12)
    schedule.restart(rates(10, 9.5, 9, 8), 1)
    assert schedule.reason(1) == "drafts of depth 1 are being judged with 1 request"
    schedule.restart(rates(10, 11, 9, 8), 1)
    assert schedule.reason(1) == "drafts of depth 1: depth 1 is predicted to gain +10 % with 1 request"


def test_hopes_of_many_requests_fall_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tries_module, "HOPE", 0.12)
    hopes = []
    for size in (1, 2, 8):
        schedule = DraftSchedule(NUM_STEPS)
        schedule.restart(rates(10, 11, 14, 13), size)
        schedule.passed(48, 48)
        hopes.append(float(schedule.tries.hopes(schedule.gains)[2] / schedule.gains[2]) - 1.0)
    np.testing.assert_allclose(hopes, 0.12 / np.sqrt([2, 3, 5]))
