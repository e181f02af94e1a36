"""Threads that make masks: a slow job delays its owner's jobs only, and nothing waits for it longer than asked."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from specmamba.errors import GrammarError
from specmamba.grammar import MaskMaker, TreeMask
from specmamba.grammar.mask_maker import NICENESS, QUICK_SECONDS, MaskJob
from tests.fake_engine import wait_until

MASK = TreeMask(np.zeros((1, 2), np.int32), np.ones(1, np.bool_))
LONG = 10.0  # seconds; only a failing test waits so long


class Gate:
    """Work that begins, and ends when the gate is opened."""

    def __init__(self) -> None:
        self.has_begun, self._may_end = threading.Event(), threading.Event()

    def __call__(self) -> TreeMask:
        self.has_begun.set()
        assert self._may_end.wait(LONG)
        return MASK

    def open(self) -> None:
        self._may_end.set()


@pytest.fixture
def gates() -> Iterator[Callable[[], Gate]]:
    made: list[Gate] = []

    def make() -> Gate:
        made.append(Gate())
        return made[-1]

    yield make
    for gate in made:
        gate.open()


@pytest.fixture
def maker() -> Iterator[MaskMaker]:
    maker = MaskMaker(max_threads=3)
    yield maker
    maker.close()


def submitted(maker: MaskMaker, owner: str | None, work: Callable[[], TreeMask], is_urgent: bool = False) -> MaskJob:
    job = MaskJob(owner, work, is_urgent)
    maker.submit(job)
    return job


def quick() -> TreeMask:
    return MASK


def is_done(job: MaskJob) -> bool:
    return job.is_done


def test_quick_jobs_are_done_when_they_are_awaited(maker: MaskMaker) -> None:
    jobs = [submitted(maker, owner, quick) for owner in ("a", None, "a", "b")]
    maker.wait(jobs, LONG)
    assert all(is_done(job) and job.result() is MASK for job in jobs)


def test_a_slow_job_holds_up_its_owner_only(maker: MaskMaker, gates: Callable[[], Gate]) -> None:
    gate = gates()
    slow = submitted(maker, "a", gate)
    assert gate.has_begun.wait(LONG)
    same, other, without = submitted(maker, "a", quick), submitted(maker, "b", quick), submitted(maker, None, quick)
    maker.wait([same, other, without], LONG)  # returns although the first cannot begin
    assert is_done(other)
    assert is_done(without)
    assert not is_done(slow)
    assert same.began is None
    urgent = submitted(maker, "a", quick, is_urgent=True)
    maker.wait([urgent], LONG)
    assert is_done(urgent)
    assert same.began is None
    gate.open()
    maker.wait([slow, same], LONG, even_blocked=True)
    assert is_done(slow)
    assert is_done(same)


def test_a_wait_ends_in_time(maker: MaskMaker, gates: Callable[[], Gate]) -> None:
    slow = submitted(maker, "a", gates())
    maker.wait([slow], 0.03)
    blocked = submitted(maker, "a", quick)
    began = time.monotonic()
    maker.wait([blocked], 0.03, even_blocked=True)
    assert time.monotonic() - began >= 0.03  # a caller that has nothing else to do must not spin
    assert not is_done(slow)
    assert not is_done(blocked)


def test_processor_time_ends_a_wait_too(maker: MaskMaker) -> None:
    may_end = threading.Event()

    def spin() -> TreeMask:
        while not may_end.is_set():
            pass
        return MASK

    job = submitted(maker, "a", spin)
    maker.wait([job], LONG, processor_seconds=0.02)
    assert not is_done(job)
    may_end.set()
    maker.wait([job], LONG)
    assert is_done(job)


def test_threads_are_bounded(maker: MaskMaker, gates: Callable[[], Gate]) -> None:
    own = [gates() for _ in range(3)]
    slow = [submitted(maker, f"owner {index}", gate) for index, gate in enumerate(own)]
    wait_until(lambda: not maker.has_room("other"))
    waiting = submitted(maker, "other", quick)
    maker.wait([waiting], 0.03)
    assert waiting.began is None
    own[1].open()
    maker.wait([slow[1], waiting], LONG)
    assert is_done(waiting)
    wait_until(lambda: maker.has_room("other"))
    assert not is_done(slow[0])


def test_urgent_jobs_of_one_owner_take_two_threads(gates: Callable[[], Gate]) -> None:
    maker, own = MaskMaker(max_threads=8), [gates() for _ in range(8)]
    try:
        jobs = [submitted(maker, "a", gate, is_urgent=True) for gate in own]
        wait_until(lambda: not maker.has_room("a"))
        maker.wait(jobs[2:], LONG)  # returns: they cannot begin
        assert [job.began is not None for job in jobs] == [True, True, *[False] * 6]
        others = [submitted(maker, owner, quick) for owner in "bcd"]
        maker.wait(others, LONG)
        assert all(map(is_done, others))
        assert jobs[2].began is None
        assert not maker.drop(jobs[0])
        assert maker.drop(jobs[7])
        own[0].open()
        wait_until(lambda: maker.has_room("b") and own[2].has_begun.is_set())
        assert not own[3].has_begun.is_set()
    finally:
        for gate in own:
            gate.open()
        maker.close()


def test_the_last_thread_is_for_jobs_that_may_be_quick(maker: MaskMaker, gates: Callable[[], Gate]) -> None:
    own = [gates(), gates()]
    slow = [submitted(maker, owner, gate) for owner, gate in zip("ab", own, strict=True)]
    wait_until(lambda: not maker.has_room("a") and not maker.has_room("b"))
    suspect = MaskJob("c", quick, is_suspect=True)
    maker.submit(suspect)
    urgent, other = submitted(maker, "a", quick, is_urgent=True), submitted(maker, "d", quick)
    maker.wait([suspect, urgent, other], LONG)
    assert is_done(other)
    assert suspect.began is None
    assert urgent.began is None
    own[0].open()
    maker.wait([slow[0], suspect, urgent], LONG, even_blocked=True)
    assert is_done(suspect)
    assert is_done(urgent)


def test_the_time_in_the_queue_makes_no_job_late(gates: Callable[[], Gate]) -> None:
    maker, gate = MaskMaker(max_threads=1), gates()
    first, second = submitted(maker, "a", gate), submitted(maker, "a", quick)
    wait_until(lambda: first.is_late)
    assert not second.is_late
    assert second.seconds_since(first.created) == 0.0
    assert first.seconds_since(first.created) > QUICK_SECONDS
    assert first.seconds_since(time.monotonic() + LONG) == 0.0
    gate.open()
    maker.wait([first, second], LONG, even_blocked=True)
    assert not first.is_late
    maker.close()


def test_owners_take_turns(gates: Callable[[], Gate]) -> None:
    maker, gate, order = MaskMaker(max_threads=1), gates(), list[str]()

    def named(name: str) -> Callable[[], TreeMask]:
        def work() -> TreeMask:
            order.append(name)
            return MASK

        return work

    submitted(maker, "first", gate)
    assert gate.has_begun.wait(LONG)
    jobs = [submitted(maker, name[0], named(name)) for name in ("a1", "a2", "a3", "b1", "b2")]
    dropped = submitted(maker, "c", named("c1"))
    maker.drop(dropped)
    maker.drop(dropped)
    gate.open()
    maker.wait(jobs, LONG)
    maker.close()
    assert order == ["a1", "b1", "a2", "b2", "a3"]
    assert not is_done(dropped)


def test_errors_are_those_of_their_job(maker: MaskMaker) -> None:
    def dead_end() -> TreeMask:
        raise GrammarError("nothing may follow")

    def broken() -> TreeMask:
        raise ZeroDivisionError("half")

    jobs = [submitted(maker, "a", work) for work in (dead_end, broken, quick)]
    maker.wait(jobs, LONG)
    with pytest.raises(GrammarError, match="nothing may follow"):
        jobs[0].result()
    with pytest.raises(GrammarError, match="ZeroDivisionError: half") as caught:
        jobs[1].result()
    assert caught.value.code == "grammar_failed"
    assert jobs[2].result() is MASK


def niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


def test_the_engine_has_precedence_over_slow_jobs(maker: MaskMaker, gates: Callable[[], Gate]) -> None:
    own, seen, gate = niceness(), dict[str, int](), gates()

    def look(name: str) -> TreeMask:
        mask = gate() if name == "slow" else MASK
        seen[name] = niceness()
        return mask

    suspect = MaskJob("a", lambda: look("suspect"), is_suspect=True)
    maker.submit(suspect)
    maker.wait([suspect], LONG)
    slow = submitted(maker, "a", lambda: look("slow"))
    assert gate.has_begun.wait(LONG)
    other = submitted(maker, "b", lambda: look("other"))
    maker.wait([other], LONG)
    gate.open()
    maker.wait([slow], LONG)
    assert seen == {"suspect": min(19, own + NICENESS), "slow": min(19, own + NICENESS), "other": own}
    assert niceness() == own


def test_closing_does_not_wait_and_ends_the_threads(gates: Callable[[], Gate]) -> None:
    before = set(threading.enumerate())
    maker, gate = MaskMaker(), gates()
    slow = submitted(maker, "a", gate)
    assert gate.has_begun.wait(LONG)
    other = submitted(maker, "b", quick)
    maker.wait([other], LONG)
    own = set(threading.enumerate()) - before
    assert len(own) == 2
    assert all(thread.daemon for thread in own)
    late = submitted(maker, "a", quick)
    maker.close()
    assert not is_done(slow)
    gate.open()
    for thread in own:
        thread.join(LONG)
        assert not thread.is_alive()
    assert late.began is None


ENDS_WHILE_A_JOB_RUNS = """
import sys, threading, time
from specmamba.grammar.mask_maker import MaskJob, MaskMaker

has_begun = threading.Event()

def work():
    has_begun.set()
    time.sleep(0.2)
    print("ended")

maker = MaskMaker()
maker.submit(MaskJob("a", work))
has_begun.wait()
maker.close()
"""


def test_the_end_of_the_process_waits_for_running_jobs() -> None:
    command = [sys.executable, "-c", ENDS_WHILE_A_JOB_RUNS]
    ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert (ended.stdout, ended.stderr) == ("ended\n", "")
