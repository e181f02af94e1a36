"""Waking an event loop: rarely, but nothing waits for longer than it may."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Callable, Coroutine

import pytest

from specmamba.engine.loop_waker import SHARE, LoopWaker
from tests.fake_engine import TEXT, FakeEngine, Served, serving

LONG_S = 30.0


def in_a_loop(test: Callable[..., Coroutine[None, None, None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(*args: object, **fixtures: object) -> None:
        asyncio.run(test(*args, **fixtures))

    return run


class Counted:
    """A loop's ``call_soon_threadsafe``, counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loop, self.num_wakes = asyncio.get_running_loop(), 0
        wake = self.loop.call_soon_threadsafe

        def counted(function: Callable[[], object]) -> asyncio.Handle:
            self.num_wakes += 1
            return wake(function)

        monkeypatch.setattr(self.loop, "call_soon_threadsafe", counted)


def _step(waker: LoopWaker, function: Callable[[], object], at_once: bool = False) -> None:
    waker.add(function, at_once)
    waker.end_step()


@in_a_loop
async def test_without_an_interval_every_step_wakes(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, called = Counted(monkeypatch), list[int]()
    waker = LoopWaker(counted.loop, 0.0)
    for number in range(3):
        _step(waker, lambda number=number: called.append(number))  # type: ignore[misc]
        await asyncio.sleep(0)
    assert called == [0, 1, 2]
    assert counted.num_wakes == 3


@in_a_loop
async def test_a_step_without_news_wakes_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Counted(monkeypatch)
    LoopWaker(counted.loop, 0.0).end_step()
    assert counted.num_wakes == 0


@in_a_loop
async def test_news_wait_for_the_loop_to_look_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, called = Counted(monkeypatch), list[int]()
    waker = LoopWaker(counted.loop, 0.02)
    for number in range(3):
        _step(waker, lambda number=number: called.append(number))  # type: ignore[misc]
        await asyncio.sleep(0)
    assert called == [0]
    began = time.perf_counter()
    while len(called) < 3:
        await asyncio.sleep(0.001)
        assert time.perf_counter() - began < 5
    assert called == [0, 1, 2]
    assert counted.num_wakes == 1


@in_a_loop
async def test_the_pause_goes_by_what_the_last_round_took(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, spent, pauses = asyncio.get_running_loop(), iter([1.0, 1.0004, 3.0004]), list[float]()
    monkeypatch.setattr(time, "thread_time", lambda: next(spent))
    monkeypatch.setattr(loop, "call_later", lambda delay, function: pauses.append(delay))
    waker = LoopWaker(loop, 0.05)
    for _ in range(3):
        _step(waker, list)
        await asyncio.sleep(0)
        waker._looks_by_itself = False  # as if the timer had passed
    assert pauses == [0.05, pytest.approx(0.0004 / SHARE), 0.05]


@in_a_loop
async def test_what_cannot_wait_takes_along_what_could(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, called = Counted(monkeypatch), list[str]()
    waker = LoopWaker(counted.loop, LONG_S)
    for name, at_once in (("first", False), ("waits", False), ("urgent", True)):
        _step(waker, lambda name=name: called.append(name), at_once)  # type: ignore[misc]
        await asyncio.sleep(0)
    assert called == ["first", "waits", "urgent"]
    assert counted.num_wakes == 2


@in_a_loop
async def test_a_loop_that_found_nothing_is_woken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    counted, called = Counted(monkeypatch), list[int]()
    waker = LoopWaker(counted.loop, 0.001)
    for number in range(3):
        _step(waker, lambda number=number: called.append(number))  # type: ignore[misc]
        await asyncio.sleep(0.05)  # its timer has passed, and it does not look for ever
        assert len(called) == number + 1
    assert counted.num_wakes == 3
    assert not waker._looks_by_itself


@pytest.fixture
def no_timer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loops that never look by themselves: what comes has been sent at once."""
    monkeypatch.setattr(LoopWaker, "_look", lambda _: None)


def _streamed(served: Served) -> list[str]:
    body = {"prompt": "a", "stream": True, "max_tokens": 1000}
    with served.http.stream("POST", "/v1/completions", json=body) as answer:
        return [line for line in answer.iter_lines() if line.startswith("data: {")]


@pytest.mark.usefixtures("no_timer")
def test_a_stream_begins_and_ends_at_once_and_gathers_in_between() -> None:
    with serving(FakeEngine(step_s=0.002), stream_chunk_interval=1.0) as served:
        chunks = [json.loads(line.removeprefix("data: ")) for line in _streamed(served)]
    texts = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(texts) == TEXT
    assert len(texts) == 2  # the first step's, and all that came after it
    assert len(texts[0]) == 2


@pytest.mark.usefixtures("no_timer")
def test_an_engine_that_fails_tells_streams_at_once() -> None:
    with serving(FakeEngine(step_s=0.002, fail_at_step=4), stream_chunk_interval=1.0) as served:
        lines = _streamed(served)
    assert "engine_error" in lines[-1]
